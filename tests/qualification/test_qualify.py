"""A dry run of `tpkernels qualify` between processes: the kernels of csrc/cuda on the emulated
driver, Triton kernels under the interpreter.

After a clean pass, faults are planted one at a time. Each fault disqualifies only the variants that
it affects.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support import emulated
from tests.support.cuda_rehearsal import SharedMemory
from tests.support.multimem_rehearsal import Multimem
from tests.support.nccl_rehearsal import nccl_code_path
from tests.support.tiers import sweep
from tpkernels.algorithms import fused, multimem
from tpkernels.algorithms.backends import TABLES
from tpkernels.cuda import layouts
from tpkernels.errors import CollectiveTimeoutError
from tpkernels.launch.session import rank_device
from tpkernels.planning.qualification import (
    DISQUALIFIED,
    NOT_RUN,
    QUALIFIED,
    QualificationReport,
    StageOutcome,
)
from tpkernels.qualification import checks, faults, litmus, virtual
from tpkernels.qualification.run import run
from tpkernels.qualification.schedule import VIRTUAL, Stage, Topology, schedule
from tpkernels.symm import gpu_memory

TWO = Topology(("a GPU",) * 2, 90, multicast=True)
ONE = Topology(("a GPU",), 90)
PREREQUISITES = {stage.name: stage.prerequisites for stage in schedule(TWO)}


@contextlib.contextmanager
def dry_run(
    driver: str, kernel: str = "", kind: str = "", patch: Callable[[], Any] | None = None
) -> Iterator[None]:
    """Run a rank on the code path of CUDA tensors. The last rank has a fault of ``kind`` in
    ``kernel``, or a patch. Virtual ranks share one process, so all of them are affected."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(nccl_code_path(driver, None))
        if kernel:  # waits for missing signals end soon
            for module, name in (
                (checks, "TIMEOUT_S"),
                (litmus, "TIMEOUT_S"),
                (virtual, "_CPU_TIMEOUT_S"),
            ):
                stack.enter_context(mock.patch.object(module, name, 4.0))
        stack.enter_context(mock.patch.object(faults, "_TIMEOUT_S", 1.5))
        if dist.get_rank() == dist.get_world_size() - 1:
            emulated.library().emulated_plant(kernel.encode(), kind.encode())
            if patch is not None:
                stack.enter_context(patch())
        yield


def run_stages(rank_context: Any, *names: str, topology: Topology = TWO) -> dict[str, StageOutcome]:
    """Run the stages with these names, or all stages, and return their outcomes."""
    stages = [stage for stage in schedule(topology) if not names or stage.name in names]
    report: QualificationReport = run(stages, "cpu", rank_context=rank_context)
    return {**report.litmus.get("2", {}), **report.variants.get("2", {})}


@pytest.mark.parametrize("kind", sweep(["direct", "others", "fused"], 1, 1))
def test_a_clean_pass(cuda_driver: str, kind: str) -> None:
    kinds = {name: name.partition("/")[0] for name in PREREQUISITES}
    names = {name for name, prefix in kinds.items() if prefix == kind}
    if kind == "others":
        names = {name for name, prefix in kinds.items() if prefix not in ("direct", "fused")}
    names |= {test for name in names for test in PREREQUISITES[name]}
    outcomes = run_stages(functools.partial(dry_run, cuda_driver), *names)
    assert {outcome.status for outcome in outcomes.values()} == {QUALIFIED}, outcomes
    assert all(outcome.checks >= 12 for outcome in outcomes.values())


# (kernel with the fault, disqualified variant, unaffected variant, kind of failure)
SHARDS, SUMS = "one_shot_all_gather", "two_shot_all_reduce"
FAULTS = {
    "torn word": ("ll_all_reduce", "direct/ll", "direct/ll_two_shot", "wrong"),
    "missing fence": (SHARDS, "direct/one_shot", "direct/ll", "wrong"),
    "stale parity": (SUMS, "direct/two_shot", "direct/ll", "wrong"),
    "wrong peer offset": (SHARDS, "direct/one_shot", "direct/two_shot", "wrong"),
    "off-by-one rows": (SUMS, "direct/two_shot", "direct/one_shot", "wrong"),
    "lost wake-up": (SHARDS, "direct/one_shot", "direct/two_shot", "error"),
    "hang": (SHARDS, "direct/one_shot", "direct/two_shot", "hang"),
    "missing fence of routes": ("routed_combine", "direct/routed", "direct/ll", "wrong"),
    "crash": ("ll_two_shot_all_reduce", "direct/ll_two_shot", "direct/two_shot", "crash"),
}


