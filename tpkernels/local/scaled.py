"""Scaled operands: fp8 and fp4 numbers with scales, how rows of them travel, and their product,
which all algorithms use.

    scales        dtype           of x [..., K]    of w [K, N]
    tensor-wise   float32         [] or [1]        [] or [1]
    row-wise      float32         [..., 1]         [1, N]
    1x32 (MXFP8)  float8_e8m0fnu  [..., K / 32]    [N, K / 32]
    1x16 (NVFP4)  float8_e4m3fn   [..., K / 16]    [N, K / 16]
    1x128         float32         [..., K / 128]   [N, K / 128], the same in 128 rows (DeepSeek's)

The last are those of experts alone (`ops.scaled_grouped_matmul`).

Block scales may also be swizzled: one dim, in tiles of 128 rows by 4 columns, padded to whole
tiles, as ``torch.nn.functional.scaled_mm`` takes them with ``SwizzleType.SWIZZLE_32_4_4``. Two fp4
numbers lie in one element of ``float4_e2m1fn_x2``, so the shapes of x and w have K / 2 then.

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

import enum
import functools
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from tpkernels.common.integers import ceil_div, round_up
from tpkernels.local.memory import empty
from tpkernels.local.product import Product
from tpkernels.torch_private import scaled_mm

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = torch.float4_e2m1fn_x2
TILE_ROWS, _TILE_COLUMNS = 128, 4  # of swizzled scales
BLOCK = 128  # of DeepSeek's scales
_UNIT_BYTES = 16  # rows that travel are padded to it, so that GPUs load them in whole vectors
_PANEL_COLUMNS = 256
_GPU_PANEL_COLUMNS = 2048  # bounds the fp32 copy of the weight; not measured
_MULTIPLE = 16  # of K and N, on GPUs; K in elements, of which fp4 has one for two numbers


class ScaledMatrix(NamedTuple):
    """Elements, x [M, K] or w [K, N], and their scales."""

    elements: torch.Tensor
    scale: torch.Tensor
    block: int | None = None  #: numbers per scale, of blocks with scales in float32


class Scaling(enum.Enum):
    """What one scale is for."""

    TENSOR = "tensor-wise"
    ROW = "row-wise"
    BLOCK = "block-wise"


def block_of(dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the numbers per scale of an operand's blocks, and the dtype of the scales."""
    return (16, torch.float8_e4m3fn) if dtype == FP4 else (32, torch.float8_e8m0fnu)


def numbers_in(dtype: torch.dtype, elements: int) -> int:
    """Return the numbers in so many elements of an operand."""
    return 2 * elements if dtype == FP4 else elements


def scaling_of(scale: torch.Tensor) -> Scaling:
    """Return the kind of an operand's scales, which have been checked."""
    if scale.dtype != torch.float32:
        return Scaling.BLOCK
    return Scaling.TENSOR if scale.dim() < 2 else Scaling.ROW


def swizzled_numel(rows: int, columns: int) -> int:
    """Return the elements of the swizzled form of scales [rows, columns]."""
    return round_up(rows, TILE_ROWS) * round_up(columns, _TILE_COLUMNS)


def plain(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return block scales as [rows, columns]."""
    if scale.dim() != 1:
        return scale.reshape(rows, columns)
    tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, _TILE_COLUMNS)
    split = scale.view(torch.uint8).reshape(*tiles, 32, 4, 4)  # row within 32, which 32, column
    matrix = split.permute(0, 3, 2, 1, 4).reshape(tiles[0] * TILE_ROWS, -1)
    return matrix[:rows, :columns].contiguous().view(scale.dtype)


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Return block scales in their swizzled form."""
    if scale.dim() == 1:
        return scale
    rows, columns = scale.shape
    tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, _TILE_COLUMNS)
    padding = tiles[1] * _TILE_COLUMNS - columns, tiles[0] * TILE_ROWS - rows
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, padding[0], 0, padding[1]))
    split = padded.view(tiles[0], 4, 32, tiles[1], _TILE_COLUMNS)
    return split.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def _fp4_numbers(pairs: torch.Tensor) -> torch.Tensor:
    """Return [..., 2]: the two numbers of each byte, the lower half first. Read as float8_e4m3fn,
    whose exponent bias is greater by 6, sign, exponent and mantissa give 1/64 of the number."""
    codes = torch.stack((pairs << 4, pairs), -1)  # in the upper halves
    bits = (codes & 0x80).bitwise_or_((codes & 0x70) >> 2)
    return bits.view(torch.float8_e4m3fn).float().mul_(64)


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of each byte, [256], or [256, 2] of fp4, for CPUs. On AMD EPYC Zen 4, 1
    thread, torch 2.13, 2026-11-23, interleaved while other work ran, [1, 512] and [256, 1024] bytes
    of fp4 took 0.28 and 0.42 of the time without it; on Zen 5, 2026-11-26, [256, 1024] of fp8 0.14
    of the time of torch's conversion."""
    codes = torch.arange(256, dtype=torch.uint8)
    return _fp4_numbers(codes) if dtype == FP4 else codes.view(dtype).float()


