"""The local matmul: exact for integers, close to float64, and bitwise independent of chunking.

Run by torch, with and without native 16-bit matmuls, and by the extension in every available vector
unit.
"""

from __future__ import annotations

import importlib
import itertools
from unittest import mock

import pytest
import torch

import tpkernels
from tests.support.cases import PACKABLE
from tests.support.local_matmul import is_within_rounding, multiply_checked, threads
from tests.support.ranked import copy_to_layout
from tpkernels import _C
from tpkernels.common.dtypes import CODES
from tpkernels.local import matmul

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
N = 2 * matmul._PANEL_COLUMNS + 7


def integers(*shape: int) -> torch.Tensor:
    """Return integers so small that every partial sum of 9 terms is exact in all dtypes."""
    return torch.randint(-3, 4, shape, dtype=torch.float64)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_exact_for_integers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, native: bool
) -> None:
    monkeypatch.setattr(matmul, "is_native", lambda _: native)
    torch.manual_seed(0)
    weight_layouts = ["plain", "transposed", "sliced"]
    weight_layouts += ["packed"] if dtype in PACKABLE else []
    layouts = itertools.product(("plain", "transposed", "sliced"), weight_layouts)
    for rows, (x_layout, w_layout) in itertools.product((1, 3, 4, 70), layouts):
        x, w, bias = integers(rows, 9), integers(9, N), integers(N)
        factor, outs = copy_to_layout(w.to(dtype), w_layout), {dtype, torch.float32}
        if w_layout == "packed":
            factor, outs = tpkernels.pack(w.to(dtype)), {dtype}
        for added, out_dtype in itertools.product((None, bias.to(dtype), bias.float()), outs):
            padded = torch.full((rows, N + 2), torch.nan, dtype=out_dtype)
            out = padded[:, 1:-1]
            assert (
                matmul.local_matmul(copy_to_layout(x.to(dtype), x_layout), factor, out, added)
                is out
            )
            expected = x @ w if added is None else x @ w + bias
            assert torch.equal(out.double(), expected), (rows, x_layout, w_layout, out_dtype)
            assert padded[:, [0, -1]].isnan().all()


def test_empty_operands() -> None:
    for rows, columns in [(0, 5), (5, 0)]:
        out = torch.empty(rows, columns)
        assert matmul.local_matmul(torch.ones(rows, 3), torch.ones(3, columns), out) is out
        if columns:
            packed = tpkernels.pack(torch.ones(3, columns))
            assert matmul.local_matmul(torch.ones(rows, 3), packed, out) is out


# Few rows. The extension reads column-major weights in place.

MAX_ROWS = 16
WIDTHS = (2, 15, 16, 31, 32, 33, 64, 100)  # K
COLUMNS = (1, 3, 4, 5, 63, 64, 65, 130)
UNITS = [name for name in _C.host.vector_units() if name != "plain"]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, MAX_ROWS)


def few_rows(unit: str, dtype: torch.dtype) -> int:
    """Return the number of rows up to which all processors read column-major weights in place."""
    return 0 if unit in ("plain", "tiles") else 4 if dtype == BF16 else 8


def k_major(k: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, k).to(dtype).t()


