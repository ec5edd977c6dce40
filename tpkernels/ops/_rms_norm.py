"""What the ops that normalise the rows of their sum share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tpkernels import dtypes, validation
from tpkernels.algorithms.parts import as_rows
from tpkernels.algorithms.reduction import RmsNorm


def check_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, columns: int, what: str
) -> tuple[float, torch.dtype]:
    """Check the arguments of the normalisation of rows of ``columns`` elements; return
    `Options.norm`."""
    validation.bias(weight, x, columns, what)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps}; it must be finite and at least 0")
    return float(eps), weight.dtype


def norm_of(weight: torch.Tensor, eps: float) -> RmsNorm:
    """Return the normalisation of a checked call."""
    return RmsNorm(weight.contiguous(), eps)


class NormGrads(NamedTuple):
    """Gradients with respect to the sum, in the accumulator's dtype, and to the normalisation's
    weight, in its own."""

    total: torch.Tensor
    weight: torch.Tensor


def norm_grads(
    ctx: Any,
    total: torch.Tensor,
    weight: torch.Tensor,
    grad_normed: torch.Tensor,
    grad_total: torch.Tensor,
) -> NormGrads:
    """Gradients, given those of both results. Their rounding counts as the identity."""
    wide = dtypes.accumulator(total.dtype)
    rows, grad = total.to(wide), grad_normed.to(wide)
    factor = torch.rsqrt(rows.square().mean(-1, keepdim=True) + ctx.eps)
    scaled, grad_scaled = rows * factor, grad * weight.to(wide)
    along = (grad_scaled * scaled).mean(-1, keepdim=True)
    return NormGrads(
        total=factor * (grad_scaled - scaled * along) + grad_total,
        weight=as_rows(grad * scaled).sum(0).to(weight.dtype),
    )
