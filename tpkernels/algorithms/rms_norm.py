"""The normalisation of a sum's rows. `direct` does it within its collective; the other algorithms
do it behind theirs, by the same code of the extension: the same bits. Where the numerics leave sums
on GPUs to the vendor, torch normalises behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from tpkernels import _C, cuda, dtypes
from tpkernels.algorithms.reduction import Reduction
from tpkernels.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.local.ranges import COPY, recorded
from tpkernels.planning.problem import VENDOR


@dataclass(frozen=True)
class RmsNorm:
    """``y = x / sqrt(mean(x^2) + eps) * weight`` of each row, in fp32, rounded once.

    ``weight`` is [N] and contiguous, in the rows' dtype or the accumulator's.
    """

    weight: torch.Tensor
    eps: float


# The op's results: the rows normalised, and the rows.
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
AllReduce: TypeAlias = Callable[[Call, torch.Tensor, torch.Tensor, Reduction], None]
AllReduceRmsNorm: TypeAlias = Callable[[Call, torch.Tensor, Reduction, RmsNorm], Rows]
MatmulAllReduce: TypeAlias = Callable[[Call, torch.Tensor, Any, Reduction], torch.Tensor]
MatmulAllReduceRmsNorm: TypeAlias = Callable[[Call, torch.Tensor, Weight, Reduction, RmsNorm], Rows]


def normalised(call: Call, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """rows [..., N], contiguous, normalised."""
    weight, eps = norm.weight, norm.eps
    if rows.device.type != "cpu":
        if call.plan.numerics != VENDOR and _has_kernel(rows):
            out = empty(rows.shape, rows.dtype, rows.device)
            cuda.rms_norm(rows, out, weight, eps)
            return out
        wide = rows.to(weight.dtype)  # torch takes operands of one dtype
        return functional.rms_norm(wide, list(weight.shape), weight, eps).to(rows.dtype)
    out, columns = empty(rows.shape, rows.dtype, rows.device), weight.numel()
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


def _has_kernel(rows: torch.Tensor) -> bool:
    return cuda.normalises(rows.dtype, rows.shape[-1]) and cuda.available(rows.device)


def behind_all_reduce(all_reduce: AllReduce) -> AllReduceRmsNorm:
    """``all_reduce_rms_norm`` by an algorithm's ``all_reduce``."""

    def all_reduce_rms_norm(
        call: Call, x: torch.Tensor, reduction: Reduction, norm: RmsNorm
    ) -> Rows:
        total = empty(x.shape, reduction.out_dtype, x.device)
        all_reduce(call, x, total, reduction)
        return normalised(call, total, norm), total

    all_reduce_rms_norm.__module__ = all_reduce.__module__
    return all_reduce_rms_norm


def behind_matmul_all_reduce(matmul_all_reduce: MatmulAllReduce) -> MatmulAllReduceRmsNorm:
    """``matmul_all_reduce_rms_norm`` by an algorithm's ``matmul_all_reduce``."""

    def matmul_all_reduce_rms_norm(
        call: Call, x: torch.Tensor, w: Weight, reduction: Reduction, norm: RmsNorm
    ) -> Rows:
        total = matmul_all_reduce(call, x, w, reduction)
        return normalised(call, total, norm), total

    matmul_all_reduce_rms_norm.__module__ = matmul_all_reduce.__module__
    return matmul_all_reduce_rms_norm
