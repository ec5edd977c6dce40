"""Division of calls into blocks, and the workspace that they need.

All ranks compute the same layout, because it depends only on the shapes and dtypes in the call
signature. LL (csrc/cuda/ll.cuh) sends twice the bytes, but data and signal arrive in one store,
without a fence.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.common.integers import ceil_div, round_up

# Max total bytes of an all-gather or reduce-scatter with LL. The value is the LL range of NCCL, not
# measured over a link. The limit for all-reduces is in planning/cost.py.
LL_BYTES = 128 << 10
# Max blocks per call: few, because blocks occupy SMs that a matmul could use. All-reduce elements
# and shard bytes per block. Not measured.
MAX_BLOCKS, _REDUCE_ELEMENTS_PER_BLOCK, _SHARD_BYTES_PER_BLOCK = 64, 4096, 8 << 10
_SLOT_ALIGNMENT = 256
SEGMENT_UNIT = 64  # elements; csrc/cuda/all_reduce.cuh
VECTOR = 8  # elements per thread and iteration of a sum; csrc/cuda/reduce.cuh
PACK_BYTES = 16  # bytes per thread and iteration of a copy; csrc/cuda/ll.cuh
_LL_THREADS, _FIRST_DATA_SIGNAL, _PACK_SIGNALS = 256, 2, 4  # csrc/cuda/ll.cuh


@dataclass(frozen=True)
class BufferLayout:
    """Block count of a call, and the layout of its signals and buffer."""

    blocks: int
    signals: int  # per source rank
    segment: int = 0  # elements reduced per rank
    slot_bytes: int = 0
    results_offset: int = 0
    nbytes: int = 0


def ll_signals(*nbytes: int) -> int:
    """Return the number of LL signals per source rank. ``nbytes``: max bytes that a rank sends to a
    peer, per shot."""
    return _FIRST_DATA_SIGNAL + _PACK_SIGNALS * sum(ceil_div(size, PACK_BYTES) for size in nbytes)


def _ll_blocks(nbytes: int, vector_bytes: int) -> int:
    """Return the number of blocks of a call with LL.

    Args:
        nbytes: max bytes from a rank to a peer.
        vector_bytes: bytes per thread and iteration.
    """
    return min(MAX_BLOCKS, max(1, ceil_div(nbytes, _LL_THREADS * vector_bytes)))


def all_reduce_layout(
    variant: str, count: int, world: int, x_itemsize: int, out_itemsize: int
) -> BufferLayout:
    """Return the layout of an all-reduce of ``count`` elements. ``x_itemsize`` and
    ``out_itemsize`` are the input and output bytes per element."""
    segment = count if variant == "ll" else round_up(ceil_div(count, world), SEGMENT_UNIT)
    nbytes = segment * x_itemsize
    if variant == "ll":
        return BufferLayout(_ll_blocks(nbytes, VECTOR * x_itemsize), ll_signals(nbytes), segment)
    if variant == "ll_two_shot":
        signals = ll_signals(nbytes, segment * out_itemsize)
        return BufferLayout(_ll_blocks(nbytes, VECTOR * x_itemsize), signals, segment)
    blocks = min(MAX_BLOCKS, max(1, ceil_div(count, _REDUCE_ELEMENTS_PER_BLOCK)))
    return _two_shot_layout(blocks, segment, nbytes, world, count * out_itemsize)


def _two_shot_layout(
    blocks: int, segment: int, slot_bytes: int, world: int, results_bytes: int
) -> BufferLayout:
    """Return the layout of a two-shot call: slots for the partials, followed by the results."""
    slot, results = (round_up(nbytes, _SLOT_ALIGNMENT) for nbytes in (slot_bytes, results_bytes))
    return BufferLayout(blocks, 1 + 2 * blocks, segment, slot, world * slot, world * slot + results)


def rows_layout(
    variant: str, rows: int, columns: int, world: int, x_itemsize: int, cluster: int
) -> BufferLayout:
    """Return the layout of an all-reduce with RMSNorm, in which ``cluster`` blocks share a row."""
    segment_rows = rows if variant == "ll" else ceil_div(rows, world)
    segment = segment_rows * columns
    uses_ll = variant in ("ll", "ll_two_shot")
    clusters = rows if uses_ll else segment_rows
    blocks = cluster * max(1, min(MAX_BLOCKS // cluster, clusters))
    if uses_ll:
        shots = 1 if variant == "ll" else 2
        return BufferLayout(blocks, ll_signals(*[segment * x_itemsize] * shots), segment)
    nbytes = rows * columns * x_itemsize
    return _two_shot_layout(blocks, segment, segment * x_itemsize, world, nbytes)


def routed_layout(tokens: int, k: int, columns: int, itemsize: int, combines: bool) -> BufferLayout:
    """Return the layout of an MoE dispatch or combine with at most ``tokens`` tokens per rank and
    ``k`` assignments per token. Each block processes some columns of all rows."""
    nbytes = tokens * columns * itemsize
    units, max_blocks = (
        ceil_div(columns, SEGMENT_UNIT),
        ceil_div(k * nbytes, _SHARD_BYTES_PER_BLOCK),
    )
    blocks = max(1, min(MAX_BLOCKS, units, max_blocks))
    return BufferLayout(blocks, 1 + blocks, nbytes=nbytes * (k if combines else 1))


def shards_layout(variant: str, shard_bytes: int, world: int, vector_bytes: int) -> BufferLayout:
    """Return the layout for shards of at most ``shard_bytes``. ``vector_bytes``: bytes per thread
    and iteration in LL."""
    if variant == "ll":
        return BufferLayout(_ll_blocks(shard_bytes, vector_bytes), ll_signals(shard_bytes))
    blocks = min(MAX_BLOCKS, max(1, ceil_div(shard_bytes, _SHARD_BYTES_PER_BLOCK)))
    slot = round_up(shard_bytes, _SLOT_ALIGNMENT)
    return BufferLayout(blocks, 1 + blocks, slot_bytes=slot, nbytes=world * slot)
