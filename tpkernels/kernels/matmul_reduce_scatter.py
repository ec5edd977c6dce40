"""``y_r = rows_r(sum_r(x_r @ w_r))`` in one kernel: each tile goes to its owner when done.

Problem: rank r needs the sum of all ranks' partials of rows [starts[r], starts[r+1]).

Algorithm: the tile loop starts with the rows of rank+1 and ends with this rank's own. Its epilogue
stores each tile, rounded to the wire's dtype, into this rank's slot in the owner's buffer. Then the
program sums its tiles of this rank's own rows over the slots: in fp32, in rank order, with bias,
residual and one rounding.

A tile is stored by TMA from shared memory if that has room for a whole tile beside the operands
(`MatmulConfig.operands`): in parts of 64 columns, which all leave while the next tile is
multiplied. Else threads store it.

Sync: the word TILES + tile from rank s says that slot s holds that tile. It is pushed while the
sender multiplies its next tile, because nobody reads a slot before it has done all its own tiles.
Every rank gives a tile to the program of the same number, so a program waits only for programs of
its own number. It has published all its tiles before it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.common.integers import round_up
from tpkernels.kernels import matmul, sync, words
from tpkernels.kernels.configs import MatmulConfig, contiguous_rows
from tpkernels.symm.device import DeviceWorkspace, Prepared

OUTSIDE = tl.constexpr(1 << 30)  # a row that no slot has


class Slots(NamedTuple):
    """The context of `push_tile` and `publish_tile`: the ranks' slots for partials."""

    peers: sync.Peers
    N: tl.tensor
    nbytes: tl.tensor  # of a slot
    wire: tl.constexpr  # the dtype of partials on their way
    tma: tl.constexpr  # whether TMA stores them


@triton.jit
def push_tile(slots, acc, tile):
    """Push this rank's partial into its slot at the owner: the `after` hook."""
    if slots.tma:
        _push_by_tma(slots, acc, tile)
    else:
        push(slots, acc, tile, tile.owner)


@triton.jit
def publish_tile(slots, owner, index):
    """Tell the owner: the `later` hook."""
    if slots.tma:
        words.await_bulk_stores()
    sync.publish(slots.peers, owner, sync.TILES + index)


@triton.jit
def push(slots, acc, tile, to):
    """Store a tile into this rank's slot at ``to``, part by part."""
    peers, N, begin = slots.peers, slots.N, tile.begin
    slot = slot_of(slots, to, peers.rank)
    parts = matmul.column_parts(acc)
    for i in tl.static_range(len(parts)):
        part = parts[i]
        column = tile.column + i * part.shape[1]
        corner, offsets, inside = matmul.tile_at(
            tile.row - begin, column, tile.end - begin, N, N, part.shape[0], part.shape[1]
        )
        tl.store(
            slot + corner + offsets, matmul.rounded(part, slots.wire), mask=inside & peers.usable
        )


@triton.jit
def _push_by_tma(slots, acc, tile):
    """Push to the owner. The descriptor is made here, because only the device knows the address:
    it depends on the epoch. A program has memory for one, and one tile in shared memory: the next
    tile's stores come after `await_bulk_stores`."""
    slot = slot_of(slots, tile.owner, slots.peers.rank)
    rows, columns = tile.end - tile.begin, tl.cast(slots.N, tl.int64)
    matrix = tl.make_tensor_descriptor(slot, [rows, slots.N], [columns, 1], acc.shape)
    # TMA has no mask, but stores nothing outside of the matrix.
    row = tl.where(slots.peers.usable, tile.row - tile.begin, OUTSIDE)
    matrix.store([row, tile.column], matmul.rounded(acc, slots.wire))


@triton.jit
def slot_of(slots, rank, source):
    """Point at the partials from ``source`` in the buffer of ``rank``."""
    buffer = sync.buffer_of(slots.peers, rank)
    return sync.pointer(buffer + tl.cast(source, tl.int64) * slots.nbytes, slots.wire)


