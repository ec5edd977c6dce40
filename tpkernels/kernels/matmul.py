"""The persistent GEMM tile loop that all fused kernels share.

Problem: compute ``y = a @ b`` with fp32 accumulation. The rows of ``a`` and ``y`` are divided among
the ranks: segment r is rows [starts[r], starts[r+1]). No tile crosses a segment boundary.

Algorithm: persistent programs. Tiles are numbered segment by segment. Within a segment, they are
ordered in groups of GROUP_M tile rows, so that concurrent programs share tiles of a and b in L2.
Program `worker` computes the tiles whose number is `worker` modulo `num_workers`. This assignment
is identical on all ranks. Each program starts with segment `first_segment`.

Hooks (without them, the loop is a plain matmul):
- `prologue(context, owner, tile_m)` runs before the loads of a tile and may wait for its rows.
- `epilogue(context, acc, tile)` consumes the fp32 accumulator.
- `deferred_signal(context, owner, index)` signals that the tile is stored. It gets the context of
  the epilogue. It runs halfway through the K loop of the next tile, and for the last tile right
  after the epilogue. Halfway, the stores of the epilogue have arrived, so the release does not
  stall the tensor cores. With warp specialization (`specialize`), separate warps multiply, and the
  hook may run earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.kernels.configs import TRITON, MatmulConfig, config_for, contiguous_rows
from tpkernels.kernels.signals import INTERPRETED
from tpkernels.symm.device import DeviceWorkspace

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class MatmulOperands(NamedTuple):
    """Operands of ``a @ b``: a [M, K] with contiguous rows, b [K, N] with any strides. An operand
    that TMA loads is a descriptor (`MatmulConfig.plan_operands`)."""

    a: tl.tensor | tl.tensor_descriptor
    b: tl.tensor | tl.tensor_descriptor
    N: tl.tensor
    K: tl.tensor
    stride_am: tl.tensor
    stride_bk: tl.tensor
    stride_bn: tl.tensor


class RowSegments(NamedTuple):
    """Division of the M rows of a matmul into segments.

    It is a launch argument, because ``num_segments`` must be a compile-time constant. If a kernel
    built the tuple and assigned it to a variable, Triton would turn it into a runtime value."""

    # [num_segments + 1]: first row of each segment, then M. None if all segments have equal size.
    starts: torch.Tensor | None
    rows: int  # rows per segment, if all segments have equal size
    M: int
    num_segments: tl.constexpr


def table_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the segment sizes if the kernel needs a `starts` table, or () if all sizes are equal.
    Triton 3.6 turns a size of 1 into a constexpr and drops it from a nested tuple. That size
    therefore also needs a table."""
    even = sizes.count(sizes[0]) == len(sizes) and (sizes[0] != 1 or TRITON >= (3, 7))
    return () if even else sizes


def make_segments(workspace: DeviceWorkspace, sizes: tuple[int, ...]) -> RowSegments:
    """Create the launch argument for segments of ``sizes`` rows."""
    starts = workspace.starts(sizes) if table_sizes(sizes) else None
    return RowSegments(starts, sizes[0], sum(sizes), tl.constexpr(len(sizes)))


class Tile(NamedTuple):
    """Position of an accumulator in the result."""

    owner: tl.tensor  # segment index
    row: tl.tensor
    column: tl.tensor
    begin: tl.tensor  # first row of the segment
    end: tl.tensor  # end row of the segment (exclusive)


@triton.jit
def segment_rows(segments, owner):
    """Return the row range [begin, end) of segment ``owner``."""
    if segments.starts is None:
        return owner * segments.rows, (owner + 1) * segments.rows
    else:
        return tl.load(segments.starts + owner), tl.load(segments.starts + owner + 1)


@triton.jit
def tiles_before(segments, N, owner, tiling: tl.constexpr):
    """Count the tiles of the segments before ``owner``. For ``owner == segments.num_segments``,
    count all tiles."""
    tiles_n = tl.cdiv(N, tiling.block_n)
    if segments.starts is None:
        return owner * (tl.cdiv(segments.rows, tiling.block_m) * tiles_n)
    else:
        count = 0
        for r in tl.static_range(segments.num_segments):
            begin, end = segment_rows(segments, r)
            count += tl.where(r < owner, tl.cdiv(end - begin, tiling.block_m) * tiles_n, 0)
        return count