def unscaled(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a matrix [M, K] without their scales, in contiguous float32."""
    # GPUs have no table: the first use may be in a capture, which can neither copy one from the
    # host nor make one that is valid before the graph runs.
    if x.is_cuda:
        numbers = _fp4_numbers(x.view(torch.uint8)).flatten(1) if x.dtype == FP4 else x.float()
        return numbers.contiguous()
    codes = x.view(torch.uint8)
    numbers = _table(x.dtype).index_select(0, codes.reshape(-1).int())
    return numbers.view(x.shape[0], numbers_in(x.dtype, x.shape[1]))


def scaled_by_blocks(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply ``numbers`` [M, K] of float32 in place by scales [M, K / block]."""
    numbers.view(*scale.shape, -1).mul_(scale.float().unsqueeze(-1))
    return numbers


@dataclass(frozen=True)
class Packing:
    """How a row of an x travels: its bytes, then those of its scales, padded, as float32 words.
    So all that moves rows moves the scales with them.

    ``scale_dtype`` is None if the rows have no scales of their own.
    """

    dtype: torch.dtype
    columns: int
    scale_dtype: torch.dtype | None
    scale_columns: int

    @classmethod
    def of(cls, x: torch.Tensor, scale: torch.Tensor) -> Packing:
        kind, columns = scaling_of(scale), x.shape[-1]
        if kind is Scaling.TENSOR:
            return cls(x.dtype, columns, None, 0)
        scales = numbers_in(x.dtype, columns) // block_of(x.dtype)[0]
        if kind is Scaling.ROW:  # or in blocks of 128
            scales = scale.shape[-1]
        return cls(x.dtype, columns, scale.dtype, scales)

    @property
    def words(self) -> int:
        """Return the words of a row."""
        return round_up(self.columns + self._scale_bytes, _UNIT_BYTES) // 4

    @property
    def _scale_bytes(self) -> int:
        return 0 if self.scale_dtype is None else self.scale_columns * self.scale_dtype.itemsize

    def pack(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return x [..., columns] and its scales as [..., words] of float32; x itself if nothing is
        to be added."""
        lead = x.shape[:-1]
        padding = 4 * self.words - self.columns - self._scale_bytes
        data = x.view(torch.uint8)
        if self.scale_dtype is None and not padding:
            return _in_words(data).view(torch.float32)
        parts = [data, data.new_zeros((*lead, padding))]
        if self.scale_dtype is not None:
            own = dense(plain(scale, prod(lead), self.scale_columns))
            parts.insert(1, own.view(torch.uint8).view(*lead, self._scale_bytes))
        packed = empty((*lead, self.words), torch.float32, x.device)
        torch.cat(parts, -1, out=packed.view(torch.uint8))
        return packed

    def data(self, packed: torch.Tensor) -> torch.Tensor:
        """Return x [..., columns] of packed rows, in their memory."""
        return packed.view(torch.uint8)[..., : self.columns].view(self.dtype)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x [M, columns] of packed rows, in their memory, and a copy of its scales; None if
        the rows have none."""
        if self.scale_dtype is None:
            return self.data(packed), None
        end = self.columns + self._scale_bytes
        own = packed.view(torch.uint8)[:, self.columns : end]
        # A copy, because a single row is contiguous as it is, and perhaps not aligned.
        own = own.clone(memory_format=torch.contiguous_format)
        return self.data(packed), own.view(self.scale_dtype)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x, contiguous and with a last stride of 1, also if it has one element or none."""
    if x.is_contiguous() and (x.dim() == 0 or x.stride(-1) == 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _in_words(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes that can be viewed as words, and loaded in units. torch's view needs whole
    words in the offset and in every stride, also of a dim of size 1."""
    whole = all(step % 4 == 0 for step in (data.storage_offset(), *data.stride()[:-1]))
    fits = whole and data.data_ptr() % _UNIT_BYTES == 0 and dense(data) is data
    return data if fits else data.clone(memory_format=torch.contiguous_format)


class ScaledWeight(Product):
    """A weight with scales, which multiplies packed rows.

    Args:
        w: [K, N].
        packing: of the rows.
        row_scale: the scale of all rows, if these have none of their own.
        fast_accum: torch's ``use_fast_accum``.
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
        data, own = self._packing.unpack(x)
        rows = ScaledMatrix(data, self._row_scale if own is None else own)
        return scaled_matmul(rows, self._w, out, bias, self._fast_accum)


def scaled_matmul(
    x: ScaledMatrix,
    w: ScaledMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Set ``out = (x * scale_x) @ (w * scale_w) + bias``. out [M, N] with unit column stride, bias
    [N] of out's dtype. Tensor-wise and row-wise scales mix."""
    if torch_takes(x, w, out.dtype):
        return by_torch(x, w, out, bias, fast_accum)
    return by_panels(x, w, out, bias)


def torch_takes(x: ScaledMatrix, w: ScaledMatrix, out_dtype: torch.dtype) -> bool:
    """Return whether ``torch._scaled_mm`` supports these operands and should be used. It follows
    from dtypes, layouts, K and N, never from M: all parts of a product are computed alike."""
    (left, scale, block), right = x, w.elements
    if not left.is_cuda or block or left.shape[1] % _MULTIPLE or right.shape[1] % _MULTIPLE:
        return False
    if right.stride(0) != 1 or left.dtype == right.dtype == torch.float8_e5m2:
        return False
    capability = torch.cuda.get_device_capability(left.device)
    if scaling_of(scale) is Scaling.BLOCK:
        return capability >= (10, 0)
    if Scaling.ROW in (scaling_of(scale), scaling_of(w.scale)):
        return capability >= (9, 0) and out_dtype == torch.bfloat16
    return capability >= (8, 9)


def by_torch(
    x: ScaledMatrix,
    w: ScaledMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Do `scaled_matmul` by torch."""
    scale_x, scale_w = x.scale, w.scale
    if scaling_of(scale_x) is Scaling.BLOCK:
        scale_x, scale_w = swizzled(scale_x), swizzled(scale_w)
    elif scale_x.dim() != scale_w.dim():
        scale_x, scale_w = scale_x.expand(out.shape[0], 1), scale_w.expand(1, out.shape[1])
    added = None if bias is None or out.dtype == torch.float32 else bias.contiguous()
    scales = dense(scale_x), dense(scale_w)
    options: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": fast_accum, "out": out}
    scaled_mm(x.elements, w.elements, *scales, bias=added, **options)
    return out if bias is None or added is not None else out.add_(bias)


def by_panels(
    x: ScaledMatrix, w: ScaledMatrix, out: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Do `scaled_matmul` in fp32, whatever the device has. Products of numbers and block scales are
    exact where they do not leave fp32's range, but for those of 1x128 blocks, which are rounded."""
    blocks = x.block or scaling_of(x.scale) is Scaling.BLOCK
    wide, (rows, columns) = unscaled(x.elements), out.shape
    scale_w = w.scale.expand(1, columns) if not blocks else w.scale
    if blocks:
        per_row = wide.shape[1] // (x.block or block_of(x.elements.dtype)[0])
        scaled_by_blocks(wide, plain(x.scale, rows, per_row))
        scale_w = plain(scale_w, columns, per_row)
    step = min(_GPU_PANEL_COLUMNS if x.elements.is_cuda else _PANEL_COLUMNS, columns)
    product = empty((rows, step), torch.float32, out.device)
    for begin in range(0, columns, step):
        some = slice(begin, begin + step)
        panel = unscaled(w.elements[:, some].t())
        if blocks:
            scaled_by_blocks(panel, scale_w[some])
        part = product[:, : panel.shape[0]]
        torch.mm(wide, panel.t(), out=part)
        if not blocks:
            part.mul_(x.scale).mul_(scale_w[:, some])
        if bias is not None:
            part.add_(bias[some])
        out[:, some].copy_(part)
    return out
