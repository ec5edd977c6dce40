"""``y_i = (concat_r(x_r) * scale_x) @ (w_i * scale_w_i)``: the column-parallel layer with sequence
parallelism, on fp8 or fp4 operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.ops.registration import Op, bias_list, define
from tpkernels.ops.validation import NO_GRADIENT

SCHEMA = (
    "all_gather_scaled_matmul(Tensor x, Tensor[] weights, Tensor scale_x, Tensor[] scales_w, "
    "str group, int gather_dim=0, Tensor[]? biases=None, *, ScalarType? out_dtype=None, "
    "bool use_fast_accum=False, bool return_gathered=False, SymInt[]? shard_sizes=None, "
    "str algorithm='auto') -> (Tensor gathered, Tensor[] outs)"
)


OP: Op[Any] = define(SCHEMA, no_gradient=NO_GRADIENT)


def all_gather_scaled_matmul(
    x: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    scale_x: torch.Tensor,
    scales_w: torch.Tensor | Sequence[torch.Tensor],
    group: GroupLike,
    gather_dim: int = 0,
    *,
    biases: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    return_gathered: bool = False,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Any:
    """Gather a scaled ``x`` over the ranks of ``group`` and multiply it by each scaled weight,
    as one operation. The bytes of ``x`` travel, each row with its scales.

    Args:
        x: [..., K] of float8_e4m3fn, float8_e5m2, or float4_e2m1fn_x2 (whose last dim is K / 2),
            this rank's shard along ``gather_dim``; any strides.
        weights: [K, N] or several [K, N_i] that share the gather, of the same kinds of dtype; any
            strides (``linear.weight.t()`` is the fast layout). N may differ by rank.
        scale_x: of ``x``. Tensor-wise, float32: [] or [1], the same on all ranks. Row-wise,
            float32: [..., 1], of this rank's rows, or of those of all ranks. Block-wise,
            float8_e8m0fnu for every 32 numbers of K: [..., K / 32], or swizzled (below); for fp4
            float8_e4m3fn for every 16.
        scales_w: of each weight. Tensor-wise: [] or [1]; row-wise: [1, N]; block-wise:
            [N, K / 32], or swizzled. Tensor-wise and row-wise scales mix.
        gather_dim: the dim of ``x`` that is split over the ranks; not the last.
        biases: [N] of ``out_dtype`` for each weight, or None.
        out_dtype: of the result: bfloat16 (default), float16 or float32.
        use_fast_accum: as in ``torch._scaled_mm``; no effect on CPUs.
        return_gathered: also return the gathered ``x``, without scales.
        shard_sizes: rows of each rank along ``gather_dim``; default: all the same.

    Swizzled scales have one dim, in the layout of ``SwizzleType.SWIZZLE_32_4_4``. Each rank's rows
    must be a multiple of 128 then.

    Returns:
        y [..., M, ..., N] for one weight, a list for several; ``(gathered, y)`` with
        ``return_gathered``. Products accumulate in fp32 and round once.

    The arguments mean what they mean in ``torch.ops.symm_mem.fused_all_gather_scaled_matmul`` and
    ``torch._scaled_mm``.
    """
    single = isinstance(weights, torch.Tensor)
    each_bias = [biases] if isinstance(biases, torch.Tensor) else biases
    gathered, outs = OP.entry()(
        x,
        [weights] if isinstance(weights, torch.Tensor) else list(weights),
        scale_x,
        [scales_w] if isinstance(scales_w, torch.Tensor) else list(scales_w),
        name_of(group),
        gather_dim,
        biases=bias_list(x, each_bias),
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        return_gathered=return_gathered,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
    result = outs[0] if single else outs
    return (gathered, result) if return_gathered else result
