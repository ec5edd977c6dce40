"""``y_r = rows_r(sum_r((x_r * scale_x_r) @ (w_r * scale_w_r)))``: the row-parallel layer with
sequence parallelism, on fp8 or fp4 operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels.groups import GroupLike, name_of
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
    """Multiply scaled operands, sum over the ranks of ``group`` and keep this rank's shard, as
    one operation.

    Args:
        x: [..., K] of float8_e4m3fn, float8_e5m2, or float4_e2m1fn_x2 (whose last dim is K / 2);
            any strides. K may differ by rank.
        w: [K, N] of the same kind of dtype; any strides (``linear.weight.t()`` is the fast layout).
        scale_x, scale_w: of this rank's slice of K, in the forms of `all_gather_scaled_matmul`.
            Each rank applies its own to its partial, so they may differ by rank: row-wise scales
            are those of a row of the slice, not of the whole row.
        scatter_dim: the dim of the sum [..., N] that is split over the ranks; not the last.
        bias: [N] of ``out_dtype``, added once, after the sum.
        residual: of the result's shape and dtype, added after the bias.
        out_dtype: of the result: bfloat16 (default), float16 or float32.
        wire_dtype: dtype of the communicated partials; ``out_dtype`` (default) or float32.
        use_fast_accum: as in ``torch._scaled_mm``; no effect on CPUs.
        shard_sizes: rows of each rank along ``scatter_dim``; default: all the same.

    Returns:
        This rank's shard of ``sum_r(partial_r) + bias + residual``. Partials are summed in fp32 in
        rank order and rounded once. On CUDA tensors ``numerics`` of `init` decides.

    The arguments mean what they mean in ``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter``
    and ``torch._scaled_mm``.
    """
    return OP.entry()(
        x,
        w,
        scale_x,
        scale_w,
        name_of(group),
        scatter_dim,
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        use_fast_accum=use_fast_accum,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
