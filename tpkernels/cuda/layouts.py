"""How calls are cut into blocks, and what they need of a workspace.

All ranks cut alike, because everything follows from the shapes and dtypes in a call's signature. A
call by LL (csrc/cuda/ll.cuh) moves twice the bytes, but is one hop without a fence.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.common.integers import ceil_div, round_up

# Largest tensor that is gathered or scattered by LL, in bytes, counted over all ranks. NCCL's range
# for LL, not measured over a link. Of all-reduces: planning/cost.py.
LL_BYTES = 128 << 10
# Most blocks of a call: few, since blocks take SMs from a matmul. Elements of an all-reduce, and
# bytes of a shard, for each. Not measured.
MOST_BLOCKS, _REDUCE_SHARE, _SHARD_SHARE = 64, 4096, 8 << 10
_SLOT_ALIGNMENT = 256
SEGMENT_UNIT = 64  # elements; csrc/cuda/all_reduce.cuh
LANE = 8  # elements that a thread sums at a time; csrc/cuda/reduce.cuh
PACK_BYTES = 16  # that a thread copies at a time; csrc/cuda/ll.cuh
_LL_THREADS, _FIRST_WORD, _PACK_WORDS = 256, 2, 4  # csrc/cuda/ll.cuh


@dataclass(frozen=True)
class BufferLayout:
    """How a call is cut, and where it keeps its data in a buffer."""

    blocks: int
    words: int  # from each source
    segment: int = 0  # elements that a rank reduces
    slot_bytes: int = 0
    results_at: int = 0
    nbytes: int = 0


def ll_words(*nbytes: int) -> int:
    """Return the words from each source, for at most so many bytes from one rank to another, in
    each hop."""
    return _FIRST_WORD + _PACK_WORDS * sum(ceil_div(size, PACK_BYTES) for size in nbytes)


def _ll_blocks(nbytes: int, lane_bytes: int) -> int:
    """Return the blocks where any rank sends another at most so many bytes, and a thread takes
    ``lane_bytes`` at a time."""
    return min(MOST_BLOCKS, max(1, ceil_div(nbytes, _LL_THREADS * lane_bytes)))


def all_reduce_layout(
    variant: str, count: int, world: int, x_bytes: int, out_bytes: int
) -> BufferLayout:
    """Return the layout for ``count`` elements of ``x_bytes`` each, which become ``out_bytes``
    each."""
    segment = count if variant == "ll" else round_up(ceil_div(count, world), SEGMENT_UNIT)
    nbytes = segment * x_bytes
    if variant == "ll":
        return BufferLayout(_ll_blocks(nbytes, LANE * x_bytes), ll_words(nbytes), segment)
    if variant == "ll_two_shot":
        words = ll_words(nbytes, segment * out_bytes)
        return BufferLayout(_ll_blocks(nbytes, LANE * x_bytes), words, segment)
    blocks = min(MOST_BLOCKS, max(1, ceil_div(count, _REDUCE_SHARE)))
    return _in_two_hops(blocks, segment, nbytes, world, count * out_bytes)


def _in_two_hops(blocks: int, segment: int, slot: int, world: int, results: int) -> BufferLayout:
    """Return the layout of a call whose results lie behind slots of so many bytes for partials."""
    slot, results = (round_up(nbytes, _SLOT_ALIGNMENT) for nbytes in (slot, results))
    return BufferLayout(blocks, 1 + 2 * blocks, segment, slot, world * slot, world * slot + results)


def rows_layout(
    variant: str, rows: int, columns: int, world: int, x_bytes: int, cluster: int
) -> BufferLayout:
    """Return the same for an all-reduce of whole rows, each normalised by ``cluster`` blocks."""
    segment_rows = rows if variant == "ll" else ceil_div(rows, world)
    segment = segment_rows * columns
    by_ll = variant in ("ll", "ll_two_shot")
    clusters = rows if by_ll else segment_rows
    blocks = cluster * max(1, min(MOST_BLOCKS // cluster, clusters))
    if by_ll:
        hops = 1 if variant == "ll" else 2
        return BufferLayout(blocks, ll_words(*[segment * x_bytes] * hops), segment)
    nbytes = rows * columns * x_bytes
    return _in_two_hops(blocks, segment, segment * x_bytes, world, nbytes)


def routed_layout(tokens: int, k: int, row: int, itemsize: int, combines: bool) -> BufferLayout:
    """Return the layout for rows of at most so many tokens of a rank, each with ``k`` routes. A
    block has some columns of all rows."""
    nbytes = tokens * row * itemsize
    units, shares = ceil_div(row, SEGMENT_UNIT), ceil_div(k * nbytes, _SHARD_SHARE)
    blocks = max(1, min(MOST_BLOCKS, units, shares))
    return BufferLayout(blocks, 1 + blocks, nbytes=nbytes * (k if combines else 1))


def shards_layout(variant: str, shard_bytes: int, world: int, lane_bytes: int) -> BufferLayout:
    """Return the layout for shards of at most so many bytes; ``lane_bytes``: what a thread takes at
    a time by LL."""
    if variant == "ll":
        return BufferLayout(_ll_blocks(shard_bytes, lane_bytes), ll_words(shard_bytes))
    blocks = min(MOST_BLOCKS, max(1, ceil_div(shard_bytes, _SHARD_SHARE)))
    slot = round_up(shard_bytes, _SLOT_ALIGNMENT)
    return BufferLayout(blocks, 1 + blocks, slot_bytes=slot, nbytes=world * slot)
