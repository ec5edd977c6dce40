"""The sum of the ranks' partials, its epilogue, and the normalisation of its rows.

`direct` normalises within its collective. The other algorithms do it behind theirs, by the same
code of the extension: the same bits. Where the numerics leave sums on GPUs to the vendor, torch
normalises behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from tpkernels import _C, cuda
from tpkernels.common import dtypes
from tpkernels.common.integers import ceil_div
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.local.ranges import COPY, recorded
from tpkernels.planning.problem import VENDOR


@dataclass(frozen=True)
class Reduction:
    """The steps after the sum of the partials: ``+ bias + residual``, then one rounding to
    ``out_dtype``.

    ``bias`` is [cols], on CPUs in the accumulator's dtype; ``residual`` is contiguous, of the
    output's shape.
    """

    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Reduction:
        """Return the epilogue of a checked call. The kernels of GPUs read a bias of any dtype."""
        if bias is not None:
            wide = bias if x.is_cuda else bias.to(dtypes.accumulator(x.dtype))
            bias = wide.contiguous()
        if residual is not None:
            residual = residual.contiguous()
        return cls(out_dtype or x.dtype, bias, residual)

    def keeps(self, total: torch.dtype) -> bool:
        """Return whether a sum in this dtype is the result already."""
        return self.bias is None and self.residual is None and self.out_dtype == total

    def epilogue(self) -> _C.host.Epilogue:
        """Return the extension's form. It holds addresses: keep the reduction alive meanwhile."""
        bias, residual = self.bias, self.residual
        return _C.host.Epilogue(
            dtypes.CODES[self.out_dtype],
            bias.data_ptr() if bias is not None else 0,
            max(bias.numel(), 1) if bias is not None else 1,
            residual.data_ptr() if residual is not None else 0,
            dtypes.CODES[residual.dtype] if residual is not None else 0,
        )


@dataclass(frozen=True)
class RmsNorm:
    """``y = x / sqrt(mean(x^2) + eps) * weight`` of each row, in fp32, rounded once.

    ``weight`` is [N] and contiguous, in the rows' dtype or the accumulator's.
    """

    weight: torch.Tensor
    eps: float


def reduce_into(
    out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction, begin: int = 0
) -> None:
    """Set ``out = round(sum of partials in order + bias + residual)``. All are contiguous, of one
    size, and start at element ``begin`` of the whole output. ``out`` may be one of the partials.
    One launch on GPUs, where the kernels of ``csrc/cuda`` can be loaded and take the dtypes."""
    if _on_gpu(out):
        if _has_kernel(out, partials, reduction):
            residual = reduction.residual
            if residual is not None:
                residual = residual.view(-1).narrow(0, begin, out.numel())
            flat = [partial.view(-1) for partial in partials]
            cuda.sum_partials(out.view(-1), flat, reduction.bias, residual, begin)
        else:
            _reduce_by_torch(out, partials, reduction, begin)
        return
    if begin and reduction.residual is not None:
        reduction = replace(reduction, residual=reduction.residual.view(-1)[begin:])
    addresses = list(map(torch.Tensor.data_ptr, partials))
    wire = dtypes.CODES[partials[0].dtype]
    with recorded(COPY):
        _C.host.sum_partials(
            out.data_ptr(), addresses, wire, begin, partials[0].numel(), reduction.epilogue()
        )


def normalised(call: Call, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """Return rows [..., N], contiguous, normalised."""
    weight, eps = norm.weight, norm.eps
    columns = weight.numel()
    if rows.device.type != "cpu" and not (
        call.plan.numerics != VENDOR
        and cuda.normalises(rows.dtype, columns)
        and cuda.available(rows.device)
    ):
        wide = rows.to(weight.dtype)  # torch takes operands of one dtype
        return functional.rms_norm(wide, list(weight.shape), weight, eps).to(rows.dtype)
    out = empty(rows.shape, rows.dtype, rows.device)
    if rows.device.type != "cpu":
        cuda.rms_norm(rows, out, weight, eps)
        return out
    with recorded(COPY):
        _C.host.normalise_rows(
            out.data_ptr(),
            rows.data_ptr(),
            dtypes.CODES[rows.dtype],
            rows.numel() // columns,
            weight.data_ptr(),
            dtypes.CODES[weight.dtype],
            columns,
            eps,
        )
    return out


def normalising(reduce: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """Make an algorithm's `reduce` return the rows of the sum normalised."""

    @functools.wraps(reduce)
    def reduce_and_normalise(
        call: Call,
        x: torch.Tensor,
        w: Weight | None,
        out: torch.Tensor,
        reduction: Reduction,
        norm: RmsNorm,
    ) -> torch.Tensor:
        reduce(call, x, w, out, reduction)
        return normalised(call, out, norm)

    return reduce_and_normalise


def _on_gpu(x: torch.Tensor) -> bool:
    return x.device.type != "cpu"


def _has_kernel(out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction) -> bool:
    operands = (out, *partials, reduction.bias, reduction.residual)
    return (
        len(partials) <= _C.cuda.MAX_WORLD
        and all(x is None or x.dtype in cuda.DTYPES for x in operands)
        and cuda.available(out.device)
    )


def _reduce_by_torch(
    out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction, begin: int
) -> None:
    """Add in a wide copy, one launch for each term, and round at the end."""
    bias, residual, count = reduction.bias, reduction.residual, out.numel()
    total = partials[0].view(-1).to(dtypes.accumulator(partials[0].dtype), copy=True)
    for partial in partials[1:]:
        total += partial.view(-1)
    if bias is not None:
        first, columns = begin % bias.numel(), bias.numel()
        if first or count % columns:
            total += bias.repeat(ceil_div(first + count, columns))[first : first + count]
        else:  # whole rows
            total.view(-1, columns).add_(bias)
    if residual is not None:
        total += residual.view(-1).narrow(0, begin, count)
    out.view(-1).copy_(total)
