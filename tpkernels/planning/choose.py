"""Which algorithm a call runs: Problem -> Plan. Pure: touches no device and communicates nothing.

Every input is the same on all ranks, so all ranks choose alike: the problem, the group's means, and
rank 0's table of measured times (`Group.tuned`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from tpkernels.common import defaults, dtypes
from tpkernels.planning.algorithms import (
    ALGORITHMS,
    Algorithm,
    bytes_per_row,
    check_algorithm,
    step_rows,
)
from tpkernels.planning.op_spec import RoutedOptions
from tpkernels.planning.problem import ORDERED, VENDOR, Problem
from tpkernels.planning.qualification import Qualification
from tpkernels.planning.table import Table

# Where one algorithm becomes faster than another, before anything was measured on the machine.

# Minimum bytes of the communicated tensor, and rows per rank of the matmul, at which `ring` beats
# `unfused` between ranks that share no memory. Smaller tensors are bound by latency, and `ring`
# sends more messages. AMD EPYC Zen 3, 2 cores, 2 to 4 network namespaces, gloo, 2026-11-21: `python
# -m benchmarks.hosts` (benchmarks/results/cpu-2core-zen3-hosts.md).
# From there on `hierarchical` is 1.01x to 1.68x as fast as `unfused` and 1.00x to 1.27x as fast as
# `ring` for ops with a matmul. AMD EPYC Zen 4, 2 cores, 2 network namespaces of 2 ranks, gloo,
# 2026-11-22: the same command (benchmarks/results/cpu-2core-hierarchical.md).
RING_MIN_BYTES = 8 << 20
RING_MIN_ROWS = 256

# Fewest rows of a rank with which a split is tried. With fewer, the time is that of streaming the
# weight, once for each part.
TRIED_MIN_ROWS = 16


# Fewest rows per rank from which `pipelined` splits the matmul on CPUs that share memory. With
# fewer rows the matmul is bound by streaming the weight, and a split streams it once per part.
# `direct` multiplies like `unfused` and communicates in less time, so it is the choice wherever a
# split might not pay off. The time of `pipelined` over that of `direct`, 2 ranks x 1 thread, bf16:
#   rows per rank   256            512            1024           2048
#   Zen 1           1.04 to 1.09                  0.93 to 0.96
#   Zen 4           1.03 to 1.21   0.73 to 1.11   0.90 to 1.06
#   Zen 5                                         0.99 to 1.06   0.99 to 1.06
#   Xeon, AMX       1.14 to 1.18   1.06 to 1.12   1.00           0.88
# Before an all-reduce, whose results are copied between the ranks in any case, it is 0.93 on Zen 1,
# but 1.04 to 1.13 on Zen 5.
# AMD EPYC Zen 1, bf16 and fp32, geometric means by op, 2026-11-27
# (benchmarks/results/cpu-2core-auto-rules.md). Zen 4, 2026-11-22, and Zen 5, 2026-11-23
# (benchmarks/results/cpu-2core-auto.md). Intel Xeon with AMX, 480 MB L3, 2026-11, (M, 4096, 4096):
# `tpkernels bench`.
PIPELINED_MIN_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """The choice, the reason for it, and how the call identifies itself to peers. ``numerics`` says
    how a reduction sums: `unfused` can leave that to the process group; `multimem`, to the
    switch."""

    algorithm: str
    reason: str
    text: str = field(repr=False)
    signature: int = field(repr=False)
    numerics: str = ORDERED


NOTHING_TUNED = Table()
_SWITCH_SUMS = (torch.float32, torch.bfloat16)  # by torch's multimem ops
_ONE_PRODUCT = "a scaled matmul is not split, because each chunk would convert the weight again"
_SUMS = {
    VENDOR: "numerics 'vendor': reduced by the process group",
    ORDERED: "numerics 'ordered': reduced in fp32, in rank order",
}


@dataclass(frozen=True)
class Means:
    """What a group offers its calls; the same on all ranks."""

    shared_memory: bool  #: all ranks of the group can map each other's memory
    workspace_bytes: int = defaults.WORKSPACE_BYTES  #: the limit of each of two data buffers
    #: Algorithm name -> why it cannot run here.
    unsupported: Mapping[str, str] = field(default_factory=dict)
    why_no_node: str | None = None  #: what the group lacks for `hierarchical`; None: nothing
    qualification: Qualification = field(
        default_factory=Qualification
    )  #: what "auto" may take on CUDA tensors


def choose(
    problem: Problem,
    means: Means,
    *,
    requested: str = "auto",
    tuned: Table = NOTHING_TUNED,
    captured: bool = False,
) -> Plan:
    """Return the plan for ``problem``.

    Args:
        requested: an algorithm's name, or "auto".
        tuned: measured times, the same on all ranks. Where they show another algorithm to be
            clearly faster than the one the thresholds give, "auto" takes the fastest.
        captured: the call is recorded in a CUDA graph, and goes by the times taken in graphs.

    Raises:
        ValueError: ``requested`` is not an algorithm.
        NotImplementedError: the requested algorithm cannot run this problem; the message says
            what it needs.
    """
    if requested != "auto":
        check_algorithm(requested)
        reason = _unsupported(problem, requested, means)
        if reason is not None:
            raise NotImplementedError(f"algorithm '{requested}' of {problem.op} {reason}")
        return _plan(problem, requested, "requested")
    ruled = _by_rule(problem, means)
    if ruled[0] in means.unsupported:
        ruled = "unfused", f"'{ruled[0]}' {means.unsupported[ruled[0]]}"
    if tuned.measurements and problem.world > 1 and problem.tuning_key is not None:
        series, extent = problem.tuning_key
        series = series.captured if captured else series
        measured = tuned.choice(series, extent, candidates(problem, means), default=ruled[0])
        if measured is not None:
            return _plan(problem, *measured)
    return _plan(problem, *ruled)


def _by_rule(problem: Problem, means: Means) -> tuple[str, str]:
    """Return the algorithm that the thresholds alone give, and why."""
    if problem.world == 1:
        # `direct` then moves nothing either, and runs without Python.
        name = "direct" if problem.device == "cpu" and means.shared_memory else "unfused"
        return name, "one rank: nothing to communicate"
    if not means.shared_memory:
        return _across_hosts(problem, means)
    if problem.device == "cuda":
        if not means.qualification.variants:
            return "unfused", f"no other algorithm is qualified: {means.qualification.summary}"
        if isinstance(routed := problem.options, RoutedOptions) and routed.max_rows is not None:
            reason = why_unqualified(problem, "direct", means)
            reason = reason or _unsupported(problem, "direct", means)
            if reason is None:
                return "direct", "with max_rows the host does not wait for token counts"
            return "unfused", f"direct {reason}"
        return "unfused", "no algorithm is known to be faster on this GPU"
    if not problem.spec.has_matmul:
        reason = _unsupported(problem, "direct", means)
        if reason is not None:
            return "unfused", f"direct {reason}"
        return "direct", "no matmul to overlap with"
    if problem.spec.scaled:
        return "direct", _ONE_PRODUCT
    rows, most = _rows_per_part(problem), step_rows(problem, means.workspace_bytes)
    reason = _unsupported(problem, "pipelined", means)
    if reason is not None:
        return "direct", f"pipelined {reason}"
    if rows < PIPELINED_MIN_ROWS:
        return "direct", f"{rows} rows per rank < {PIPELINED_MIN_ROWS}: the matmul is not split"
    if most < PIPELINED_MIN_ROWS:
        return "direct", f"the workspace holds {most} rows per rank < {PIPELINED_MIN_ROWS}"
    if problem.dim is None:
        return "direct", "before an all-reduce, splitting the matmul is not faster"
    return "pipelined", f"{rows} rows per rank >= {PIPELINED_MIN_ROWS}"


def candidates(problem: Problem, means: Means) -> list[str]:
    """Return what "auto" may take: all that can run, except under Triton's interpreter, and that
    is qualified, on CUDA tensors."""
    return [
        name
        for name, reason in unsupported_algorithms(problem, means).items()
        if reason is None
        and problem.device not in ALGORITHMS[name].interpreted
        and why_unqualified(problem, name, means) is None
    ]


def why_unqualified(problem: Problem, name: str, means: Means) -> str | None:
    """Return why "auto" may not take an algorithm that has not proven itself, or that may wait for
    ever; None: it may."""
    if problem.device != "cuda" or problem.world == 1:
        return None
    if ALGORITHMS[name].unbounded:
        return "has no timeout, so it runs only if it is requested by name"
    return means.qualification.why_not(problem.op, name)


def is_worth_trying(problem: Problem, name: str) -> bool:
    """Return whether an algorithm that can run may be faster than others on CPU tensors. A scaled
    product is not split: each part would convert the weight again."""
    if not (ALGORITHMS[name].splits_matmul and problem.spec.has_matmul):
        return True
    return not problem.spec.scaled and _rows_per_part(problem) >= TRIED_MIN_ROWS


def _across_hosts(problem: Problem, means: Means) -> tuple[str, str]:
    reason, rows = "the ranks do not share memory", _rows_per_part(problem)
    if problem.device == "cuda":
        return "unfused", f"{reason}; no algorithm is known to be faster on this GPU"
    if problem.spec.scaled:
        return "unfused", f"{reason}; {_ONE_PRODUCT}"
    if problem.spec.routed:
        return "unfused", reason
    if problem.nbytes < RING_MIN_BYTES:
        return "unfused", f"{reason}; {problem.nbytes} bytes < {RING_MIN_BYTES}"
    if problem.spec.has_matmul and rows < RING_MIN_ROWS:
        return "unfused", f"{reason}; {rows} rows per rank < {RING_MIN_ROWS}"
    if problem.spec.has_matmul and _unsupported(problem, "hierarchical", means) is None:
        reason += ", except within a host"
        return "hierarchical", f"{reason}; {problem.nbytes} bytes >= {RING_MIN_BYTES}"
    if problem.op == "matmul_reduce_scatter":  # 0.88x to 1.13x as fast, with no trend
        return "unfused", f"{reason}; 'ring' was not faster in measurements"
    if _unsupported(problem, "ring", means) is not None:
        return "unfused", f"{reason}; 'ring' cannot gather along K"
    return "ring", f"{reason}; {problem.nbytes} bytes >= {RING_MIN_BYTES}"


def unsupported_algorithms(problem: Problem, means: Means) -> dict[str, str | None]:
    """Return why each algorithm cannot run ``problem``; None: it can."""
    return {name: _unsupported(problem, name, means) for name in ALGORITHMS}


def _instead(problem: Problem, algorithm: Algorithm) -> str:
    """Return what to use in place of an algorithm that lacks an op on a device type, as the end of
    a message."""
    other = "cpu" if problem.device == "cuda" else "cuda"
    if problem.op in algorithm.lacks.get(other, ()):
        return ""
    hosts = "; across hosts use 'unfused' or 'ring'" if algorithm.spans_hosts else ""
    return f", only on {other} tensors{hosts}"


def _rows_per_part(problem: Problem) -> int:
    """Return the rows of the smallest matmul after a split by rank, but for ranks without rows."""
    if problem.dim is None:
        return problem.rows // problem.world
    if problem.dim == len(problem.shape) - 1:
        return problem.rows
    return min((size for size in problem.sizes if size), default=0) * prod(
        problem.shape[problem.dim + 1 : -1]
    )


def _unsupported(problem: Problem, name: str, means: Means) -> str | None:
    """Return why an algorithm cannot run ``problem``; None: it can."""
    algorithm = ALGORITHMS[name]
    last = problem.dim == len(problem.shape) - 1
    if problem.spec.scaled and algorithm.plain_weights:
        return "does not support operands with scales"
    if problem.op in algorithm.lacks.get(problem.device, ()):
        instead = _instead(problem, algorithm)
        return f"does not support {problem.op} on {problem.device} tensors{instead}"
    by_switch = algorithm.kernels.get(problem.device) == "multicast"
    if by_switch and problem.spec.reduces and problem.numerics == ORDERED:
        return "sums in the order of the switch, but numerics is 'ordered'"
    if by_switch and problem.spec.reduces and problem.dtype not in _SWITCH_SUMS:
        dtype = dtypes.name(problem.dtype)
        return f"sums only float32 and bfloat16 (with the torch multimem ops), not {dtype}"
    if algorithm.splits_matmul and problem.spec.has_matmul and problem.spec.gathers and last:
        return (
            "cannot gather the dim that the matmul sums over (K): it would round each partial sum"
        )
    if algorithm.needs_shared_memory and not means.shared_memory:
        return "needs shared memory, but the ranks of this group do not share memory"
    if algorithm.spans_hosts and means.shared_memory:
        return "is for groups that span hosts, but all ranks of this group share memory"
    if algorithm.spans_hosts and means.why_no_node is not None:
        return means.why_no_node
    if algorithm.overlaps_matmul and not problem.spec.has_matmul:
        return "overlaps communication with a matmul, but this op does not contain a matmul"
    if problem.device in algorithm.whole_rows:
        vector = problem.dim == 0 and not problem.spec.has_matmul
        # A plain product's rows can be put in the order of the ranks.
        movable = problem.spec.has_matmul and not problem.spec.scaled
        split = problem.outer != 1 and not movable
        if problem.dim is not None and (split or (last and not vector)):
            dims = "any dim except the last" if movable else "dim 0 only"
            return (
                f"moves complete rows: it can split shape {list(problem.shape)} along {dims}, not "
                f"along dim {problem.dim}"
            )
        routed = problem.options if isinstance(problem.options, RoutedOptions) else None
        if routed and (assignments := problem.shape[0] * routed.top_k) >= 1 << 31:
            return f"supports fewer than 2**31 (token, expert) assignments, not {assignments}"
        if problem.dtype == torch.float64:
            return "accumulates in float32 and does not support float64"
    elif (
        problem.device == "cpu"
        and algorithm.step_rows
        and algorithm.step_rows(problem, means.workspace_bytes) < 1
    ):
        return (
            f"needs {bytes_per_row(problem)} bytes for one row of each rank, but workspace_bytes "
            f"is {means.workspace_bytes}; pass a larger workspace_bytes to tpkernels.init"
        )
    return means.unsupported.get(name)


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, algorithm: str, reason: str) -> Plan:
    numerics = problem.numerics if ALGORITHMS[algorithm].any_order else ORDERED
    name, by_switch = algorithm, "multicast" in ALGORITHMS[algorithm].kernels.values()
    if (
        problem.device == "cuda" and problem.spec.reduces and problem.world > 1
    ):  # else it is no choice
        how = _SUMS[numerics].replace("process group", "switch" if by_switch else "process group")
        name, reason = f"{algorithm}, {numerics}", f"{reason}; {how}"
    text = f"{problem} [{name}]"
    return Plan(algorithm, reason, text, zlib.crc32(text.encode()) or 1, numerics)
