"""``y_r = rows_r(sum_r(x_r @ w_r))`` in one kernel: each finished tile is stored at its owner.

Problem: rank r needs the sum of the partials of all ranks for rows [starts[r], starts[r+1]).

Algorithm: the tile loop starts with the rows of rank+1 and ends with the local rows. Its epilogue
rounds each tile to the wire dtype and stores it in the slot of this rank, in the buffer of the
owner. Then each program reduces its tiles of the local rows over the slots: in fp32, in rank order,
with bias, residual and one rounding.

TMA stores a tile from shared memory if a full tile fits there in addition to the operands
(`MatmulConfig.plan_operands`). The tile leaves in slices of 64 columns while the next tile is
multiplied. Otherwise threads store the tile.

Sync: signal TILES + tile from rank s means that slot s holds that tile. The sender stores the
signal while it multiplies its next tile. The delay is harmless, because a program of the owner
reads slots only after it has computed all its own tiles. All ranks assign a tile to the same
program number, so a program waits only for programs with its number. It publishes all its tiles
before it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.common.integers import round_up
from tpkernels.kernels import matmul, signals, sync
from tpkernels.kernels.configs import MatmulConfig, contiguous_rows
from tpkernels.symm.device import DeviceWorkspace, PreparedCall

OUTSIDE = tl.constexpr(1 << 30)  # row index outside every slot: TMA drops the store


class Slots(NamedTuple):
    """Slots for the partials of all ranks: context of `push_tile` and `publish_tile`."""

    peers: sync.Peers
    N: tl.tensor
    nbytes: tl.tensor  # bytes per slot
    wire: tl.constexpr  # dtype of the partials in the slots
    tma: tl.constexpr  # whether TMA stores the partials


@triton.jit
def push_tile(slots, acc, tile):
    """Epilogue: store a tile of the local partial in the slot at its owner."""
    if slots.tma:
        _push_by_tma(slots, acc, tile)
    else:
        push(slots, acc, tile, tile.owner)


@triton.jit
def publish_tile(slots, owner, index):
    """Deferred signal: notify the owner that a tile is stored."""
    if slots.tma:
        signals.await_bulk_stores()
    sync.publish(slots.peers, owner, sync.TILES + index)


@triton.jit
def push(slots, acc, tile, dst):
    """Store a tile in the buffer of rank ``dst``, in the slot for this rank, slice by slice."""
    peers, N, begin = slots.peers, slots.N, tile.begin
    slot = slot_pointer(slots, dst, peers.rank)
    slices = matmul.column_slices(acc)
    for i in tl.static_range(len(slices)):
        acc_slice = slices[i]
        column = tile.column + i * acc_slice.shape[1]
        corner, offsets, inside = matmul.tile_offsets(
            tile.row - begin, column, tile.end - begin, N, N, acc_slice.shape[0], acc_slice.shape[1]
        )
        tl.store(
            slot + corner + offsets,
            matmul.rounded(acc_slice, slots.wire),
            mask=inside & peers.usable,
        )


@triton.jit
def _push_by_tma(slots, acc, tile):
    """Store a tile at its owner with TMA. The kernel creates the descriptor, because the address
    depends on the epoch. A program has memory for one descriptor, and shared memory for one tile:
    the stores of the next tile follow `await_bulk_stores`."""
    slot = slot_pointer(slots, tile.owner, slots.peers.rank)
    rows, columns = tile.end - tile.begin, tl.cast(slots.N, tl.int64)
    matrix = tl.make_tensor_descriptor(slot, [rows, slots.N], [columns, 1], acc.shape)
    # TMA has no mask, but it drops stores outside the matrix.
    row = tl.where(slots.peers.usable, tile.row - tile.begin, OUTSIDE)
    matrix.store([row, tile.column], matmul.rounded(acc, slots.wire))


@triton.jit
def slot_pointer(slots, rank, source):
    """Return a pointer to the slot of ``source`` in the buffer of ``rank``."""
    buffer = sync.buffer_address(slots.peers, rank)
    return sync.pointer(buffer + tl.cast(source, tl.int64) * slots.nbytes, slots.wire)


@triton.jit
def sum_partials(slots, buffer, offsets, inside, WORLD: tl.constexpr):
    """Sum the elements at ``offsets`` over the slots of the local ``buffer``, in rank order. Loads
    do not wait for each other, so only the registers limit the number in flight."""
    acc = tl.zeros(inside.shape, dtype=tl.float32)
    for source in tl.static_range(WORLD):
        slot = sync.pointer(buffer + tl.cast(slots.nbytes, tl.int64) * source, slots.wire)
        acc += tl.load(slot + offsets, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def first_tile(preceding, worker, num_workers):
    """Return the first tile of program ``worker`` in a segment after ``preceding`` tiles."""
    return (worker + num_workers - preceding % num_workers) % num_workers


@triton.jit
def sum_tiles(
    slots, segments, owner, out, out_row, bias, residual, worker, num_workers,
    on_stored: tl.constexpr, on_stored_context, WORLD: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Reduce the tiles of this program in segment ``owner`` into ``out``. The segment starts at row
    ``out_row`` of ``out``. The hook `on_stored(context, result, out_offsets, inside, tile, last)`
    receives the stored elements, sum_m rows of a tile per call. ``last`` marks the last call of a
    tile."""
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    SUM_M: tl.constexpr = tiling.sum_m
    N = slots.N
    buffer = sync.buffer_address(slots.peers, slots.peers.rank)
    begin, end = matmul.segment_rows(segments, owner)
    preceding = matmul.tiles_before(segments, N, owner, tiling)
    count = tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(first_tile(preceding, worker, num_workers), count, num_workers):
        tile_m, tile_n = matmul.tile_position(tile, end - begin, N, tiling)
        sync.wait_for_all(slots.peers, sync.TILES + tile)
        for top in range(0, BLOCK_M, SUM_M):
            row, column = tile_m * BLOCK_M + top, tile_n * BLOCK_N
            corner, offsets, inside = matmul.tile_offsets(
                row, column, end - begin, N, N, SUM_M, BLOCK_N
            )
            acc = sum_partials(slots, buffer, corner + offsets, inside, WORLD)
            out_offsets = tl.cast(out_row, tl.int64) * N + corner + offsets
            residual_pointers = None if residual is None else residual + out_offsets
            acc = matmul.add_bias_and_residual(acc, bias, residual_pointers, column, N, inside)
            result = matmul.rounded(acc, out.dtype.element_ty)
            tl.store(out + out_offsets, result, mask=inside)
            if on_stored is not None:
                on_stored(
                    on_stored_context, result, out_offsets, inside, tile, top + SUM_M >= BLOCK_M
                )


