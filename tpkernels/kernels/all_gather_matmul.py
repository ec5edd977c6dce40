"""``y = concat_r(x_r) @ w`` in one kernel: rows that are here are multiplied while others travel.

Problem: rank r has rows [starts[r], starts[r+1]) of x; every rank needs all of them, in `gathered`.

Algorithm, few bytes: a first kernel copies the own rows into symmetric memory, for the peers, and
into `gathered`. In the second, the first FETCHERS programs bring the peers' rows into `gathered`, a
row of tiles at a time, from rank+1 on; the others run the tile loop, own rows first, then those of
rank+1, ... as they arrive. Many bytes: copy engines bring the peers' rows, chunk by chunk, in a
call of several launches (csrc/cuda/copies.h) of which the tile loop is a part; algorithms/fused.py.

Sync: ENTERED of a peer says that its rows are in its buffer, since the copy is an earlier kernel of
the stream. A fetcher waits for it, and for each chunk publishes a word to its own rank, TILES +
chunk from the chunk's owner; a tile waits for the word of its chunk. Where copy engines do that,
the stream they work on publishes these words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpkernels.kernels.configs import MatmulConfig
from tpkernels.kernels.matmul import matmul, matmul_tiles, segment, store_result
from tpkernels.kernels.sync import (
    ENTERED,
    TILES,
    buffer_of,
    enter,
    failed,
    fence_async_proxy,
    finish,
    join,
    next_buffer,
    pointer,
    poison,
    publish_from,
    wait_for,
)
from tpkernels.symm.device import DeviceWorkspace

FIRST_CHUNK = TILES.value  # the word of it
COPY_BLOCK = 4096  # elements that a program copies at a time
# Bytes of a chunk that copy engines bring, and programs that make room for the kernels which wait
# for it and tell of it. Not measured.
_CHUNK_BYTES, _ROOM = 8 << 20, 2


@triton.jit
def copy_elements(source, to, count, lane, lanes, BLOCK: tl.constexpr):
    """Copies ``count`` elements, ``lane`` of ``lanes`` its part of them."""
    for begin in range(lane * BLOCK, count, lanes * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def shard_kernel(
    x, gathered, count, regions, state, rank, buffers_at, buffer_stride, BLOCK: tl.constexpr
):
    """Copies this rank's rows to where the peers, and where its own tiles find them."""
    own = next_buffer(regions, state, rank, buffers_at, buffer_stride)
    own = pointer(own, x.dtype.element_ty)
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    if failed(state):
        count = 0
    copy_elements(x, own, count, lane, lanes, BLOCK)
    copy_elements(x, gathered, count, lane, lanes, BLOCK)


@triton.jit
def _fetch(
    peers,
    gathered,
    starts,
    M,
    K,
    lane,
    lanes,
    WORLD: tl.constexpr,
    CHAOS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COPY: tl.constexpr,
):
    """Brings the peers' rows; the fetchers take the chunks of all peers in turn."""
    turn = lane
    for i in range(1, WORLD):
        owner = (peers.rank + i) % WORLD
        begin, end = segment(starts, M, owner, WORLD)
        chunks = tl.cdiv(end - begin, BLOCK_M)
        if turn < chunks:
            wait_for(peers, owner, ENTERED, CHAOS)
        theirs = pointer(buffer_of(peers, owner), gathered.dtype.element_ty)
        for chunk in range(turn, chunks, lanes):
            row = chunk * BLOCK_M
            count = tl.minimum(BLOCK_M, end - begin - row) * K
            to = gathered + (begin + row).to(tl.int64) * K
            copy_elements(theirs + row.to(tl.int64) * K, to, count, 0, 1, COPY)
            publish_from(peers, peers.rank, owner, TILES + chunk, CHAOS)
        turn += tl.cdiv(tl.maximum(chunks - turn, 0), lanes) * lanes - chunks


