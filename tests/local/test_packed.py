"""Packed weights: the product is exact for integers, the weight comes back to the bit, and what
cannot be packed is refused."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

import tpkernels
from tests.local.test_matmul import integers
from tests.support.ranked import place
from tests.support.refusals import packable
from tpkernels.local import packed
from tpkernels.local.matmul import local_matmul

LAYOUTS = ("plain", "transposed", "sliced")


@pytest.mark.parametrize("dtype", packable(), ids=str)
def test_it_is_the_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(1, 9, 37), (3, 9, 1), (70, 1, 5), (5, 9, 600)]
    for (rows, k, n), (of_x, of_w) in itertools.product(
        shapes, itertools.product(LAYOUTS, LAYOUTS)
    ):
        x, w, bias = integers(rows, k), integers(k, n), integers(n)
        factor = tpkernels.pack(place(w.to(dtype), of_w))
        assert packed.columns_of(factor) == n
        for given in (None, bias.to(dtype), bias.float()):
            around = torch.full((rows, n + 2), torch.nan, dtype=dtype)
            out = around[:, 1:-1]
            assert local_matmul(place(x.to(dtype), of_x), factor, out, given) is out
            expected = x @ w if given is None else x @ w + bias
            assert torch.equal(out.double(), expected), (rows, k, n, of_x, of_w)


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


@pytest.mark.parametrize("rows, columns", [(0, 5), (3, 5)])
def test_any_rows(rows: int, columns: int) -> None:
    out = torch.zeros(rows, columns)
    assert local_matmul(torch.ones(rows, 3), tpkernels.pack(torch.ones(3, columns)), out) is out
    assert (out == 3).all()


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
