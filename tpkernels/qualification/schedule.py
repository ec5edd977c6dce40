"""What `tpkernels qualify` runs on a machine, in which order, and for how long. Pure: it depends on
a `Topology` alone, so tests can ask about machines that are not here.

Order: worlds from the largest down, since most jobs use all GPUs of a host; in each the litmus
tests, then the ways from the simplest protocol to the most involved. A stage that does not fit the
budget is not run, and its way is not qualified.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpkernels.planning.trust import COPY_ENGINES, SHARDS, SUMS

FAULTS = ("late", "killed", "another call")  #: of one rank
LITMUS = ("messages", "words", "lines", "copies")  #: of single stores and signals
KINDS = ("all_gather", "reduce_scatter", "all_reduce")  #: of ops with a matmul

# Seconds of a stage on GPUs. Start: ranks, contexts, symmetric memory; and its calls. Assumed: no
# GPU has run one. Compiling: for each of so many Triton kernels, which take 0.94 s of CPU time for
# sm_90 in the median of 15, and 8.1 s the first one. AMD EPYC Zen 5, 2026-11-25,
# tests/support/kernel_builds.py.
START_S, CALLS_S, COMPILE_S = 4.0, 2.0, 2.0
_KERNELS = {"all_gather": 12, "reduce_scatter": 12, "all_reduce": 18, COPY_ENGINES: 6}
_THOROUGH = 4.0  # as many calls
_FAULT_S = 15.0
AUTOMATIC_S, ONE_GPU_S, MOST_S = 60.0, 1800.0, 3600.0  #: budgets


# The litmus test that a way relies on: it may be right by luck where the test fails.
_RELY_ON = {
    "words": ("direct/ll", "direct/ll_two_shot"),
    "lines": ("direct/ll128",),
    "messages": ("direct/two_shot", "direct/one_shot", *(f"fused/{kind}" for kind in KINDS)),
    "copies": (*(f"pipelined/{kind}" for kind in KINDS), f"fused/{COPY_ENGINES}"),
}
RELIES_ON = {way: test for test, ways in _RELY_ON.items() for way in ways}


@dataclass(frozen=True)
class Topology:
    """What a host's GPUs can do for one another.

    Attributes:
        kinds: each GPU's name.
        capability: compute capability, 90 for 9.0.
        visible: GPUs that one rank sees; fewer than all with ``--gpus-per-task``.
        peers: every GPU maps every other's memory.
        nvlink: NVML knows an NVLink between all pairs.
        refused: why no rank may run kernels that wait, such as MIG; "" if they may.
    """

    kinds: tuple[str, ...]
    capability: int
    visible: int = 0
    peers: bool = True
    nvlink: bool = False
    refused: str = ""

    @property
    def gpus(self) -> int:
        """Return how many GPUs the host has."""
        return len(self.kinds)


@dataclass(frozen=True)
class Stage:
    """A part of the qualification, in processes of its own.

    Attributes:
        name: of a litmus test, of a fault as "fault, algorithm", or of a way as "algorithm/way".
        world: the number of ranks.
        backend: of their process group.
        seconds: that it is expected to take on a GPU.
        why_not: why it is not run; "" if it is.
    """

    name: str
    world: int
    backend: str = "gloo"
    seconds: float = START_S + CALLS_S
    why_not: str = ""

    @property
    def is_litmus(self) -> bool:
        """Return whether it tests what the ways rely on, not a way."""
        return "/" not in self.name


def worlds_of(topology: Topology) -> tuple[int, ...]:
    """Return the numbers of ranks for which a host qualifies by default: all its GPUs, then half of
    them and so on; two ranks on one GPU, which prove the kernels but no link."""
    if topology.gpus == 1:
        return (2,)
    worlds = [topology.gpus]
    while worlds[-1] > 3:
        worlds.append(worlds[-1] // 2)
    return tuple(worlds)


def schedule(
    topology: Topology,
    worlds: Sequence[int] = (),
    *,
    budget: float | None = None,
    thorough: bool = False,
    only: str = "",
    known: Callable[[str, int], bool] = lambda name, world: False,
) -> list[Stage]:
    """Return the stages in their order, also those that are not run, with the reason.

    Args:
        worlds: the numbers of ranks; empty: `worlds_of` the topology.
        budget: seconds for all stages; None: 30 minutes on one GPU, else 60.
        thorough: make four times as many calls, and faults: a late rank, a killed one, one in
            another call.
        only: stages whose names begin so.
        known: says of a name and a number of ranks that they need not be run again.
    """
    left = budget if budget is not None else ONE_GPU_S if topology.gpus == 1 else MOST_S
    planned = []
    for world in worlds or worlds_of(topology):
        for stage in _stages(topology, world, thorough):
            if not stage.name.startswith(only) or known(stage.name, world):
                continue
            if not stage.why_not and stage.seconds > left:
                text = f"the budget: {left:.0f} s were left, it takes {stage.seconds:.0f} s"
                stage = replace(stage, why_not=text)  # noqa: PLW2901
            if not stage.why_not:
                left -= stage.seconds
            planned.append(stage)
    return planned


def _stages(topology: Topology, world: int, thorough: bool) -> list[Stage]:
    calls = CALLS_S * (_THOROUGH if thorough else 1.0)
    shared = world > topology.gpus
    lines = "" if topology.nvlink and not shared else "no NVLink between all ranks' GPUs, says NVML"
    direct = dict.fromkeys((*SUMS[::-1], *SHARDS[::-1]))  # two_shot and one_shot before LL
    ways = [f"direct/{way}" for way in direct] + [f"pipelined/{kind}" for kind in KINDS]
    stages = [Stage(name, world, seconds=START_S + calls) for name in (*LITMUS, *ways)]
    for kind in (*KINDS, COPY_ENGINES):
        compiling = COMPILE_S * _KERNELS[kind]
        stages.append(Stage(f"fused/{kind}", world, seconds=START_S + calls + compiling))
    stages += [
        Stage(f"ring/{kind}", world, "nccl", START_S + calls) for kind in (*KINDS, "all_to_all")
    ]
    if thorough:
        pairs = itertools.product(FAULTS, ("direct", "pipelined", "fused"))
        stages += [
            Stage(f"{kind}, {name}", world, seconds=START_S + _FAULT_S) for kind, name in pairs
        ]
    reasons = {"lines": lines, "direct/ll128": lines}
    return [
        replace(stage, why_not=_why_not(topology, stage) or reasons.get(stage.name, ""))
        for stage in stages
    ]


def _why_not(topology: Topology, stage: Stage) -> str:
    shared = stage.world > topology.gpus
    if topology.refused:
        return topology.refused
    if len(set(topology.kinds)) > 1:
        return f"GPUs of several kinds: {', '.join(sorted(set(topology.kinds)))}"
    if topology.capability < 80:
        return f"compute capability {topology.capability / 10:.1f}; it needs 8.0"
    if not topology.peers and not shared:
        return "no peer access between all GPUs"
    if 0 < topology.visible < min(stage.world, topology.gpus):
        return (
            f"a process sees {topology.visible} of {topology.gpus} GPUs: let it see all "
            "(CUDA_VISIBLE_DEVICES, no --gpus-per-task)"
        )
    if stage.backend == "nccl" and shared:
        return "NCCL has no two ranks on one GPU"
    return ""
