"""Select the algorithm of a call: Problem -> Plan. Pure: accesses no device, does not communicate.

Every input is identical on all ranks, so all ranks select the same algorithm. The inputs are the
problem, the capabilities of the group, and the timing table of rank 0 (`Group.timing_table`).
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

# Default crossover points between algorithms, for machines without measured times.

# Minimum bytes of the communicated tensor, and rows per rank of the matmul, at which `ring` beats
# `unfused` between ranks that do not share memory. Smaller tensors are bound by latency, and `ring`
# sends more messages. AMD EPYC Zen 3, 2 cores, 2 to 4 network namespaces, gloo, 2026-11-21: `python
# -m benchmarks.hosts` (benchmarks/results/cpu-2core-zen3-hosts.md).
# Above the same limits, for ops with a matmul, `hierarchical` is 1.01x to 1.68x as fast as
# `unfused` and 1.00x to 1.27x as fast as `ring`. AMD EPYC Zen 4, 2 cores, 2 network namespaces of 2
# ranks, gloo, 2026-11-22: `python -m benchmarks.hosts`
# (benchmarks/results/cpu-2core-hierarchical.md).
RING_MIN_BYTES = 8 << 20
RING_MIN_ROWS = 256

# Minimum rows per rank at which the tuner times a split matmul. With fewer rows the matmul is bound
# by streaming the weight, and a split streams it once per chunk.
TUNED_SPLIT_MIN_ROWS = 16


# Minimum rows per rank at which `auto` selects `pipelined` on CPUs that share memory. With fewer
# rows the matmul is bound by streaming the weight, and a split streams it once per chunk. `direct`
# runs the same matmul as `unfused` and communicates in less time. It is therefore the default
# unless a split clearly pays off. Time of `pipelined` / time of `direct`, 2 ranks x 1 thread, bf16:
#   rows per rank   256            512            1024           2048
#   Zen 1           1.04 to 1.09                  0.93 to 0.96
#   Zen 4           1.03 to 1.21   0.73 to 1.11   0.90 to 1.06
#   Zen 5                                         0.99 to 1.06   0.99 to 1.06
#   Xeon, AMX       1.14 to 1.18   1.06 to 1.12   1.00           0.88
# Before an all-reduce the ratio is 0.93 on Zen 1, but 1.04 to 1.13 on Zen 5. There the ranks copy
# the results from each other in any case.
# AMD EPYC Zen 1, bf16 and fp32, geometric means by op, 2026-11-27
# (benchmarks/results/cpu-2core-auto-rules.md). Zen 4, 2026-11-22, and Zen 5, 2026-11-23
# (benchmarks/results/cpu-2core-auto.md). Intel Xeon with AMX, 480 MB L3, 2026-11, (M, 4096, 4096):
# `tpkernels bench`.
PIPELINED_MIN_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """The selected algorithm, the reason, and the signature that identifies the call to peers.
    ``numerics`` is the summation order of a reduction. With `VENDOR`, `unfused` uses the order of
    the process group and `multimem` the order of the switch."""

    algorithm: str
    reason: str
    description: str = field(repr=False)
    signature: int = field(repr=False)
    numerics: str = ORDERED


EMPTY_TABLE = Table()
_MULTIMEM_DTYPES = (torch.float32, torch.bfloat16)  # dtypes that the torch multimem ops reduce
_SCALED_NOT_SPLIT = (
    "a scaled matmul is not split, because each chunk would convert the weight again"
)
_SUMMATION = {
    VENDOR: "numerics 'vendor': reduced by the process group",
    ORDERED: "numerics 'ordered': reduced in fp32, in rank order",
}


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a group. Identical on all ranks."""

    shared_memory: bool  #: all ranks of the group can map the memory of all peers
    workspace_bytes: int = defaults.WORKSPACE_BYTES  #: limit for each of the two data buffers
    #: Algorithm name -> reason why it cannot run on this machine.
    unsupported: Mapping[str, str] = field(default_factory=dict)
    no_node_reason: str | None = None  #: reason why `hierarchical` cannot run, or None
    #: Variants that "auto" may select on CUDA tensors.
    qualification: Qualification = field(default_factory=Qualification)


def choose(
    problem: Problem,
    capabilities: Capabilities,
    *,
    requested: str = "auto",
    tuned: Table = EMPTY_TABLE,
    captured: bool = False,
) -> Plan:
    """Return the plan for ``problem``.

    Args:
        requested: the name of an algorithm, or "auto".
        tuned: measured times, identical on all ranks. "auto" selects the fastest algorithm if the
            times show that it is clearly faster than the default of the thresholds.
        captured: the call is captured in a CUDA graph; use the times measured in graphs.

    Raises:
        ValueError: ``requested`` is not an algorithm.
        NotImplementedError: the requested algorithm, or a sum by a tree, cannot run this problem.
            The message contains the requirement.
    """
    if requested != "auto":
        check_algorithm(requested)
        reason = _find_obstacle(problem, requested, capabilities)
        if reason is not None:
            raise NotImplementedError(f"algorithm '{requested}' of {problem.op} {reason}")
        return _make_plan(problem, requested, "requested")
    if problem.sum_units:
        reason = _find_obstacle(problem, "direct", capabilities)
        if reason is not None:
            raise NotImplementedError(f"{problem.op} with numerics 'invariant' {reason}")
        return _make_plan(
            problem, "direct", "numerics 'invariant': no other algorithm sums by a tree"
        )
    default = _choose_by_rule(problem, capabilities)
    if default[0] in capabilities.unsupported:
        default = "unfused", f"'{default[0]}' {capabilities.unsupported[default[0]]}"
    if tuned.measurements and problem.world > 1 and problem.tuning_key is not None:
        series, extent = problem.tuning_key
        series = series.captured if captured else series
        measured = tuned.select(
            series, extent, candidates(problem, capabilities), default=default[0]
        )
        if measured is not None:
            return _make_plan(problem, *measured)
    return _make_plan(problem, *default)


