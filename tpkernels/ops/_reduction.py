"""What the ops that sum partials share: the epilogue's arguments."""

from __future__ import annotations

import torch

from tpkernels import dtypes
from tpkernels.algorithms.reduction import Reduction


def describe(
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[str, ...]:
    """The options that all ranks must share, in words, for the call's signature."""
    options = [f"x {dtypes.name(x_dtype)}", f"out {dtypes.name(out_dtype)}"]
    if bias is not None:
        options.append("bias")
    if residual is not None:
        options.append("residual")
    return tuple(options)


def reduction_of(
    x: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Reduction:
    """The epilogue of a checked call."""
    if bias is not None:
        bias = bias.to(dtypes.accumulator(x.dtype)).contiguous()
    if residual is not None:
        residual = residual.contiguous()
    return Reduction(out_dtype or x.dtype, bias, residual)
