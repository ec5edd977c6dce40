"""The sum of the ranks' partials with its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels import _C, dtypes
from tpkernels.integers import ceil_div
from tpkernels.local.memory import empty
from tpkernels.local.ranges import COPY, recorded


@dataclass(frozen=True)
class Reduction:
    """The steps after the sum of the partials: ``+ bias + residual``, then one rounding to
    ``out_dtype``.

    ``bias`` is [cols] in the accumulator's dtype; ``residual`` is contiguous, of the output's
    shape.
    """

    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def epilogue(self) -> _C.host.Epilogue:
        """The extension's form. It holds addresses: keep the reduction alive while it is used."""
        bias, residual = self.bias, self.residual
        return _C.host.Epilogue(
            dtypes.CODES[self.out_dtype],
            bias.data_ptr() if bias is not None else 0,
            max(bias.numel(), 1) if bias is not None else 1,
            residual.data_ptr() if residual is not None else 0,
            dtypes.CODES[residual.dtype] if residual is not None else 0,
        )


def reduced(partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """The result for a single rank, whose partial is the whole sum. May be ``partial`` itself."""
    plain = reduction.bias is None and reduction.residual is None
    if plain and reduction.out_dtype == partial.dtype:
        return partial
    out = empty(partial.shape, reduction.out_dtype, partial.device)
    reduce_into(out, [partial.contiguous()], reduction)
    return out


def reduce_into(
    out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction, begin: int = 0
) -> None:
    """``out = round(sum of partials in order + bias + residual)``. All are contiguous, of one size,
    and start at element ``begin`` of the whole output. ``out`` may be one of the partials."""
    if out.device.type != "cpu":
        _reduce_by_torch(out, partials, reduction, begin)
        return
    if begin and reduction.residual is not None:
        rest = reduction.residual.view(-1)[begin:]
        reduction = Reduction(reduction.out_dtype, reduction.bias, rest)
    addresses = [partial.data_ptr() for partial in partials]
    wire = dtypes.CODES[partials[0].dtype]
    with recorded(COPY):
        _C.host.sum_partials(
            out.data_ptr(), addresses, wire, begin, partials[0].numel(), reduction.epilogue()
        )


def _reduce_by_torch(
    out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction, begin: int
) -> None:
    wide, count = dtypes.accumulator(partials[0].dtype), out.numel()
    total = partials[0].reshape(-1).to(wide, copy=True)
    for partial in partials[1:]:
        total += partial.reshape(-1)
    if reduction.bias is not None and count:
        columns = reduction.bias.numel()
        bias = reduction.bias.roll(-(begin % columns))
        total += bias.repeat(ceil_div(count, columns))[:count]
    if reduction.residual is not None:
        total += reduction.residual.view(-1)[begin : begin + count]
    out.view(-1).copy_(total)
