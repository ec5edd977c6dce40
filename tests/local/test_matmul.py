"""The local matmul: exact for integers, close to float64, and the same bits whatever the parts. By
torch, whether this processor multiplies 16-bit numbers at full speed or not, and by the extension
in every vector unit that it has."""

from __future__ import annotations

import importlib
import itertools
from unittest import mock

import pytest
import torch

import tpkernels
from tests.support.cases import PACKABLE
from tests.support.products import product, threads, within_rounding
from tests.support.ranked import place
from tpkernels import _C
from tpkernels.common.dtypes import CODES
from tpkernels.local import matmul

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
N = 2 * matmul._PANEL_COLUMNS + 7


def integers(*shape: int) -> torch.Tensor:
    """So small that every partial sum of 9 products is exact in all dtypes."""
    return torch.randint(-3, 4, shape, dtype=torch.float64)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_it_is_the_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, native: bool
) -> None:
    monkeypatch.setattr(matmul, "native", lambda _: native)
    torch.manual_seed(0)
    of_weights = ["plain", "transposed", "sliced"]
    of_weights += ["packed"] if dtype in PACKABLE else []
    layouts = itertools.product(("plain", "transposed", "sliced"), of_weights)
    for rows, (of_x, of_w) in itertools.product((1, 3, 4, 70), layouts):
        x, w, bias = integers(rows, 9), integers(9, N), integers(N)
        factor, outs = place(w.to(dtype), of_w), {dtype, torch.float32}
        if of_w == "packed":
            factor, outs = tpkernels.pack(w.to(dtype)), {dtype}
        for given, out_dtype in itertools.product((None, bias.to(dtype), bias.float()), outs):
            around = torch.full((rows, N + 2), torch.nan, dtype=out_dtype)
            out = around[:, 1:-1]
            assert matmul.local_matmul(place(x.to(dtype), of_x), factor, out, given) is out
            expected = x @ w if given is None else x @ w + bias
            assert torch.equal(out.double(), expected), (rows, of_x, of_w, out_dtype)
            assert around[:, [0, -1]].isnan().all()


def test_nothing_to_multiply() -> None:
    for rows, columns in [(0, 5), (5, 0)]:
        out = torch.empty(rows, columns)
        assert matmul.local_matmul(torch.ones(rows, 3), torch.ones(3, columns), out) is out
        if columns:
            packed = tpkernels.pack(torch.ones(3, columns))
            assert matmul.local_matmul(torch.ones(rows, 3), packed, out) is out


# Few rows, of which the extension reads columns in place.

MOST = 16
WIDTHS = (2, 15, 16, 31, 32, 33, 64, 100)  # K
COLUMNS = (1, 3, 4, 5, 63, 64, 65, 130)
UNITS = [name for name in _C.host.vector_units() if name != "plain"]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, MOST)


def few_rows(unit: str, dtype: torch.dtype) -> int:
    """For so many, columns are read in place whatever the processor."""
    return 0 if unit in ("plain", "tiles") else 4 if dtype == BF16 else 8


def k_major(k: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, k).to(dtype).t()


