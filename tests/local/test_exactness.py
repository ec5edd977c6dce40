"""Whether products of parts have the bits of the whole product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tpkernels
from tpkernels.algorithms.parts import Split
from tpkernels.local import exactness
from tpkernels.local.exactness import multiplies_parts_exactly, parts_are_exact
from tpkernels.local.matmul import layout_of
from tpkernels.local.packed import pack
from tpkernels.local.product import Product
from tpkernels.planning.problem import Problem

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    parts_are_exact.cache_clear()


def tried(parts: Any, shape: tuple[int, int, int], layout: str, *dtypes: torch.dtype) -> bool:
    return parts_are_exact(frozenset(parts), shape, layout, *dtypes, None, 1)


def summing_in_halves(rows_from: int, columns_from: int = 0) -> Any:
    """A product that sums K in two halves from so many rows and columns on, else in one."""

    def product(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *_: Any, **whole: int
    ) -> torch.Tensor:
        terms = (x.float().unsqueeze(2) * w.float()).transpose(0, 1)  # [K, M, N]
        parts = 2 if x.shape[0] >= rows_from and w.shape[1] >= columns_from else 1
        totals = torch.zeros(parts, *terms.shape[1:])
        for k, term in enumerate(terms):
            totals[k * parts // len(terms)] += term  # one after the other, rounded each time
        return out.copy_(totals.sum(0))

    return product


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_another_order_is_seen(dtype: torch.dtype, layout: str) -> None:
    for limits, exact in [((0,), True), ((99,), True), ((20,), False), ((0, 69), False)]:
        parts_are_exact.cache_clear()
        with mock.patch.object(exactness, "local_matmul", summing_in_halves(*limits)):
            found = tried([(16, 70), (32, 30)], (32, 129, 70), layout, dtype, dtype)
        assert found is exact, limits


def test_rows_and_columns_at_the_end_count() -> None:
    """A part may begin anywhere: each row and column of the whole must have its twin's bits."""
    for at in [(-1, 0), (0, -1)]:

        def product(
            x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *_: Any, at: Any = at, **whole: int
        ) -> torch.Tensor:
            out.zero_()[at] = float(len(x) == 70)
            return out

        parts_are_exact.cache_clear()
        with mock.patch.object(exactness, "local_matmul", product):
            assert not tried([(6, 70)], (70, 5, 70), "rows", F32, F32)


def test_the_products_that_are_tried() -> None:
    """Those of all steps, of one row as well, and of whole parts; none that is empty."""
    problem = Problem("all_gather_matmul", "cpu", 3, (8, 5), 0, (7, 1, 0), F32)
    split = replace(Split.of_matmul(problem, 5, None), step=4)
    assert split.products(6, whole_parts=False) == {(4, 6), (3, 6), (1, 6)}
    assert split.products(6, whole_parts=True) == {(7, 6), (4, 6), (3, 6), (1, 6)}


def test_what_is_not_tried() -> None:
    """A caller's product promises its bits, a scaled one is not split, and a whole has them."""
    with mock.patch.object(exactness, "parts_are_exact", None):
        for w, part, exact in [
            (tpkernels.CustomMatmul(torch.clone, (5, 3), F32), (1, 3), True),
            (mock.Mock(spec=Product), (1, 3), False),
            (torch.ones(5, 3), (7, 3), True),
        ]:
            assert multiplies_parts_exactly(w, frozenset([part]), (7, 5, 3), F32, F32) is exact


def test_operands_are_as_the_algorithms_have_them() -> None:
    """Of the shape, layout and dtypes of the call; parts know the whole that they belong to."""
    seen: list[tuple[Any, ...]] = []

    def product(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *_: Any, **whole: int
    ) -> torch.Tensor:
        seen.append((*x.shape, layout_of(w), x.dtype, out.dtype, *whole.values()))
        return out.zero_()

    w = torch.ones(5, 3)
    assert [layout_of(each) for each in (w, w.t(), pack(w))] == ["rows", "columns", "packed"]
    with mock.patch.object(exactness, "local_matmul", product), torch.device("meta"):
        for layout, dtype in [("rows", F32), ("columns", BF16), ("packed", F32)]:
            seen.clear()
            assert tried([(7, 130), (100, 130)], (200, 33, 130), layout, dtype, F32)
            assert seen == [
                (200, 33, layout, dtype, F32),
                (7, 33, layout, dtype, F32, 200, 130),
                (100, 33, layout, dtype, F32, 200, 130),
            ]