@triton.jit
def sum_partials(slots, buffer, at, inside, WORLD: tl.constexpr):
    """Sum the elements ``at`` of the slots in this rank's ``buffer``, in rank order. Nothing waits
    between the loads of two ranks, so as many are in flight as registers can take."""
    acc = tl.zeros(inside.shape, dtype=tl.float32)
    for source in tl.static_range(WORLD):
        slot = sync.pointer(buffer + tl.cast(slots.nbytes, tl.int64) * source, slots.wire)
        acc += tl.load(slot + at, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def first_tile(before, lane, lanes):
    """Return the first tile of program ``lane`` in a segment that follows ``before`` tiles."""
    return (lane + lanes - before % lanes) % lanes


@triton.jit
def sum_tiles(
    slots, segments, own, out, out_row, bias, residual, lane, lanes, on_stored: tl.constexpr,
    on_stored_context, WORLD: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Sum the program's tiles of the segment ``own`` into ``out``, whose row ``out_row`` is the
    first of that segment. The hook `on_stored(context, result, at, inside, tile, last)` gets what
    was stored: sum_m rows of a tile at a time; ``last`` is true for the last of them."""
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    SUM_M: tl.constexpr = tiling.sum_m
    N = slots.N
    buffer = sync.buffer_of(slots.peers, slots.peers.rank)
    begin, end = matmul.segment(segments, own)
    before = matmul.tiles_before(segments, N, own, tiling)
    count = tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(first_tile(before, lane, lanes), count, lanes):
        tile_m, tile_n = matmul.position(tile, end - begin, N, tiling)
        sync.wait_for_all(slots.peers, sync.TILES + tile)
        for top in range(0, BLOCK_M, SUM_M):
            row, column = tile_m * BLOCK_M + top, tile_n * BLOCK_N
            corner, offsets, inside = matmul.tile_at(row, column, end - begin, N, N, SUM_M, BLOCK_N)
            acc = sum_partials(slots, buffer, corner + offsets, inside, WORLD)
            at = tl.cast(out_row, tl.int64) * N + corner + offsets
            more = None if residual is None else residual + at
            acc = matmul.epilogue(acc, bias, more, column, N, inside)
            result = matmul.rounded(acc, out.dtype.element_ty)
            tl.store(out + at, result, mask=inside)
            if on_stored is not None:
                on_stored(on_stored_context, result, at, inside, tile, top + SUM_M >= BLOCK_M)


@triton.jit(do_not_specialize=sync.SCALARS)
def matmul_reduce_scatter_kernel(
    a, b, bias, residual, out, segments, N, K, stride_am, stride_bk, stride_bn, slot_bytes,
    workspace, rank, signature, timeout_ns, seed, WIRE: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Compute ``out = rows_rank(round(sum_r(a_r @ b_r) + bias + residual))``."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    matmul.matmul_tiles(
        matmul.MatmulOperands(a, b, N, K, stride_am, stride_bk, stride_bn), segments,
        (rank + 1) % workspace.world, lane, lanes, None, None, push_tile,
        Slots(peers, N, slot_bytes, WIRE, tiling.store_tma), tiling, publish_tile,
    )  # fmt: skip
    sum_tiles(
        Slots(peers, N, slot_bytes, WIRE, False), segments, rank, out, 0, bias, residual,
        lane, lanes, None, None, workspace.world, tiling,
    )  # fmt: skip
    if sync.finish(peers):
        begin, end = matmul.segment(segments, rank)
        sync.poison(out, tl.cast(end - begin, tl.int64) * N)


_ALIGNMENT = 256  # bytes, of a slot


def slot_bytes(rows: int, n: int, wire: torch.dtype) -> int:
    """Return the bytes of one rank's slot for ``rows`` rows."""
    return round_up(rows * n * wire.itemsize, _ALIGNMENT)


def prepare(
    config: MatmulConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    sizes: tuple[int, ...],
    wire: torch.dtype,
) -> Prepared:
    """Prepare x [M, K], w [K, N] -> out [sizes[rank], N], residual like out. The launch takes x, w,
    bias, residual and out. Partials travel in the dtype ``wire``."""
    x, k, n = contiguous_rows(x), *w.shape
    slot = slot_bytes(max(sizes), n, wire)
    operands = config.operands(x, w, wire)
    strides = x.stride(0), *w.stride()

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        programs = min(config.tiles(sizes, n), config.programs)
        call, dtype = sync.launch_arguments(space, signature), matmul.TRITON_DTYPES[wire]
        args = matmul.segments_of(space, sizes), n, k, *strides, slot, *call, dtype
        return operands.bind(matmul_reduce_scatter_kernel, programs, args, space.scratch)

    tiles = config.tiles([max(sizes)], n)
    return Prepared(1 + tiles, len(sizes) * slot, matmul.table_of(sizes), bind)
