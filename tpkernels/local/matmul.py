"""The local matrix product that all algorithms use.

If the processor has no instructions for a 16-bit dtype, torch multiplies it many times slower than
fp32. In that case the product is computed in fp32, one panel of weight columns at a time: the panel
is converted into a buffer that stays in the cache, so the conversion costs little compared with the
product. The same code gives fp32 results of 16-bit operands. Either way products accumulate in fp32
and round once.

The extension multiplies where it is faster than torch (csrc/host/product.h): by packed weights, by
plain ones with few rows, and with many where torch leaves vector units unused.

On GPUs it is torch's product with the user's settings. By default these let cuBLAS add the parts of
a split K in the result's dtype. The ops do not change that: the settings are the process's, so a
switch would affect the products of other threads.
"""

from __future__ import annotations

import warnings

import torch

from tpkernels import _C
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of, is_packed, native
from tpkernels.local.product import Product, Weight
from tpkernels.local.ranges import MATMUL, profiling, recorded

# Columns of a converted panel, and the fewest rows for which conversion pays off.
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


def converts(dtype: torch.dtype, rows: int) -> bool:
    """Return whether a product of ``rows`` rows is computed in fp32 on this processor."""
    return not native(dtype) and rows >= _MIN_ROWS


def layout_of(w: Weight) -> str:
    """Return the layout of a weight, on which the bits of a product depend."""
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
    whole_rows: int | None = None,
    whole_columns: int | None = None,
) -> torch.Tensor:
    """Set ``out = x @ w + bias``. x [M, K], w [K, N], out [M, N] of any float dtype, bias [N]; any
    strides, ``out`` with unit column stride. With a packed ``w`` or a caller's product,
    ``out`` has x's dtype; the latter has no bias. `Product` says what x is with a scaled one.

    Where x is a part of the rows of a product, ``whole_rows`` is how many that has, and where w is
    a part of its columns, ``whole_columns``: what computes the product follows from these, so that
    a result has the same bits whatever the parts are."""
    if not out.numel():
        return out
    whole = whole_rows or x.shape[0], whole_columns or out.shape[1]
    if not profiling():  # takes 0.1 us; a null range would take 0.4
        return _multiply(x, w, out, bias, whole)
    with recorded(MATMUL):
        return _multiply(x, w, out, bias, whole)


def new_product(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ w + bias`` in a new tensor of x's dtype; see `local_matmul`."""
    rows = x.shape[0]
    if rows and bias is None and is_packed(w) and not profiling():
        return _C.calls.matmul(x, w)
    return local_matmul(x, w, empty((rows, columns_of(w)), x.dtype, x.device), bias)


def _multiply(
    x: torch.Tensor,
    w: Weight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    whole: tuple[int, int],
) -> torch.Tensor:
    """``whole``: the rows and columns of the whole product."""
    if not isinstance(w, torch.Tensor) and isinstance(w, Product):  # an abstract class is slow
        return w.multiply(x, out, bias)
    if x.is_cuda:
        return _multiply_on_gpu(x, w, out, bias)
    wide_bias = None if bias is None else bias.float().contiguous()
    if _C.calls.multiply(x, w, out, wide_bias, whole):
        return out
    same = x.dtype == out.dtype and (bias is None or bias.dtype == x.dtype)
    if same and not converts(x.dtype, whole[0]):
        return torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
    wide = empty(x.shape, torch.float32, x.device).copy_(x)
    for begin in range(0, w.shape[1], _PANEL_COLUMNS):
        part = slice(begin, begin + _PANEL_COLUMNS)
        panel, to = w[:, part].float(), out[:, part]
        panel_bias = None if wide_bias is None else wide_bias[part]
        if not _C.calls.multiply(wide, panel, to, panel_bias, whole):
            in_place = to if to.dtype == torch.float32 else None
            if panel_bias is None:
                product = torch.mm(wide, panel, out=in_place)
            else:
                product = torch.addmm(panel_bias, wide, panel, out=in_place)
            if in_place is None:
                to.copy_(product)
    return out


def _multiply_on_gpu(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if x.dtype == out.dtype and (bias is None or bias.dtype == x.dtype):
        return torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
    if out.dtype == torch.float32:
        torch.mm(x, w, out_dtype=torch.float32, out=out)
        return out if bias is None else out.add_(bias)
    wide = torch.mm(x, w, out_dtype=torch.float32)
    return out.copy_(wide) if bias is None else torch.add(wide, bias, out=out)
