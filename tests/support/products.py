"""Products by the extension, and what their rounding may amount to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tpkernels import _C
from tpkernels.local.packed import columns_of

FILLER = 77  # around what is read and written, and in what is neither


def product(
    x: torch.Tensor,
    w: Any,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    columns: int | None = None,
) -> torch.Tensor | None:
    """``x @ w + bias`` with canaries around it; None where the extension leaves it to torch.
    ``columns``: of the result, if not those of w."""
    n = columns_of(w) if columns is None else columns
    around = torch.full((x.shape[0] + 2, n + 9), FILLER, dtype=dtype)
    inside = around[1:-1, 1 : 1 + n]
    took = _C.calls.multiply(x, w, inside, bias, (x.shape[0], 0))
    result = inside.clone()
    inside.fill_(FILLER)
    assert (around == FILLER).all(), "wrote beyond the result"
    assert took or (result == FILLER).all()
    return result if took else None


def within_rounding(
    got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> bool:
    """Whether a product is as close to the exact one as sums in fp32, rounded once, must be."""
    x, w = x.double(), w.double()
    exact = x @ w + bias
    bound = x.shape[1] ** 0.5 * torch.finfo(torch.float32).eps * (x.abs() @ w.abs())
    if got.dtype != torch.float32 or isinstance(bias, torch.Tensor):
        bound += torch.finfo(got.dtype).eps * exact.abs()
    return bool(((got.double() - exact).abs() <= bound).all())


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
