"""``y = concat_r(x_r) @ w`` in one kernel: local rows are multiplied while others travel.

Problem: rank r has rows [starts[r], starts[r+1]) of x; every rank needs all of them, in `gathered`.

Algorithm, few bytes: a first kernel copies this rank's rows into symmetric memory, for the peers,
and into `gathered`. In the second kernel, the first programs are fetchers. They bring the peers'
rows into `gathered`, piece by piece. The other programs run the tile loop: this rank's rows first,
then those of rank+1, ... as they arrive. Many bytes: copy engines bring the peers' rows, chunk by
chunk. Such a call has several launches (cuda/copies.py), and the tile loop is one of them; see
algorithms/fused.py.

Fetchers: the elements of each peer's rows are cut into pieces, whatever K is. The fetchers take the
pieces of rank+1, rank+2, ... in turn, so several of them work on one row of tiles. Each copies
blocks through a ring in shared memory (`cp.async`, which Triton makes of the loads of a pipelined
loop) and stores the oldest block while the others are in flight.

Sync: ENTERED of a peer says that its rows are in its buffer, since the copy is an earlier kernel of
the stream. A fetcher waits for it, and publishes the word TILES + piece from the owner to its own
rank. A tile waits until its rows are there: for the words of all pieces that they are in, or for
the flag of their chunk, owner * chunks + chunk, which the copy engines' streams raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.common.integers import ceil_div
from tpkernels.kernels import matmul, sync, words
from tpkernels.kernels.bound import BoundKernel
from tpkernels.kernels.configs import MatmulConfig
from tpkernels.symm import device
from tpkernels.symm.device import DeviceWorkspace, Prepared

# Bytes that a fetcher has in flight, and elements that it loads at a time. Not measured. If a read
# from a peer takes 1 us, 16 fetchers with 8 KiB in flight bring 130 GB/s at most, and 12 with
# 64 KiB more than NVLink does.
RING_BYTES, BLOCK = 64 << 10, 4096
_FLAGS_AT = tl.constexpr(device.FLAGS_AT)
_COPY_BLOCK = 4096  # elements that a program copies at a time
# Bytes of a chunk that copy engines bring, and multiprocessors that the grid leaves free for the
# kernels that wait for the peers, which are blocks of one warp. Not measured.
_CHUNK_BYTES, _ROOM = 4 << 20, 1


@triton.jit
def copy_elements(source, to, count, lane, lanes, BLOCK: tl.constexpr):
    """Copy this program's part of ``count`` elements; it is ``lane`` of ``lanes``."""
    for begin in range(lane * BLOCK, count, lanes * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["rank"])
def shard_kernel(x, gathered, count, workspace, rank, BLOCK: tl.constexpr):
    """Copy this rank's rows to where the peers find them, and to ``gathered``, where its own tiles
    do."""
    own = sync.pointer(sync.next_buffer(workspace, rank), x.dtype.element_ty)
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    if sync.failed(workspace.state):
        count = 0
    copy_elements(x, own, count, lane, lanes, BLOCK)
    copy_elements(x, gathered, count, lane, lanes, BLOCK)


class Fetching(NamedTuple):
    """How programs bring the rows; known at compile time."""

    programs: int
    piece: int  # elements for which there is a word; from a peer's first element on
    block: int  # elements that a program loads at a time
    blocks: int  # that it has in flight


NO_FETCHING = Fetching(0, 1, 1, 1)


def fetching_of(config: MatmulConfig, itemsize: int, most: int, world: int) -> Fetching:
    """Choose for shards of at most ``most`` elements; the same on all ranks."""
    piece, blocks = config.piece_bytes // itemsize, RING_BYTES // (BLOCK * itemsize)
    programs = min(config.fetchers, (world - 1) * ceil_div(most, piece))
    return Fetching(programs, piece, BLOCK, blocks)


@triton.jit
def _pieces_in(rows, K, fetching: tl.constexpr):
    """Count the pieces that begin in the first ``rows`` rows of a peer."""
    return tl.cdiv(tl.cast(rows, tl.int64) * K, fetching.piece).to(tl.int32)


@triton.jit
def _bring(source, to, count, fetching: tl.constexpr):
    """Copy ``count`` elements from the start of a line of a buffer. Loads take whole vectors,
    also where sizes or the result are not aligned; a buffer ends with a line of 256 bytes."""
    VECTOR: tl.constexpr = 16
    readable = tl.cdiv(count, VECTOR) * VECTOR
    for begin in tl.range(0, readable, fetching.block, num_stages=fetching.blocks + 1):
        at = begin + tl.arange(0, fetching.block)
        tl.store(to + at, tl.load(source + at, mask=at < readable), mask=at < count)