def _choose_by_rule(problem: Problem, capabilities: Capabilities) -> tuple[str, str]:
    """Return the default algorithm according to the thresholds, and the reason."""
    if problem.world == 1:
        # With one rank `direct` moves no data either, and it runs without Python.
        name = "direct" if problem.device == "cpu" and capabilities.shared_memory else "unfused"
        return name, "one rank: nothing to communicate"
    if not capabilities.shared_memory:
        return _choose_across_hosts(problem, capabilities)
    if problem.device == "cuda":
        if not capabilities.qualification.variants:
            return (
                "unfused",
                f"no other algorithm is qualified: {capabilities.qualification.summary}",
            )
        if isinstance(routed := problem.options, RoutedOptions) and routed.max_rows is not None:
            reason = find_qualification_obstacle(problem, "direct", capabilities)
            reason = reason or _find_obstacle(problem, "direct", capabilities)
            if reason is None:
                return "direct", "with max_rows the host does not wait for token counts"
            return "unfused", f"direct {reason}"
        return "unfused", "no algorithm is known to be faster on this GPU"
    if not problem.spec.has_matmul:
        reason = _find_obstacle(problem, "direct", capabilities)
        if reason is not None:
            return "unfused", f"direct {reason}"
        return "direct", "no matmul to overlap with"
    if problem.spec.scaled:
        return "direct", _SCALED_NOT_SPLIT
    rows, max_rows = _rows_per_chunk(problem), step_rows(problem, capabilities.workspace_bytes)
    reason = _find_obstacle(problem, "pipelined", capabilities)
    if reason is not None:
        return "direct", f"pipelined {reason}"
    if rows < PIPELINED_MIN_ROWS:
        return "direct", f"{rows} rows per rank < {PIPELINED_MIN_ROWS}: the matmul is not split"
    if max_rows < PIPELINED_MIN_ROWS:
        return "direct", f"the workspace holds {max_rows} rows per rank < {PIPELINED_MIN_ROWS}"
    if problem.dim is None:
        return "direct", "before an all-reduce, splitting the matmul is not faster"
    return "pipelined", f"{rows} rows per rank >= {PIPELINED_MIN_ROWS}"


def candidates(problem: Problem, capabilities: Capabilities) -> list[str]:
    """Return the algorithms that "auto" may select: supported, not in the Triton interpreter and,
    on CUDA tensors, qualified."""
    return [
        name
        for name, reason in unsupported_algorithms(problem, capabilities).items()
        if reason is None
        and problem.device not in ALGORITHMS[name].interpreted
        and find_qualification_obstacle(problem, name, capabilities) is None
    ]


def find_qualification_obstacle(
    problem: Problem, name: str, capabilities: Capabilities
) -> str | None:
    """Return the reason why "auto" may not select an algorithm on CUDA tensors: it is not qualified
    or has no timeout. None if "auto" may select it."""
    if problem.device != "cuda" or problem.world == 1:
        return None
    if ALGORITHMS[name].unbounded:
        return "has no timeout, so it runs only if it is requested by name"
    return capabilities.qualification.reason_against(problem.op, name)


def is_worth_timing(problem: Problem, name: str) -> bool:
    """Return whether a supported algorithm can be the fastest on CPU tensors. A scaled matmul is
    not split, because each chunk would convert the weight again."""
    if not (ALGORITHMS[name].splits_matmul and problem.spec.has_matmul):
        return True
    return not problem.spec.scaled and _rows_per_chunk(problem) >= TUNED_SPLIT_MIN_ROWS


