"""All-gather and scaled matmul: ``y_i = (concat_r(x_r) * scale_x) @ (w_i * scale_w_i)``.

The column-parallel layer with sequence parallelism, for fp8 and fp4 operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
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
    """Gather a scaled ``x`` along ``gather_dim`` and multiply it by each scaled weight.

    Sends the fp8 or fp4 bytes of ``x``, each row with its scales. With tensor-wise or row-wise
    scales it equals::

        rows = tpkernels.all_gather(x.float() * scale_x, group, gather_dim)
        y = [(rows @ (w.float() * scale_w) + bias).to(out_dtype)
             for w, scale_w, bias in zip(weights, scales_w, biases)]

    Args:
        x: [..., K] of float8_e4m3fn or float8_e5m2, or [..., K / 2] of float4_e2m1fn_x2. Local
            shard along ``gather_dim``, with any strides.
        weights: [K, N], or a list of [K, N_i] that share the gather. fp8 or fp4 like ``x``, with
            any strides (``linear.weight.t()`` is the fast layout). N may differ by rank.
        scale_x: Scales of ``x``. Tensor-wise: float32 [] or [1], equal on all ranks. Row-wise:
            float32 [..., 1], for the local rows or for the rows of all ranks. Block-wise, fp8:
            float8_e8m0fnu [..., K / 32]. Block-wise, fp4: float8_e4m3fn [..., K / 16]. Block
            scales may be swizzled (see below).
        scales_w: Scales of each weight. Tensor-wise: [] or [1]. Row-wise: [1, N]. Block-wise:
            [N, K / 32] for fp8, [N, K / 16] for fp4, or swizzled. Tensor-wise and row-wise scales
            can be combined.
        gather_dim: Dim of ``x`` that is split over the ranks. Not the last dim.
        biases: [N] of ``out_dtype``, or None, for each weight.
        out_dtype: bfloat16 (default), float16 or float32.
        use_fast_accum: See ``torch._scaled_mm``. No effect on CPUs.
        return_gathered: Also return the gathered ``x``, without scales.
        shard_sizes: Rows of each rank along ``gather_dim``. Default: all ranks have as many as
            ``x``.

    Returns:
        ``y`` with the shape of the gathered ``x``, but N as the last dim, accumulated in fp32 and
        rounded once. A list of weights gives a list. With ``return_gathered``: ``(gathered, y)``.

    Swizzled scales have one dim, in the layout of ``SwizzleType.SWIZZLE_32_4_4``. They require a
    multiple of 128 rows on each rank.

    Gradient: not supported.

    The arguments match ``torch.ops.symm_mem.fused_all_gather_scaled_matmul`` and
    ``torch._scaled_mm``.
    """
    single = isinstance(weights, torch.Tensor)
    optional_biases = [biases] if isinstance(biases, torch.Tensor) else biases
    gathered, outs = OP.entry()(
        x,
        [weights] if isinstance(weights, torch.Tensor) else list(weights),
        scale_x,
        [scales_w] if isinstance(scales_w, torch.Tensor) else list(scales_w),
        group_name(group),
        gather_dim,
        biases=bias_list(x, optional_biases),
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        return_gathered=return_gathered,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
    result = outs[0] if single else outs
    return (gathered, result) if return_gathered else result
