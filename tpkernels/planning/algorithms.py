"""The algorithms: one record each of what an algorithm does and what it needs; and how many
bytes of a rank's data buffers a call on CPU tensors uses per step. The numbers are the same on all
ranks.

Planning, checks, the backward passes and the CLI ask these records instead of comparing names. The
code of an algorithm is attached to its name in `backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from tpkernels.common.integers import ceil_div, round_up
from tpkernels.planning.op_spec import OPS, RoutedOptions
from tpkernels.planning.problem import Problem

LINE_BYTES = 64  # parts of a step are aligned to cache lines
# Bytes per rank of the chunks in which `direct` moves large tensors: `kLimits` in
# csrc/host/collectives.h.
_CHUNK_BYTES = 512 << 10
_SLACK_BYTES = 4 << 10
_HIERARCHICAL_CHUNK_BYTES = 1 << 20  # untuned


def bytes_per_row(problem: Problem) -> int:
    """Return the bytes of a data buffer that one row of each rank takes in a step of `pipelined`,
    and of routed tokens in one of `direct`."""
    width, world = problem.shape[-1], problem.world
    if isinstance(problem.options, RoutedOptions):
        each = world * problem.options.top_k if problem.spec.combines else 1
        return each * width * problem.dtype.itemsize
    if problem.spec.gathers:
        return width * problem.dtype.itemsize
    if problem.dim is None:  # partials, and sums of 4 bytes an element, or 8 in float64
        return world * width * (problem.dtype.itemsize + max(4, problem.dtype.itemsize))
    if problem.dim == len(problem.shape) - 1:
        width = max(problem.sizes)
    return world * width * problem.dtype.itemsize


def step_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the rows of each rank that fit into a step of `pipelined`."""
    return (workspace_bytes - 2 * problem.world * LINE_BYTES) // max(bytes_per_row(problem), 1)


def _pipelined_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes of a data buffer that one step of `pipelined` uses."""
    rows = problem.rows  # of the largest shard
    if problem.dim is None:
        rows = ceil_div(rows, problem.world)
    elif problem.dim < len(problem.shape) - 1:
        inner = prod(problem.shape[problem.dim + 1 : -1])
        rows = problem.outer * max(problem.sizes) * inner
    rows_per_step = max(1, min(rows, step_rows(problem, workspace_bytes)))
    return rows_per_step * bytes_per_row(problem) + 2 * problem.world * LINE_BYTES


def chunk_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes for each rank of a step of `hierarchical` without a matmul; a multiple of
    all sizes of elements."""
    fitting = workspace_bytes // problem.world // LINE_BYTES * LINE_BYTES
    return max(LINE_BYTES, min(_HIERARCHICAL_CHUNK_BYTES, fitting))


def _hierarchical_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the rows of each rank in a step of `hierarchical`, which splits no row of a matmul.
    Elements alone can always be split."""
    return step_rows(problem, workspace_bytes) if problem.spec.has_matmul else 1


def _hierarchical_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return an upper bound of the bytes: those of a host that has all ranks."""
    if problem.spec.has_matmul:
        return _pipelined_bytes(problem, workspace_bytes)
    each = min(problem.nbytes, chunk_bytes(problem, workspace_bytes))
    return problem.world * round_up(each, LINE_BYTES)


def _direct_rows(problem: Problem, workspace_bytes: int) -> int:
    """Return the rows of each rank in a step of `direct`, which splits no token's."""
    if not problem.spec.routed:
        return 1
    return (workspace_bytes - _SLACK_BYTES) // bytes_per_row(problem)


