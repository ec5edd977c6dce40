"""What `tpkernels qualify` runs on a machine, in which order, and for how long. Pure: it depends on
a `Topology` alone, so tests can ask about machines that are not here.

Order: the largest world size first, since most jobs use all GPUs of a host. In each world, litmus
tests run before the variants that rely on them, and simple protocols before involved ones. If ranks
share a GPU, all variants first run on virtual ranks, whose kernels run concurrently (virtual.py). A
variant that fails there is not run in processes. A stage that does not fit the budget is not run,
and its variant is not qualified.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpkernels.planning.qualification import COPY_ENGINES, SHARDS, SUMS

FAULTS = ("late", "killed", "another call")  #: of one rank
#: Of single stores and signals.
LITMUS = ("messages", "words", "copies", "bulk")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")  #: of ops with a matmul

# Seconds of a stage on GPUs. Start: ranks, contexts, symmetric memory; and its calls. Together 1 to
# 6 s on an H200, 2026-11-26, and 13 to 22 s with compiling. Compiling: for each of so many Triton
# kernels, which take 0.94 s of CPU time for sm_90 in the median of 15, and 8.1 s the first one. AMD
# EPYC Zen 5, 2026-11-25, tests/support/kernel_builds.py. On AMD EPYC Zen 1, 2026-11-26, 0.7 to
# 1.6 s.
START_S, CALLS_S, COMPILE_S = 4.0, 2.0, 1.0
_KERNELS = {"all_gather": 12, "reduce_scatter": 12, "all_reduce": 18, COPY_ENGINES: 6}
_VIRTUAL_KERNELS = 5  # more: for 4 and 8 ranks, and without waits
_THOROUGH = 4.0  # as many calls
_FAULT_S = 15.0
AUTOMATIC_S, ONE_GPU_S, MOST_S = 60.0, 240.0, 3600.0  #: budgets
VIRTUAL = "virtual "  #: before the name of a variant that virtual ranks check
OVER_BUDGET = "over budget"  #: why a stage is left out


# The variants that rely on each litmus test: if the test fails, they may be right by luck. On GPUs
# with TMA, `fused` stores its partials with TMA.
_RELY_ON = {
    "words": ("direct/ll", "direct/ll_two_shot"),
    "messages": (
        *("direct/two_shot", "direct/one_shot", "direct/routed"),
        *(f"fused/{kind}" for kind in KINDS),
    ),
    "copies": (*(f"pipelined/{kind}" for kind in KINDS), f"fused/{COPY_ENGINES}"),
    "bulk": ("fused/reduce_scatter", "fused/all_reduce"),
}
_TMA_SINCE = 90  # compute capability


@dataclass(frozen=True)
class Topology:
    """What a host's GPUs can do for one another.

    Attributes:
        kinds: each GPU's name.
        capability: compute capability, 90 for 9.0.
        visible: GPUs that one rank sees; fewer than all with ``--gpus-per-task``.
        peers: every GPU maps every other's memory.
        multicast: NVSwitches store at all GPUs at once.
        refused: why no rank may run kernels that wait, such as MIG; "" if they may.
    """

    kinds: tuple[str, ...]
    capability: int
    visible: int = 0
    peers: bool = True
    multicast: bool = False
    refused: str = ""

    @property
    def gpus(self) -> int:
        """Return how many GPUs the host has."""
        return len(self.kinds)


@dataclass(frozen=True)
class Stage:
    """A part of the qualification, in processes of its own.

    Attributes:
        name: a litmus test, a fault as "fault, algorithm", or a variant as "algorithm/variant",
            prefixed with `VIRTUAL` if virtual ranks check it.
        world: the number of ranks.
        backend: of their process group.
        seconds: that it is expected to take on a GPU.
        why_not: why it is not run; "" if it is.
        relies_on: the litmus tests without which it is not run.
    """

    name: str
    world: int
    backend: str = "gloo"
    seconds: float = START_S + CALLS_S
    why_not: str = ""
    relies_on: tuple[str, ...] = ()

    @property
    def is_litmus(self) -> bool:
        """Return whether it tests what the variants rely on, not a variant."""
        return "/" not in self.name or self.is_virtual

    @property
    def is_virtual(self) -> bool:
        """Return whether virtual ranks run it, in one process."""
        return self.name.startswith(VIRTUAL)

    @property
    def is_over_budget(self) -> bool:
        """Return whether it is left out for want of time."""
        return OVER_BUDGET in self.why_not

    def within(self, left: float) -> Stage:
        """Return this stage, left out if it takes more than ``left`` seconds."""
        if self.why_not and not self.is_over_budget:
            return self
        why = f"{OVER_BUDGET}: it needs {self.seconds:.0f} s, and {left:.0f} s are left"
        return replace(self, why_not=why if self.seconds > left else "")


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
    """Return the stages in their order, also those that are not run, with the reason. Which fit the
    budget follows from the seconds that they are expected to take; `run` goes by those they take.

    Args:
        worlds: the numbers of ranks; empty: `worlds_of` the topology.
        budget: seconds for all stages; None: 4 minutes on one GPU, else 60.
        thorough: make four times as many calls, and faults: a late rank, a killed one, one in
            another call.
        only: stages whose names begin so, and the litmus tests that they rely on.
        known: says of a name and a number of ranks that they need not be run again.
    """
    left = budget_of(topology, budget)
    planned = []
    for world in worlds or worlds_of(topology):
        stages = _stages(topology, world, thorough)
        asked = [stage for stage in stages if stage.name.startswith(only)]
        relied_on = {test for stage in asked for test in stage.relies_on}
        missing: dict[str, str] = {}
        for stage in stages:
            if (stage not in asked and stage.name not in relied_on) or known(stage.name, world):
                continue
            fitting = stage.within(left)
            lacking = [test for test in stage.relies_on if test in missing]
            if lacking and not fitting.why_not:
                fitting = replace(stage, why_not=f"{lacking[0]}: {missing[lacking[0]]}")
            if fitting.why_not:
                missing[stage.name] = fitting.why_not
            else:
                left -= stage.seconds
            planned.append(fitting)
    return planned


def budget_of(topology: Topology, budget: float | None = None) -> float:
    """Return the seconds for all stages: those asked for, or the machine's default."""
    default = ONE_GPU_S if topology.gpus == 1 else MOST_S
    return default if budget is None else budget


