"""Whether a product of some rows has the bits that these rows have in the product of all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tpkernels.local import exactness
from tpkernels.local.exactness import Layout, layout_of, rows_are_exact
from tpkernels.local.packed import is_packed, pack

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    rows_are_exact.cache_clear()


def summing_in_halves(rows_from: int) -> Any:
    """A product that sums K in two halves from so many rows on, and in one otherwise."""

    def product(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, whole_rows: int = 0
    ) -> torch.Tensor:
        terms = (x.float().unsqueeze(2) * w.float()).transpose(0, 1)  # [K, M, N]
        parts = 2 if x.shape[0] >= rows_from else 1
        totals = torch.zeros(parts, *terms.shape[1:])
        for k, term in enumerate(terms):
            totals[k * parts // len(terms)] += term  # one after the other, rounded each time
        return out.copy_(totals.sum(0))

    return product


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_another_order_is_seen(dtype: torch.dtype, layout: Layout) -> None:
    for rows_from, exact in [(0, True), (99, True), (20, False)]:
        rows_are_exact.cache_clear()
        with mock.patch.object(exactness, "local_matmul", summing_in_halves(rows_from)):
            found = rows_are_exact((16,), (32, 129, 70), layout, dtype, dtype)
        assert found is exact, rows_from


def test_the_operands_have_the_asked_shape_and_layout() -> None:
    seen: list[tuple[Any, ...]] = []

    def product(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, whole_rows: int = 0
    ) -> torch.Tensor:
        seen.append((tuple(x.shape), tuple(w.shape), w.stride(), x.dtype, out.dtype))
        return out.zero_()

    with mock.patch.object(exactness, "local_matmul", product), torch.device("meta"):
        assert rows_are_exact((7, 100), (200, 33, 130), "columns", BF16, F32)
        assert rows_are_exact((1,), (2, 1, 1), "rows", F32, F32)
    assert seen[:3] == [((rows, 33), (33, 130), (1, 33), BF16, F32) for rows in (200, 7, 100)]
    assert seen[3:] == [((rows, 1), (1, 1), (1, 1), F32, F32) for rows in (2, 1)]


@pytest.mark.parametrize("k", [64, 96, 1000])
def test_it_agrees_with_products_of_random_numbers(k: int) -> None:
    """What is found exact is exact for other numbers, too."""
    numbers = torch.Generator().manual_seed(k)
    for rows, part in [(4, 2), (32, 16), (128, 64)]:
        for dtype in (F32, BF16):
            if not rows_are_exact((part,), (rows, k, 96), "columns", dtype, dtype):
                continue
            x = torch.randn(rows, k, generator=numbers).to(dtype)
            w = torch.randn(96, k, generator=numbers).to(dtype).t()
            whole = exactness.local_matmul(x, w, torch.empty(rows, 96, dtype=dtype))
            out = torch.empty(part, 96, dtype=dtype)
            some = exactness.local_matmul(x[:part], w, out, whole_rows=rows)
            assert torch.equal(some, whole[:part]), (rows, part, dtype)


def test_a_part_is_tried_as_the_algorithms_compute_it() -> None:
    told: list[int | None] = []

    def product(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, whole_rows: int | None = None
    ) -> torch.Tensor:
        told.append(whole_rows)
        return out.zero_()

    with mock.patch.object(exactness, "local_matmul", product):
        rows_are_exact((16, 8), (32, 5, 3), "columns", BF16, BF16)
    assert told == [None, 32, 32]


def test_packed_weights_are_tried_packed() -> None:
    seen: list[bool] = []

    def product(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, whole_rows: int = 0
    ) -> torch.Tensor:
        seen.append(is_packed(w))
        return out.zero_()

    w = torch.ones(5, 3)
    assert [layout_of(each) for each in (w, w.t(), pack(w))] == ["rows", "columns", "packed"]
    with mock.patch.object(exactness, "local_matmul", product):
        rows_are_exact((1,), (2, 5, 3), "packed", F32, F32)
    assert seen == [True, True]