def _direct_bytes(problem: Problem, workspace_bytes: int) -> int:
    """Return the bytes of chunks of the tensor and of sums, at 4 bytes an element, or 8 in
    float64; of routed tokens, those of chunks of their rows."""
    if problem.spec.routed:
        each = bytes_per_row(problem)
        chunk = _CHUNK_BYTES * problem.world
        return max(each, min(max(problem.sizes) * each, chunk, workspace_bytes)) + _SLACK_BYTES
    with_sums = 1 + ceil_div(max(4, problem.dtype.itemsize), problem.dtype.itemsize)
    moved = min(problem.nbytes, _CHUNK_BYTES * problem.world)
    return moved * with_sums + _SLACK_BYTES


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm does and what it needs; sets and keys are of device types."""

    name: str
    splits_matmul: bool = False  #: by rank, so it cannot gather the dim that the matmul sums over
    overlaps_matmul: bool = False  #: has nothing to do for an op without a matmul
    needs_shared_memory: bool = False  #: every rank reads or writes its peers' memory
    #: For groups that span hosts; uses memory shared within a host.
    spans_hosts: bool = False
    any_order: bool = False  #: may sum in another order than the ranks', where numerics permits
    sends: bool = False  #: by sends and receives of the process group
    plain_weights: bool = False  #: supports plain weights only, without scales
    unbounded: bool = False  #: its waits have no deadline, so ``auto`` never takes it
    #: The collectives that it has no function for.
    lacks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: "Triton" or "CUDA", of our own; "multicast", torch's multimem ops.
    kernels: Mapping[str, str] = field(default_factory=dict)
    #: By op, kernels that it also uses on CUDA tensors where they load.
    optional_kernels: Mapping[str, str] = field(default_factory=dict)
    #: Moves whole rows, so that it can split a product's dims but the last, else dim 0 only, and
    #: accumulates in float32.
    whole_rows: frozenset[str] = frozenset()
    #: Runs in Triton's interpreter, so ``auto`` never takes it.
    interpreted: frozenset[str] = frozenset()
    #: Bytes that a call on CPU tensors uses of each data buffer, given the limit; with less it
    #: takes more steps.
    workspace_bytes: Callable[[Problem, int], int] = lambda problem, limit: 0
    #: Rows of each rank that fit a step of a call on CPU tensors; None: every call fits.
    step_rows: Callable[[Problem, int], int] | None = None


_ROUTED = frozenset(spec.name for spec in OPS.values() if spec.routed)
_ALL_TO_ALL = frozenset({"all_to_all"})
_ALL_TO_ALLS = _ROUTED | _ALL_TO_ALL
_RECORDS = (
    Algorithm("unfused", any_order=True),
    Algorithm(
        "ring", splits_matmul=True, sends=True, lacks=dict.fromkeys(("cpu", "cuda"), _ROUTED)
    ),
    Algorithm(
        "direct",
        needs_shared_memory=True,
        lacks={"cuda": _ALL_TO_ALL},
        kernels={"cuda": "CUDA"},
        whole_rows=frozenset({"cuda"}),
        workspace_bytes=_direct_bytes,
        step_rows=_direct_rows,
    ),
    Algorithm(
        "multimem",
        needs_shared_memory=True,
        any_order=True,
        lacks={"cpu": frozenset(OPS), "cuda": _ALL_TO_ALLS},
        kernels={"cuda": "multicast"},
        unbounded=True,
        whole_rows=frozenset({"cuda"}),
    ),
    Algorithm(
        "pipelined",
        splits_matmul=True,
        overlaps_matmul=True,
        needs_shared_memory=True,
        kernels={"cuda": "CUDA"},
        whole_rows=frozenset({"cuda"}),
        workspace_bytes=_pipelined_bytes,
        step_rows=step_rows,
    ),
    Algorithm(
        "fused",
        splits_matmul=True,
        plain_weights=True,
        overlaps_matmul=True,
        needs_shared_memory=True,
        kernels={"cpu": "Triton", "cuda": "Triton"},
        optional_kernels={"all_gather_matmul": "CUDA"},  # copy engines may bring the rows
        whole_rows=frozenset({"cpu", "cuda"}),
        interpreted=frozenset({"cpu"}),
    ),
    Algorithm(
        "hierarchical",
        splits_matmul=True,
        spans_hosts=True,
        sends=True,
        lacks={"cpu": _ALL_TO_ALLS, "cuda": frozenset(OPS)},
        workspace_bytes=_hierarchical_bytes,
        step_rows=_hierarchical_rows,
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = {record.name: record for record in _RECORDS}


def check_algorithm(name: str) -> None:
    """Raise ``ValueError`` for a name that is no algorithm of this package."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm '{name}'; choose from auto, {', '.join(ALGORITHMS)}")
