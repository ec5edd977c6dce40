"""The products of experts with fp8 rows and weights that have scales.

On CPUs and where torch's own does not apply, each group is a product of its own
(`local.scaled.scaled_matmul`), on GPUs by a copy of ``counts`` on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpkernels.local.memory import empty
from tpkernels.local.scaled import BLOCK, ScaledMatrix, scaled_matmul, torch_takes
from tpkernels.ops import validation
from tpkernels.ops.grouped_matmul import ranges_of
from tpkernels.ops.registration import Op, define_local

SCHEMA = (
    "scaled_grouped_matmul(Tensor x, Tensor stack, Tensor scale_x, Tensor scale_w, Tensor counts, "
    "*, ScalarType? out_dtype=None) -> Tensor"
)
_TORCHS: Any = getattr(F, "scaled_grouped_mm", None)
_GENERATIONS = (9, 10)  # of GPUs, for which it is


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
    if x.is_cuda and len(stack) and _torch_takes(ScaledMatrix(x, scale_x, block), stack[0], dtype):
        row_wise, ends = F.ScalingType.RowWise, counts.cumsum(0, dtype=torch.int32)
        scales = scale_x.flatten(), row_wise, scale_w.flatten(1).contiguous(), row_wise
        product: torch.Tensor = _TORCHS(x, stack, *scales, offs=ends, output_dtype=dtype)
        return product
    out = empty((len(x), stack.shape[2]), dtype, x.device)
    for w, scale, rows in zip(stack, scale_w, ranges_of(counts, x), strict=True):
        if rows.start == rows.stop:
            continue
        left, each = ScaledMatrix(x[rows], scale_x[rows], block), scale
        if block:
            each = scale.t().repeat_interleave(block, 0)[: w.shape[1]]
        scaled_matmul(left, ScaledMatrix(w, each), out[rows])
    return out


def _torch_takes(x: ScaledMatrix, w: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product takes these rows, and weights such as w [K, N]."""
    rows, right = x.elements, ScaledMatrix(w, x.scale)
    aligned = rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0
    alike = rows.dtype == w.dtype == torch.float8_e4m3fn
    known = torch.cuda.get_device_capability(rows.device)[0] in _GENERATIONS
    return _TORCHS is not None and aligned and alike and known and torch_takes(x, right, dtype)


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
    """Multiply fp8 rows of each group by the group's own fp8 weight, as `grouped_matmul` does rows
    of wider dtypes. Local, and without a gradient.

    Args:
        x: [R, K] of float8_e4m3fn or float8_e5m2, sorted by group.
        w: [E, K, N] of either, of any strides.
        scale_x: float32, [R, 1]: one for each row; or [R, K / 128]: one for 128 numbers of it.
        scale_w: float32, [E, 1, N]: one for each column; or, with blocks of x, [E, K / 128, N / 128
            rounded up]: one for 128 x 128 numbers. Those are DeepSeek's.
        counts: [E] of int64 or int32, the rows of each group.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        ``(x * scale_x) @ (w * scale_w)`` [R, N], summed in float32 and rounded once. Scales of
        blocks are multiplied in first, in float32; row-wise ones afterwards.

    Raises:
        ValueError: shapes do not fit, or counts do not add up to R.
        TypeError: a scale is not float32.
        NotImplementedError: a dtype is not supported, or a gradient is needed.
    """
    return OP.entry()(x, w, scale_x, scale_w, counts, out_dtype=out_dtype)
