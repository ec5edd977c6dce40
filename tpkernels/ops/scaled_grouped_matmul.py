"""Grouped GEMM of local experts with scaled fp8 rows and weights.

GPUs use ``F.scaled_grouped_mm`` if it supports the operands. Otherwise, and on CPUs, each group is
a separate matmul (`local.scaled.scaled_matmul`), and GPUs copy ``counts`` to the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpkernels.local.memory import empty
from tpkernels.local.scaled import BLOCK, ScaledMatrix, scaled_matmul, torch_supports
from tpkernels.ops import validation
from tpkernels.ops.grouped_matmul import group_slices
from tpkernels.ops.registration import Op, define_local

SCHEMA = (
    "scaled_grouped_matmul(Tensor x, Tensor stack, Tensor scale_x, Tensor scale_w, Tensor counts, "
    "*, ScalarType? out_dtype=None) -> Tensor"
)
_GROUPED_MM: Any = getattr(F, "scaled_grouped_mm", None)
_GENERATIONS = (9, 10)  # compute capabilities (major) that F.scaled_grouped_mm supports


def _run(
    x: torch.Tensor,
    stack: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    counts: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    validation.tensors({"x": x, "w": stack, "scale_x": scale_x, "scale_w": scale_w})
    validation.scaled_rows(x, scale_x)
    block = BLOCK if validation.scaled_stack(stack, scale_w, x, scale_x) else None
    validation.group_counts(counts, x, stack)
    dtype = validation.out_dtype(out_dtype, x, scaled=True)
    if (
        x.is_cuda
        and len(stack)
        and _torch_supports_groups(ScaledMatrix(x, scale_x, block), stack[0], dtype)
    ):
        row_wise, end_offsets = F.ScalingType.RowWise, counts.cumsum(0, dtype=torch.int32)
        scales = scale_x.flatten(), row_wise, scale_w.flatten(1).contiguous(), row_wise
        y: torch.Tensor = _GROUPED_MM(x, stack, *scales, offs=end_offsets, output_dtype=dtype)
        return y
    out = empty((len(x), stack.shape[2]), dtype, x.device)
    for w, scale, rows in zip(stack, scale_w, group_slices(counts, x), strict=True):
        if rows.start == rows.stop:
            continue
        left, w_scale = ScaledMatrix(x[rows], scale_x[rows], block), scale
        if block:
            w_scale = scale.t().repeat_interleave(block, 0)[: w.shape[1]]
        scaled_matmul(left, ScaledMatrix(w, w_scale), out[rows])
    return out


def _torch_supports_groups(x: ScaledMatrix, w: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if ``F.scaled_grouped_mm`` supports these rows and weights like w [K, N]."""
    rows, right = x.elements, ScaledMatrix(w, x.scale)
    aligned = rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0
    supported_dtype = rows.dtype == w.dtype == torch.float8_e4m3fn
    supported_gpu = torch.cuda.get_device_capability(rows.device)[0] in _GENERATIONS
    return (
        _GROUPED_MM is not None
        and aligned
        and supported_dtype
        and supported_gpu
        and torch_supports(x, right, dtype)
    )


OP: Op[torch.Tensor] = define_local(
    SCHEMA,
    run=_run,
    fake=lambda x, stack, *_, out_dtype=None: x.new_empty(
        (x.shape[0], stack.shape[2]), dtype=validation.out_dtype(out_dtype, x, scaled=True)
    ),
    no_gradient=validation.NO_GRADIENT,
)


def scaled_grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    counts: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply the fp8 rows of each group by the fp8 weight of the group. Local, no communication.

    With row-wise scales it equals::

        groups = (x.float() * scale_x).split(counts.tolist())
        y = torch.cat([rows @ (w[e].float() * scale_w[e]) for e, rows in enumerate(groups)])
        y = y.to(out_dtype)

    Args:
        x: [R, K] of float8_e4m3fn or float8_e5m2, sorted by group.
        w: [E, K, N] of float8_e4m3fn or float8_e5m2, with any strides.
        scale_x: float32. Row-wise: [R, 1]. Block-wise: [R, K / 128], a scale for 128 elements.
        scale_w: float32. Row-wise: [E, 1, N], a scale for each column. Block-wise:
            [E, K / 128, ceil(N / 128)], a scale for 128 x 128 elements, as in DeepSeek models. Both
            operands must have the same kind of scales.
        counts: [E] of int64 or int32, rows per group, with sum R.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        [R, N], accumulated in float32 and rounded once. Block scales are applied before the sum, in
        float32, row-wise scales after it.

    Raises:
        ValueError: The shapes do not match, or the counts do not add up to R.
        TypeError: A scale is not float32.
        NotImplementedError: A dtype is not supported, or a gradient is needed.

    Gradient: not supported.
    """
    return OP.entry()(x, w, scale_x, scale_w, counts, out_dtype=out_dtype)