def test_few_rows_are_exact_for_integers(unit: str) -> None:
    torch.manual_seed(0)
    for dtype, k, n in itertools.product(DTYPES, WIDTHS, COLUMNS):
        w = torch.randint(-1, 2, (n, k)).to(dtype).t()
        x, bias = torch.randint(-1, 2, (MOST, k)).to(dtype), torch.randint(-3, 4, (n,)).float()
        expected = x.float() @ w.float()
        few = few_rows(unit, dtype)
        assert _C.calls.multiplies(CODES[dtype], "columns", 4) is (few > 0)
        for rows, out_dtype, added in itertools.product(ROWS, {dtype, F32}, (None, bias)):
            got = product(x[:rows], w, out_dtype, added)
            assert got is not None or rows > few, (dtype, k, n, rows)
            if got is not None:
                exact = expected[:rows] if added is None else expected[:rows] + added
                assert torch.equal(got.float(), exact), (dtype, k, n, rows, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_close_to_float64_and_the_same_beside_others(unit: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    most = few_rows(unit, dtype)
    if not most:
        return
    # The last one is read in chunks by all rows, and not by one.
    for (k, n), count in itertools.product([(100, 65), (1000, 300), (4099, 70)], (1, 2)):
        x, w = torch.randn(most, k).to(dtype), k_major(k, n, dtype)
        with threads(count):
            whole = product(x, w, F32)
            assert whole is not None and within_rounding(whole, x, w), (k, n)
            for rows, columns in itertools.product([(0, 1), (1, 3)], [(0, n), (7, 60), (n - 1, n)]):
                part = product(x[slice(*rows)], w[:, slice(*columns)], F32)
                assert part is not None
                assert torch.equal(part, whole[slice(*rows), slice(*columns)]), (k, rows, columns)


@pytest.mark.skipif(not UNITS, reason="needs a vector unit")
def test_which_few_rows_are_left_to_torch() -> None:
    x, w = torch.randn(3, 40), k_major(40, 12, F32)
    assert product(x, w, F32) is not None
    assert product(torch.randn(6, 48)[::2, 3:43], k_major(60, 12, F32)[9:49], F32) is not None
    assert product(torch.randn(MOST + 1, 40), w, F32) is None  # w has few columns
    assert product(x, w.contiguous(), F32) is None
    assert product(place(x, "transposed").bfloat16(), w.bfloat16(), BF16) is None
    assert product(x.bfloat16(), w, F32) is None
    assert product(x.double(), w.double(), torch.float64) is None
    assert product(x, w, torch.float64) is None
    assert product(x[:, :0], w[:0], F32) is None
    with pytest.raises(ValueError, match="out and bias do not fit the matmul"):
        product(x, w, F32, torch.ones(11))
    assert product(x[:, :30], w, F32) is None
    part = torch.empty(3, 12)
    assert not _C.calls.multiply(x, w, part, None, (MOST + 1, 0))
    assert not _C.calls.multiply(x, w, part, None, (2, 0))


@pytest.mark.skipif(not UNITS, reason="needs a vector unit")
def test_a_part_is_computed_as_the_whole_is() -> None:
    """By torch, if that multiplies so many rows."""
    x, w, out = torch.ones(2, 33), k_major(33, 5, F32), torch.empty(2, 5)
    for rows, by_torch in [(2, False), (MOST + 1, True)]:
        with mock.patch.object(torch, "mm", wraps=torch.mm) as called:
            matmul.local_matmul(x, w, out, None, rows)
        assert called.called is by_torch


# Many rows, for which the extension makes panels of the weight where torch is slower.
# tests/native/test_products.cpp has them on all processors with AVX-512.

LAYOUTS = ("rows", "columns")


def repacks(dtype: torch.dtype) -> bool:
    return _C.calls.multiplies(CODES[dtype], "rows", 64)


REPACKED = [dtype for dtype in (F32, BF16) if repacks(dtype)]
needs_repacking = pytest.mark.skipif(not REPACKED, reason="torch multiplies as fast here")


def weight(k: int, n: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    w = torch.randn(k, n).to(dtype)
    return w if layout == "rows" else w.t().contiguous().t()


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows_are_close_to_float64(dtype: torch.dtype, layout: str) -> None:
    """Also more rows, columns and K than are held at a time, odd ones, and parts of tensors."""
    torch.manual_seed(0)
    shapes = [(24, 32, 48), (33, 47, 129), (800, 1100, 64), (100, 2051, 70)]
    for (rows, k, n), out_dtype in itertools.product(shapes, {dtype, F32}):
        x = torch.randn(rows, k + 3).to(dtype)[:, 1 : 1 + k]
        w, bias = weight(k, n + 8, dtype, layout)[:, 3 : 3 + n], torch.randn(n)
        around = torch.full((rows, n + 2), torch.nan, dtype=out_dtype)
        out = around[:, 1:-1]
        taken = _C.calls.multiply(x, w, out, None, (rows, 0))
        assert taken or (layout == "columns" and out_dtype == BF16)
        assert not taken or within_rounding(out, x, w), (rows, k, n, out_dtype)
        matmul.local_matmul(x, w, out, bias)
        assert within_rounding(out, x, w, bias), (rows, k, n, out_dtype)
        assert around[:, [0, -1]].isnan().all()


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows_do_not_depend_on_each_other(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(1)
    x, w, rows = torch.randn(300, 700).to(dtype), weight(700, 200, dtype, layout), 300
    whole = torch.empty(rows, 200)
    assert _C.calls.multiply(x, w, whole, None, (rows, 0))
    for count, (begin, end) in itertools.product((1, 2, 3), [(0, 300), (7, 8), (100, 256)]):
        part = torch.empty(end - begin, 200)
        with threads(count):
            assert _C.calls.multiply(x[begin:end], w, part, None, (rows, 0))
        assert torch.equal(part, whole[begin:end]), (count, begin)


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
def test_gradients_of_weights(dtype: torch.dtype) -> None:
    """``x^T @ grad``, whose left operand has no contiguous rows."""
    torch.manual_seed(2)
    x, grad = torch.randn(130, 70).to(dtype), torch.randn(130, 65).to(dtype)
    out = torch.empty(70, 65)
    with mock.patch.object(torch, "mm") as by_torch:
        matmul.local_matmul(x.t(), grad, out)
    assert not by_torch.called
    assert within_rounding(out, x.t(), grad)


@pytest.mark.parametrize("dtype", REPACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_a_whole(dtype: torch.dtype, layout: str) -> None:
    """What has few columns because it is a part has the bits of the whole."""
    torch.manual_seed(3)
    x, w = torch.randn(64, 4096).to(dtype), weight(4096, 64, dtype, layout)
    whole, parts = torch.empty(64, 64), torch.empty(64, 64)
    matmul.local_matmul(x, w, whole)
    for columns in (slice(0, 20), slice(20, 64)):
        matmul.local_matmul(x, w[:, columns], parts[:, columns], whole_columns=64)
    assert torch.equal(parts, whole)


@needs_repacking
def test_which_many_rows_are_left_to_torch() -> None:
    dtype = REPACKED[0]
    for rows, k, n, taken in [(64, 64, 64, 1), (64, 31, 64, 0), (64, 64, 47, 0), (2, 64, 64, 0)]:
        x, w = torch.ones(rows, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
        out = torch.empty(rows, n)
        assert _C.calls.multiply(x, w, out, None, (rows, 0)) == taken
        assert not _C.calls.multiply(x, w[:, ::2], out[:, : (n + 1) // 2], None, (rows, 0))
        assert not _C.calls.multiply(x, w.half(), out, None, (rows, 0))


def test_a_unit_that_failed_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C.host, "failed_vector_units", lambda: ["avx512"])
    with pytest.warns(
        RuntimeWarning,
        match="tpkernels disabled avx512 on this processor, because a self-test with small",
    ):
        importlib.reload(matmul)