@triton.jit
def find_owner(segments, N, tile, tiling: tl.constexpr):
    """Return the segment that contains a tile."""
    if segments.num_segments == 1:
        return 0
    elif segments.starts is None:
        return tile // tiles_before(segments, N, 1, tiling)
    else:
        tiles_n = tl.cdiv(N, tiling.block_n)
        owner = 0
        count = 0
        for r in tl.static_range(segments.num_segments):
            begin, end = segment_rows(segments, r)
            count += tl.cdiv(end - begin, tiling.block_m) * tiles_n
            owner += tl.where(tile >= count, 1, 0)
        return owner


@triton.jit
def tile_position(tile, rows, N, tiling: tl.constexpr):
    """Return the (tile row, tile column) of a tile within a segment of ``rows`` rows."""
    tiles_m, tiles_n = tl.cdiv(rows, tiling.block_m), tl.cdiv(N, tiling.block_n)
    first = tile // (tiling.group_m * tiles_n) * tiling.group_m
    height = tl.minimum(tiles_m - first, tiling.group_m)
    within = tile % (tiling.group_m * tiles_n)
    return first + within % height, within // height


@triton.jit
def scheduled_tile(segments, N, worker, num_workers, skipped, count, step, tiling: tl.constexpr):
    """Return the tile for iteration ``step`` of program ``worker`` as (segment, index within the
    segment). The program has ``count`` tiles and starts at tile
    ``worker + skipped * num_workers``."""
    tile = worker + (skipped + step) % count * num_workers
    owner = find_owner(segments, N, tile, tiling)
    return owner, tile - tiles_before(segments, N, owner, tiling)


@triton.jit
def tile_offsets(row, column, row_end, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (offset of the tile corner, offsets within the tile, bounds mask) for a tile of a
    matrix with N columns. Only the corner offset needs 64 bits."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (row + rows < row_end)[:, None] & (column + columns < N)[None, :]
    return row.to(tl.int64) * stride + column, rows[:, None] * stride + columns[None, :], inside


@triton.jit
def matmul_tiles(
    operands, segments, first_segment, worker, num_workers, prologue: tl.constexpr,
    prologue_context, epilogue: tl.constexpr, epilogue_context, tiling: tl.constexpr,
    deferred_signal: tl.constexpr = None,
):  # fmt: skip
    """Run the tile loop of one program."""
    a, b, N, K, stride_am, stride_bk, stride_bn = operands
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    BLOCK_K: tl.constexpr = tiling.block_k
    total = tiles_before(segments, N, segments.num_segments, tiling)
    count = tl.cdiv(tl.maximum(total - worker, 0), num_workers)
    first = tiles_before(segments, N, first_segment, tiling)
    skipped = tl.cdiv(tl.maximum(first - worker, 0), num_workers)
    half = K // BLOCK_K // 2 * BLOCK_K
    tl.assume(K > 0)
    # The loop carries no value across tiles. If the K loop read a value that is assigned after it,
    # Triton 3.6 and 3.7 would flatten the loops incorrectly: from the second step on, the K loop
    # would see the value of the current tile.
    # Invariant: no load of a tile overtakes its prologue. Loads of the next tile may be in flight
    # during the epilogue, and separate warps may multiply the next tile, only if the loop has no
    # prologue. Hooks run in the first num_warps warps.
    for i in tl.range(0, count, flatten=prologue is None, warp_specialize=tiling.specialized):
        owner, index = scheduled_tile(segments, N, worker, num_workers, skipped, count, i, tiling)
        begin, end = segment_rows(segments, owner)
        tile_m, tile_n = tile_position(index, end - begin, N, tiling)
        row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
        corner, x_offsets, x_rows = tile_offsets(row, 0, end, 1, stride_am, BLOCK_M, 1)
        columns = column + tl.arange(0, BLOCK_N)
        if prologue is not None:
            prologue(prologue_context, owner, tile_m)
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
            if INTERPRETED:  # the dot of the interpreter treats bf16 as integers
                x, y = x.to(tl.float32), y.to(tl.float32)
            acc = tl.dot(x, y, acc, input_precision="ieee")
            if deferred_signal is not None:  # noqa: SIM102 - known at compile time
                if (k == half) & (i > 0):
                    stored_owner, stored_index = scheduled_tile(
                        segments, N, worker, num_workers, skipped, count, i - 1, tiling
                    )
                    deferred_signal(epilogue_context, stored_owner, stored_index)
        epilogue(epilogue_context, acc, Tile(owner, row, column, begin, end))
    if deferred_signal is not None:  # noqa: SIM102 - as above
        if count > 0:
            stored_owner, stored_index = scheduled_tile(
                segments, N, worker, num_workers, skipped, count, count - 1, tiling
            )
            deferred_signal(epilogue_context, stored_owner, stored_index)


# Columns per accumulator slice. The epilogue converts an accumulator slice by slice, through shared
# memory. It needs the registers and shared memory of one slice in addition to the K loop. That
# leaves space for the loads of the next tile and avoids spills for every stored dtype.
SLICE_COLUMNS = tl.constexpr(64)


@triton.jit
def column_slices(acc):
    """Split ``acc`` into a tuple of slices of at most SLICE_COLUMNS columns, from left to right."""
    if acc.shape[1] <= SLICE_COLUMNS:
        return (acc,)
    else:
        halves = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1)
        left, right = halves.split()
        return column_slices(left) + column_slices(right)