def _choose_across_hosts(problem: Problem, capabilities: Capabilities) -> tuple[str, str]:
    reason, rows = "the ranks do not share memory", _rows_per_chunk(problem)
    if problem.device == "cuda":
        return "unfused", f"{reason}; no algorithm is known to be faster on this GPU"
    if problem.spec.scaled:
        return "unfused", f"{reason}; {_SCALED_NOT_SPLIT}"
    if problem.spec.routed:
        return "unfused", reason
    if problem.nbytes < RING_MIN_BYTES:
        return "unfused", f"{reason}; {problem.nbytes} bytes < {RING_MIN_BYTES}"
    if problem.spec.has_matmul and rows < RING_MIN_ROWS:
        return "unfused", f"{reason}; {rows} rows per rank < {RING_MIN_ROWS}"
    if problem.spec.has_matmul and _find_obstacle(problem, "hierarchical", capabilities) is None:
        reason += ", except within a host"
        return "hierarchical", f"{reason}; {problem.nbytes} bytes >= {RING_MIN_BYTES}"
    if problem.op == "matmul_reduce_scatter":  # 0.88x to 1.13x as fast, with no trend
        return "unfused", f"{reason}; 'ring' was not faster in measurements"
    if _find_obstacle(problem, "ring", capabilities) is not None:
        return "unfused", f"{reason}; 'ring' cannot gather along K"
    return "ring", f"{reason}; {problem.nbytes} bytes >= {RING_MIN_BYTES}"


def unsupported_algorithms(problem: Problem, capabilities: Capabilities) -> dict[str, str | None]:
    """Return, for each algorithm, the reason why it cannot run ``problem``, or None if it can."""
    return {name: _find_obstacle(problem, name, capabilities) for name in ALGORITHMS}


def _format_alternatives(problem: Problem, algorithm: Algorithm) -> str:
    """Return the end of an error message: alternatives to an algorithm that does not implement an
    op on a device type."""
    device = "cpu" if problem.device == "cuda" else "cuda"
    if problem.op in algorithm.unsupported_ops.get(device, ()):
        return ""
    hosts = "; across hosts use 'unfused' or 'ring'" if algorithm.spans_hosts else ""
    return f", only on {device} tensors{hosts}"


def _rows_per_chunk(problem: Problem) -> int:
    """Return the rows of the smallest matmul after a split by rank. Ranks without rows do not
    count."""
    if problem.dim is None:
        return problem.rows // problem.world
    if problem.dim == len(problem.shape) - 1:
        return problem.rows
    return min((size for size in problem.sizes if size), default=0) * prod(
        problem.shape[problem.dim + 1 : -1]
    )


def _find_obstacle(problem: Problem, name: str, capabilities: Capabilities) -> str | None:
    """Return the reason why an algorithm cannot run ``problem``, or None if it can."""
    algorithm = ALGORITHMS[name]
    last = problem.dim == len(problem.shape) - 1
    if problem.spec.scaled and algorithm.plain_weights:
        return "does not support operands with scales"
    if problem.sum_units and name != "direct":
        return "sums in rank order, but numerics is 'invariant'; leave out the algorithm"
    if problem.op in algorithm.unsupported_ops.get(problem.device, ()):
        alternatives = _format_alternatives(problem, algorithm)
        return f"does not support {problem.op} on {problem.device} tensors{alternatives}"
    uses_switch = algorithm.kernels.get(problem.device) == "multicast"
    if uses_switch and problem.spec.reduces and problem.numerics == ORDERED:
        return "sums in the order of the switch, but numerics is 'ordered'"
    if uses_switch and problem.spec.reduces and problem.dtype not in _MULTIMEM_DTYPES:
        dtype = dtypes.name(problem.dtype)
        return f"sums only float32 and bfloat16 (with the torch multimem ops), not {dtype}"
    if algorithm.splits_matmul and problem.spec.has_matmul and problem.spec.gathers and last:
        return (
            "cannot gather the dim that the matmul sums over (K): it would round each partial sum"
        )
    if algorithm.needs_shared_memory and not capabilities.shared_memory:
        return "needs shared memory, but the ranks of this group do not share memory"
    if algorithm.spans_hosts and capabilities.shared_memory:
        return "is for groups that span hosts, but all ranks of this group share memory"
    if algorithm.spans_hosts and capabilities.no_node_reason is not None:
        return capabilities.no_node_reason
    if algorithm.overlaps_matmul and not problem.spec.has_matmul:
        return "overlaps communication with a matmul, but this op does not contain a matmul"
    if problem.device in algorithm.moves_full_rows:
        vector = problem.dim == 0 and not problem.spec.has_matmul
        # The rows of an unscaled matmul can be permuted into rank order.
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
        and algorithm.step_rows(problem, capabilities.workspace_bytes) < 1
    ):
        return (
            f"needs {bytes_per_row(problem)} bytes for one row of each rank, but workspace_bytes "
            f"is {capabilities.workspace_bytes}; pass a larger workspace_bytes to tpkernels.init"
        )
    return capabilities.unsupported.get(name)


@functools.lru_cache(maxsize=4096)
def _make_plan(problem: Problem, algorithm: str, reason: str) -> Plan:
    numerics = problem.numerics if ALGORITHMS[algorithm].any_order else ORDERED
    name, uses_switch = algorithm, "multicast" in ALGORITHMS[algorithm].kernels.values()
    # Without these conditions numerics has no effect.
    if problem.device == "cuda" and problem.spec.reduces and problem.world > 1:
        summation = _SUMMATION[numerics].replace(
            "process group", "switch" if uses_switch else "process group"
        )
        name, reason = f"{algorithm}, {numerics}", f"{reason}; {summation}"
    description = f"{problem} [{name}]"
    return Plan(algorithm, reason, description, zlib.crc32(description.encode()) or 1, numerics)