@triton.jit
def _await_rows(context, owner, tile_m):
    """The `before` hook: waits for the chunk, some rows of tiles."""
    if owner != context[0].rank:
        wait_for(context[0], owner, TILES + tile_m // context[3], context[1])
        if context[2]:
            fence_async_proxy()


@triton.jit(do_not_specialize=["rank", "signature", "timeout_ns", "seed"])
def all_gather_matmul_kernel(
    gathered,
    b,
    bias,
    out,
    starts,
    M,
    N,
    K,
    stride_bk,
    stride_bn,
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
    chunk_tiles,
    PART: tl.constexpr,
    FETCHERS: tl.constexpr,
    COPY: tl.constexpr,
    WORLD: tl.constexpr,
    CHAOS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
):
    """Gathers x [M, K] into ``gathered`` and computes ``out = round(x @ b + bias)``. PART: of
    a call in which others gather, and which they begin and end."""
    peers = join(
        regions, state, control, rank, signature, timeout_ns, words, buffers_at, buffer_stride,
        seed, WORLD,
    )  # fmt: skip
    if not PART:
        enter(peers, CHAOS)
    lane = tl.program_id(0)
    if lane < FETCHERS:
        _fetch(
            peers, gathered, starts, M, K, lane, FETCHERS, WORLD, CHAOS, BLOCK_M, COPY,
        )  # fmt: skip
    else:
        matmul_tiles(
            gathered, b, starts, M, N, K, K, stride_bk, stride_bn, rank, lane - FETCHERS,
            tl.num_programs(0) - FETCHERS, _await_rows, (peers, CHAOS, A_TMA, chunk_tiles),
            store_result, (out, bias, N), WORLD,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_TMA, B_TMA,
        )  # fmt: skip
    if not PART:  # noqa: SIM102 - what is known when compiling and what is not do not mix
        if finish(peers, CHAOS):
            poison(out, tl.cast(M, tl.int64) * N)
            poison(gathered, tl.cast(M, tl.int64) * K)  # what later weights multiply


def requirements(config: MatmulConfig, sizes: tuple[int, ...], x: torch.Tensor) -> tuple[int, int]:
    """(words from one source, bytes of a buffer) that a call needs. x [rows, K]."""
    chunks = triton.cdiv(max(sizes), config.block_m)
    return 1 + chunks, max(sizes) * x.shape[1] * x.dtype.itemsize


def all_gather_matmul(
    space: DeviceWorkspace,
    signature: int,
    config: MatmulConfig,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor,
    sizes: tuple[int, ...],
) -> None:
    """x [sizes[rank], K], weights [K, N_i] -> outs [M, N_i] and gathered [M, K], where M is the sum
    of ``sizes``. The later weights find all rows in place: theirs are plain products."""
    (m, k), rows = gathered.shape, x.shape[0]
    own = gathered.narrow(0, sum(sizes[: space.rank]), rows)
    if rows:
        shard_kernel[(min(config.programs, triton.cdiv(rows * k, COPY_BLOCK)),)](
            x, own, rows * k, space.regions, space.state, space.rank, space.buffers_at,
            space.buffer_stride, BLOCK=COPY_BLOCK,
        )  # fmt: skip
    b, out = weights[0], outs[0]
    fetchers = config.fetchers if space.world > 1 else 0
    lanes = min(config.programs - fetchers, config.tiles(sizes, out.shape[1]))
    all_gather_matmul_kernel[(fetchers + max(lanes, 1),)](
        gathered, b, biases[0], out, space.starts(sizes), m, b.shape[1], k, *b.stride(),
        **space.arguments(signature), chunk_tiles=1, PART=False, FETCHERS=fetchers,
        COPY=COPY_BLOCK, **config.constants(gathered, b), **config.launch(),
    )  # fmt: skip
    for b, bias, out in zip(weights[1:], biases[1:], outs[1:], strict=True):
        matmul(gathered, b, bias, out=out, config=config)


def chunk_tiles(config: MatmulConfig, x: torch.Tensor) -> tuple[int, int]:
    """(rows of tiles of a chunk that a copy engine brings, rows of x in it); x [rows, K]."""
    tiles = max(1, _CHUNK_BYTES // (config.block_m * x.shape[1] * x.dtype.itemsize))
    return tiles, tiles * config.block_m


def copied_requirements(
    config: MatmulConfig, sizes: tuple[int, ...], x: torch.Tensor
) -> tuple[int, int]:
    """As ``requirements``, where copy engines bring the rows, by a word of the call's own."""
    _, step = chunk_tiles(config, x)
    nbytes = max(sizes) * x.shape[1] * x.dtype.itemsize
    return FIRST_CHUNK + triton.cdiv(max(sizes), step) + 2, triton.cdiv(nbytes, 2)


def multiply_arriving(
    space: DeviceWorkspace,
    signature: int,
    config: MatmulConfig,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor,
    sizes: tuple[int, ...],
) -> None:
    """``out = round(gathered @ w + bias)`` while the rows of ``gathered`` [M, K] arrive, rank by
    rank and in chunks of ``chunk_tiles``, of which words TILES, TILES + 1, ... tell."""
    m, k = gathered.shape
    lanes = min(config.programs - _ROOM, config.tiles(sizes, out.shape[1]))
    all_gather_matmul_kernel[(max(lanes, 1),)](
        gathered, w, bias, out, space.starts(sizes), m, w.shape[1], k, *w.stride(),
        **space.arguments(signature), chunk_tiles=chunk_tiles(config, gathered)[0], PART=True,
        FETCHERS=0, COPY=COPY_BLOCK, **config.constants(gathered, w), **config.launch(),
    )  # fmt: skip
