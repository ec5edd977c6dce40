"""The matrix product, and the one tile loop that all fused kernels are made of.

Problem: ``y = a @ b`` with fp32 accumulation, where the rows of ``a`` (and of y) belong to ranks:
segment r is rows [starts[r], starts[r+1]). No tile crosses the end of a segment.

Algorithm: persistent programs. Tiles are numbered segment by segment and, within a segment, in
groups of GROUP_M rows of tiles, so that programs that run together share tiles of a and b in L2.
Program `lane` has the tiles whose number is `lane` modulo `lanes`, the same on all ranks, and
starts with the segment `lead`.

Hooks: `before(context, owner, tile_m)` runs before the loads of a tile and may wait for its rows;
`after(context, acc, tile)` takes the fp32 accumulator. `later(context, owner, index)`, for the same
tile and with the context of `after`, runs when half of the next tile has been multiplied, after the
last tile at once: what `after` has stored has arrived by then, so a release does not hold up the
tensor cores. Where other warps multiply than store (`specialize`), it may run at once. Without
hooks this is a matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.kernels.configs import TRITON, MatmulConfig, config_for, contiguous_rows
from tpkernels.kernels.words import INTERPRETED
from tpkernels.symm.device import DeviceWorkspace

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class MatmulOperands(NamedTuple):
    """The operands of ``a @ b``. a [M, K] has contiguous rows; b [K, N] has any strides. What TMA
    loads is a descriptor (`MatmulConfig.operands`)."""

    a: tl.tensor | tl.tensor_descriptor
    b: tl.tensor | tl.tensor_descriptor
    N: tl.tensor
    K: tl.tensor
    stride_am: tl.tensor
    stride_bk: tl.tensor
    stride_bn: tl.tensor


class RowSegments(NamedTuple):
    """How the M rows of a product are split. It is a launch argument because ``number`` must be
    known at compile time: Triton makes a runtime value of such a field when a kernel assigns the
    tuple to a variable."""

    # A table: the first row of each segment, and the end of the last; None: all equal.
    starts: torch.Tensor | None
    rows: int  # of each segment, if all are equal
    M: int
    number: tl.constexpr


def table_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes whose table of `starts` a kernel reads: none if all are equal. Triton 3.6
    makes a 1 a constexpr and loses it in a nested tuple, so it gets a table."""
    even = sizes.count(sizes[0]) == len(sizes) and (sizes[0] != 1 or TRITON >= (3, 7))
    return () if even else sizes


def segments_of(space: DeviceWorkspace, sizes: tuple[int, ...]) -> RowSegments:
    """Return the launch argument for segments of ``sizes`` rows."""
    starts = space.starts(sizes) if table_of(sizes) else None
    return RowSegments(starts, sizes[0], sum(sizes), tl.constexpr(len(sizes)))


class Tile(NamedTuple):
    """Where an accumulator belongs."""

    owner: tl.tensor  # the segment
    row: tl.tensor
    column: tl.tensor
    begin: tl.tensor  # rows of the segment
    end: tl.tensor


@triton.jit
def segment(segments, owner):
    """Return the first row of a segment, and the row after its last."""
    if segments.starts is None:
        return owner * segments.rows, (owner + 1) * segments.rows
    else:
        return tl.load(segments.starts + owner), tl.load(segments.starts + owner + 1)


@triton.jit
def tiles_before(segments, N, owner, tiling: tl.constexpr):
    """Count the tiles of the segments before that of ``owner``; of all, if that is their number."""
    tiles_n = tl.cdiv(N, tiling.block_n)
    if segments.starts is None:
        return owner * (tl.cdiv(segments.rows, tiling.block_m) * tiles_n)
    else:
        count = 0
        for r in tl.static_range(segments.number):
            begin, end = segment(segments, r)
            count += tl.where(r < owner, tl.cdiv(end - begin, tiling.block_m) * tiles_n, 0)
        return count


