"""Scaled matmul and all-reduce: ``y = sum_r((x_r * scale_x_r) @ (w_r * scale_w_r))``.

The row-parallel layer without sequence parallelism, for fp8 and fp4 operands.
"""

from __future__ import annotations

import torch

from tpkernels.groups import GroupLike, group_name
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
    """Multiply scaled operands and return the sum over the ranks on every rank.

    With tensor-wise or row-wise scales it equals::

        total = ((x.float() * scale_x) @ (w.float() * scale_w)).to(wire_dtype)
        dist.all_reduce(total, group=group)
        y = (total + bias + residual).to(out_dtype)

    Args:
        x: [..., K] of float8_e4m3fn or float8_e5m2, or [..., K / 2] of float4_e2m1fn_x2, with any
            strides. K may differ by rank.
        w: [K, N], fp8 or fp4 like ``x``, with any strides (``linear.weight.t()`` is the fast
            layout).
        scale_x: Scales of ``x`` for the local slice of K, in the formats of
            `all_gather_scaled_matmul`. They may differ by rank.
        scale_w: Scales of ``w`` for the local slice of K, in the same formats.
        bias: [N] of ``out_dtype``, added once after the sum. ``bias`` and ``residual`` must be
            equal on all ranks.
        residual: [..., N] of ``out_dtype``, added after the bias.
        out_dtype: bfloat16 (default), float16 or float32.
        wire_dtype: Dtype of the communicated partial sums: ``out_dtype`` (default) or float32.
        use_fast_accum: See ``torch._scaled_mm``. No effect on CPUs.

    Returns:
        ``sum_r(partial_r) + bias + residual``, [..., N]. Partial sums accumulate as in
        `scaled_matmul_reduce_scatter`.

    Gradient: not supported.
    """
    return OP.entry()(
        x,
        w,
        scale_x,
        scale_w,
        group_name(group),
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        use_fast_accum=use_fast_accum,
        algorithm=algorithm,
    )
