"""Run the stages of a qualification, each in processes of its own with a deadline, so that a crash,
a hang or a spoilt CUDA context costs only the variant that it disqualifies."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import date
from typing import Any

import torch
from torch.autograd import DeviceType

from tpkernels.common import nvml
from tpkernels.launch import RankError, Ranks
from tpkernels.launch.ranks import Outcome
from tpkernels.launch.session import SHARED_GPU
from tpkernels.planning.qualification import (
    DISQUALIFIED,
    NOT_RUN,
    QUALIFIED,
    Failure,
    QualificationReport,
    StageOutcome,
)
from tpkernels.qualification import checks, faults, litmus, virtual
from tpkernels.qualification.checks import StageReport
from tpkernels.qualification.schedule import LITMUS, VIRTUAL, Stage, Topology
from tpkernels.torch_private import SymmetricMemory

_CUDA = DeviceType.CUDA
_REPORT_S = 5.0  # for the other ranks to say what they saw after one was killed
_GRACE = 4.0  # times the seconds that a stage is expected to take, to its deadline
_LEAST_S = 60.0
# What says more about the cause comes first: peers of a rank that crashed, or that left when it saw
# wrong values, wait in vain.
_KINDS = ("crash", "wrong", "memory", "hang", "error", "lost", "unsupported")
Around = Callable[[], AbstractContextManager[Any]]


def topology_here() -> Topology:
    """Return what this host's GPUs can do for one another."""
    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    peers, present = True, count
    with contextlib.suppress(*nvml.ERRORS):
        present = max(count, len(nvml.uuids()))
    for i in range(count):
        others = (j for j in range(count) if j != i)
        peers = peers and all(torch.cuda.can_device_access_peer(i, j) for j in others)
    mig = any("MIG" in gpu.name for gpu in found)
    kinds = tuple(gpu.name for gpu in found)
    return Topology(
        kinds + kinds[:1] * (present - count),
        min((10 * gpu.major + gpu.minor for gpu in found), default=0),
        count,
        peers,
        count > 1 and all(SymmetricMemory.has_multicast_support(_CUDA, i) for i in range(count)),
        "MIG instances do not support peer access" if mig else "",
    )


def run(
    stages: list[Stage],
    device: str,
    *,
    repeats: int = 1,
    budget: float = math.inf,
    known: QualificationReport | None = None,
    around: Around | None = None,
    on_stage: Callable[
        [Stage, StageOutcome, QualificationReport], None
    ] = lambda stage, outcome, report: None,
) -> QualificationReport:
    """Run stages in their order; return the report.

    Args:
        device: "cuda"; "cpu" rehearses them on CPU tensors.
        budget: seconds for all stages. One that is expected to take more than what is left is not
            run.
        known: an earlier report, which the new one extends; its litmus tests count.
        around: makes a context in which each rank runs its part, where a test replaces GPUs.
        on_stage: called after each stage, with the report so far.
    """
    report, begin = known or QualificationReport(), time.monotonic()
    for planned in stages:
        stage = planned.within(budget - (time.monotonic() - begin))
        world = str(stage.world)
        litmus_tests = report.litmus.get(world, {})
        outcome = _outcome(stage, device, repeats, around, litmus_tests)
        new = {world: {stage.name: outcome}}
        today = date.today().isoformat()
        report = report.extended(
            QualificationReport(today, litmus=new)
            if stage.is_litmus
            else QualificationReport(today, variants=new)
        )
        on_stage(stage, outcome, report)
    return report


def _outcome(
    stage: Stage,
    device: str,
    repeats: int,
    around: Around | None,
    litmus_tests: Mapping[str, StageOutcome],
) -> StageOutcome:
    if stage.why_not:
        return StageOutcome(NOT_RUN, why=stage.why_not)
    for test in stage.relies_on:
        if device == "cpu" and test not in litmus_tests:
            continue
        relied_on = litmus_tests.get(test, StageOutcome(NOT_RUN, why="not run"))
        if relied_on.status != QUALIFIED:
            what = test if "/" in test else f"litmus test of {test}"
            return StageOutcome(NOT_RUN, why=f"{what}: {relied_on.reason}")
    begin = time.monotonic()
    reports, ended = _reports(stage, device, repeats, around)
    seconds = round(time.monotonic() - begin, 1)
    killed = stage.name.startswith("killed")  # as it is meant to be
    failures = [
        _ending(one, stage)
        for one in ended
        if not one.ok and not (killed and one.rank == faults.CULPRIT and one.exitcode == -9)
    ]
    failures += [one.failure for one in reports if one.failure is not None]
    count = min((one.checks for one in reports), default=0)
    return outcome_of(failures, count, seconds)


def outcome_of(failures: Sequence[Failure], count: int, seconds: float) -> StageOutcome:
    """Return the outcome of a stage with ``count`` right calls, and the failures of its ranks."""
    if not failures:
        return StageOutcome(QUALIFIED, count, seconds)
    first = min(failures, key=lambda failure: _KINDS.index(failure.kind))
    if first.kind == "unsupported":  # on all ranks that say anything
        return StageOutcome(NOT_RUN, count, seconds, why=first.text)
    return StageOutcome(DISQUALIFIED, count, seconds, failure=first)


def _reports(
    stage: Stage, device: str, repeats: int, around: Around | None
) -> tuple[list[StageReport], list[Outcome]]:
    """Return what the ranks report, and how those ended that do not."""
    world, env = stage.world, {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    if stage.is_virtual:
        world, env = 1, env | virtual.ENVIRONMENT
    elif device == "cuda" and world > torch.cuda.device_count():
        env |= SHARED_GPU
    backend = "gloo" if device == "cpu" else stage.backend
    limit = max(_LEAST_S, _GRACE * stage.seconds * repeats)
    try:
        with Ranks(
            world, backend=backend, env=env, start_timeout=_LEAST_S, lost_grace=_REPORT_S
        ) as ranks:
            found = ranks.run(run_on_rank, stage.name, device, repeats, around, timeout=limit)
            return found, []
    except RankError as error:
        return [one.value for one in error.outcomes if one.ok], list(error.outcomes)


def run_on_rank(name: str, device: str, repeats: int, around: Around | None) -> StageReport:
    """Run a rank's part of a stage."""
    with around() if around is not None else contextlib.nullcontext():
        if name.startswith(VIRTUAL):
            return virtual.check(name.removeprefix(VIRTUAL), device, repeats)
        if "/" in name:
            return checks.check_variant(name, device, repeats)
        if name in LITMUS:
            return litmus.check(name, device, repeats)
        return faults.check(name, device)


def _ending(ended: Outcome, stage: Stage) -> Failure:
    """Return how a rank failed that did not report."""
    call = f"{stage.name} on {stage.world} ranks"
    if ended.timed_out:
        return Failure("hang", call, ended.rank, text=f"no report after {ended.seconds:.0f} s")
    if ended.exitcode is not None:
        code = ended.exitcode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Failure("crash", call, ended.rank, text=f"the process ended: {how}")
    lines = (ended.error or "").strip().splitlines()
    return Failure("error", call, ended.rank, text=lines[-1] if lines else "")
