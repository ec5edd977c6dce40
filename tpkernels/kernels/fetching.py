"""Programs that bring the peers' rows for an all-gather, a piece at a time.

Problem: rank r has rows [starts[r], starts[r+1]) of x [M, K] in its buffer. Every rank wants all of
them in its own memory, soon and with few programs.

Algorithm: the elements of each peer's rows are cut into pieces, whatever K is. The fetchers take
the pieces of rank+1, rank+2, ... in turn, so several of them work on one row of tiles. Each copies
blocks through a ring in shared memory (`cp.async`, which Triton makes of the loads of a pipelined
loop) and stores the oldest block while the others are in flight.

Sync: ENTERED of a peer says that its rows are in its buffer. A fetcher waits for it, and publishes
the word TILES + piece from the owner to its own rank. Who reads rows waits for the words of all
pieces that they are in.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tpkernels.integers import ceil_div
from tpkernels.kernels.configs import MatmulConfig
from tpkernels.kernels.matmul import segment
from tpkernels.kernels.sync import (
    ENTERED,
    TILES,
    buffer_of,
    pointer,
    publish_from,
    wait_for,
    word_of,
)
from tpkernels.kernels.words import THREADS, any_lacks

# Bytes that a fetcher has in flight, and elements that it loads at a time. Not measured. If a read
# from a peer takes 1 us, 16 fetchers with 8 KiB in flight bring 130 GB/s at most, and 12 with
# 64 KiB more than NVLink does.
RING_BYTES, BLOCK = 64 << 10, 4096


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
        begin, end = segment(segments, owner)
        count = tl.cast(end - begin, tl.int64) * K
        pieces = _pieces_in(end - begin, K, fetching)
        if turn < pieces:
            wait_for(peers, owner, ENTERED)
        theirs = pointer(buffer_of(peers, owner), gathered.dtype.element_ty)
        ours = gathered + tl.cast(begin, tl.int64) * K
        for piece in range(turn, pieces, lanes):
            first = tl.cast(piece, tl.int64) * PIECE
            elements = tl.minimum(count - first, PIECE).to(tl.int32)
            _bring(theirs + first, ours + first, elements, fetching)
            publish_from(peers, peers.rank, owner, TILES + piece)
        turn += tl.cdiv(tl.maximum(pieces - turn, 0), lanes) * lanes - pieces


@triton.jit
def _wait_for_range(peers, source, first, last):
    """Wait for the words [first, last) from one rank; THREADS at once if these are there."""
    for begin in range(first, last, THREADS):
        index, end = begin + tl.arange(0, THREADS), tl.minimum(begin + THREADS, last)
        words = word_of(peers, peers.rank, source, index)
        if any_lacks(words, index < end, peers.word) | (peers.space.chaos != 0):
            for word in range(begin, end):
                wait_for(peers, source, word)


@triton.jit
def await_rows(peers, segments, K, owner, row, rows, fetching: tl.constexpr):
    """Return when ``rows`` rows of ``owner``, from its row ``row`` on, are there."""
    begin, end = segment(segments, owner)
    last = _pieces_in(tl.minimum(row + rows, end - begin), K, fetching)
    first = (tl.cast(row, tl.int64) * K // fetching.piece).to(tl.int32)
    _wait_for_range(peers, owner, first + TILES, last + TILES)
