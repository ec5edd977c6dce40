"""The stages of `tpkernels qualify`, with their order and expected times. Pure: the schedule is a
function of a `Topology`, so tests can schedule for any machine.

World sizes: the largest first, because most jobs use all GPUs of a host. Within a world size,
litmus tests run before the variants that rely on them, and simple protocols before complex
protocols. If ranks share a GPU, all variants first run on virtual ranks, whose kernels run
concurrently (virtual.py). A variant that fails there does not run in processes. A stage that does
not fit the budget does not run, and its variant is not qualified.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpkernels.planning.qualification import COPY_ENGINES, SHARDS, SUMS

FAULTS = ("late", "killed", "another call")  #: faults of one rank
#: Litmus tests of stores, signals and copies.
LITMUS = ("messages", "words", "copies", "bulk")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")  #: collectives of ops with a matmul

# Seconds of a stage on GPUs. START_S: processes, CUDA contexts, symmetric memory. CALLS_S: calls.
# Measured together on an H200, 2026-11-26: 1 to 6 s, or 13 to 22 s with compilation.
# COMPILE_S: compilation of one Triton kernel. Measured CPU time for sm_90 with
# tests/support/kernel_builds.py: median 0.94 s of 15 kernels and 8.1 s for the first kernel on AMD
# EPYC Zen 5, 2026-11-25; 0.7 to 1.6 s on AMD EPYC Zen 1, 2026-11-26.
START_S, CALLS_S, COMPILE_S = 4.0, 2.0, 1.0
# Number of Triton kernels per variant of `fused`.
_KERNELS = {"all_gather": 12, "reduce_scatter": 12, "all_reduce": 18, COPY_ENGINES: 6}
_VIRTUAL_KERNELS = 5  # additional kernels of virtual ranks: 4 and 8 ranks, and without waits
_THOROUGH = 4.0  # factor for the number of calls
_FAULT_S = 15.0
#: Default budgets in seconds: of `tpkernels.qualify`, of one GPU, of several GPUs.
AUTOMATIC_S, ONE_GPU_S, MULTI_GPU_S = 60.0, 240.0, 3600.0
VIRTUAL = "virtual "  #: name prefix of a variant that virtual ranks check
OVER_BUDGET = "over budget"  #: reason why a stage is skipped


# The variants that rely on each litmus test. If the test fails, a correct result of these variants
# proves nothing. On GPUs with TMA, `fused` stores its partial sums with TMA ("bulk").
_LITMUS_DEPENDENTS = {
    "words": ("direct/ll", "direct/ll_two_shot"),
    "messages": (
        *("direct/two_shot", "direct/one_shot", "direct/routed"),
        *(f"fused/{collective}" for collective in COLLECTIVES),
    ),
    "copies": (*(f"pipelined/{collective}" for collective in COLLECTIVES), f"fused/{COPY_ENGINES}"),
    "bulk": ("fused/reduce_scatter", "fused/all_reduce"),
}
_TMA_MIN_CAPABILITY = 90  # minimum compute capability of TMA


@dataclass(frozen=True)
class Topology:
    """The GPUs of a host and their links.

    Attributes:
        gpu_models: names of the GPUs.
        capability: lowest compute capability, 90 for 9.0.
        visible: number of GPUs visible to one rank. Less than all with Slurm ``--gpus-per-task``.
        peers: whether all pairs of GPUs have peer access.
        multicast: whether NVSwitch multicast is available.
        unsupported_reason: reason why ranks cannot run kernels that wait, such as MIG. "" if they
            can.
    """

    gpu_models: tuple[str, ...]
    capability: int
    visible: int = 0
    peers: bool = True
    multicast: bool = False
    unsupported_reason: str = ""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return len(self.gpu_models)


@dataclass(frozen=True)
class Stage:
    """A step of the qualification, in separate processes.

    Attributes:
        name: a litmus test, a fault as "fault, algorithm", or a variant as "algorithm/variant",
            prefixed with `VIRTUAL` if virtual ranks check it.
        world: the number of ranks.
        backend: backend of the process group.
        seconds: expected seconds on a GPU.
        skip_reason: reason why the stage is skipped; "" if it runs.
        prerequisites: litmus tests that must pass first.
    """

    name: str
    world: int
    backend: str = "gloo"
    seconds: float = START_S + CALLS_S
    skip_reason: str = ""
    prerequisites: tuple[str, ...] = ()

    @property
    def is_litmus(self) -> bool:
        """Return whether the stage is a prerequisite of variants, not a variant."""
        return "/" not in self.name or self.is_virtual

    @property
    def is_virtual(self) -> bool:
        """Return whether virtual ranks in one process run the stage."""
        return self.name.startswith(VIRTUAL)

    @property
    def is_over_budget(self) -> bool:
        """Return whether the stage is skipped because of the budget."""
        return OVER_BUDGET in self.skip_reason

    def within(self, remaining: float) -> Stage:
        """Return this stage, marked as skipped if it needs more than ``remaining`` seconds."""
        if self.skip_reason and not self.is_over_budget:
            return self
        reason = f"{OVER_BUDGET}: it needs {self.seconds:.0f} s, and {remaining:.0f} s are left"
        return replace(self, skip_reason=reason if self.seconds > remaining else "")


def default_worlds(topology: Topology) -> tuple[int, ...]:
    """Return the default world sizes: all GPUs of the host, then half of them, down to 2 or 3. With
    one GPU: two ranks, which validate the kernels but not a link."""
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
    has_result: Callable[[str, int], bool] = lambda name, world: False,
) -> list[Stage]:
    """Return the stages in order, including skipped stages with the reason. The budget is compared
    with expected times here, and with elapsed time in `run`.

    Args:
        worlds: the world sizes; empty means `default_worlds`.
        budget: seconds for all stages. Default: 4 minutes with one GPU, otherwise 60 minutes.
        thorough: run four times as many calls, and inject faults: a late rank, a killed rank and a
            rank in a different call.
        only: run only stages whose names start with this, and the litmus tests that they rely on.
        has_result: returns, for a stage name and a world size, whether a saved result exists.
    """
    remaining = resolve_budget(topology, budget)
    planned = []
    for world in worlds or default_worlds(topology):
        stages = _stages(topology, world, thorough)
        requested = [stage for stage in stages if stage.name.startswith(only)]
        required_tests = {test for stage in requested for test in stage.prerequisites}
        skipped: dict[str, str] = {}
        for stage in stages:
            if (stage not in requested and stage.name not in required_tests) or has_result(
                stage.name, world
            ):
                continue
            result = stage.within(remaining)
            missing = [test for test in stage.prerequisites if test in skipped]
            if missing and not result.skip_reason:
                result = replace(stage, skip_reason=f"{missing[0]}: {skipped[missing[0]]}")
            if result.skip_reason:
                skipped[stage.name] = result.skip_reason
            else:
                remaining -= stage.seconds
            planned.append(result)
    return planned


def resolve_budget(topology: Topology, budget: float | None = None) -> float:
    """Return the budget of all stages in seconds, or the default of the machine."""
    default = ONE_GPU_S if topology.gpus == 1 else MULTI_GPU_S
    return default if budget is None else budget


def _stages(topology: Topology, world: int, thorough: bool) -> list[Stage]:
    calls = CALLS_S * (_THOROUGH if thorough else 1.0)
    shared = world > topology.gpus
    no_switch = "" if topology.multicast and not shared else "no NVSwitch multicast"
    stages: dict[str, Stage] = {}

    def add(name: str, seconds: float = START_S + calls, backend: str = "gloo") -> None:
        tests = [test for test, variants in _LITMUS_DEPENDENTS.items() if name in variants]
        if topology.capability < _TMA_MIN_CAPABILITY and "bulk" in tests:
            tests.remove("bulk")
        for test in tests:
            if test not in stages:
                add(test)
        tests += [VIRTUAL + name] * (VIRTUAL + name in stages)
        stage = Stage(name, world, backend, seconds, prerequisites=tuple(tests))
        skip_reason = _find_skip_reason(topology, stage) or no_switch * name.startswith("multimem/")
        stages[name] = replace(stage, skip_reason=skip_reason)

    # Simple protocols first: two_shot and one_shot before LL.
    direct = [
        f"direct/{variant}" for variant in dict.fromkeys((*SUMS[::-1], *SHARDS[::-1], "routed"))
    ]
    pipelined = [f"pipelined/{collective}" for collective in COLLECTIVES]
    kernels = {f"fused/{collective}": count for collective, count in _KERNELS.items()}
    variants = (*direct, *pipelined, *kernels)
    for variant in variants:
        if shared:
            compilation = (
                COMPILE_S * (kernels[variant] + _VIRTUAL_KERNELS) if variant in kernels else 0.0
            )
            add(VIRTUAL + variant, START_S + calls + compilation)
    for variant in variants:
        compiled = VIRTUAL + variant in stages  # the Triton cache then contains the kernels
        add(variant, START_S + calls + (0.0 if compiled else COMPILE_S * kernels.get(variant, 0)))
    for collective in COLLECTIVES:
        add(f"multimem/{collective}", backend="nccl")  # groups with gloo use ordered numerics
    for collective in (*COLLECTIVES, "all_to_all"):
        add(f"ring/{collective}", backend="nccl")
    for fault, algorithm in itertools.product(FAULTS, ("direct", "pipelined", "fused")):
        if thorough:
            add(f"{fault}, {algorithm}", START_S + _FAULT_S)
    return list(stages.values())


def _find_skip_reason(topology: Topology, stage: Stage) -> str:
    shared = stage.world > topology.gpus
    if topology.unsupported_reason:
        return topology.unsupported_reason
    if len(set(topology.gpu_models)) > 1:
        return f"the GPUs are of different models: {', '.join(sorted(set(topology.gpu_models)))}"
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
