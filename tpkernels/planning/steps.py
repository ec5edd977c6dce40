"""How much of a rank's data buffers a call on CPU tensors uses, and how `pipelined` and
`hierarchical` are cut into steps that fit. All ranks compute the same."""

from __future__ import annotations

from math import prod

from tpkernels.integers import ceil_div, round_up
from tpkernels.planning.problem import Problem

LINE_BYTES = 64  # parts of a step are aligned to cache lines
# Bytes per rank of the chunks in which `direct` moves large tensors: `kLimits` in
# csrc/host/collectives.h.
_CHUNK_BYTES = 512 << 10
_SLACK_BYTES = 4 << 10
_HIERARCHICAL_CHUNK_BYTES = 1 << 20  # untuned


def step_bytes(problem: Problem) -> int:
    """Return the bytes of a data buffer that one row of each rank takes in a step of
    `pipelined`."""
    width, world = problem.shape[-1], problem.world
    if problem.spec.gathers:
        return width * problem.dtype.itemsize
    if problem.dim is None:  # partials, and sums of 4 bytes an element, or 8 in float64
        return world * width * (problem.dtype.itemsize + max(4, problem.dtype.itemsize))
    if problem.dim == len(problem.shape) - 1:
        width = max(problem.sizes)
    return world * width * problem.dtype.itemsize


def step_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the rows of each rank that fit into a step of `pipelined`."""
    return (workspace_bytes - 2 * problem.world * LINE_BYTES) // max(step_bytes(problem), 1)


def pipelined_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes that a call by `pipelined` uses of each data buffer."""
    rows = ceil_div(problem.rows, problem.world) if problem.dim is None else _most_rows(problem)
    steps = max(1, min(rows, step_rows(problem, workspace_bytes)))
    return steps * step_bytes(problem) + 2 * problem.world * LINE_BYTES


def chunk_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes for each rank of a step of `hierarchical` without a matmul; a multiple of
    all sizes of elements."""
    fitting = workspace_bytes // problem.world // LINE_BYTES * LINE_BYTES
    return max(LINE_BYTES, min(_HIERARCHICAL_CHUNK_BYTES, fitting))


def hierarchical_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the rows of each rank in a step of `hierarchical`, which splits no row of a matmul.
    Elements alone can always be split."""
    return step_rows(problem, workspace_bytes) if problem.spec.has_matmul else 1


def hierarchical_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes that a call by `hierarchical` uses of each data buffer: at most those of one
    host with all ranks."""
    if problem.spec.has_matmul:
        return pipelined_bytes(problem, workspace_bytes)
    each = min(problem.nbytes, chunk_bytes(problem, workspace_bytes))
    return problem.world * round_up(each, LINE_BYTES)


def direct_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes that a call by `direct` uses of each data buffer. The sums lie there too, at
    4 bytes an element, or 8 in float64."""
    with_sums = 1 + ceil_div(max(4, problem.dtype.itemsize), problem.dtype.itemsize)
    moved = min(problem.nbytes, _CHUNK_BYTES * problem.world)
    return moved * with_sums + _SLACK_BYTES


def _most_rows(problem: Problem) -> int:
    """Return the matrix rows of the largest shard."""
    assert problem.dim is not None  # an all-reduce has no shards
    if problem.dim == len(problem.shape) - 1:
        return problem.rows
    inner = prod(problem.shape[problem.dim + 1 : -1])
    return problem.outer * max(problem.sizes) * inner
