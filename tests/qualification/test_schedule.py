"""Stages that `tpkernels qualify` would run on several machines, their order, and their total
time."""

from __future__ import annotations

import pytest

from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import get_variants
from tpkernels.qualification.schedule import (
    AUTOMATIC_S,
    LITMUS,
    MULTI_GPU_S,
    ONE_GPU_S,
    OVER_BUDGET,
    VIRTUAL,
    Stage,
    Topology,
    schedule,
)

H100 = ("NVIDIA H100 80GB HBM3",)
MACHINES = {
    "8 H100": (Topology(H100 * 8, 90, multicast=True), (8, 4, 2), MULTI_GPU_S),
    "2 A100 over PCIe": (Topology(("NVIDIA A100-PCIE-40GB",) * 2, 80), (2,), MULTI_GPU_S),
    "GB200": (Topology(("NVIDIA GB200",) * 4, 100), (4, 2), MULTI_GPU_S),
    "one GPU for two ranks": (Topology(H100, 90), (2,), ONE_GPU_S),
    "3 GPUs": (Topology(H100 * 3, 90), (3,), MULTI_GPU_S),
}


def get_runnable(stages: list[Stage]) -> list[Stage]:
    return [stage for stage in stages if not stage.skip_reason]


@pytest.mark.parametrize("machine", MACHINES)
def test_runnable_stages_fit_the_budget(machine: str) -> None:
    topology, worlds, budget = MACHINES[machine]
    stages = schedule(topology)
    assert tuple(dict.fromkeys(stage.world for stage in stages)) == worlds
    assert sum(stage.seconds for stage in get_runnable(stages)) <= budget
    left_out = {stage.name: stage.skip_reason for stage in stages if stage.skip_reason}
    shared = {stage.name for stage in stages if stage.name.startswith("ring/")}
    switch = {stage.name for stage in stages if stage.name.startswith("multimem")}
    expected = shared if topology.gpus == 1 else set()
    expected |= set() if topology.multicast else switch
    assert left_out.keys() == expected, left_out


@pytest.mark.parametrize("machine", MACHINES)
def test_required_stages_come_first(machine: str) -> None:
    topology, worlds, _ = MACHINES[machine]
    for world in worlds:
        stages = schedule(topology, [world])
        names = [stage.name for stage in stages]
        assert len(set(names)) == len(names)
        for stage in stages:
            assert all(names.index(test) < names.index(stage.name) for test in stage.prerequisites)
            is_torch_only = stage.name.startswith(("ring/", "multimem/"))
            assert stage.prerequisites or stage.is_litmus or is_torch_only
            on_virtual_ranks = {test for test in stage.prerequisites if test.startswith(VIRTUAL)}
            virtual = topology.gpus == 1 and not (stage.is_litmus or is_torch_only)
            assert on_virtual_ranks == ({VIRTUAL + stage.name} if virtual else set())
    fused = next(stage for stage in stages if stage.name == "fused/reduce_scatter")
    assert ("bulk" in fused.prerequisites) == (topology.capability >= 90)


def test_every_variant_of_every_op_has_a_stage() -> None:
    names = {stage.name for stage in schedule(MACHINES["8 H100"][0])}
    needed = {
        variant
        for name, algorithm in ALGORITHMS.items()
        for op, spec in OPS.items()
        if name != "unfused" and op not in algorithm.unsupported_ops.get("cuda", ())
        if spec.has_matmul or not algorithm.overlaps_matmul
        for variant in get_variants(spec, name)
    }
    assert names == needed | set(LITMUS) | {"fused/copy_engines"}


def test_the_automatic_minute() -> None:
    """The automatic run covers the variants of `direct` for decoding. Stages that do not run give
    the reason."""
    stages = schedule(MACHINES["8 H100"][0], [8], budget=AUTOMATIC_S)
    ran = get_runnable(stages)
    assert sum(stage.seconds for stage in ran) <= AUTOMATIC_S
    assert {f"direct/{variant}" for variant in ("two_shot", "ll", "one_shot")} <= {
        stage.name for stage in ran
    }
    rest = [stage for stage in stages if stage.skip_reason]
    assert rest and all(stage.is_over_budget for stage in rest)


REFUSED = {
    "make all visible": Topology(H100 * 8, 90, visible=1),
    "MIG": Topology(H100 * 2, 90, unsupported_reason="MIG instances do not support peer access"),
    "of different models": Topology((*H100, "NVIDIA A100"), 80),
    "at least 8.0 is required": Topology(("Tesla V100",) * 2, 70),
    "no peer access": Topology(("NVIDIA L4",) * 2, 89, peers=False),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_machines(reason: str) -> None:
    stages = schedule(REFUSED[reason])
    assert stages and all(reason in stage.skip_reason for stage in stages)


def test_a_selection_of_stages() -> None:
    """The litmus tests that the selected stages rely on also run, unless they have results."""
    variants = [f"pipelined/{kind}" for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    for finished, needed in ((set(), ["copies"]), ({"copies"}, [])):
        stages = schedule(
            MACHINES["8 H100"][0],
            [2],
            only="pipelined/",
            has_result=lambda name, _, finished=finished: name in finished,
        )
        assert [stage.name for stage in stages] == needed + variants


def test_one_gpu_runs_everything_on_virtual_ranks_first() -> None:
    """Stages that do not fit the four minutes, or that rely on such a stage, give the reason."""
    topology = MACHINES["one GPU for two ranks"][0]
    names = [stage.name for stage in get_runnable(schedule(topology))]
    virtual = [name for name in names if name.startswith(VIRTUAL)]
    assert names[: len(virtual)] == virtual and len(virtual) == 12
    assert {f"{VIRTUAL}{name}" for name in names if "/" in name} >= {*virtual}
    left_out = {s.name: s for s in schedule(topology, budget=20.0, only="fused/all_r")}
    assert left_out[f"{VIRTUAL}fused/all_reduce"].is_over_budget
    assert left_out["fused/all_reduce"].skip_reason.startswith(f"{VIRTUAL}fused/all_reduce: ")


def test_a_stage_must_fit_the_remaining_time() -> None:
    stage = Stage("direct/ll", 2, seconds=6.0)
    late = stage.within(5.0)
    assert late.skip_reason == f"{OVER_BUDGET}: it needs 6 s, and 5 s are left"
    assert late.within(6.0) == stage  # earlier stages were faster than planned
    refused = Stage("ring/all_gather", 2, skip_reason="NCCL does not support two ranks on one GPU")
    assert refused.within(100.0) == refused == refused.within(0.0)