def _stages(topology: Topology, world: int, thorough: bool) -> list[Stage]:
    calls = CALLS_S * (_THOROUGH if thorough else 1.0)
    shared = world > topology.gpus
    no_switch = "" if topology.multicast and not shared else "no NVSwitch multicast"
    stages: dict[str, Stage] = {}

    def add(name: str, seconds: float = START_S + calls, backend: str = "gloo") -> None:
        tests = [test for test, variants in _RELY_ON.items() if name in variants]
        if topology.capability < _TMA_SINCE and "bulk" in tests:
            tests.remove("bulk")
        for test in tests:
            if test not in stages:
                add(test)
        tests += [VIRTUAL + name] * (VIRTUAL + name in stages)
        stage = Stage(name, world, backend, seconds, relies_on=tuple(tests))
        why_not = _why_not(topology, stage) or no_switch * name.startswith("multimem/")
        stages[name] = replace(stage, why_not=why_not)

    # two_shot and one_shot before LL
    direct = [
        f"direct/{variant}" for variant in dict.fromkeys((*SUMS[::-1], *SHARDS[::-1], "routed"))
    ]
    pipelined = [f"pipelined/{kind}" for kind in KINDS]
    kernels = {f"fused/{kind}": count for kind, count in _KERNELS.items()}
    variants = (*direct, *pipelined, *kernels)
    for variant in variants:
        if shared:
            more = COMPILE_S * (kernels[variant] + _VIRTUAL_KERNELS) if variant in kernels else 0.0
            add(VIRTUAL + variant, START_S + calls + more)
    for variant in variants:
        compiled = VIRTUAL + variant in stages  # into Triton's cache
        add(variant, START_S + calls + (0.0 if compiled else COMPILE_S * kernels.get(variant, 0)))
    for kind in KINDS:
        add(f"multimem/{kind}", backend="nccl")  # gloo's groups sum in order
    for kind in (*KINDS, "all_to_all"):
        add(f"ring/{kind}", backend="nccl")
    for fault, algorithm in itertools.product(FAULTS, ("direct", "pipelined", "fused")):
        if thorough:
            add(f"{fault}, {algorithm}", START_S + _FAULT_S)
    return list(stages.values())


def _why_not(topology: Topology, stage: Stage) -> str:
    shared = stage.world > topology.gpus
    if topology.refused:
        return topology.refused
    if len(set(topology.kinds)) > 1:
        return f"the GPUs are of different models: {', '.join(sorted(set(topology.kinds)))}"
    if topology.capability < 80:
        return f"compute capability is {topology.capability / 10:.1f}; at least 8.0 is required"
    if not topology.peers and not shared:
        return "some GPUs have no peer access to each other"
    if 0 < topology.visible < min(stage.world, topology.gpus):
        return (
            f"a process sees {topology.visible} of {topology.gpus} GPUs: make all visible "
            "(CUDA_VISIBLE_DEVICES; Slurm without --gpus-per-task)"
        )
    if stage.backend == "nccl" and shared:
        return "NCCL does not support two ranks on one GPU"
    return ""