@pytest.mark.parametrize("fault", sweep(FAULTS, 3, 1))
def test_a_fault_disqualifies_its_variant(cuda_driver: str, fault: str) -> None:
    kernel, affected, unaffected, kind = FAULTS[fault]
    rank_context = functools.partial(dry_run, cuda_driver, kernel, fault)
    with mock.patch.multiple("tpkernels.qualification.run", _MIN_S=12.0, _GRACE=1.0):
        outcomes = run_stages(
            rank_context, *PREREQUISITES[affected], *PREREQUISITES[unaffected], affected, unaffected
        )
    assert outcomes[unaffected].status == QUALIFIED, outcomes[unaffected]
    assert outcomes[affected].status == DISQUALIFIED
    failure = outcomes[affected].failure
    assert failure is not None and failure.kind == kind, failure


LITMUS_FAULTS = {
    "words": ("litmus_words", "torn word", "direct/ll"),
    "messages": ("litmus_messages", "missing fence", "direct/one_shot"),
    "copies": ("call_publish", "lost wake-up", "pipelined/all_gather"),
    "bulk": ("litmus_bulk", "missing fence", "fused/reduce_scatter"),
}


@pytest.mark.parametrize("test", sweep(LITMUS_FAULTS, 1, 1))
def test_a_failed_litmus_test_disqualifies_its_variants(cuda_driver: str, test: str) -> None:
    kernel, fault, variant = LITMUS_FAULTS[test]
    outcomes = run_stages(functools.partial(dry_run, cuda_driver, kernel, fault), test, variant)
    failure = outcomes[test].failure
    assert outcomes[test].status == DISQUALIFIED and failure is not None
    assert outcomes[variant].status == NOT_RUN and test in outcomes[variant].why, outcomes[variant]
    if failure.kind == "wrong":
        assert 0 < failure.wrong <= failure.elements and failure.first
        assert failure.peer == 1


def rolled_rows() -> Any:
    """Patch an op so that the rows of x are off by one."""
    key = "matmul_reduce_scatter", "fused"
    run = TABLES["cuda"][key]

    def off_by_one(call: Any, x: torch.Tensor, *args: Any) -> Any:
        return run(call, x.roll(1, 0), *args)

    return mock.patch.dict(TABLES["cuda"], {key: off_by_one})


class Scarce(SharedMemory):
    """Memory that is too small for the workspace of a large call."""

    @staticmethod
    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        if nbytes > 100_000:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
        return torch.empty(nbytes, **options)


class WrongSwitch(Multimem):
    """An in-switch reduction with a wrong row on this rank."""

    def multimem_all_reduce_(self, x: torch.Tensor, op: str, name: str) -> None:
        super().multimem_all_reduce_(x, op, name)
        x[:1] += 1


def wrong_switch() -> Any:
    return mock.patch.object(multimem, "_ops", WrongSwitch())


def no_memory() -> Any:
    return mock.patch.multiple(gpu_memory, symmetric_memory=Scarce, SymmetricMemory=Scarce)


PATCHES = {
    "out of memory": (no_memory, "direct/two_shot", "direct/one_shot", "memory"),
    "wrong sums": (wrong_switch, "multimem/all_reduce", "multimem/all_gather", "wrong"),
    "off-by-one rows": (rolled_rows, "fused/reduce_scatter", "fused/copy_engines", "wrong"),
}


@pytest.mark.parametrize("fault", sweep(PATCHES, 2, 2))
def test_a_fault_outside_the_kernels_of_cuda(cuda_driver: str, fault: str) -> None:
    patch, affected, unaffected, kind = PATCHES[fault]
    rank_context = functools.partial(dry_run, cuda_driver, patch=patch)
    outcomes = run_stages(rank_context, "messages", "copies", affected, unaffected)
    failure = outcomes[affected].failure
    assert outcomes[unaffected].status == QUALIFIED, outcomes[unaffected]
    assert failure is not None and failure.kind == kind, outcomes[affected]
    assert failure.first or "out of memory" in failure.text, failure


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", sweep(["fused", "direct", "pipelined"]))
def test_faults_of_a_rank(cuda_driver: str, algorithm: str) -> None:
    stages = [
        stage for stage in schedule(TWO, thorough=True) if stage.name.endswith(f", {algorithm}")
    ]
    report = run(stages, "cpu", rank_context=functools.partial(dry_run, cuda_driver))
    assert len(report.litmus["2"]) == 3
    assert {outcome.status for outcome in report.litmus["2"].values()} == {QUALIFIED}, report.litmus


