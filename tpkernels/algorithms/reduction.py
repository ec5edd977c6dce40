"""Sum of partial sums, its epilogue, and RMSNorm of its rows.

`direct` normalises within its collective. The other algorithms normalise afterwards with the same
C++ code, so results are bitwise identical. On GPUs with "vendor" numerics, torch normalises.
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
from tpkernels.local.ranges import COPY, record_range
from tpkernels.local.weight import Weight
from tpkernels.planning.problem import VENDOR


@dataclass(frozen=True)
class Reduction:
    """Epilogue of a sum of partial sums: ``+ bias + residual``, then one rounding to ``out_dtype``.

    Attributes:
        bias: [cols]; on CPUs in the accumulator dtype.
        residual: contiguous, with the shape of the output.
    """

    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    @classmethod
    def create(
        cls,
        x: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Reduction:
        """Return the epilogue of a checked call. GPU kernels accept a bias of any dtype."""
        if bias is not None:
            acc_bias = bias if x.is_cuda else bias.to(dtypes.accumulator(x.dtype))
            bias = acc_bias.contiguous()
        if residual is not None:
            residual = residual.contiguous()
        return cls(out_dtype or x.dtype, bias, residual)

    def is_identity(self, total: torch.dtype) -> bool:
        """Return True if a sum of dtype ``total`` is already the result."""
        return self.bias is None and self.residual is None and self.out_dtype == total

    def epilogue(self) -> _C.host.Epilogue:
        """Return the C++ epilogue. It stores addresses, so this object must outlive it."""
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

    ``weight`` [N] is contiguous, in the dtype of the rows or of the accumulator.
    """

    weight: torch.Tensor
    eps: float


def reduce_into(
    out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction, begin: int = 0
) -> None:
    """Set ``out = round(sum of partials in order + bias + residual)``.

    ``out`` and the partials are contiguous, have equal sizes, and start at element ``begin`` of the
    full output, to which bias and residual belong. ``out`` may be one of the partials. On GPUs this
    is one launch if the kernels of ``csrc/cuda`` are available and support the dtypes.
    """
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
    with record_range(COPY):
        _C.host.sum_partials(
            out.data_ptr(), addresses, wire, begin, partials[0].numel(), reduction.epilogue()
        )


def apply_rms_norm(call: Call, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """Return RMSNorm of contiguous rows [..., N]."""
    weight, eps = norm.weight, norm.eps
    columns = weight.numel()
    if rows.device.type != "cpu" and not (
        call.plan.numerics != VENDOR
        and cuda.supports_rms_norm(rows.dtype, columns)
        and cuda.available(rows.device)
    ):
        converted = rows.to(weight.dtype)  # torch requires operands of one dtype
        return functional.rms_norm(converted, list(weight.shape), weight, eps).to(rows.dtype)
    out = empty(rows.shape, rows.dtype, rows.device)
    if rows.device.type != "cpu":
        cuda.rms_norm(rows, out, weight, eps)
        return out
    with record_range(COPY):
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


def with_rms_norm(reduce: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """Extend the `reduce` of an algorithm with RMSNorm of the rows of the sum."""

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
        return apply_rms_norm(call, out, norm)

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
    """Add in the accumulator dtype, one launch per term, and round at the end."""
    bias, residual, count = reduction.bias, reduction.residual, out.numel()
    total = partials[0].view(-1).to(dtypes.accumulator(partials[0].dtype), copy=True)
    for partial in partials[1:]:
        total += partial.view(-1)
    if bias is not None:
        first_column, columns = begin % bias.numel(), bias.numel()
        if first_column or count % columns:
            total += bias.repeat(ceil_div(first_column + count, columns))[
                first_column : first_column + count
            ]
        else:  # the slice consists of full rows
            total.view(-1, columns).add_(bias)
    if residual is not None:
        total += residual.view(-1).narrow(0, begin, count)
    out.view(-1).copy_(total)
