"""Which calls take the kernels of csrc/cuda/low_latency.cuh, and what these need.

They move twice the bytes, but a call is one hop without a fence. All ranks decide alike, because a
call's bytes follow from the shapes and dtypes in its signature. The lines of
csrc/cuda/whole_lines.cuh move 8/7 of the bytes.
"""

from __future__ import annotations

from tpkernels.integers import ceil_div

# Largest tensor that is gathered or scattered by a low-latency call, in bytes. NCCL's range for LL;
# untuned: no GPU has run it. Of all-reduces: planning/cost.py.
LOW_LATENCY_BYTES = 128 << 10
_THREADS, _MOST_BLOCKS = 256, 64  # kLowLatencyThreads; as other calls
_FIRST_DATA, _PACK_BYTES, _PACK_WORDS = 2, 16, 4  # csrc/cuda/lines.cuh
_LINE_WORDS, _LINE_VECTORS = 16, 7  # csrc/cuda/whole_lines.cuh
_VECTOR = 8  # elements


def takes(nbytes: int) -> bool:
    """Return whether ``auto`` gathers or scatters a tensor of ``nbytes``, counted over all ranks,
    by a low-latency kernel."""
    return nbytes <= LOW_LATENCY_BYTES


def words(*nbytes: int) -> int:
    """Words from each source, for at most so many bytes from one rank to another, in each hop."""
    return _FIRST_DATA + _PACK_WORDS * sum(ceil_div(each, _PACK_BYTES) for each in nbytes)


def line_words(elements: int, *sizes: int) -> int:
    """Words from each source in whole lines, for a segment with elements of these sizes in each
    hop."""
    turns = ceil_div(ceil_div(elements, _VECTOR), _LINE_VECTORS)
    lines = sum(turns * ceil_div(_VECTOR * size, _PACK_BYTES) for size in sizes)
    return _LINE_WORDS * (1 + lines)


def line_blocks(elements: int) -> int:
    """As `blocks`: of eight threads, seven have a vector."""
    return blocks(ceil_div(elements, _LINE_VECTORS) * (_LINE_VECTORS + 1), _VECTOR)


def blocks(nbytes: int, lane_bytes: int) -> int:
    """The same on all ranks: ``nbytes`` is the most that any sends to another, ``lane_bytes`` what
    a thread takes at a time."""
    return min(_MOST_BLOCKS, max(1, ceil_div(nbytes, _THREADS * lane_bytes)))