@triton.jit
def fetch_rows(peers, gathered, segments, K, lane, fetching: tl.constexpr):
    """Bring the peers' rows; the fetchers take the pieces of all peers in turn."""
    PIECE: tl.constexpr = fetching.piece
    lanes: tl.constexpr = fetching.programs
    world = peers.space.world
    turn = lane
    for i in range(1, world):
        owner = (peers.rank + i) % world
        begin, end = matmul.segment(segments, owner)
        count = tl.cast(end - begin, tl.int64) * K
        pieces = _pieces_in(end - begin, K, fetching)
        if turn < pieces:
            sync.wait_for(peers, owner, sync.ENTERED)
        theirs = sync.pointer(sync.buffer_of(peers, owner), gathered.dtype.element_ty)
        ours = gathered + tl.cast(begin, tl.int64) * K
        for piece in range(turn, pieces, lanes):
            first = tl.cast(piece, tl.int64) * PIECE
            elements = tl.minimum(count - first, PIECE).to(tl.int32)
            _bring(theirs + first, ours + first, elements, fetching)
            sync.publish_from(peers, peers.rank, owner, sync.TILES + piece)
        turn += tl.cdiv(tl.maximum(pieces - turn, 0), lanes) * lanes - pieces


class _Arrivals(NamedTuple):
    """The context of `_await_rows`: what tells that rows are there."""

    peers: sync.Peers
    segments: matmul.RowSegments
    K: tl.tensor
    chunk_tiles: tl.tensor  # rows of tiles in a chunk, if there are no fetchers
    chunks: tl.tensor  # of a rank, at most
    block_m: tl.constexpr
    fetching: tl.constexpr
    tma: tl.constexpr  # whether TMA reads the rows