# Virtual ranks: forks of a process in these tests, streams of a process on a GPU.


@pytest.mark.parametrize(
    "variants",
    [
        ["direct/routed", "pipelined/all_gather"],
        pytest.param(
            [
                *(f"direct/{variant}" for variant in ("two_shot", "ll", "ll_two_shot", "one_shot")),
                *("pipelined/reduce_scatter", "pipelined/all_reduce"),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(["fused/all_gather", "fused/reduce_scatter"], marks=pytest.mark.slow),
        pytest.param(["fused/all_reduce", "fused/copy_engines"], marks=pytest.mark.slow),
    ],
    ids=["default", "more", "fused", "more fused"],
)
def test_virtual_ranks_pass(cuda_driver: str, variants: list[str]) -> None:
    rank_context = functools.partial(dry_run, cuda_driver)
    outcomes = run_stages(rank_context, *(VIRTUAL + variant for variant in variants), topology=ONE)
    assert len(outcomes) == len(variants)
    assert {outcome.status for outcome in outcomes.values()} == {QUALIFIED}, outcomes
    assert all(outcome.checks >= 8 for outcome in outcomes.values())


@pytest.mark.parametrize("fault", sweep(["off-by-one rows", "crash"]))
def test_a_variant_that_fails_on_virtual_ranks_is_not_run_in_processes(
    cuda_driver: str, fault: str
) -> None:
    variant = "direct/ll_two_shot" if fault == "crash" else "direct/two_shot"
    kernel = f"{variant.removeprefix('direct/')}_all_reduce"
    rank_context = functools.partial(dry_run, cuda_driver, kernel, fault)
    outcomes = run_stages(
        rank_context, VIRTUAL + variant, variant, VIRTUAL + "direct/one_shot", topology=ONE
    )
    failure = outcomes[VIRTUAL + variant].failure
    assert failure is not None and failure.kind == ("crash" if fault == "crash" else "wrong"), (
        failure
    )
    assert outcomes[variant].status == NOT_RUN and VIRTUAL + variant in outcomes[variant].why
    assert outcomes[VIRTUAL + "direct/one_shot"].status == QUALIFIED


@emulated.on_ranks(1)
def test_a_virtual_rank_that_makes_no_call_is_reported() -> None:
    with mock.patch.object(virtual, "_CPU_TIMEOUT_S", 0.5):
        ranks = virtual.VirtualRanks(2, torch.device("cpu"), 1 << 12)
    call = next(checks.make_calls("direct/one_shot", "cpu", 1))
    operands = [call.operands(rank, 2, ranks.device) for rank in range(2)]
    rank_0_call = ranks.bind(operands[0], "direct")
    assert ranks.failed_wait() is None
    ranks.run([rank_0_call, list], lambda rank, results: None)
    failed = ranks.failed_wait()
    assert failed is not None and failed[0] == 0
    assert isinstance(failed[1], CollectiveTimeoutError) and failed[1].peer == 1, failed


def test_virtual_ranks_need_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs only virtual ranks has no process group."""
    current = list[int]()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    assert rank_device("cuda") == torch.device("cuda", 0)


def test_virtual_ranks_share_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of one rank must not occupy more than its share. Otherwise the kernels of its peers
    never start."""
    from tpkernels.kernels import configs

    monkeypatch.setattr(configs, "INTERPRETED", False)
    gpu = torch.device("cuda", 0)
    with configs.assume_device(90, 132):
        for world, max_blocks in ((8, 16), (2, 64)):
            with virtual.sharing(gpu, world):
                assert configs.config_for(gpu, torch.bfloat16, 4096, 4096).programs == 132 // world
                assert max_blocks == layouts.MAX_BLOCKS
        assert configs.config_for(gpu, torch.bfloat16, 4096, 4096).programs == 132
    assert layouts.MAX_BLOCKS == 64


def check_loading(variant: str) -> None:
    """Require that each launch of `load` ends without peers and leaves no state for later calls.
    The dtype is float32, because the interpreter cannot fill bfloat16 with NaN."""
    call = next(
        item for item in checks.make_calls(variant, "cpu", 1) if item.dtype == torch.float32
    )
    ranks = virtual.create_ranks(variant, torch.device("cpu"), 2, [call])
    algorithm = variant.partition("/")[0]
    operands = [call.operands(rank, 2, ranks.device) for rank in range(2)]
    launches, begin = [ranks.bind(item, algorithm) for item in operands], time.monotonic()
    ranks._forked = False
    ranks.load(launches)
    ranks._forked = True
    assert time.monotonic() - begin < virtual._CPU_TIMEOUT_S / 2
    assert not any(
        workspace.state.any() or workspace.control.any() for workspace in ranks.workspaces
    )
    assert not any(region.any() for region in ranks._regions)
    check = functools.partial(virtual._compare, operands, [[], []])
    assert ranks.run(launches, check) is None and ranks.failed_wait() is None


@emulated.on_ranks(1)
def test_kernels_are_loaded_one_rank_after_the_other() -> None:
    for variant in ("direct/two_shot", "direct/ll", "pipelined/all_gather"):
        check_loading(variant)


@pytest.mark.thorough
@emulated.interpreted(1)
def test_interpreted_kernels_are_loaded_one_rank_after_the_other() -> None:
    check_loading("fused/all_reduce")


def ignore_skipped_waits() -> Any:
    set_chaos = virtual.VirtualRanks.set_chaos

    def set_delays(ranks: virtual.VirtualRanks, max_delay_us: int, **broken: bool) -> None:
        set_chaos(ranks, max_delay_us)

    return mock.patch.multiple(virtual.VirtualRanks, set_chaos=set_delays)


@pytest.mark.thorough
def test_virtual_ranks_must_detect_skipped_waits(cuda_driver: str) -> None:
    rank_context = functools.partial(dry_run, cuda_driver, patch=ignore_skipped_waits)
    name = VIRTUAL + "direct/one_shot"
    failure = run_stages(rank_context, name, topology=ONE)[name].failure
    assert failure is not None and "the checks miss a removed wait" in failure.text


def broken_copies() -> Any:
    return mock.patch.object(
        fused, "_gather_by_copy_engines", side_effect=RuntimeError("no copies")
    )


@pytest.mark.thorough
def test_virtual_ranks_use_copy_engines_to_check_them(cuda_driver: str) -> None:
    """Their shards are so small that kernels would copy them otherwise."""
    rank_context = functools.partial(dry_run, cuda_driver, patch=broken_copies)
    name = VIRTUAL + "fused/copy_engines"
    failure = run_stages(rank_context, name, topology=ONE)[name].failure
    assert failure is not None and "no copies" in failure.text


def test_a_stage_without_a_driver_is_not_run() -> None:
    """Without an emulated driver, no variant is disqualified."""
    name = VIRTUAL + "direct/one_shot"
    outcome = run_stages(None, name, topology=ONE)[name]
    assert outcome.status == NOT_RUN and "driver" in outcome.why, outcome


def test_stages_follow_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage is planned with 6 s. The first lasts 9 s, the next stages 2 s.

    Stages run as long as their planned time fits the remaining budget, even if the plan skipped
    them.
    """
    clock = [100.0]

    def outcome(stage: Stage, *_: object) -> StageOutcome:
        if stage.skip_reason:
            return StageOutcome(NOT_RUN, why=stage.skip_reason)
        clock[0] += 9.0 if stage.name == "direct/a" else 2.0
        return StageOutcome(QUALIFIED)

    monkeypatch.setattr("tpkernels.qualification.run._run_stage", outcome)
    monkeypatch.setattr("tpkernels.qualification.run.time.monotonic", lambda: clock[0])
    stages = [Stage(f"direct/{name}", 2, seconds=6.0) for name in "abcde"]
    stages[3] = stages[3].within(0.0)  # skipped by the plan
    report = run(stages, "cpu", budget=20.0)
    ran = [name for name, result in report.variants["2"].items() if result.status == QUALIFIED]
    assert ran == ["direct/a", "direct/b", "direct/c", "direct/d"]
    assert report.variants["2"]["direct/e"].why == "over budget: it needs 6 s, and 5 s are left"
