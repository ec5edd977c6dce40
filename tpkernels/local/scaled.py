"""Scaled operands: fp8 and fp4 elements with scales, their packed rows, and their matmul.

    scales        dtype           of x [..., K]    of w [K, N]
    tensor-wise   float32         [] or [1]        [] or [1]
    row-wise      float32         [..., 1]         [1, N]
    1x32 (MXFP8)  float8_e8m0fnu  [..., K / 32]    [N, K / 32]
    1x16 (NVFP4)  float8_e4m3fn   [..., K / 16]    [N, K / 16]
    1x128         float32         [..., K / 128]   [N, K / 128], equal in each 128 rows (DeepSeek)

Only `ops.scaled_grouped_matmul` supports 1x128 scales.

Block scales may also be swizzled: one dim, in tiles of 128 rows by 4 columns, padded to full tiles,
as ``torch.nn.functional.scaled_mm`` expects with ``SwizzleType.SWIZZLE_32_4_4``. One element of
``float4_e2m1fn_x2`` holds two fp4 values, so x and w then have K / 2 elements along K.

On CPUs operands are converted to fp32, one panel of weight columns at a time, as in `local.matmul`.
``torch._scaled_mm`` also converts, but the full weight, and is slower. Time of panels of 256
columns, relative to torch: AMD EPYC Zen 4, 1 thread, torch 2.13, 2026-11-23, row-wise scales,
float8_e4m3fn to bf16, interleaved while other work ran.

    rows                       1      32     128    512    1024
    K = 2048, N = 4096         0.48   0.45   0.61   0.75   0.83
    K = N = 1024               0.80   0.82   0.84   0.98   0.95

The corresponding times on an Intel Xeon with AMX: 0.48, 0.54 and 0.75 for 1, 32 and 512 rows, and
0.91 for 128 rows with K = N = 1024. Tensor-wise scales there select the reference kernel of oneDNN.
It is 140 times slower, and raises if ``ONEDNN_MAX_CPU_ISA`` is set.

All variants accumulate in fp32 and round once, unless ``use_fast_accum`` allows torch to
deviate.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from tpkernels.common.integers import ceil_div, round_up
from tpkernels.local.memory import empty
from tpkernels.local.weight import OpaqueWeight
from tpkernels.torch_private import scaled_mm

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = torch.float4_e2m1fn_x2
TILE_ROWS, _TILE_COLUMNS = 128, 4  # one tile of swizzled scales
BLOCK = 128  # elements of K per DeepSeek scale
_ROW_ALIGNMENT = 16  # bytes; sent rows are padded to it so that GPUs can use 16-byte vector loads
_PANEL_COLUMNS = 256
_GPU_PANEL_COLUMNS = 2048  # bounds the fp32 copy of the weight; not measured
_GPU_ALIGNMENT = 16  # divides K and N in elements on GPUs; an fp4 element holds two values


class ScaledMatrix(NamedTuple):
    """Elements of x [M, K] or w [K, N], and their scales."""

    elements: torch.Tensor
    scale: torch.Tensor
    block: int | None = None  #: values per scale, for block scales in float32


class Scaling(enum.Enum):
    """Granularity of scales."""

    TENSOR = "tensor-wise"
    ROW = "row-wise"
    BLOCK = "block-wise"


def scale_block(dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the values per block scale of an operand, and the dtype of the scales."""
    return (16, torch.float8_e4m3fn) if dtype == FP4 else (32, torch.float8_e8m0fnu)


def num_values(dtype: torch.dtype, elements: int) -> int:
    """Return the number of values in ``elements`` elements of an operand."""
    return 2 * elements if dtype == FP4 else elements


def get_scaling(scale: torch.Tensor) -> Scaling:
    """Return the granularity of the scales of a checked operand."""
    if scale.dtype != torch.float32:
        return Scaling.BLOCK
    return Scaling.TENSOR if scale.dim() < 2 else Scaling.ROW


def swizzled_numel(rows: int, columns: int) -> int:
    """Return the number of elements of swizzled scales, for scales [rows, columns]."""
    return round_up(rows, TILE_ROWS) * round_up(columns, _TILE_COLUMNS)


