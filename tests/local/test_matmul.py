"""The local matmul, whether this processor multiplies 16-bit numbers at full speed or not: exact
for integers."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.ranked import place
from tpkernels.local import matmul

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
N = 2 * matmul._PANEL_COLUMNS + 7


def integers(*shape: int) -> torch.Tensor:
    """So small that every partial sum of 9 products is exact in all dtypes."""
    return torch.randint(-3, 4, shape, dtype=torch.float64)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, native: bool
) -> None:
    monkeypatch.setattr(matmul, "native", lambda _: native)
    torch.manual_seed(0)
    layouts = itertools.product(("plain", "transposed", "sliced"), repeat=2)
    for rows, (of_x, of_w) in itertools.product((1, 3, 4), layouts):
        x, w, bias = integers(rows, 9), integers(9, N), integers(N)
        for given in (None, bias.to(dtype), bias.float()):
            for out_dtype in {dtype, torch.float32}:
                out = torch.full((rows, N), torch.nan, dtype=out_dtype)
                got = matmul.local_matmul(
                    place(x.to(dtype), of_x), place(w.to(dtype), of_w), out, given
                )
                assert got is out
                expected = x @ w if given is None else x @ w + bias
                assert torch.equal(out.double(), expected), (rows, of_x, of_w, out_dtype)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0)])
def test_nothing_to_multiply(rows: int, columns: int) -> None:
    out = torch.empty(rows, columns)
    assert matmul.local_matmul(torch.ones(rows, 3), torch.ones(3, columns), out) is out
