"""The algorithms: one record each of what an algorithm does and what it needs.

Planning, checks, the backward passes and the CLI ask these records instead of comparing names. The
code of an algorithm is attached to its name in `backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tpkernels.planning import steps
from tpkernels.planning.problem import Problem


def _no_bytes(problem: Problem, workspace_bytes: int) -> int:
    return 0


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm does and what it needs.

    Attributes:
        splits_matmul: multiplies the rows of each rank by themselves, so it cannot gather the dim
            that the matmul sums over.
        overlaps_matmul: has nothing to do for an op without a matmul.
        needs_shared_memory: every rank reads or writes its peers' memory.
        needs_nodes: is for groups that span hosts, and on CPU tensors reads or writes the memory
            of the ranks of the same host.
        sends: by sends and receives of the process group.
        no_all_to_all: device types on which it has none.
        kernels: by device type, the kind of our own kernels that it launches, "Triton" or "CUDA".
        optional_kernels: by op, kernels that it also uses on CUDA tensors where they load.
        whole_rows: device types on which it moves whole rows, so that it can split a product's dims
            but the last, else dim 0 only, and accumulates in float32.
        tests_only: device types on which ``auto`` never takes it, because it runs under Triton's
            interpreter.
        workspace_bytes: bytes that a call on CPU tensors uses of each data buffer, given the limit;
            with less it takes more steps.
        step_rows: rows of each rank that fit a step of a call on CPU tensors; None: there are no
            steps, every call fits.
    """

    name: str
    splits_matmul: bool = False
    overlaps_matmul: bool = False
    needs_shared_memory: bool = False
    needs_nodes: bool = False
    sends: bool = False
    no_all_to_all: frozenset[str] = frozenset()
    kernels: Mapping[str, str] = field(default_factory=dict)
    optional_kernels: Mapping[str, str] = field(default_factory=dict)
    whole_rows: frozenset[str] = frozenset()
    tests_only: frozenset[str] = frozenset()
    workspace_bytes: Callable[[Problem, int], int] = _no_bytes
    step_rows: Callable[[Problem, int], int] | None = None


_RECORDS = (
    Algorithm("unfused"),
    Algorithm("ring", splits_matmul=True, sends=True),
    Algorithm(
        "direct",
        needs_shared_memory=True,
        no_all_to_all=frozenset({"cuda"}),
        kernels={"cuda": "CUDA"},
        whole_rows=frozenset({"cuda"}),
        workspace_bytes=steps.direct_bytes,
    ),
    Algorithm(
        "pipelined",
        splits_matmul=True,
        overlaps_matmul=True,
        needs_shared_memory=True,
        kernels={"cuda": "CUDA"},
        whole_rows=frozenset({"cuda"}),
        workspace_bytes=steps.pipelined_bytes,
        step_rows=steps.step_rows,
    ),
    Algorithm(
        "fused",
        splits_matmul=True,
        overlaps_matmul=True,
        needs_shared_memory=True,
        kernels={"cpu": "Triton", "cuda": "Triton"},
        optional_kernels={"all_gather_matmul": "CUDA"},  # copy engines may bring the rows
        whole_rows=frozenset({"cpu", "cuda"}),
        tests_only=frozenset({"cpu"}),
    ),
    Algorithm(
        "hierarchical",
        splits_matmul=True,
        needs_nodes=True,
        sends=True,
        no_all_to_all=frozenset({"cpu", "cuda"}),
        workspace_bytes=steps.hierarchical_bytes,
        step_rows=steps.hierarchical_rows,
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = {record.name: record for record in _RECORDS}


def check_algorithm(name: str) -> None:
    """Raise ``ValueError`` for a name that is no algorithm of this package."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm '{name}'; there are auto, {', '.join(ALGORITHMS)}")