def unswizzle(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return block scales as [rows, columns]."""
    if scale.dim() != 1:
        return scale.reshape(rows, columns)
    tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, _TILE_COLUMNS)
    split = scale.view(torch.uint8).reshape(*tiles, 32, 4, 4)  # row % 32, row // 32, column
    matrix = split.permute(0, 3, 2, 1, 4).reshape(tiles[0] * TILE_ROWS, -1)
    return matrix[:rows, :columns].contiguous().view(scale.dtype)


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """Return block scales in swizzled form."""
    if scale.dim() == 1:
        return scale
    rows, columns = scale.shape
    tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, _TILE_COLUMNS)
    padding = tiles[1] * _TILE_COLUMNS - columns, tiles[0] * TILE_ROWS - rows
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, padding[0], 0, padding[1]))
    split = padded.view(tiles[0], 4, 32, tiles[1], _TILE_COLUMNS)
    return split.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def _fp4_values(pairs: torch.Tensor) -> torch.Tensor:
    """Return the two values of each byte as [..., 2], the lower half first.

    The bits of an fp4 value are read as float8_e4m3fn. Its exponent bias is greater by 6, so the
    result is 1/64 of the value.
    """
    codes = torch.stack((pairs << 4, pairs), -1)  # each code in the upper half of a byte
    bits = (codes & 0x80).bitwise_or_((codes & 0x70) >> 2)
    return bits.view(torch.float8_e4m3fn).float().mul_(64)


@functools.cache
def _decode_table(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of all bytes, [256], or [256, 2] for fp4. Used on CPUs.

    Time relative to the code without a table, interleaved while other work ran, 1 thread, torch
    2.13: AMD EPYC Zen 4, 2026-11-23, [1, 512] and [256, 1024] bytes of fp4: 0.28 and 0.42. Zen
    5, 2026-11-26, [256, 1024] bytes of fp8: 0.14 of the time of the torch conversion.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    return _fp4_values(codes) if dtype == FP4 else codes.view(dtype).float()


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """Return the unscaled values of a matrix [M, K] in contiguous float32."""
    # GPUs do not use a table. The first use may be in a graph capture. A capture cannot copy a
    # table from the host, and a table created in it is not valid before the graph runs.
    if x.is_cuda:
        values = _fp4_values(x.view(torch.uint8)).flatten(1) if x.dtype == FP4 else x.float()
        return values.contiguous()
    codes = x.view(torch.uint8)
    values = _decode_table(x.dtype).index_select(0, codes.reshape(-1).int())
    return values.view(x.shape[0], num_values(x.dtype, x.shape[1]))


def apply_block_scales(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply float32 ``values`` [M, K] in place by scales [M, K / block]."""
    values.view(*scale.shape, -1).mul_(scale.float().unsqueeze(-1))
    return values


@dataclass(frozen=True)
class Packing:
    """Row format for communication: elements, scales and padding, viewed as float32.

    Code that moves packed rows therefore also moves their scales. ``scale_dtype`` is None if the
    rows have no row or block scales.
    """

    dtype: torch.dtype
    columns: int
    scale_dtype: torch.dtype | None
    scale_columns: int

    @classmethod
    def for_rows(cls, x: torch.Tensor, scale: torch.Tensor) -> Packing:
        scaling, columns = get_scaling(scale), x.shape[-1]
        if scaling is Scaling.TENSOR:
            return cls(x.dtype, columns, None, 0)
        scales = num_values(x.dtype, columns) // scale_block(x.dtype)[0]
        if scaling is Scaling.ROW:  # includes 1x128 blocks
            scales = scale.shape[-1]
        return cls(x.dtype, columns, scale.dtype, scales)

    @property
    def packed_width(self) -> int:
        """Return the number of float32 elements of a packed row."""
        return round_up(self.columns + self._scale_bytes, _ROW_ALIGNMENT) // 4

    @property
    def _scale_bytes(self) -> int:
        return 0 if self.scale_dtype is None else self.scale_columns * self.scale_dtype.itemsize

    def pack(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return x [..., columns] and its scales as rows [..., packed_width] of float32.

        If the rows need neither scales nor padding, the result is a view of x if possible.
        """
        leading_dims = x.shape[:-1]
        padding = 4 * self.packed_width - self.columns - self._scale_bytes
        data = x.view(torch.uint8)
        if self.scale_dtype is None and not padding:
            return _as_words(data).view(torch.float32)
        segments = [data, data.new_zeros((*leading_dims, padding))]
        if self.scale_dtype is not None:
            scales = as_dense(unswizzle(scale, prod(leading_dims), self.scale_columns))
            segments.insert(1, scales.view(torch.uint8).view(*leading_dims, self._scale_bytes))
        packed = empty((*leading_dims, self.packed_width), torch.float32, x.device)
        torch.cat(segments, -1, out=packed.view(torch.uint8))
        return packed

    def data(self, packed: torch.Tensor) -> torch.Tensor:
        """Return x [..., columns] as a view of packed rows."""
        return packed.view(torch.uint8)[..., : self.columns].view(self.dtype)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x [M, columns] as a view of packed rows, and a copy of its scales.

        The scales are None if the rows have no row or block scales.
        """
        if self.scale_dtype is None:
            return self.data(packed), None
        end = self.columns + self._scale_bytes
        scales = packed.view(torch.uint8)[:, self.columns : end]
        # Always copy: a single row is contiguous, but may not be aligned.
        scales = scales.clone(memory_format=torch.contiguous_format)
        return self.data(packed), scales.view(self.scale_dtype)


def as_dense(x: torch.Tensor) -> torch.Tensor:
    """Return x, contiguous and with a last stride of 1, even if it has at most one element."""
    if x.is_contiguous() and (x.dim() == 0 or x.stride(-1) == 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """Return ``data``, or a copy of it that can be viewed as float32 and loaded in aligned vectors.

    ``torch.Tensor.view`` requires that 4 divides the offset and all strides, also of dims of
    size 1.
    """
    word_aligned = all(step % 4 == 0 for step in (data.storage_offset(), *data.stride()[:-1]))
    fits = word_aligned and data.data_ptr() % _ROW_ALIGNMENT == 0 and as_dense(data) is data
    return data if fits else data.clone(memory_format=torch.contiguous_format)


class ScaledWeight(OpaqueWeight):
    """A weight with scales that multiplies packed rows.

    Args:
        w: [K, N].
        packing: format of the rows.
        row_scale: scale of all rows, if the rows have no row or block scales.
        fast_accum: ``use_fast_accum`` of torch.
    """

    dtype = torch.float32

    def __init__(
        self, w: ScaledMatrix, packing: Packing, row_scale: torch.Tensor, fast_accum: bool
    ) -> None:
        self._w, self._packing = w, packing
        self._row_scale, self._fast_accum = row_scale, fast_accum
        self.shape = tuple(w.elements.shape)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        data, scales = self._packing.unpack(x)
        rows = ScaledMatrix(data, self._row_scale if scales is None else scales)
        return scaled_matmul(rows, self._w, out, bias, self._fast_accum)


def scaled_matmul(
    x: ScaledMatrix,
    w: ScaledMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Set ``out = (x * scale_x) @ (w * scale_w) + bias``.

    Tensor-wise and row-wise scales can be mixed.

    Args:
        x: [M, K].
        w: [K, N].
        out: [M, N] with unit column stride.
        bias: [N] in the dtype of out.
        fast_accum: ``use_fast_accum`` of torch.
    """
    if torch_supports(x, w, out.dtype):
        return scaled_matmul_by_torch(x, w, out, bias, fast_accum)
    return scaled_matmul_by_panels(x, w, out, bias)


def torch_supports(x: ScaledMatrix, w: ScaledMatrix, out_dtype: torch.dtype) -> bool:
    """Return True if ``torch._scaled_mm`` supports these operands and should be used.

    This follows from dtypes, layouts, K and N, never from M: all chunks of a matmul use one
    implementation.
    """
    (left, scale, block), right = x, w.elements
    if (
        not left.is_cuda
        or block
        or left.shape[1] % _GPU_ALIGNMENT
        or right.shape[1] % _GPU_ALIGNMENT
    ):
        return False
    if right.stride(0) != 1 or left.dtype == right.dtype == torch.float8_e5m2:
        return False
    capability = torch.cuda.get_device_capability(left.device)
    if get_scaling(scale) is Scaling.BLOCK:
        return capability >= (10, 0)
    if Scaling.ROW in (get_scaling(scale), get_scaling(w.scale)):
        return capability >= (9, 0) and out_dtype == torch.bfloat16
    return capability >= (8, 9)


def scaled_matmul_by_torch(
    x: ScaledMatrix,
    w: ScaledMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Run `scaled_matmul` with ``torch._scaled_mm``."""
    scale_x, scale_w = x.scale, w.scale
    if get_scaling(scale_x) is Scaling.BLOCK:
        scale_x, scale_w = swizzle(scale_x), swizzle(scale_w)
    elif scale_x.dim() != scale_w.dim():
        scale_x, scale_w = scale_x.expand(out.shape[0], 1), scale_w.expand(1, out.shape[1])
    fused_bias = None if bias is None or out.dtype == torch.float32 else bias.contiguous()
    scales = as_dense(scale_x), as_dense(scale_w)
    options: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": fast_accum, "out": out}
    scaled_mm(x.elements, w.elements, *scales, bias=fused_bias, **options)
    return out if bias is None or fused_bias is not None else out.add_(bias)


def scaled_matmul_by_panels(
    x: ScaledMatrix, w: ScaledMatrix, out: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run `scaled_matmul` in fp32. Works on all devices.

    Values times block scales are exact within the fp32 range, except with scales of 1x128 blocks.
    """
    blocks = x.block or get_scaling(x.scale) is Scaling.BLOCK
    x_fp32, (rows, columns) = to_float32(x.elements), out.shape
    scale_w = w.scale.expand(1, columns) if not blocks else w.scale
    if blocks:
        per_row = x_fp32.shape[1] // (x.block or scale_block(x.elements.dtype)[0])
        apply_block_scales(x_fp32, unswizzle(x.scale, rows, per_row))
        scale_w = unswizzle(scale_w, columns, per_row)
    step = min(_GPU_PANEL_COLUMNS if x.elements.is_cuda else _PANEL_COLUMNS, columns)
    acc = empty((rows, step), torch.float32, out.device)
    for begin in range(0, columns, step):
        panel_columns = slice(begin, begin + step)
        panel = to_float32(w.elements[:, panel_columns].t())
        if blocks:
            apply_block_scales(panel, scale_w[panel_columns])
        acc_panel = acc[:, : panel.shape[0]]
        torch.mm(x_fp32, panel.t(), out=acc_panel)
        if not blocks:
            acc_panel.mul_(x.scale).mul_(scale_w[:, panel_columns])
        if bias is not None:
            acc_panel.add_(bias[panel_columns])
        out[:, panel_columns].copy_(acc_panel)
    return out
