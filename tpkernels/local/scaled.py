"""The product of scaled operands, which all algorithms use.

On CPUs operands are converted to fp32, one panel of weight columns at a time, as in `local.matmul`:
``torch._scaled_mm`` converts too, but all of the weight, in more time. AMD EPYC Zen 4, 1 thread,
torch 2.13, 2026-11-23, row-wise scales, float8_e4m3fn to bf16, interleaved while other work ran:
for 1, 32, 128, 512 and 1024 rows, panels of 256 columns take 0.48, 0.45, 0.61, 0.75 and 0.83 of
torch's time with K = 2048 and N = 4096, and 0.80, 0.82, 0.84, 0.98 and 0.95 with K = N = 1024.
Intel Xeon with AMX, the same: 0.48, 0.54 and 0.75 for 1, 32 and 512 rows, and 0.91 for 128 with
K = N = 1024. Tensor-wise scales there reach oneDNN's reference, which takes 140 times as long, and
which ``ONEDNN_MAX_CPU_ISA`` makes refuse.

Either way products accumulate in fp32 and round once, except where `use_fast_accum` allows torch
not to.
"""

from __future__ import annotations

import torch

from tpkernels.local.memory import empty
from tpkernels.local.product import Product
from tpkernels.local.scales import (
    FP4,
    Packing,
    Scaling,
    block_of,
    dense,
    plain,
    scaled_by_blocks,
    scaling_of,
    swizzled,
    unscaled,
)

_PANEL_COLUMNS = 256
_GPU_PANEL_COLUMNS = 2048  # bounds the fp32 copy of the weight; not measured
_MULTIPLE = 16  # of K and N, on GPUs; K in elements, of which fp4 has one for two numbers


class ScaledWeight(Product):
    """A weight with scales, which multiplies packed rows.

    Args:
        w: [K, N].
        scale: of ``w``.
        packing: of the rows.
        row_scale: the scale of all rows, if these have none of their own.
        fast_accum: torch's ``use_fast_accum``.
    """

    dtype = torch.float32

    def __init__(
        self,
        w: torch.Tensor,
        scale: torch.Tensor,
        packing: Packing,
        row_scale: torch.Tensor,
        fast_accum: bool,
    ) -> None:
        self._w, self._scale, self._packing = w, scale, packing
        self._row_scale, self._fast_accum = row_scale, fast_accum
        self.shape = tuple(w.shape)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        data, own = self._packing.unpack(x)
        scale = self._row_scale if own is None else own
        return scaled_matmul(data, self._w, scale, self._scale, out, bias, self._fast_accum)


def scaled_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """``out = (x * scale_x) @ (w * scale_w) + bias``. x [M, K], w [K, N], out [M, N] with unit
    column stride, bias [N] of out's dtype; `local.scales` has the scales. Tensor-wise and row-wise
    ones mix."""
    by_torch = torch_takes(x, w, scale_x, scale_w, out.dtype)
    return (_by_torch if by_torch else by_panels)(
        x, w, scale_x, scale_w, out, bias, fast_accum=fast_accum
    )


def torch_takes(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    out_dtype: torch.dtype,
) -> bool:
    """Return whether ``torch._scaled_mm`` supports these operands and should be used. It follows
    from dtypes, layouts, K and N, never from M: all parts of a product are computed alike."""
    blocks = scaling_of(scale_x) is Scaling.BLOCK
    if not x.is_cuda:
        return False
    capability = torch.cuda.get_device_capability(x.device)
    if x.shape[1] % _MULTIPLE or w.shape[1] % _MULTIPLE or w.stride(0) != 1:
        return False
    if x.dtype == w.dtype == torch.float8_e5m2:
        return False
    if blocks:
        return capability >= (10, 0)
    if Scaling.ROW in (scaling_of(scale_x), scaling_of(scale_w)):
        return capability >= (9, 0) and out_dtype == torch.bfloat16
    return capability >= (8, 9)


def _by_torch(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    fast_accum: bool,
) -> torch.Tensor:
    if scaling_of(scale_x) is Scaling.BLOCK:
        scale_x, scale_w = swizzled(scale_x), swizzled(scale_w)
    elif scale_x.dim() != scale_w.dim():
        scale_x = scale_x.expand(x.shape[0], 1)
        scale_w = scale_w.expand(1, w.shape[1])
    fused = None if bias is None or out.dtype == torch.float32 else bias.contiguous()
    torch._scaled_mm(
        x,
        w,
        dense(scale_x),
        dense(scale_w),
        bias=fused,
        out_dtype=out.dtype,
        use_fast_accum=fast_accum,
        out=out,
    )
    return out if bias is None or fused is not None else out.add_(bias)


def by_panels(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    fast_accum: bool = False,
) -> torch.Tensor:
    """`scaled_matmul` in fp32, whatever the device has. Exact products of numbers and block scales
    that do not leave fp32's range."""
    blocks = scaling_of(scale_x) is Scaling.BLOCK
    wide, columns = unscaled(x), w.shape[1]
    by_column = scale_w.expand(1, columns) if not blocks else None
    if blocks:
        block, _ = block_of(x.dtype)
        per_row = wide.shape[1] // block
        scaled_by_blocks(wide, plain(scale_x, x.shape[0], per_row))
        scale_w = plain(scale_w, columns, per_row)
    step = min(_GPU_PANEL_COLUMNS if x.is_cuda else _PANEL_COLUMNS, columns)
    product = empty((x.shape[0], step), torch.float32, x.device)
    for begin in range(0, columns, step):
        some = slice(begin, begin + step)
        panel = _columns(w, some)
        if blocks:
            scaled_by_blocks(panel, scale_w[some])
        part = product[:, : panel.shape[0]]
        torch.mm(wide, panel.t(), out=part)
        if by_column is not None:
            part.mul_(scale_x).mul_(by_column[:, some])
        if bias is not None:
            part.add_(bias[some])
        out[:, some].copy_(part)
    return out


def _columns(w: torch.Tensor, some: slice) -> torch.Tensor:
    """Return the numbers of some columns of w [K, N], as rows: [columns, K] of float32."""
    rows = w[:, some].t()
    return unscaled(rows) if w.dtype == FP4 else rows.float().contiguous()