@triton.jit(do_not_specialize=sync.SCALARS)
def matmul_reduce_scatter_kernel(
    a, b, bias, residual, out, segments, N, K, stride_am, stride_bk, stride_bn, slot_bytes,
    workspace, rank, signature, timeout_ns, seed, WIRE: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Compute ``out = rows_rank(round(sum_r(a_r @ b_r) + bias + residual))``."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    matmul.matmul_tiles(
        matmul.MatmulOperands(a, b, N, K, stride_am, stride_bk, stride_bn), segments,
        (rank + 1) % workspace.world, worker, num_workers, None, None, push_tile,
        Slots(peers, N, slot_bytes, WIRE, tiling.store_tma), tiling, publish_tile,
    )  # fmt: skip
    sum_tiles(
        Slots(peers, N, slot_bytes, WIRE, False), segments, rank, out, 0, bias, residual,
        worker, num_workers, None, None, workspace.world, tiling,
    )  # fmt: skip
    if sync.finish(peers):
        begin, end = matmul.segment_rows(segments, rank)
        sync.poison(out, tl.cast(end - begin, tl.int64) * N)


_ALIGNMENT = 256  # bytes, slot alignment


def slot_bytes(rows: int, n: int, wire: torch.dtype) -> int:
    """Return the size in bytes of a slot for ``rows`` rows."""
    return round_up(rows * n * wire.itemsize, _ALIGNMENT)


def prepare(
    config: MatmulConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    sizes: tuple[int, ...],
    wire: torch.dtype,
) -> PreparedCall:
    """Prepare x [M, K], w [K, N] -> out [sizes[rank], N]; residual has the shape of out. The launch
    arguments are (x, w, bias, residual, out). Partials are sent in dtype ``wire``."""
    x, k, n = contiguous_rows(x), *w.shape
    slot = slot_bytes(max(sizes), n, wire)
    operand_plan = config.plan_operands(x, w, wire)
    strides = x.stride(0), *w.stride()

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        programs = min(config.tiles(sizes, n), config.programs)
        call, dtype = sync.launch_arguments(workspace, signature), matmul.TRITON_DTYPES[wire]
        args = matmul.make_segments(workspace, sizes), n, k, *strides, slot, *call, dtype
        return operand_plan.bind(matmul_reduce_scatter_kernel, programs, args, workspace.scratch)

    tiles = config.tiles([max(sizes)], n)
    return PreparedCall(1 + tiles, len(sizes) * slot, matmul.table_sizes(sizes), bind)