@triton.jit
def owner_of(segments, N, tile, tiling: tl.constexpr):
    """Return the segment that a tile is in."""
    if segments.number == 1:
        return 0
    elif segments.starts is None:
        return tile // tiles_before(segments, N, 1, tiling)
    else:
        tiles_n = tl.cdiv(N, tiling.block_n)
        owner = 0
        count = 0
        for r in tl.static_range(segments.number):
            begin, end = segment(segments, r)
            count += tl.cdiv(end - begin, tiling.block_m) * tiles_n
            owner += tl.where(tile >= count, 1, 0)
        return owner


@triton.jit
def position(tile, rows, N, tiling: tl.constexpr):
    """Return where a tile is in a segment of ``rows`` rows: (tile row, tile column)."""
    tiles_m, tiles_n = tl.cdiv(rows, tiling.block_m), tl.cdiv(N, tiling.block_n)
    first = tile // (tiling.group_m * tiles_n) * tiling.group_m
    height = tl.minimum(tiles_m - first, tiling.group_m)
    within = tile % (tiling.group_m * tiles_n)
    return first + within % height, within // height


@triton.jit
def tile_in_step(segments, N, lane, lanes, skipped, count, step, tiling: tl.constexpr):
    """Return the tile that program ``lane`` multiplies as number ``step`` of its ``count``:
    (segment, number in the segment). It begins with tile ``lane + skipped * lanes``."""
    tile = lane + (skipped + step) % count * lanes
    owner = owner_of(segments, N, tile, tiling)
    return owner, tile - tiles_before(segments, N, owner, tiling)


@triton.jit
def tile_at(row, column, row_end, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a tile of a matrix of N columns: (offset of its corner, offsets within it, mask of
    what is inside the matrix). Only the corner needs 64 bits."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (row + rows < row_end)[:, None] & (column + columns < N)[None, :]
    return row.to(tl.int64) * stride + column, rows[:, None] * stride + columns[None, :], inside


@triton.jit
def matmul_tiles(
    product, segments, lead, lane, lanes, before: tl.constexpr, before_context, after: tl.constexpr,
    after_context, tiling: tl.constexpr, later: tl.constexpr = None,
):  # fmt: skip
    """Run the tile loop."""
    a, b, N, K, stride_am, stride_bk, stride_bn = product
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    BLOCK_K: tl.constexpr = tiling.block_k
    total = tiles_before(segments, N, segments.number, tiling)
    count = tl.cdiv(tl.maximum(total - lane, 0), lanes)
    first = tiles_before(segments, N, lead, tiling)
    skipped = tl.cdiv(tl.maximum(first - lane, 0), lanes)
    half = K // BLOCK_K // 2 * BLOCK_K
    tl.assume(K > 0)
    # The loop carries no value from one tile to the next: where the loop over K reads one that is
    # assigned after it, Triton (3.6 to 3.7) flattens the loops wrongly, and the value is that of
    # the tile itself from the second step on.
    # Invariant: no load of a tile overtakes its `before`. Only where there is none, loads of the
    # next tile are in flight during `after`, or other warps multiply it. Hooks run in the first
    # num_warps warps.
    for i in tl.range(0, count, flatten=before is None, warp_specialize=tiling.specialized):
        owner, index = tile_in_step(segments, N, lane, lanes, skipped, count, i, tiling)
        begin, end = segment(segments, owner)
        tile_m, tile_n = position(index, end - begin, N, tiling)
        row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
        corner, x_offsets, x_rows = tile_at(row, 0, end, 1, stride_am, BLOCK_M, 1)
        columns = column + tl.arange(0, BLOCK_N)
        if before is not None:
            before(before_context, owner, tile_m)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            depth = k + tl.arange(0, BLOCK_K)
            if tiling.a_tma:
                x = a.load([row, k])
            else:
                x = tl.load(
                    a + corner + x_offsets + depth[None, :],
                    mask=x_rows & (depth < K)[None, :],
                    other=0.0,
                )
            if tiling.b_tma == "k":
                y = b.load([column, k]).T
            elif tiling.b_tma == "n":
                y = b.load([k, column])
            else:
                y = tl.load(
                    b
                    + depth.to(tl.int64)[:, None] * stride_bk
                    + columns.to(tl.int64)[None, :] * stride_bn,
                    mask=(depth < K)[:, None] & (columns < N)[None, :],
                    other=0.0,
                )
            if INTERPRETED:  # its dot treats bf16 as integers
                x, y = x.to(tl.float32), y.to(tl.float32)
            acc = tl.dot(x, y, acc, input_precision="ieee")
            if later is not None:  # noqa: SIM102 - a condition known at compile time and one not
                if (k == half) & (i > 0):
                    stored_owner, stored_index = tile_in_step(
                        segments, N, lane, lanes, skipped, count, i - 1, tiling
                    )
                    later(after_context, stored_owner, stored_index)
        after(after_context, acc, Tile(owner, row, column, begin, end))
    if later is not None:  # noqa: SIM102 - as above
        if count > 0:
            stored_owner, stored_index = tile_in_step(
                segments, N, lane, lanes, skipped, count, count - 1, tiling
            )
            later(after_context, stored_owner, stored_index)


# An accumulator is converted, and goes through shared memory, in parts of so many columns. So an
# epilogue needs the registers and the shared memory of one part more than the loop over K does: the
# loads of the next tile have room beside it, and nothing spills, whatever dtype is stored.
PART = tl.constexpr(64)


@triton.jit
def column_parts(acc):
    """Split ``acc`` into a tuple of parts of at most PART columns, from left to right."""
    if acc.shape[1] <= PART:
        return (acc,)
    else:
        halves = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1)
        left, right = halves.split()
        return column_parts(left) + column_parts(right)


