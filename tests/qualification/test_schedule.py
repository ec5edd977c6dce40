"""Which stages `tpkernels qualify` would run on machines that are not here, in which order, and
whether they fit the time."""

from __future__ import annotations

import pytest

from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import variants_of
from tpkernels.qualification.schedule import (
    AUTOMATIC_S,
    LITMUS,
    MOST_S,
    ONE_GPU_S,
    OVER_BUDGET,
    VIRTUAL,
    Stage,
    Topology,
    schedule,
)

H100 = ("NVIDIA H100 80GB HBM3",)
MACHINES = {
    "8 H100": (Topology(H100 * 8, 90, multicast=True), (8, 4, 2), MOST_S),
    "2 A100 over PCIe": (Topology(("NVIDIA A100-PCIE-40GB",) * 2, 80), (2,), MOST_S),
    "GB200": (Topology(("NVIDIA GB200",) * 4, 100), (4, 2), MOST_S),
    "one GPU for two ranks": (Topology(H100, 90), (2,), ONE_GPU_S),
    "3 GPUs": (Topology(H100 * 3, 90), (3,), MOST_S),
}


def run_of(stages: list[Stage]) -> list[Stage]:
    return [stage for stage in stages if not stage.why_not]


@pytest.mark.parametrize("machine", MACHINES)
def test_all_that_a_machine_can_run_fits_the_time(machine: str) -> None:
    topology, worlds, budget = MACHINES[machine]
    stages = schedule(topology)
    assert tuple(dict.fromkeys(stage.world for stage in stages)) == worlds
    assert sum(stage.seconds for stage in run_of(stages)) <= budget
    left_out = {stage.name: stage.why_not for stage in stages if stage.why_not}
    shared = {stage.name for stage in stages if stage.name.startswith("ring/")}
    switch = {stage.name for stage in stages if stage.name.startswith("multimem")}
    wanted = shared if topology.gpus == 1 else set()
    wanted |= set() if topology.multicast else switch
    assert left_out.keys() == wanted, left_out


@pytest.mark.parametrize("machine", MACHINES)
def test_what_a_variant_relies_on_comes_before_it(machine: str) -> None:
    topology, worlds, _ = MACHINES[machine]
    for world in worlds:
        stages = schedule(topology, [world])
        names = [stage.name for stage in stages]
        assert len(set(names)) == len(names)
        for stage in stages:
            assert all(names.index(test) < names.index(stage.name) for test in stage.relies_on)
            torchs = stage.name.startswith(("ring/", "multimem/"))
            assert stage.relies_on or stage.is_litmus or torchs
            on_virtual_ranks = {test for test in stage.relies_on if test.startswith(VIRTUAL)}
            virtual = topology.gpus == 1 and not (stage.is_litmus or torchs)
            assert on_virtual_ranks == ({VIRTUAL + stage.name} if virtual else set())
    fused = next(stage for stage in stages if stage.name == "fused/reduce_scatter")
    assert ("bulk" in fused.relies_on) == (topology.capability >= 90)


def test_every_variant_of_every_op_has_a_stage() -> None:
    names = {stage.name for stage in schedule(MACHINES["8 H100"][0])}
    needed = {
        variant
        for name, algorithm in ALGORITHMS.items()
        for op, spec in OPS.items()
        if name != "unfused" and op not in algorithm.lacks.get("cuda", ())
        if spec.has_matmul or not algorithm.overlaps_matmul
        for variant in variants_of(spec, name)
    }
    assert names == needed | set(LITMUS) | {"fused/copy_engines"}


def test_the_automatic_minute() -> None:
    """It covers the variants of `direct`, for decoding; other stages give why they did not run."""
    stages = schedule(MACHINES["8 H100"][0], [8], budget=AUTOMATIC_S)
    ran = run_of(stages)
    assert sum(stage.seconds for stage in ran) <= AUTOMATIC_S
    assert {f"direct/{variant}" for variant in ("two_shot", "ll", "one_shot")} <= {
        stage.name for stage in ran
    }
    rest = [stage for stage in stages if stage.why_not]
    assert rest and all(stage.is_over_budget for stage in rest)


REFUSED = {
    "make all visible": Topology(H100 * 8, 90, visible=1),
    "MIG": Topology(H100 * 2, 90, refused="MIG instances do not support peer access"),
    "of different models": Topology((*H100, "NVIDIA A100"), 80),
    "at least 8.0 is required": Topology(("Tesla V100",) * 2, 70),
    "no peer access": Topology(("NVIDIA L4",) * 2, 89, peers=False),
}


@pytest.mark.parametrize("why", REFUSED)
def test_machines_that_can_run_nothing(why: str) -> None:
    stages = schedule(REFUSED[why])
    assert stages and all(why in stage.why_not for stage in stages)


def test_only_some() -> None:
    """With the litmus tests that they rely on, unless these are known."""
    variants = [f"pipelined/{kind}" for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    for known, needed in ((set(), ["copies"]), ({"copies"}, [])):
        stages = schedule(
            MACHINES["8 H100"][0],
            [2],
            only="pipelined/",
            known=lambda name, _, known=known: name in known,
        )
        assert [stage.name for stage in stages] == needed + variants


def test_one_gpu_runs_everything_on_virtual_ranks_first() -> None:
    """And names what does not fit into its four minutes, or relies on something that does not."""
    topology = MACHINES["one GPU for two ranks"][0]
    names = [stage.name for stage in run_of(schedule(topology))]
    virtual = [name for name in names if name.startswith(VIRTUAL)]
    assert names[: len(virtual)] == virtual and len(virtual) == 12
    assert {f"{VIRTUAL}{name}" for name in names if "/" in name} >= {*virtual}
    left_out = {s.name: s for s in schedule(topology, budget=20.0, only="fused/all_r")}
    assert left_out[f"{VIRTUAL}fused/all_reduce"].is_over_budget
    assert left_out["fused/all_reduce"].why_not.startswith(f"{VIRTUAL}fused/all_reduce: ")


def test_a_stage_fits_into_the_time_that_is_left() -> None:
    stage = Stage("direct/ll", 2, seconds=6.0)
    late = stage.within(5.0)
    assert late.why_not == f"{OVER_BUDGET}: it needs 6 s, and 5 s are left"
    assert late.within(6.0) == stage  # the stages before it took less than expected
    refused = Stage("ring/all_gather", 2, why_not="NCCL does not support two ranks on one GPU")
    assert refused.within(100.0) == refused == refused.within(0.0)
