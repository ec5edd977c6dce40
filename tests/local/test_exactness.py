"""Checks that chunked matmuls are bitwise identical to the full matmul."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tpkernels
from tpkernels.algorithms.chunks import ChunkPlan
from tpkernels.local import exactness
from tpkernels.local.exactness import is_chunking_exact, probe_chunks
from tpkernels.local.matmul import weight_layout
from tpkernels.local.packed import pack
from tpkernels.local.weight import OpaqueWeight
from tpkernels.planning.problem import Problem

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def clear_cache() -> None:
    probe_chunks.cache_clear()


def probe(chunks: Any, shape: tuple[int, int, int], layout: str, *dtypes: torch.dtype) -> bool:
    return probe_chunks(frozenset(chunks), shape, layout, *dtypes, None, 1)


def summing_in_halves(rows_from: int, columns_from: int = 0) -> Any:
    """Return a matmul that sums K in two halves if it has at least this many rows and columns."""

    def matmul(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *_: Any, **full_shape: int
    ) -> torch.Tensor:
        terms = (x.float().unsqueeze(2) * w.float()).transpose(0, 1)  # [K, M, N]
        num_sums = 2 if x.shape[0] >= rows_from and w.shape[1] >= columns_from else 1
        totals = torch.zeros(num_sums, *terms.shape[1:])
        for k, term in enumerate(terms):
            totals[k * num_sums // len(terms)] += term  # sequential sum, rounded after each term
        return out.copy_(totals.sum(0))

    return matmul


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_different_order_is_detected(dtype: torch.dtype, layout: str) -> None:
    for limits, exact in [((0,), True), ((99,), True), ((20,), False), ((0, 69), False)]:
        probe_chunks.cache_clear()
        with mock.patch.object(exactness, "local_matmul", summing_in_halves(*limits)):
            result = probe([(16, 70), (32, 30)], (32, 129, 70), layout, dtype, dtype)
        assert result is exact, limits


def test_rows_and_columns_at_the_end_count() -> None:
    """A chunk may begin anywhere. So each row and column must be bitwise identical to its
    copies."""
    for index in [(-1, 0), (0, -1)]:

        def matmul(
            x: torch.Tensor,
            w: torch.Tensor,
            out: torch.Tensor,
            *_: Any,
            index: Any = index,
            **full_shape: int,
        ) -> torch.Tensor:
            out.zero_()[index] = float(len(x) == 70)
            return out

        probe_chunks.cache_clear()
        with mock.patch.object(exactness, "local_matmul", matmul):
            assert not probe([(6, 70)], (70, 5, 70), "rows", F32, F32)


def test_probed_shapes() -> None:
    """The shapes of all steps, a single row and full shards are probed, without empty shapes."""
    problem = Problem("all_gather_matmul", "cpu", 3, (8, 5), 0, (7, 1, 0), F32)
    plan = replace(ChunkPlan.for_matmul(problem, 5, None), chunk_rows=4)
    assert plan.matmul_shapes(6, full_shards=False) == {(4, 6), (3, 6), (1, 6)}
    assert plan.matmul_shapes(6, full_shards=True) == {(7, 6), (4, 6), (3, 6), (1, 6)}


def test_cases_without_a_probe() -> None:
    """A custom matmul promises bitwise identity, a scaled matmul is never chunked, and the full
    matmul is trivially identical."""
    with mock.patch.object(exactness, "probe_chunks", None):
        for w, chunk, exact in [
            (tpkernels.CustomMatmul(torch.clone, (5, 3), F32), (1, 3), True),
            (mock.Mock(spec=OpaqueWeight), (1, 3), False),
            (torch.ones(5, 3), (7, 3), True),
        ]:
            assert is_chunking_exact(w, frozenset([chunk]), (7, 5, 3), F32, F32) is exact


def test_operands_of_the_probes() -> None:
    """Operands have the shape, layout and dtypes of the call. Chunks pass the sizes of the full
    matmul."""
    seen: list[tuple[Any, ...]] = []

    def matmul(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *_: Any, **full_shape: int
    ) -> torch.Tensor:
        seen.append((*x.shape, weight_layout(w), x.dtype, out.dtype, *full_shape.values()))
        return out.zero_()

    w = torch.ones(5, 3)
    assert [weight_layout(weight) for weight in (w, w.t(), pack(w))] == [
        "rows",
        "columns",
        "packed",
    ]
    with mock.patch.object(exactness, "local_matmul", matmul), torch.device("meta"):
        for layout, dtype in [("rows", F32), ("columns", BF16), ("packed", F32)]:
            seen.clear()
            assert probe([(7, 130), (100, 130)], (200, 33, 130), layout, dtype, F32)
            assert seen == [
                (200, 33, layout, dtype, F32),
                (7, 33, layout, dtype, F32, 200, 130),
                (100, 33, layout, dtype, F32, 200, 130),
            ]