def test_few_rows_are_exact_for_integers(unit: str) -> None:
    torch.manual_seed(0)
    for dtype, k, n in itertools.product(DTYPES, WIDTHS, COLUMNS):
        w = torch.randint(-1, 2, (n, k)).to(dtype).t()
        x, bias = torch.randint(-1, 2, (MAX_ROWS, k)).to(dtype), torch.randint(-3, 4, (n,)).float()
        expected = x.float() @ w.float()
        few = few_rows(unit, dtype)
        assert _C.calls.has_matmul_kernel(CODES[dtype], "columns", 4) is (few > 0)
        for rows, out_dtype, added in itertools.product(ROWS, {dtype, F32}, (None, bias)):
            result = multiply_checked(x[:rows], w, out_dtype, added)
            assert result is not None or rows > few, (dtype, k, n, rows)
            if result is not None:
                exact = expected[:rows] if added is None else expected[:rows] + added
                assert torch.equal(result.float(), exact), (dtype, k, n, rows, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_close_to_float64_and_independent_of_other_rows(unit: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    max_rows = few_rows(unit, dtype)
    if not max_rows:
        return
    # The last weight is read in chunks for all rows, but not for one row.
    for (k, n), count in itertools.product([(100, 65), (1000, 300), (4099, 70)], (1, 2)):
        x, w = torch.randn(max_rows, k).to(dtype), k_major(k, n, dtype)
        with threads(count):
            full = multiply_checked(x, w, F32)
            assert full is not None and is_within_rounding(full, x, w), (k, n)
            for rows, columns in itertools.product([(0, 1), (1, 3)], [(0, n), (7, 60), (n - 1, n)]):
                chunk = multiply_checked(x[slice(*rows)], w[:, slice(*columns)], F32)
                assert chunk is not None
                assert torch.equal(chunk, full[slice(*rows), slice(*columns)]), (k, rows, columns)


@pytest.mark.skipif(not UNITS, reason="needs a vector unit")
def test_few_rows_left_to_torch() -> None:
    x, w = torch.randn(3, 40), k_major(40, 12, F32)
    assert multiply_checked(x, w, F32) is not None
    assert (
        multiply_checked(torch.randn(6, 48)[::2, 3:43], k_major(60, 12, F32)[9:49], F32) is not None
    )
    assert multiply_checked(torch.randn(MAX_ROWS + 1, 40), w, F32) is None  # w has few columns
    assert multiply_checked(x, w.contiguous(), F32) is None
    assert multiply_checked(copy_to_layout(x, "transposed").bfloat16(), w.bfloat16(), BF16) is None
    assert multiply_checked(x.bfloat16(), w, F32) is None
    assert multiply_checked(x.double(), w.double(), torch.float64) is None
    assert multiply_checked(x, w, torch.float64) is None
    assert multiply_checked(x[:, :0], w[:0], F32) is None
    with pytest.raises(ValueError, match="out and bias do not fit the matmul"):
        multiply_checked(x, w, F32, torch.ones(11))
    assert multiply_checked(x[:, :30], w, F32) is None
    chunk = torch.empty(3, 12)
    assert not _C.calls.multiply(x, w, chunk, None, (MAX_ROWS + 1, 0))
    assert not _C.calls.multiply(x, w, chunk, None, (2, 0))


@pytest.mark.skipif(not UNITS, reason="needs a vector unit")
def test_a_chunk_uses_the_kernel_of_the_full_matmul() -> None:
    """torch computes the chunk if it would compute the full number of rows."""
    x, w, out = torch.ones(2, 33), k_major(33, 5, F32), torch.empty(2, 5)
    for rows, uses_torch in [(2, False), (MAX_ROWS + 1, True)]:
        with mock.patch.object(torch, "mm", wraps=torch.mm) as mm:
            matmul.local_matmul(x, w, out, None, rows)
        assert mm.called is uses_torch


# Many rows. The extension packs the weight into panels if torch is slower.
# tests/native/test_matmul.cpp covers all processors with AVX-512.

LAYOUTS = ("rows", "columns")


def repacks(dtype: torch.dtype) -> bool:
    return _C.calls.has_matmul_kernel(CODES[dtype], "rows", 64)


REPACKED = [dtype for dtype in (F32, BF16) if repacks(dtype)]
needs_repacking = pytest.mark.skipif(not REPACKED, reason="torch multiplies as fast here")


def weight(k: int, n: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    w = torch.randn(k, n).to(dtype)
    return w if layout == "rows" else w.t().contiguous().t()


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows_are_close_to_float64(dtype: torch.dtype, layout: str) -> None:
    """Sizes include more rows, columns and K than one block, odd sizes, and slices of tensors."""
    torch.manual_seed(0)
    shapes = [(24, 32, 48), (33, 47, 129), (800, 1100, 64), (100, 2051, 70)]
    for (rows, k, n), out_dtype in itertools.product(shapes, {dtype, F32}):
        x = torch.randn(rows, k + 3).to(dtype)[:, 1 : 1 + k]
        w, bias = weight(k, n + 8, dtype, layout)[:, 3 : 3 + n], torch.randn(n)
        padded = torch.full((rows, n + 2), torch.nan, dtype=out_dtype)
        out = padded[:, 1:-1]
        handled = _C.calls.multiply(x, w, out, None, (rows, 0))
        assert handled or (layout == "columns" and out_dtype == BF16)
        assert not handled or is_within_rounding(out, x, w), (rows, k, n, out_dtype)
        matmul.local_matmul(x, w, out, bias)
        assert is_within_rounding(out, x, w, bias), (rows, k, n, out_dtype)
        assert padded[:, [0, -1]].isnan().all()


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows_do_not_depend_on_each_other(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(1)
    x, w, rows = torch.randn(300, 700).to(dtype), weight(700, 200, dtype, layout), 300
    full = torch.empty(rows, 200)
    assert _C.calls.multiply(x, w, full, None, (rows, 0))
    for count, (begin, end) in itertools.product((1, 2, 3), [(0, 300), (7, 8), (100, 256)]):
        chunk = torch.empty(end - begin, 200)
        with threads(count):
            assert _C.calls.multiply(x[begin:end], w, chunk, None, (rows, 0))
        assert torch.equal(chunk, full[begin:end]), (count, begin)


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
def test_gradients_of_weights(dtype: torch.dtype) -> None:
    """``x^T @ grad``: the left operand has no contiguous rows."""
    torch.manual_seed(2)
    x, grad = torch.randn(130, 70).to(dtype), torch.randn(130, 65).to(dtype)
    out = torch.empty(70, 65)
    with mock.patch.object(torch, "mm") as torch_mm:
        matmul.local_matmul(x.t(), grad, out)
    assert not torch_mm.called
    assert is_within_rounding(out, x.t(), grad)


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_columns_of_a_full_matmul(dtype: torch.dtype, layout: str) -> None:
    """A slice with few columns is bitwise identical to the columns of the full matmul."""
    torch.manual_seed(3)
    x, w = torch.randn(64, 4096).to(dtype), weight(4096, 64, dtype, layout)
    full, joined = torch.empty(64, 64), torch.empty(64, 64)
    matmul.local_matmul(x, w, full)
    for columns in (slice(0, 20), slice(20, 64)):
        matmul.local_matmul(x, w[:, columns], joined[:, columns], full_columns=64)
    assert torch.equal(joined, full)


@needs_repacking
def test_many_rows_left_to_torch() -> None:
    dtype = REPACKED[0]
    for rows, k, n, handled in [(64, 64, 64, 1), (64, 31, 64, 0), (64, 64, 47, 0), (2, 64, 64, 0)]:
        x, w = torch.ones(rows, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
        out = torch.empty(rows, n)
        assert _C.calls.multiply(x, w, out, None, (rows, 0)) == handled
        assert not _C.calls.multiply(x, w[:, ::2], out[:, : (n + 1) // 2], None, (rows, 0))
        assert not _C.calls.multiply(x, w.half(), out, None, (rows, 0))


def test_a_failed_unit_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C.host, "failed_vector_units", lambda: ["avx512"])
    with pytest.warns(
        RuntimeWarning,
        match="tpkernels disabled avx512 on this processor, because a self-test with small",
    ):
        importlib.reload(matmul)
