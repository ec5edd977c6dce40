"""``y = sum_r(x_r @ w_r)`` on every rank, in one kernel.

Problem: all ranks need the sum of all partials, with the same bits.

Algorithm: few rows, one-shot: each tile is pushed to all ranks, and every rank sums all tiles. Many
rows, two-shot: the rows are split into one segment per rank and reduced as in
matmul_reduce_scatter; then each owner pushes its results to all ranks, which copy them out.

Sync: TILES + tile as in matmul_reduce_scatter. The result of a tile has the word `results` + tile,
from its owner. A program waits only for programs of its own number.
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
from tpkernels.symm.device import DeviceWorkspace, Prepared

# Largest partial, in bytes, that is reduced one-shot. Not measured.
ONE_SHOT_BYTES = 256 << 10


class _Results(NamedTuple):
    """The context of `_publish_result`: where two-shot passes results on."""

    peers: sync.Peers
    out: tl.tensor
    begin: tl.tensor  # byte of a buffer
    word: tl.tensor  # of the first tile


@triton.jit
def _push_to_all(slots, acc, tile):
    """Push a tile to all ranks: the `after` hook of one-shot."""
    peers = slots.peers
    for i in range(peers.space.world):
        scatter.push(slots, acc, tile, (peers.rank + 1 + i) % peers.space.world)


@triton.jit
def _publish_to_all(slots, owner, index):
    """Tell all ranks that a tile is there: the `later` hook of one-shot."""
    sync.publish_to_all(slots.peers, sync.TILES + index)


@triton.jit
def _results_at(results, rank):
    """Point at the results for ``rank``."""
    address = sync.buffer_of(results.peers, rank) + results.begin
    return sync.pointer(address, results.out.dtype.element_ty)


@triton.jit
def _publish_result(results, result, at, inside, tile, last):
    """Push results to all peers: the `on_stored` hook of two-shot."""
    peers = results.peers
    for i in range(1, peers.space.world):
        to = (peers.rank + i) % peers.space.world
        tl.store(_results_at(results, to) + at, result, mask=inside & peers.usable)
    if last:
        sync.publish_to_all(peers, results.word + tile)


@triton.jit
def _copy_results(results, segments, N, lane, lanes, tiling: tl.constexpr):
    """Copy the results of the other owners out of this rank's buffer."""
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    SUM_M: tl.constexpr = tiling.sum_m
    peers, out = results.peers, results.out
    for i in range(1, segments.number):
        owner = (peers.rank + i) % peers.space.world
        begin, end = matmul.segment(segments, owner)
        before = matmul.tiles_before(segments, N, owner, tiling)
        count = tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in range(scatter.first_tile(before, lane, lanes), count, lanes):
            tile_m, tile_n = matmul.position(tile, end - begin, N, tiling)
            sync.wait_for(peers, owner, results.word + tile)
            row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
            for top in range(0, BLOCK_M, SUM_M):
                corner, offsets, inside = matmul.tile_at(
                    row + top, column, end, N, N, SUM_M, BLOCK_N
                )
                result = tl.load(_results_at(results, peers.rank) + corner + offsets, inside)
                tl.store(out + corner + offsets, result, mask=inside)


@triton.jit(do_not_specialize=sync.SCALARS)
def matmul_all_reduce_kernel(
    a, b, bias, residual, out, segments, N, K, stride_am, stride_bk, stride_bn, slot_bytes,
    results_at, results, workspace, rank, signature, timeout_ns, seed, ONE_SHOT: tl.constexpr,
    WIRE: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Compute ``out = round(sum_r(a_r @ b_r) + bias + residual)``, the same on every rank."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    passed_on = _Results(peers, out, results_at, results)
    own = 0 if ONE_SHOT else rank
    begin, _ = matmul.segment(segments, own)
    matmul.matmul_tiles(
        matmul.MatmulOperands(a, b, N, K, stride_am, stride_bk, stride_bn), segments,
        (own + 1) % segments.number, lane, lanes, None, None,
        _push_to_all if ONE_SHOT else scatter.push_tile,
        scatter.Slots(peers, N, slot_bytes, WIRE, tiling.store_tma), tiling,
        _publish_to_all if ONE_SHOT else scatter.publish_tile,
    )  # fmt: skip
    scatter.sum_tiles(
        scatter.Slots(peers, N, slot_bytes, WIRE, False), segments, own, out,
        begin, bias, residual, lane, lanes, None if ONE_SHOT else _publish_result, passed_on,
        workspace.world, tiling,
    )  # fmt: skip
    _copy_results(passed_on, segments, N, lane, lanes, tiling)
    if sync.finish(peers):
        sync.poison(out, tl.cast(segments.M, tl.int64) * N)


def _whole_tiles(m: int, world: int, block_m: int) -> tuple[int, ...]:
    """Return the rows that each rank reduces in two-shot, in whole tiles."""
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
) -> Prepared:
    """Prepare x [M, K], w [K, N] -> out [M, N], residual like out. The launch takes x, w, bias,
    residual and out. Partials travel in the dtype ``wire``."""
    x, m, (k, n) = contiguous_rows(x), x.shape[0], w.shape
    few = m * n * wire.itemsize <= ONE_SHOT_BYTES
    sizes = (m,) if few else _whole_tiles(m, world, config.block_m)
    one_shot = len(sizes) == 1
    slot, results = scatter.slot_bytes(max(sizes), n, wire), 1 + config.tiles([max(sizes)], n)
    operands = config.operands(x, w, wire)
    strides = x.stride(0), *w.stride()

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        programs = min(config.tiles(sizes, n), config.programs)
        args = matmul.segments_of(space, sizes), n, k, *strides, slot, world * slot, results
        call = sync.launch_arguments(space, signature)
        args = *args, *call, one_shot, matmul.TRITON_DTYPES[wire]
        scratch = None if one_shot else space.scratch
        return operands.bind(matmul_all_reduce_kernel, programs, args, scratch)

    copied = 0 if one_shot else m * n * out_dtype.itemsize
    return Prepared(2 * results, world * slot + copied, matmul.table_of(sizes), bind)
