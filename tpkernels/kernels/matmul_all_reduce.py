"""``y = sum_r(x_r @ w_r)`` on every rank, in one kernel.

Problem: all ranks need the sum of all partials, with the same bits.

Algorithm: few rows, one-shot: each tile is pushed to all ranks, and each sums all tiles. Many rows,
two-shot: the rows are split into one segment per rank and reduced as in matmul_reduce_scatter; then
the owner pushes its results to all ranks, which copy them out.

Sync: TILES + tile as in matmul_reduce_scatter; for results, that plus the `results` word, from the
owner. Programs wait for their namesakes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpkernels.kernels.configs import MatmulConfig
from tpkernels.kernels.matmul import (
    contiguous_rows,
    matmul_tiles,
    position,
    segment,
    tile_at,
    tiles_before,
)
from tpkernels.kernels.matmul_reduce_scatter import (
    TRITON_DTYPES,
    first_tile,
    push,
    push_tile,
    slot_bytes,
    sum_tiles,
)
from tpkernels.kernels.sync import (
    buffer_of,
    enter,
    finish,
    join,
    pointer,
    poison,
    publish,
    wait_for,
)
from tpkernels.shards import shard_sizes
from tpkernels.symm.device import DeviceWorkspace

# Bytes of a partial up to which every rank sums all of it. Not measured.
ONE_SHOT_BYTES = 256 << 10


@triton.jit
def _push_to_all(context, acc, owner, tile, row, column, begin, end):
    """The `after` hook of one-shot."""
    peers = context[0]
    for i in range(peers.world):
        to = (peers.rank + 1 + i) % peers.world
        push(peers, acc, to, tile, row, column, end, context[1], context[2], context[3], context[4])


@triton.jit
def _results(peers, rank, results_at, out):
    """Where the results for ``rank`` stand."""
    return pointer(buffer_of(peers, rank) + results_at, out.dtype.element_ty)


@triton.jit
def _publish_result(context, result, at, inside, tile, last):
    """The hook of two-shot: results go to all peers."""
    peers, results_at, results, out = context[0], context[1], context[2], context[3]
    for i in range(1, peers.world):
        to = (peers.rank + i) % peers.world
        tl.store(_results(peers, to, results_at, out) + at, result, mask=inside & peers.usable)
        if last:
            publish(peers, to, results + tile, context[4])


@triton.jit(do_not_specialize=["rank", "signature", "timeout_ns", "seed"])
def matmul_all_reduce_kernel(
    a,
    b,
    bias,
    residual,
    out,
    starts,
    M,
    N,
    K,
    stride_am,
    stride_bk,
    stride_bn,
    slot_bytes,
    results_at,  # bytes
    results,  # words
    regions,
    state,
    control,
    rank,
    signature,
    timeout_ns,
    words,
    buffers_at,
    buffer_stride,
    seed,
    ONE_SHOT: tl.constexpr,
    WIRE: tl.constexpr,
    WORLD: tl.constexpr,
    CHAOS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUM_M: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
):
    """``out = round(sum_r(a_r @ b_r) + bias + residual)``, the same on every rank."""
    peers = join(
        regions, state, control, rank, signature, timeout_ns, words, buffers_at, buffer_stride,
        seed, WORLD,
    )  # fmt: skip
    enter(peers, CHAOS)
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    SEGMENTS: tl.constexpr = 1 if ONE_SHOT else WORLD
    own = 0 if ONE_SHOT else rank
    matmul_tiles(
        a, b, starts, M, N, K, stride_am, stride_bk, stride_bn, (own + 1) % SEGMENTS,
        lane, lanes, None, None, _push_to_all if ONE_SHOT else push_tile,
        (peers, N, slot_bytes, WIRE, CHAOS), SEGMENTS,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_TMA, B_TMA,
    )  # fmt: skip
    sum_tiles(
        peers, starts, M, N, own, out, 0 if ONE_SHOT else tl.load(starts + rank), bias, residual,
        slot_bytes, lane, lanes, None if ONE_SHOT else _publish_result,
        (peers, results_at, results, out, CHAOS),
        WIRE, SEGMENTS, WORLD, CHAOS, BLOCK_M, BLOCK_N, GROUP_M, SUM_M,
    )  # fmt: skip
    for i in range(1, SEGMENTS):
        owner = (rank + i) % WORLD
        begin, end = segment(starts, M, owner, SEGMENTS)
        before = tiles_before(starts, M, N, owner, SEGMENTS, BLOCK_M, BLOCK_N)
        count = tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in range(first_tile(before, lane, lanes), count, lanes):
            tile_m, tile_n = position(tile, end - begin, N, BLOCK_M, BLOCK_N, GROUP_M)
            wait_for(peers, owner, results + tile, CHAOS)
            row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
            for top in range(0, BLOCK_M, SUM_M):
                corner, offsets, inside = tile_at(row + top, column, end, N, N, SUM_M, BLOCK_N)
                result = tl.load(_results(peers, rank, results_at, out) + corner + offsets, inside)
                tl.store(out + corner + offsets, result, mask=inside)
    if finish(peers, CHAOS):
        poison(out, tl.cast(M, tl.int64) * N)


def _segments(
    m: int, n: int, world: int, wire: torch.dtype, config: MatmulConfig
) -> tuple[int, ...]:
    """Rows that each rank reduces, whole tiles of them; of one segment alone in one-shot."""
    if m * n * wire.itemsize <= ONE_SHOT_BYTES:
        return (m,)
    tiles = shard_sizes(triton.cdiv(m, config.block_m), world)
    ends = [min(m, sum(tiles[: r + 1]) * config.block_m) for r in range(world)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def _layout(
    sizes: tuple[int, ...], n: int, world: int, wire: torch.dtype, config: MatmulConfig
) -> tuple[int, int, int]:
    """(bytes of a slot, where results begin in a buffer, first word of results)."""
    slot = slot_bytes(max(sizes), n, wire)
    return slot, world * slot, 1 + config.tiles([max(sizes)], n)


def matmul_all_reduce(
    space: DeviceWorkspace,
    signature: int,
    config: MatmulConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    wire: torch.dtype,
) -> None:
    """x [M, K], w [K, N] -> out [M, N]; residual like out."""
    x, (m, k), n = contiguous_rows(x), x.shape, w.shape[1]
    sizes = _segments(m, n, space.world, wire, config)
    matmul_all_reduce_kernel[(max(min(config.tiles(sizes, n), config.programs), 1),)](
        x, w, bias, residual, out, space.starts(sizes), m, n, k, x.stride(0), *w.stride(),
        *_layout(sizes, n, space.world, wire, config), **space.arguments(signature),
        ONE_SHOT=len(sizes) == 1, WIRE=TRITON_DTYPES[wire],
        SUM_M=config.sum_m, **config.constants(x, w),
        **config.launch(),
    )  # fmt: skip


def requirements(
    config: MatmulConfig, m: int, n: int, world: int, wire: torch.dtype, out: torch.dtype
) -> tuple[int, int]:
    """(words from one source, bytes of a buffer) that a call needs."""
    sizes = _segments(m, n, world, wire, config)
    _, results_at, results = _layout(sizes, n, world, wire, config)
    return 2 * results, results_at + (m * n * out.itemsize if len(sizes) > 1 else 0)