@triton.jit
def rounded(acc, dtype: tl.constexpr):
    """Convert ``acc`` to ``dtype``, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter's cast truncates
        bits = acc.to(tl.int32, bitcast=True)
        acc = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return acc.to(dtype)


@triton.jit
def epilogue(acc, bias, residual, column, N, inside):
    """Add ``acc + bias + residual`` in fp32; ``residual`` points at the tile's elements."""
    if bias is not None:
        columns = column + tl.arange(0, acc.shape[1])
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        acc += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    return acc


class Result(NamedTuple):
    """The context of `store_result`."""

    out: tl.tensor
    bias: tl.tensor | None
    N: tl.tensor


@triton.jit
def store_result(context, acc, tile):
    """Add the bias and round once: the `after` hook where a tile is the result."""
    N, out = context.N, context.out
    parts = column_parts(acc)
    for i in tl.static_range(len(parts)):
        part = parts[i]
        column = tile.column + i * part.shape[1]
        corner, offsets, inside = tile_at(
            tile.row, column, tile.end, N, N, part.shape[0], part.shape[1]
        )
        part = epilogue(part, context.bias, None, column, N, inside)
        tl.store(out + corner + offsets, rounded(part, out.dtype.element_ty), mask=inside)


@triton.jit
def matmul_kernel(
    a, b, bias, out, M, N, K, stride_am, stride_bk, stride_bn, before: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Compute ``out = round(a @ b + bias)``."""
    matmul_tiles(
        MatmulOperands(a, b, N, K, stride_am, stride_bk, stride_bn), RowSegments(None, M, M, 1), 0,
        tl.program_id(0), tl.num_programs(0), before, None, store_result, Result(out, bias, N),
        tiling,
    )  # fmt: skip


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """Return ``round(a @ b + bias)``, summed in fp32. a [M, K], b [K, N] of any strides."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype, device=a.device)
    bind_matmul(config or config_for(a.device, a.dtype, *out.shape), a, b, out.dtype)(
        a, b, bias, out
    )
    return out


def bind_matmul(
    config: MatmulConfig, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype
) -> Callable[..., None]:
    """Return a launch of ``out = round(a @ b + bias)`` for tensors like a [M, K] and b [K, N]. It
    takes a, b, bias and out."""
    a, (m, k), n = contiguous_rows(a), a.shape, b.shape[1]
    if m == 0:
        return lambda *_: None
    operands = config.operands(a, b, out_dtype)
    programs = min(config.tiles([m], n), config.programs)
    return operands.bind(matmul_kernel, programs, (m, n, k, a.stride(0), *b.stride(), None))