@triton.jit
def rounded(acc, dtype: tl.constexpr):
    """Convert ``acc`` to ``dtype``, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the cast of the interpreter truncates
        bits = acc.to(tl.int32, bitcast=True)
        acc = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return acc.to(dtype)


@triton.jit
def add_bias_and_residual(acc, bias, residual, column, N, inside):
    """Return ``acc + bias + residual`` in fp32. ``residual``: pointers to the tile elements."""
    if bias is not None:
        columns = column + tl.arange(0, acc.shape[1])
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        acc += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    return acc


class Result(NamedTuple):
    """Context of the `store_result` epilogue."""

    out: tl.tensor
    bias: tl.tensor | None
    N: tl.tensor


@triton.jit
def store_result(context, acc, tile):
    """Epilogue of a plain matmul: add the bias, round once and store the tile."""
    N, out = context.N, context.out
    slices = column_slices(acc)
    for i in tl.static_range(len(slices)):
        acc_slice = slices[i]
        column = tile.column + i * acc_slice.shape[1]
        corner, offsets, inside = tile_offsets(
            tile.row, column, tile.end, N, N, acc_slice.shape[0], acc_slice.shape[1]
        )
        acc_slice = add_bias_and_residual(acc_slice, context.bias, None, column, N, inside)
        tl.store(out + corner + offsets, rounded(acc_slice, out.dtype.element_ty), mask=inside)


@triton.jit
def matmul_kernel(
    a, b, bias, out, M, N, K, stride_am, stride_bk, stride_bn, prologue: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Compute ``out = round(a @ b + bias)``."""
    matmul_tiles(
        MatmulOperands(a, b, N, K, stride_am, stride_bk, stride_bn), RowSegments(None, M, M, 1), 0,
        tl.program_id(0), tl.num_programs(0), prologue, None, store_result, Result(out, bias, N),
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
    """Return ``round(a @ b + bias)`` with fp32 accumulation: a [M, K], b [K, N], any strides."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype, device=a.device)
    bind_matmul(config or config_for(a.device, a.dtype, *out.shape), a, b, out.dtype)(
        a, b, bias, out
    )
    return out


def bind_matmul(
    config: MatmulConfig, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype
) -> Callable[..., None]:
    """Return a function that launches ``out = round(a @ b + bias)``. Its arguments are
    (a, b, bias, out), with the shapes, dtypes and strides of ``a`` [M, K] and ``b`` [K, N]."""
    a, (m, k), n = contiguous_rows(a), a.shape, b.shape[1]
    if m == 0:
        return lambda *_: None
    operand_plan = config.plan_operands(a, b, out_dtype)
    programs = min(config.tiles([m], n), config.programs)
    return operand_plan.bind(matmul_kernel, programs, (m, n, k, a.stride(0), *b.stride(), None))
