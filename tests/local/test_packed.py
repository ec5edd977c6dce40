"""Packed weights: the product is exact for integers, the weight comes back to the bit, what cannot
be packed is refused, and which packed weights are known to be panels."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import tpkernels
from tests.support.products import product, threads, within_rounding
from tests.support.refusals import packable
from tpkernels import _C
from tpkernels.dtypes import CODES
from tpkernels.local import packed
from tpkernels.local.matmul import local_matmul, new_product

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_the_bias_is_added_before_rounding() -> None:
    if torch.bfloat16 not in packable():
        pytest.skip("this processor has no instructions for bfloat16")
    w, out = tpkernels.pack(torch.ones(2, 3).bfloat16()), torch.empty(1, 3).bfloat16()
    # Even numbers are next to 256: 257 alone would be 256, and 257 + 1 is 258.
    local_matmul(torch.tensor([[256.0, 1.0]]).bfloat16(), w, out, torch.ones(3).bfloat16())
    assert (out == 258).all()
    # A float32 bias is not rounded to bfloat16 either, which would be 256 + 1, and so 256.
    local_matmul(torch.tensor([[256.0, 0.0]]).bfloat16(), w, out, torch.full((3,), 1.0001))
    assert (out == 258).all()


@pytest.mark.parametrize("dtype", packable(), ids=str)
def test_the_weight_comes_back(dtype: torch.dtype) -> None:
    w = torch.randn(37, 19).to(dtype)
    kept = w.clone()
    factor = tpkernels.pack(torch.nn.Parameter(w))
    assert not factor.requires_grad
    w.zero_()  # it has memory of its own
    assert torch.equal(factor.to_dense().t(), kept)


def test_what_cannot_be_packed() -> None:
    w = torch.ones(4, 3)
    for given, error, pattern in (
        (torch.ones(3), ValueError, r"w has shape \[3\]; only a matrix \[K, N\]"),
        (torch.ones(3, 0), ValueError, r"w has shape \[3, 0\]"),
        (tpkernels.pack(w), ValueError, r"shape \[3, 4\] is packed already"),
        (w.to("meta"), NotImplementedError, "w is a torch.strided tensor on meta; only dense CPU"),
        (w.to_sparse(), NotImplementedError, "torch.sparse_coo tensor on cpu"),
        (w.double(), NotImplementedError, "w is float64.*use the plain weight"),
        (w.int(), NotImplementedError, "w has dtype int32; supported"),
    ):
        with pytest.raises(error, match=pattern):
            tpkernels.pack(given)
    with (
        mock.patch.object(packed, "native", lambda _: False),
        pytest.raises(NotImplementedError, match=r"w is bfloat16.*no instructions.*in float32"),
    ):
        tpkernels.pack(w.bfloat16())
    with (
        mock.patch.object(torch.backends.mkldnn, "is_available", lambda: False),
        pytest.raises(NotImplementedError, match=r"torch was built without oneDNN; use the plain"),
    ):
        tpkernels.pack(w)


# In panels.

MOST = 150
COLUMNS = _C.calls.PANEL_COLUMNS


def takes_panels(dtype: torch.dtype) -> bool:
    return _C.calls.multiplies(CODES[dtype], "packed", 1)


PANELS = [dtype for dtype in (F32, F16, BF16) if takes_panels(dtype)]
PACKED = [dtype for dtype in PANELS if dtype in packable()]


def in_panels(w: torch.Tensor) -> tuple[SimpleNamespace, torch.Tensor]:
    """A weight [K, N] as csrc/host/product.h describes it, written apart from the package; and its
    memory."""
    group = 4 // w.dtype.itemsize
    parts = []
    for panel in w.split(COLUMNS, dim=1):
        for groups in panel.split(len(w) // group * group or 1):  # and what an odd K leaves
            together = group if len(groups) % group == 0 else 1
            parts.append(groups.reshape(-1, together, panel.shape[1]).transpose(1, 2).flatten())
    memory = torch.cat(parts)
    pitch = COLUMNS * len(w) * w.dtype.itemsize
    panels = _C.calls.Panels(memory.data_ptr(), pitch, *w.shape, CODES[w.dtype])
    return SimpleNamespace(_tpkernels_panels=panels), memory


def test_exact_for_integers(unit: str) -> None:
    torch.manual_seed(0)
    shapes = [(1, 3), (2, 1), (3, 64), (17, 65), (32, 63), (33, 130)]
    for dtype, (k, n) in itertools.product((F32, F16, BF16), shapes):
        w = torch.randint(-2, 3, (k, n)).to(dtype)
        weight, memory = in_panels(w)
        wide, bias = torch.randint(-2, 3, (MOST, k + 5)).to(dtype), torch.randint(-3, 4, (n,))
        for rows, out_dtype, added in itertools.product(
            (1, 2, 5, 6, 7, 13, 17, MOST), {dtype, F32}, (None, bias.float())
        ):
            x = wide[:rows, 2 : 2 + k]
            got = product(x, weight, out_dtype, added, n)
            taken = k > 1 and _C.calls.multiplies(CODES[dtype], "packed", rows)
            assert (got is not None) is taken, (dtype, k, n, rows)
            if got is not None:
                exact = x.float() @ w.float() + (0 if added is None else added)
                assert torch.equal(got.float(), exact), (dtype, k, n, rows, out_dtype)
        del memory


@pytest.mark.parametrize("dtype", PANELS, ids=str)
def test_close_to_float64_and_the_same_beside_other_rows(unit: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    k, n = 2601, 70  # several chunks of K where rows take several passes
    w = torch.randn(k, n).to(dtype)
    weight, memory = in_panels(w)
    x = torch.randn(MOST, k).to(dtype)
    whole = product(x, weight, F32, columns=n)
    assert whole is not None
    assert within_rounding(whole, x, w)
    # With 2 threads, one of the 2 panels for each; with 3, each panel in parts of the rows.
    for rows, count in [((0, 1), 1), ((3, 10), 1), ((0, MOST), 2), ((0, MOST), 3)]:
        with threads(count):
            part = product(x[slice(*rows)], weight, F32, columns=n)
        assert part is not None and torch.equal(part, whole[slice(*rows)]), (rows, count)
    del memory


def test_what_is_left_to_others() -> None:
    w = torch.randn(40, 12)
    weight, memory = in_panels(w)
    x = torch.randn(3, 40)
    assert product(x, weight, F32, columns=12) is not None
    assert product(x[:, :39], weight, F32, columns=12) is None
    assert product(x.bfloat16(), weight, F32, columns=12) is None
    assert product(x, SimpleNamespace(), F32, columns=12) is None
    with pytest.raises(ValueError, match="another shape"):
        product(x, weight, F32, columns=13)
    del memory


@pytest.mark.parametrize("dtype", packable(), ids=str)
def test_a_packed_weight_and_its_alias(dtype: torch.dtype) -> None:
    """Whether or not this torch packs in panels: an alias is not known to be."""
    torch.manual_seed(2)
    w, x = torch.randint(-2, 3, (100, 70)).to(dtype), torch.randint(-2, 3, (MOST, 100)).to(dtype)
    factor = tpkernels.pack(w)
    known = hasattr(factor, "_tpkernels_panels")
    assert takes_panels(dtype) or not known
    for rows in (1, 7, MOST):
        known = known and _C.calls.multiplies(CODES[dtype], "packed", rows)
        exact = (x[:rows].float() @ w.float()).to(dtype)
        out = torch.empty_like(exact)
        assert _C.calls.multiply(x[:rows], factor, out, None, True, (rows, 0)) is known
        assert not _C.calls.multiply(x[:rows], factor.detach(), out, None, True, (rows, 0))
        for each in (factor, factor.detach()):
            assert torch.equal(new_product(x[:rows], each), exact)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_another_layout_is_not_taken_for_panels(dtype: torch.dtype) -> None:
    w = torch.randn(100, 128).to(dtype)
    if not hasattr(tpkernels.pack(w), "_tpkernels_panels"):
        pytest.skip("this torch does not pack in panels")
    factor = tpkernels.pack(w)
    description = packed._description(factor)
    try:
        packed._pitch_of.cache_clear()
        with mock.patch.object(_C.calls, "PANEL_COLUMNS", 32):
            assert packed._panel_pitch(factor) is None
        packed._pitch_of.cache_clear()
        assert packed._pitch_of(description[:-1], 128, 100, dtype) is None
        with (
            mock.patch.object(packed, "_reordered", torch.Tensor.to_mkldnn),  # row by row
            mock.patch.object(packed, "_description", return_value=b""),
        ):
            assert packed._pitch_of(b"", 128, 128, dtype) is None
        packed._pitch_of.cache_clear()
        assert packed._pitch_of(description, 128, 100, dtype) is not None
    finally:
        packed._pitch_of.cache_clear()


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_the_memory_lives_as_long_as_the_tensor(dtype: torch.dtype) -> None:
    """Few rows are multiplied by what was packed: `pack` says not to assign data."""
    factor = tpkernels.pack(torch.ones(512, 512, dtype=dtype))
    other = tpkernels.pack(torch.full((512, 512), 2, dtype=dtype))
    factor.data = other
    del other
    results = new_product(torch.ones(1, 512, dtype=dtype), factor)
    known = hasattr(factor, "_tpkernels_panels")
    assert (results == (512 if known else 1024)).all()


@pytest.mark.parametrize("dtype", packable(), ids=str)
def test_strides_do_not_change_the_bits(dtype: torch.dtype) -> None:
    """Nor does a bias of zeros, or a profiler."""
    torch.manual_seed(4)
    factor, x = tpkernels.pack(torch.randn(2000, 70).to(dtype)), torch.randn(2000, 40).to(dtype).t()
    results = [new_product(x, factor), new_product(x, factor, torch.zeros(70, dtype=dtype))]
    with torch.profiler.profile():
        results.append(new_product(x, factor))
    assert all(torch.equal(each, new_product(x.contiguous(), factor)) for each in results)


def test_packing_leaves_the_random_numbers_alone() -> None:
    packed._pitch_of.cache_clear()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    tpkernels.pack(torch.ones(20, 30))
    assert torch.equal(torch.random.get_rng_state(), before)
