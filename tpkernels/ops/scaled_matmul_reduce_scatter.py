"""Scaled matmul and reduce-scatter: ``y_r = rows_r(sum_r((x_r * scale_x_r) @ (w_r * scale_w_r)))``.

The row-parallel layer with sequence parallelism, for fp8 and fp4 operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.ops.registration import Op, define
from tpkernels.ops.validation import NO_GRADIENT

SCHEMA = (
    "scaled_matmul_reduce_scatter(Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, str group, "
    "int scatter_dim=0, Tensor? bias=None, Tensor? residual=None, *, ScalarType? out_dtype=None, "
    "ScalarType? wire_dtype=None, bool use_fast_accum=False, SymInt[]? shard_sizes=None, "
    "str algorithm='auto') -> Tensor"
)


OP: Op[torch.Tensor] = define(SCHEMA, no_gradient=NO_GRADIENT)


def scaled_matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    group: GroupLike,
    scatter_dim: int = 0,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply scaled operands, sum over the ranks and return the local shard of the sum.

    With tensor-wise or row-wise scales and ``scatter_dim=0`` it equals::

        partial = ((x.float() * scale_x) @ (w.float() * scale_w)).to(wire_dtype)
        y = (tpkernels.reduce_scatter(partial, group) + bias + residual).to(out_dtype)

    Args:
        x: [..., K] of float8_e4m3fn or float8_e5m2, or [..., K / 2] of float4_e2m1fn_x2, with any
            strides. K may differ by rank.
        w: [K, N], fp8 or fp4 like ``x``, with any strides (``linear.weight.t()`` is the fast
            layout).
        scale_x: Scales of ``x``, in the formats of `all_gather_scaled_matmul`. They apply to the
            partial sum of the local slice of K and may differ by rank. A row-wise scale covers the
            local slice of a row.
        scale_w: Scales of ``w``, in the formats of `all_gather_scaled_matmul`. They may differ by
            rank.
        scatter_dim: Dim of the sum [..., N] that is split over the ranks. Not the last dim.
        bias: [N] of ``out_dtype``, added once after the sum.
        residual: Local shard with the shape and dtype of the result, added after the bias.
        out_dtype: bfloat16 (default), float16 or float32.
        wire_dtype: Dtype of the communicated partial sums: ``out_dtype`` (default) or float32.
        use_fast_accum: See ``torch._scaled_mm``. No effect on CPUs.
        shard_sizes: Rows of each rank along ``scatter_dim``. Default: all equal.

    Returns:
        The local shard of ``sum_r(partial_r) + bias + residual``. Partial sums accumulate in fp32
        in rank order and are rounded once. For CUDA tensors, ``numerics`` of `init` selects the
        order.

    Gradient: not supported.

    The arguments match ``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter`` and
    ``torch._scaled_mm``.
    """
    return OP.entry()(
        x,
        w,
        scale_x,
        scale_w,
        group_name(group),
        scatter_dim,
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        use_fast_accum=use_fast_accum,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
