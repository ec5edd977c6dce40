"""``y = sum_r(x_r @ w_r)`` on every rank, in one kernel.

Problem: all ranks need the sum of all partials, bitwise identical.

Algorithm:
- one-shot (few rows): each tile is pushed to all ranks, and every rank reduces all tiles.
- two-shot (many rows): the rows are divided into one segment per rank and reduced as in
  matmul_reduce_scatter. Then each owner pushes its results to all ranks, and every rank copies them
  into its output.

Sync: signals TILES + tile as in matmul_reduce_scatter. The owner stores the result of a tile on all
ranks, then sends signal `first_result` + tile. A program waits only for programs with its number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.common.integers import ceil_div
from tpkernels.common.shards import shard_sizes
from tpkernels.kernels import matmul, sync
from tpkernels.kernels import matmul_reduce_scatter as scatter
from tpkernels.kernels.configs import MatmulConfig, contiguous_rows
from tpkernels.symm.device import DeviceWorkspace, PreparedCall

# Max bytes of a partial for one-shot. Not measured.
ONE_SHOT_BYTES = 256 << 10


class _Results(NamedTuple):
    """Output and result buffers of two-shot: context of `_publish_result`."""

    peers: sync.Peers
    out: tl.tensor
    begin: tl.tensor  # byte offset of the results in a buffer
    first_signal: tl.tensor  # signal of the first tile


@triton.jit
def _push_to_all(slots, acc, tile):
    """Epilogue of one-shot: push a tile to all ranks."""
    peers = slots.peers
    for i in range(peers.workspace.world):
        scatter.push(slots, acc, tile, (peers.rank + 1 + i) % peers.workspace.world)


@triton.jit
def _publish_to_all(slots, owner, index):
    """Deferred signal of one-shot: notify all ranks that a tile is stored."""
    sync.publish_to_all(slots.peers, sync.TILES + index)


@triton.jit
def _results_pointer(results, rank):
    """Return a pointer to the results in the buffer of ``rank``."""
    address = sync.buffer_address(results.peers, rank) + results.begin
    return sync.pointer(address, results.out.dtype.element_ty)


@triton.jit
def _publish_result(results, result, out_offsets, inside, tile, last):
    """Push results to all peers: the `on_stored` hook of two-shot."""
    peers = results.peers
    for i in range(1, peers.workspace.world):
        dst = (peers.rank + i) % peers.workspace.world
        tl.store(_results_pointer(results, dst) + out_offsets, result, mask=inside & peers.usable)
    if last:
        sync.publish_to_all(peers, results.first_signal + tile)


@triton.jit
def _copy_results(results, segments, N, worker, num_workers, tiling: tl.constexpr):
    """Copy the results of the peers from the local buffer into the output."""
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    SUM_M: tl.constexpr = tiling.sum_m
    peers, out = results.peers, results.out
    for i in range(1, segments.num_segments):
        owner = (peers.rank + i) % peers.workspace.world
        begin, end = matmul.segment_rows(segments, owner)
        preceding = matmul.tiles_before(segments, N, owner, tiling)
        count = tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in range(scatter.first_tile(preceding, worker, num_workers), count, num_workers):
            tile_m, tile_n = matmul.tile_position(tile, end - begin, N, tiling)
            sync.wait_for(peers, owner, results.first_signal + tile)
            row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
            for top in range(0, BLOCK_M, SUM_M):
                corner, offsets, inside = matmul.tile_offsets(
                    row + top, column, end, N, N, SUM_M, BLOCK_N
                )
                result = tl.load(_results_pointer(results, peers.rank) + corner + offsets, inside)
                tl.store(out + corner + offsets, result, mask=inside)


@triton.jit(do_not_specialize=sync.SCALARS)
def matmul_all_reduce_kernel(
    a, b, bias, residual, out, segments, N, K, stride_am, stride_bk, stride_bn, slot_bytes,
    results_offset, first_result, workspace, rank, signature, timeout_ns, seed,
    ONE_SHOT: tl.constexpr, WIRE: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Compute ``out = round(sum_r(a_r @ b_r) + bias + residual)`` on every rank."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    result_context = _Results(peers, out, results_offset, first_result)
    local_segment = 0 if ONE_SHOT else rank
    begin, _ = matmul.segment_rows(segments, local_segment)
    matmul.matmul_tiles(
        matmul.MatmulOperands(a, b, N, K, stride_am, stride_bk, stride_bn), segments,
        (local_segment + 1) % segments.num_segments, worker, num_workers, None, None,
        _push_to_all if ONE_SHOT else scatter.push_tile,
        scatter.Slots(peers, N, slot_bytes, WIRE, tiling.store_tma), tiling,
        _publish_to_all if ONE_SHOT else scatter.publish_tile,
    )  # fmt: skip
    scatter.sum_tiles(
        scatter.Slots(peers, N, slot_bytes, WIRE, False), segments, local_segment, out,
        begin, bias, residual, worker, num_workers, None if ONE_SHOT else _publish_result,
        result_context, workspace.world, tiling,
    )  # fmt: skip
    _copy_results(result_context, segments, N, worker, num_workers, tiling)
    if sync.finish(peers):
        sync.poison(out, tl.cast(segments.M, tl.int64) * N)


def _tile_aligned_sizes(m: int, world: int, block_m: int) -> tuple[int, ...]:
    """Return the number of rows that each rank reduces in two-shot, rounded to full tiles."""
    tiles = shard_sizes(ceil_div(m, block_m), world)
    ends = [min(m, sum(tiles[: r + 1]) * block_m) for r in range(world)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def prepare(
    config: MatmulConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    out_dtype: torch.dtype,
    world: int,
    wire: torch.dtype,
) -> PreparedCall:
    """Prepare x [M, K], w [K, N] -> out [M, N]; residual has the shape of out. The launch arguments
    are (x, w, bias, residual, out). Partials are sent in dtype ``wire``."""
    x, m, (k, n) = contiguous_rows(x), x.shape[0], w.shape
    small = m * n * wire.itemsize <= ONE_SHOT_BYTES
    sizes = (m,) if small else _tile_aligned_sizes(m, world, config.block_m)
    one_shot = len(sizes) == 1
    slot, first_result = scatter.slot_bytes(max(sizes), n, wire), 1 + config.tiles([max(sizes)], n)
    operand_plan = config.plan_operands(x, w, wire)
    strides = x.stride(0), *w.stride()

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        programs = min(config.tiles(sizes, n), config.programs)
        args = (
            matmul.make_segments(workspace, sizes),
            n,
            k,
            *strides,
            slot,
            world * slot,
            first_result,
        )
        call = sync.launch_arguments(workspace, signature)
        args = *args, *call, one_shot, matmul.TRITON_DTYPES[wire]
        scratch = None if one_shot else workspace.scratch
        return operand_plan.bind(matmul_all_reduce_kernel, programs, args, scratch)

    result_bytes = 0 if one_shot else m * n * out_dtype.itemsize
    return PreparedCall(
        2 * first_result, world * slot + result_bytes, matmul.table_sizes(sizes), bind
    )
