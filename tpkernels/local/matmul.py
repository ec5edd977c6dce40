"""The local matmul of all algorithms.

If the processor has no instructions for a 16-bit dtype, torch multiplies it many times slower than
fp32. The matmul then runs in fp32, one panel of weight columns at a time. Each panel is converted
into a buffer that stays in the cache, so the conversion costs little compared with the matmul. The
same code computes fp32 results of 16-bit operands. All variants accumulate in fp32 and round once.

The C++ extension multiplies if it is faster than torch (csrc/host/matmul.h): packed weights, plain
weights with few rows, and plain weights with many rows if torch leaves vector units unused.

On GPUs torch multiplies, with the user settings. By default these allow cuBLAS to add the partial
sums of a split K in the result dtype. The ops do not change the settings, because they are global
to the process: a switch would affect matmuls of other threads.
"""

from __future__ import annotations

import warnings

import torch

from tpkernels import _C
from tpkernels.local.memory import empty
from tpkernels.local.packed import is_native, is_packed, weight_columns
from tpkernels.local.ranges import MATMUL, profiling, record_range
from tpkernels.local.weight import OpaqueWeight, Weight

# Columns of a converted panel, and the minimum number of rows for which conversion pays off.
# AMD EPYC Zen 3 (AVX2), 1 thread, torch 2.13, 2026-11-21, (2048, 2048, 4096) bf16: torch.mm 3488
# ms, panels of 128/256/512/2048 columns 506/463/444/473 ms; 4 rows: torch.mm 6.9 ms, panels of 256
# 6.2 ms.
_PANEL_COLUMNS = 256
_MIN_ROWS = 4

if _failed := _C.host.failed_vector_units():
    warnings.warn(
        f"tpkernels disabled {', '.join(_failed)} on this processor, because a self-test with "
        "small integers gave wrong results. Please report this with the output of `tpkernels info`",
        RuntimeWarning,
        stacklevel=2,
    )


def needs_fp32(dtype: torch.dtype, rows: int) -> bool:
    """Return True if a matmul with ``rows`` rows runs in fp32 on this processor."""
    return not is_native(dtype) and rows >= _MIN_ROWS


def weight_layout(w: Weight) -> str:
    """Return the layout of a weight. The rounding of a matmul depends on it."""
    if not isinstance(w, torch.Tensor):
        return "unknown"
    if is_packed(w):
        return "int8" if w.dtype == torch.int8 else "packed"
    return "columns" if w.stride(0) < w.stride(1) else "rows"


def local_matmul(
    x: torch.Tensor,
    w: Weight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    full_rows: int | None = None,
    full_columns: int | None = None,
) -> torch.Tensor:
    """Set ``out = x @ w + bias``.

    For a chunk of a matmul, pass the size of the full matmul. The implementation follows from the
    full size, so it does not depend on the chunk size.

    Args:
        x: [M, K], any strides. For a scaled weight: rows packed by `local.scaled.Packing`.
        w: [K, N], any strides.
        out: [M, N] of any float dtype, with unit column stride. With a packed weight or a
            `CustomMatmul` it has the dtype of x.
        bias: [N]. A `CustomMatmul` does not support it.
        full_rows: rows of the full matmul, if x is a chunk of its rows.
        full_columns: columns of the full matmul, if w is a chunk of its columns.
    """
    if not out.numel():
        return out
    full_shape = full_rows or x.shape[0], full_columns or out.shape[1]
    if not profiling():  # this test costs 0.1 us, a null range 0.4 us
        return _multiply(x, w, out, bias, full_shape)
    with record_range(MATMUL):
        return _multiply(x, w, out, bias, full_shape)


def allocating_matmul(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ w + bias`` in a new tensor with the dtype of x; see `local_matmul`."""
    rows = x.shape[0]
    if rows and bias is None and is_packed(w) and not profiling():
        return _C.calls.matmul(x, w)
    return local_matmul(x, w, empty((rows, weight_columns(w)), x.dtype, x.device), bias)


def _multiply(
    x: torch.Tensor,
    w: Weight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    full_shape: tuple[int, int],
) -> torch.Tensor:
    """``full_shape``: rows and columns of the full matmul."""
    # The first test avoids the second, which is slow for an abstract class.
    if not isinstance(w, torch.Tensor) and isinstance(w, OpaqueWeight):
        return w.multiply(x, out, bias)
    if x.is_cuda:
        return _multiply_on_gpu(x, w, out, bias)
    bias_fp32 = None if bias is None else bias.float().contiguous()
    if _C.calls.multiply(x, w, out, bias_fp32, full_shape):
        return out
    same_dtype = x.dtype == out.dtype and (bias is None or bias.dtype == x.dtype)
    if same_dtype and not needs_fp32(x.dtype, full_shape[0]):
        return torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
    x_fp32 = empty(x.shape, torch.float32, x.device).copy_(x)
    for begin in range(0, w.shape[1], _PANEL_COLUMNS):
        columns = slice(begin, begin + _PANEL_COLUMNS)
        panel, out_panel = w[:, columns].float(), out[:, columns]
        panel_bias = None if bias_fp32 is None else bias_fp32[columns]
        if not _C.calls.multiply(x_fp32, panel, out_panel, panel_bias, full_shape):
            in_place = out_panel if out_panel.dtype == torch.float32 else None
            if panel_bias is None:
                result = torch.mm(x_fp32, panel, out=in_place)
            else:
                result = torch.addmm(panel_bias, x_fp32, panel, out=in_place)
            if in_place is None:
                out_panel.copy_(result)
    return out


def _multiply_on_gpu(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if x.dtype == out.dtype and (bias is None or bias.dtype == x.dtype):
        return torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
    if out.dtype == torch.float32:
        torch.mm(x, w, out_dtype=torch.float32, out=out)
        return out if bias is None else out.add_(bias)
    result = torch.mm(x, w, out_dtype=torch.float32)
    return out.copy_(result) if bias is None else torch.add(result, bias, out=out)
