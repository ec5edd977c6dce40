"""``y = sum_r(x_r @ w_r)`` on every rank, in one kernel.

Problem: all ranks need the sum of all partials, with the same bits.

Algorithm: few rows, one-shot: each tile is pushed to all ranks, and every rank sums all tiles. Many
rows, two-shot: the rows are split into one segment per rank and reduced as in
matmul_reduce_scatter; then each owner pushes its results to all ranks, which copy them out.

Sync: TILES + tile as in matmul_reduce_scatter. The result of a tile has the word `results` + tile,
from its owner. A program waits only for programs of its own number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.integers import ceil_div
from tpkernels.kernels.configs import MatmulConfig, contiguous_rows
from tpkernels.kernels.matmul import (
    Product,
    matmul_tiles,
    position,
    segment,
    segments_of,
    table_of,
    tile_at,
    tiles_before,
)
from tpkernels.kernels.matmul_reduce_scatter import (
    TRITON_DTYPES,
    Slots,
    first_tile,
    publish_tile,
    push,
    push_tile,
    slot_bytes,
    sum_tiles,
)
from tpkernels.kernels.sync import (
    SCALARS,
    TILES,
    buffer_of,
    enter,
    finish,
    join,
    launch_arguments,
    pointer,
    poison,
    publish_to_all,
    wait_for,
)
from tpkernels.shards import shard_sizes
from tpkernels.symm.device import DeviceWorkspace, Prepared

# Largest partial, in bytes, that is reduced one-shot. Not measured.
ONE_SHOT_BYTES = 256 << 10


class _Results(NamedTuple):
    """Where two-shot passes results on; the context of `_publish_result`."""

    peers: Any
    out: Any
    begin: Any  # byte of a buffer
    word: Any  # of the first tile


@triton.jit
def _push_to_all(slots, acc, tile):
    """The `after` hook of one-shot."""
    peers = slots.peers
    for i in range(peers.space.world):
        push(slots, acc, tile, (peers.rank + 1 + i) % peers.space.world)


@triton.jit
def _publish_to_all(slots, owner, index):
    """The `later` hook of one-shot."""
    publish_to_all(slots.peers, TILES + index)


@triton.jit
def _results_at(results, rank):
    """Where the results for ``rank`` are."""
    address = buffer_of(results.peers, rank) + results.begin
    return pointer(address, results.out.dtype.element_ty)


@triton.jit
def _publish_result(results, result, at, inside, tile, last):
    """The `on_stored` hook of two-shot: results go to all peers."""
    peers = results.peers
    for i in range(1, peers.space.world):
        to = (peers.rank + i) % peers.space.world
        tl.store(_results_at(results, to) + at, result, mask=inside & peers.usable)
    if last:
        publish_to_all(peers, results.word + tile)


@triton.jit
def _copy_results(results, segments, N, lane, lanes, tiling: tl.constexpr):
    """Copy the results of the other owners out of this rank's buffer."""
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    SUM_M: tl.constexpr = tiling.sum_m
    peers, out = results.peers, results.out
    for i in range(1, segments.number):
        owner = (peers.rank + i) % peers.space.world
        begin, end = segment(segments, owner)
        before = tiles_before(segments, N, owner, tiling)
        count = tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in range(first_tile(before, lane, lanes), count, lanes):
            tile_m, tile_n = position(tile, end - begin, N, tiling)
            wait_for(peers, owner, results.word + tile)
            row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
            for top in range(0, BLOCK_M, SUM_M):
                corner, offsets, inside = tile_at(row + top, column, end, N, N, SUM_M, BLOCK_N)
                result = tl.load(_results_at(results, peers.rank) + corner + offsets, inside)
                tl.store(out + corner + offsets, result, mask=inside)


@triton.jit(do_not_specialize=SCALARS)
def matmul_all_reduce_kernel(
    a, b, bias, residual, out, segments, N, K, stride_am, stride_bk, stride_bn, slot_bytes,
    results_at, results, workspace, rank, signature, timeout_ns, seed, ONE_SHOT: tl.constexpr,
    WIRE: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """``out = round(sum_r(a_r @ b_r) + bias + residual)``, the same on every rank."""
    peers = join(workspace, rank, signature, timeout_ns, seed)
    enter(peers)
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    passed_on = _Results(peers, out, results_at, results)
    own = 0 if ONE_SHOT else rank
    begin, _ = segment(segments, own)
    matmul_tiles(
        Product(a, b, N, K, stride_am, stride_bk, stride_bn), segments,
        (own + 1) % segments.number, lane, lanes, None, None,
        _push_to_all if ONE_SHOT else push_tile,
        Slots(peers, N, slot_bytes, WIRE, tiling.store_tma), tiling,
        _publish_to_all if ONE_SHOT else publish_tile,
    )  # fmt: skip
    sum_tiles(
        Slots(peers, N, slot_bytes, WIRE, False), segments, own, out,
        begin, bias, residual, lane, lanes, None if ONE_SHOT else _publish_result, passed_on,
        workspace.world, tiling,
    )  # fmt: skip
    _copy_results(passed_on, segments, N, lane, lanes, tiling)
    if finish(peers):
        poison(out, tl.cast(segments.M, tl.int64) * N)


@functools.lru_cache(maxsize=4096)
def _whole_tiles(m: int, world: int, block_m: int) -> tuple[int, ...]:
    """Rows that each rank reduces in two-shot, in whole tiles."""
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
    """x [M, K], w [K, N] -> out [M, N]; residual like out. Takes x, w, bias, residual and out.
    Partials have the dtype ``wire`` on their way."""
    x, m, (k, n) = contiguous_rows(x), x.shape[0], w.shape
    few = m * n * wire.itemsize <= ONE_SHOT_BYTES
    sizes = (m,) if few else _whole_tiles(m, world, config.block_m)
    one_shot = len(sizes) == 1
    slot, results = slot_bytes(max(sizes), n, wire), 1 + config.tiles([max(sizes)], n)
    operands = config.operands(x, w, wire)
    strides = x.stride(0), *w.stride()

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        programs = min(config.tiles(sizes, n), config.programs)
        rest = segments_of(space, sizes), n, k, *strides, slot, world * slot, results
        rest += *launch_arguments(space, signature), one_shot, TRITON_DTYPES[wire]
        scratch = None if one_shot else space.scratch
        return operands.bind(matmul_all_reduce_kernel, programs, rest, scratch)

    copied = 0 if one_shot else m * n * out_dtype.itemsize
    return Prepared(2 * results, world * slot + copied, table_of(sizes), bind)
