"""Products of many rows with a plain weight, of which the extension makes panels where torch is
slower. tests/native/test_products.cpp has them on all processors with AVX-512."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from tests.support.products import threads, within_rounding
from tpkernels import _C
from tpkernels.dtypes import CODES
from tpkernels.local.matmul import local_matmul

F32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = ("rows", "columns")


def repacks(dtype: torch.dtype) -> bool:
    return _C.calls.multiplies(CODES[dtype], "rows", 64)


DTYPES = [dtype for dtype in (F32, BF16) if repacks(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="torch multiplies as fast on this processor")


def weight(k: int, n: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    w = torch.randn(k, n).to(dtype)
    return w if layout == "rows" else w.t().contiguous().t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_close_to_float64(dtype: torch.dtype, layout: str) -> None:
    """Also more rows, columns and K than are held at a time, odd ones, and parts of tensors."""
    torch.manual_seed(0)
    shapes = [(24, 32, 48), (33, 47, 129), (800, 1100, 64), (100, 2051, 70)]
    for (rows, k, n), out_dtype in itertools.product(shapes, {dtype, F32}):
        x = torch.randn(rows, k + 3).to(dtype)[:, 1 : 1 + k]
        w, bias = weight(k, n + 8, dtype, layout)[:, 3 : 3 + n], torch.randn(n)
        around = torch.full((rows, n + 2), torch.nan, dtype=out_dtype)
        out = around[:, 1:-1]
        taken = _C.calls.multiply(x, w, out, None, False, (rows, 0))
        assert taken or (layout == "columns" and out_dtype == BF16)
        assert not taken or within_rounding(out, x, w), (rows, k, n, out_dtype)
        local_matmul(x, w, out, bias)
        assert within_rounding(out, x, w, bias), (rows, k, n, out_dtype)
        assert around[:, [0, -1]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_result_does_not_depend_on_the_others(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(1)
    x, w, rows = torch.randn(300, 700).to(dtype), weight(700, 200, dtype, layout), 300
    whole = torch.empty(rows, 200)
    assert _C.calls.multiply(x, w, whole, None, False, (rows, 0))
    for count, (begin, end) in itertools.product((1, 2, 3), [(0, 300), (7, 8), (100, 256)]):
        part = torch.empty(end - begin, 200)
        with threads(count):
            assert _C.calls.multiply(x[begin:end], w, part, None, False, (rows, 0))
        assert torch.equal(part, whole[begin:end]), (count, begin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_weights(dtype: torch.dtype) -> None:
    """``x^T @ grad``, whose left operand has no contiguous rows."""
    torch.manual_seed(2)
    x, grad, out = (
        torch.randn(130, 70).to(dtype),
        torch.randn(130, 65).to(dtype),
        torch.empty(70, 65),
    )
    with mock.patch.object(torch, "mm") as by_torch:
        local_matmul(x.t(), grad, out)
    assert not by_torch.called
    assert within_rounding(out, x.t(), grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_a_whole(dtype: torch.dtype, layout: str) -> None:
    """What has few columns because it is a part has the bits of the whole."""
    torch.manual_seed(3)
    x, w = torch.randn(64, 4096).to(dtype), weight(4096, 64, dtype, layout)
    whole, parts = torch.empty(64, 64), torch.empty(64, 64)
    local_matmul(x, w, whole)
    for columns in (slice(0, 20), slice(20, 64)):
        local_matmul(x, w[:, columns], parts[:, columns], whole_columns=64)
    assert torch.equal(parts, whole)


def test_what_is_left_to_torch() -> None:
    dtype = DTYPES[0]
    for rows, k, n, taken in [
        (64, 64, 64, True),
        (64, 31, 64, False),
        (64, 64, 47, False),
        (2, 64, 64, False),
    ]:
        x, w, out = (
            torch.ones(rows, k, dtype=dtype),
            torch.ones(k, n, dtype=dtype),
            torch.empty(rows, n),
        )
        assert _C.calls.multiply(x, w, out, None, False, (rows, 0)) is taken
        assert not _C.calls.multiply(x, w[:, ::2], out[:, : (n + 1) // 2], None, False, (rows, 0))
        assert not _C.calls.multiply(x, w.half(), out, None, False, (rows, 0))
