"""One record per algorithm with its properties and requirements, and the data buffer bytes that a
step of a call on CPU tensors uses. The byte counts are identical on all ranks.

Planning, checks, backward passes and the CLI read these records instead of comparing names.
`backends` maps the names to implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from tpkernels import _C
from tpkernels.common.integers import ceil_div, round_up
from tpkernels.planning.op_spec import OPS, RoutedOptions
from tpkernels.planning.problem import Problem

LINE_BYTES = 64  # cache line; alignment of the segments of a step
# Chunk size of `direct` for large tensors, in bytes per rank: `kChunkBytes` in
# csrc/host/collectives.h.
CHUNK_BYTES = 512 << 10
SLACK_BYTES = 4 << 10
_HIERARCHICAL_CHUNK_BYTES = 1 << 20  # untuned


def bytes_per_row(problem: Problem) -> int:
    """Return the data buffer bytes for one row of every rank, in a step of `pipelined` or, for
    routed tokens, of `direct`."""
    width, world = problem.shape[-1], problem.world
    if isinstance(problem.options, RoutedOptions):
        slots = world * problem.options.top_k if problem.spec.combines else 1
        return slots * width * problem.dtype.itemsize
    if problem.spec.gathers:
        return width * problem.dtype.itemsize
    if problem.dim is None:  # partial sums, and results of 4 bytes per element (float64: 8)
        return world * width * (problem.dtype.itemsize + max(4, problem.dtype.itemsize))
    if problem.dim == len(problem.shape) - 1:
        width = max(problem.sizes)
    return world * width * problem.dtype.itemsize


def step_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the number of rows per rank that fit into a step of `pipelined`."""
    return (workspace_bytes - 2 * problem.world * LINE_BYTES) // max(bytes_per_row(problem), 1)


def _pipelined_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the data buffer bytes that one step of `pipelined` uses."""
    rows = problem.rows  # rows of the largest shard
    if problem.dim is None:
        rows = ceil_div(rows, problem.world)
    elif problem.dim < len(problem.shape) - 1:
        inner = prod(problem.shape[problem.dim + 1 : -1])
        rows = problem.outer * max(problem.sizes) * inner
    rows_per_step = max(1, min(rows, step_rows(problem, workspace_bytes)))
    return rows_per_step * bytes_per_row(problem) + 2 * problem.world * LINE_BYTES


def chunk_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes per rank in a step of `hierarchical` without a matmul. They are a multiple
    of every element size."""
    limit = workspace_bytes // problem.world // LINE_BYTES * LINE_BYTES
    return max(LINE_BYTES, min(_HIERARCHICAL_CHUNK_BYTES, limit))


def _hierarchical_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the number of rows per rank that fit into a step of `hierarchical`. It does not split
    a row of a matmul. Without a matmul it can split at any element, so the result is 1."""
    return step_rows(problem, workspace_bytes) if problem.spec.has_matmul else 1


def _hierarchical_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return an upper bound: the bytes that a step would use if one host had all ranks."""
    if problem.spec.has_matmul:
        return _pipelined_bytes(problem, workspace_bytes)
    chunk = min(problem.nbytes, chunk_bytes(problem, workspace_bytes))
    return problem.world * round_up(chunk, LINE_BYTES)


def _direct_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the number of rows per rank that fit into a step of `direct`. It does not split the
    row of a token. Without routed tokens it can split at any element, so the result is 1."""
    if not problem.spec.routed:
        return 1
    return (workspace_bytes - SLACK_BYTES) // bytes_per_row(problem)


def _direct_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes for chunks of the tensor and of the reduced results (4 bytes per element,
    float64: 8). For routed tokens: the bytes for chunks of token rows."""
    if problem.spec.routed:
        row = bytes_per_row(problem)
        chunk = CHUNK_BYTES * problem.world
        return max(row, min(max(problem.sizes) * row, chunk, workspace_bytes)) + SLACK_BYTES
    copies = 1 + ceil_div(max(4, problem.dtype.itemsize), problem.dtype.itemsize)
    if problem.sum_units:
        copies += (
            _C.calls.SumTree(problem.sum_units.k_sizes, problem.sum_units.size, 0).max_nodes - 1
        )
    chunk = min(problem.nbytes, CHUNK_BYTES * problem.world)
    return chunk * copies + SLACK_BYTES