@triton.jit
def _await_rows(arrivals, owner, tile_m):
    """Wait for the rows of a tile: the `before` hook."""
    peers, K = arrivals.peers, arrivals.K
    if owner != peers.rank:
        if arrivals.fetching.programs == 0:
            flag = owner * arrivals.chunks + tile_m // arrivals.chunk_tiles
            raised = tl.full((), 1, tl.int64)
            sync.await_value(peers, owner, peers.space.state + _FLAGS_AT + flag, raised, flag)
        else:
            begin, end = matmul.segment(arrivals.segments, owner)
            row = tile_m * arrivals.block_m
            rows = tl.minimum(row + arrivals.block_m, end - begin)
            last = _pieces_in(rows, K, arrivals.fetching)
            first = (tl.cast(row, tl.int64) * K // arrivals.fetching.piece).to(tl.int32)
            sync.wait_for_range(peers, owner, first + sync.TILES, last + sync.TILES)
        if arrivals.tma:
            words.fence_async_proxy()


# Chunks differ between eager calls and captures (`prepare_arriving`). A capture must run the kernel
# that an eager call has compiled.
@triton.jit(do_not_specialize=[*sync.SCALARS, "chunk_tiles", "chunks"])
def all_gather_matmul_kernel(
    a, b, bias, out, gathered, segments, N, K, stride_bk, stride_bn, workspace, rank, signature,
    timeout_ns, seed, chunk_tiles, chunks, PART: tl.constexpr, fetching: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Gather x [M, K] into ``gathered`` and compute ``out = round(x @ b + bias)``. ``a`` is
    ``gathered`` as the tile loop takes it. PART: other launches begin and end the call and gather
    the rows."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    if not PART:
        sync.enter(peers)
    lane = tl.program_id(0)
    if lane < fetching.programs:
        fetch_rows(peers, gathered, segments, K, lane, fetching)
    else:
        matmul.matmul_tiles(
            matmul.MatmulOperands(a, b, N, K, K, stride_bk, stride_bn), segments, rank,
            lane - fetching.programs, tl.num_programs(0) - fetching.programs,
            _await_rows,
            _Arrivals(
                peers, segments, K, chunk_tiles, chunks, tiling.block_m, fetching, tiling.a_tma
            ),
            matmul.store_result, matmul.Result(out, bias, N), tiling,
        )  # fmt: skip
    if not PART:  # noqa: SIM102 - a condition known at compile time and one that is not
        if sync.finish(peers):
            sync.poison(out, tl.cast(segments.M, tl.int64) * N)
            sync.poison(gathered, tl.cast(segments.M, tl.int64) * K)  # later products read it


def prepare(
    config: MatmulConfig,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    gathered: torch.Tensor,
    out_dtype: torch.dtype,
    sizes: tuple[int, ...],
) -> Prepared:
    """Prepare x [sizes[rank], K], weights [K, N_i] -> outs [M, N_i] and gathered [M, K], where M is
    the sum of ``sizes``. The launch takes x, the lists of weights, biases and outs, and gathered.
    The first weight's kernel gathers; the others' are plain products."""
    (rows, k), w = x.shape, weights[0]
    operands = config.operands(gathered, w, out_dtype, waits=True)
    fetching = fetching_of(config, x.itemsize, max(sizes) * k, len(sizes))
    multiply_others = bind_others(config, gathered, weights[1:], out_dtype)

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        begin, arguments = sum(sizes[: space.rank]), sync.launch_arguments(space, signature)
        programs = min(config.programs, ceil_div(rows * k, _COPY_BLOCK))
        shard = rows * k, *arguments[:2], _COPY_BLOCK
        share = BoundKernel(shard_kernel, programs, shard, {})
        lanes = min(config.programs - fetching.programs, config.tiles(sizes, w.shape[1]))
        programs, segments = fetching.programs + max(lanes, 1), matmul.segments_of(space, sizes)
        args = segments, w.shape[1], k, *w.stride(), *arguments, 1, 1, False, fetching
        multiply = operands.bind(all_gather_matmul_kernel, programs, args)

        def run(
            x: torch.Tensor,
            weights: list[torch.Tensor],
            biases: list[torch.Tensor | None],
            outs: list[torch.Tensor],
            gathered: torch.Tensor,
        ) -> None:
            if rows:
                share(x, gathered.narrow(0, begin, rows))
            multiply(gathered, weights[0], biases[0], outs[0], gathered)
            if len(weights) > 1:
                multiply_others(gathered, weights[1:], biases[1:], outs[1:])

        return run

    elements = max(sizes) * k
    pieces = ceil_div(elements, fetching.piece)
    return Prepared(1 + pieces, elements * x.itemsize, matmul.table_of(sizes), bind)


def bind_others(
    config: MatmulConfig,
    gathered: torch.Tensor,
    weights: list[torch.Tensor],
    out_dtype: torch.dtype,
) -> Callable[..., None]:
    """Return the products with further weights, once all rows are there. They take gathered, and
    the lists of weights, biases and outs."""
    products = [matmul.bind_matmul(config, gathered, w, out_dtype) for w in weights]

    def run(gathered: torch.Tensor, *lists: Sequence[torch.Tensor | None]) -> None:
        for product, w, bias, out in zip(products, *lists, strict=True):
            product(gathered, w, bias, out)

    return run


class ArrivingLaunch(NamedTuple):
    """The product of a call in which copy engines bring the rows, chunk by chunk. Flag ``owner *
    chunks + i`` says that chunk i of a rank's rows is there."""

    prepared: Prepared
    chunk_rows: int
    chunks: int  # of a rank, at most


def prepare_arriving(
    config: MatmulConfig,
    w: torch.Tensor,
    gathered: torch.Tensor,
    out_dtype: torch.dtype,
    sizes: tuple[int, ...],
    by_kernels: bool = False,
) -> ArrivingLaunch:
    """Prepare ``out = round(gathered @ w + bias)`` while the rows of ``gathered`` [M, K] arrive.
    The launch takes gathered, w, bias and out. Its words are ENTERED, one for the bytes in a rank's
    memory, and one for the call's end. If kernels raise the flags, chunks have twice the bytes."""
    k = gathered.shape[1]
    row_bytes = k * gathered.itemsize
    tiles = ceil_div(max(sizes), config.block_m)
    chunk_tiles = max(
        1,
        _CHUNK_BYTES * (2 if by_kernels else 1) // (config.block_m * row_bytes),
        ceil_div(tiles, device.FLAGS // len(sizes)),
    )
    chunks = ceil_div(tiles, chunk_tiles)
    operands = config.operands(gathered, w, out_dtype, waits=True)

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        lanes = min(config.programs - _ROOM, config.tiles(sizes, w.shape[1]))
        args = matmul.segments_of(space, sizes), w.shape[1], k, *w.stride()
        call = sync.launch_arguments(space, signature)
        args = *args, *call, chunk_tiles, chunks, True, NO_FETCHING
        multiply = operands.bind(all_gather_matmul_kernel, lanes, args)

        def run(gathered: torch.Tensor, w: torch.Tensor, *more: torch.Tensor | None) -> None:
            multiply(gathered, w, *more, gathered)

        return run

    nbytes = ceil_div(max(sizes) * row_bytes, 2)
    prepared = Prepared(3, nbytes, matmul.table_of(sizes), bind)
    return ArrivingLaunch(prepared, chunk_tiles * config.block_m, chunks)
