"""``y = sum_r((x_r * scale_x_r) @ (w_r * scale_w_r))`` on every rank: the row-parallel layer, on
fp8 or fp4 operands."""

from __future__ import annotations

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.ops.registration import Op, define
from tpkernels.ops.validation import NO_GRADIENT

SCHEMA = (
    "scaled_matmul_all_reduce(Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, str group, "
    "Tensor? bias=None, Tensor? residual=None, *, ScalarType? out_dtype=None, "
    "ScalarType? wire_dtype=None, bool use_fast_accum=False, str algorithm='auto') -> Tensor"
)


OP: Op[torch.Tensor] = define(SCHEMA, no_gradient=NO_GRADIENT)


def scaled_matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply scaled operands and sum over the ranks of ``group``, as one operation.

    Args:
        x, w, scale_x, scale_w, bias, out_dtype, wire_dtype, use_fast_accum: as in
            `scaled_matmul_reduce_scatter`. Scales are of this rank's slice of K.
        residual: of the result's shape and dtype, added after the bias, the same on all ranks.

    Returns:
        ``sum_r(partial_r) + bias + residual`` [..., N] on every rank, summed as in
        `scaled_matmul_reduce_scatter`.
    """
    return OP.entry()(
        x,
        w,
        scale_x,
        scale_w,
        name_of(group),
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        use_fast_accum=use_fast_accum,
        algorithm=algorithm,
    )