@dataclass(frozen=True)
class Algorithm:
    """Properties and requirements of an algorithm. Keys of mappings and elements of sets are device
    types."""

    name: str
    #: Splits the matmul by rank, so it cannot gather the dim that the matmul reduces (K).
    splits_matmul: bool = False
    overlaps_matmul: bool = False  #: supports only ops with a matmul
    needs_shared_memory: bool = False  #: every rank reads or writes memory of its peers
    #: For groups that span hosts; uses memory shared within a host.
    spans_hosts: bool = False
    any_order: bool = False  #: may reduce in an order other than rank order, if numerics permits
    sends: bool = False  #: uses point-to-point sends and receives of the process group
    plain_weights: bool = False  #: supports plain weights only, without scales
    unbounded: bool = False  #: waits have no deadline, so ``auto`` never selects it
    #: The ops that it does not implement.
    unsupported_ops: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: "Triton" or "CUDA": kernels of this package. "multicast": the torch multimem ops.
    kernels: Mapping[str, str] = field(default_factory=dict)
    #: By op: kernels that it also uses on CUDA tensors if they load.
    optional_kernels: Mapping[str, str] = field(default_factory=dict)
    #: Moves full rows and accumulates in float32. Of an unscaled matmul it can split any dim except
    #: the last, otherwise only dim 0.
    moves_full_rows: frozenset[str] = frozenset()
    #: Runs in the Triton interpreter, so ``auto`` never selects it.
    interpreted: frozenset[str] = frozenset()
    #: Bytes of each data buffer that a call on CPU tensors uses, given the limit. A lower limit
    #: means more steps.
    buffer_bytes: Callable[[Problem, int], int] = lambda problem, limit: 0
    #: Number of rows per rank that fit into a step of a call on CPU tensors. None: every call fits.
    step_rows: Callable[[Problem, int], int] | None = None


_ROUTED = frozenset(spec.name for spec in OPS.values() if spec.routed)
_ALL_TO_ALL = frozenset({"all_to_all"})
_ALL_TO_ALLS = _ROUTED | _ALL_TO_ALL
_RECORDS = (
    Algorithm("unfused", any_order=True),
    Algorithm(
        "ring",
        splits_matmul=True,
        sends=True,
        unsupported_ops=dict.fromkeys(("cpu", "cuda"), _ROUTED),
    ),
    Algorithm(
        "direct",
        needs_shared_memory=True,
        unsupported_ops={"cuda": _ALL_TO_ALL},
        kernels={"cuda": "CUDA"},
        moves_full_rows=frozenset({"cuda"}),
        buffer_bytes=_direct_bytes,
        step_rows=_direct_rows,
    ),
    Algorithm(
        "multimem",
        needs_shared_memory=True,
        any_order=True,
        unsupported_ops={"cpu": frozenset(OPS), "cuda": _ALL_TO_ALLS},
        kernels={"cuda": "multicast"},
        unbounded=True,
        moves_full_rows=frozenset({"cuda"}),
    ),
    Algorithm(
        "pipelined",
        splits_matmul=True,
        overlaps_matmul=True,
        needs_shared_memory=True,
        kernels={"cuda": "CUDA"},
        moves_full_rows=frozenset({"cuda"}),
        buffer_bytes=_pipelined_bytes,
        step_rows=step_rows,
    ),
    Algorithm(
        "fused",
        splits_matmul=True,
        plain_weights=True,
        overlaps_matmul=True,
        needs_shared_memory=True,
        kernels={"cpu": "Triton", "cuda": "Triton"},
        optional_kernels={"all_gather_matmul": "CUDA"},  # copy engines may gather the rows
        moves_full_rows=frozenset({"cpu", "cuda"}),
        interpreted=frozenset({"cpu"}),
    ),
    Algorithm(
        "hierarchical",
        splits_matmul=True,
        spans_hosts=True,
        sends=True,
        unsupported_ops={"cpu": _ALL_TO_ALLS, "cuda": frozenset(OPS)},
        buffer_bytes=_hierarchical_bytes,
        step_rows=_hierarchical_rows,
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = {record.name: record for record in _RECORDS}


def check_algorithm(name: str) -> None:
    """Raise ``ValueError`` if ``name`` is not an algorithm of this package."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm '{name}'; choose from auto, {', '.join(ALGORITHMS)}")
