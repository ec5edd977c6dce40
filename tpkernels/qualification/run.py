"""Run the stages of a qualification. Each stage runs in separate processes with a deadline, so a
crash, a hang or a corrupted CUDA context disqualifies only the variant under test."""

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
_REPORT_S = 5.0  # seconds in which the remaining ranks report after a rank was killed
_GRACE = 4.0  # deadline of a stage / expected seconds
_MIN_S = 60.0  # minimum deadline, in seconds
# Kinds of failures, closest to the cause first. If a rank crashes or exits after wrong values, the
# waits of its peers fail later.
_FAILURE_KINDS = ("crash", "wrong", "memory", "hang", "error", "lost", "unsupported")
RankContext = Callable[[], AbstractContextManager[Any]]


def get_topology() -> Topology:
    """Return the topology of the GPUs on this host."""
    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    has_peer_access, num_gpus = True, count
    with contextlib.suppress(*nvml.ERRORS):
        num_gpus = max(count, len(nvml.uuids()))
    for i in range(count):
        peers = (j for j in range(count) if j != i)
        has_peer_access = has_peer_access and all(
            torch.cuda.can_device_access_peer(i, j) for j in peers
        )
    mig = any("MIG" in gpu.name for gpu in gpus)
    gpu_models = tuple(gpu.name for gpu in gpus)
    return Topology(
        gpu_models + gpu_models[:1] * (num_gpus - count),
        min((10 * gpu.major + gpu.minor for gpu in gpus), default=0),
        count,
        has_peer_access,
        count > 1 and all(SymmetricMemory.has_multicast_support(_CUDA, i) for i in range(count)),
        "MIG instances do not support peer access" if mig else "",
    )


def run(
    stages: list[Stage],
    device: str,
    *,
    repeats: int = 1,
    budget: float = math.inf,
    previous: QualificationReport | None = None,
    rank_context: RankContext | None = None,
    on_stage: Callable[
        [Stage, StageOutcome, QualificationReport], None
    ] = lambda stage, outcome, report: None,
) -> QualificationReport:
    """Run the stages in order. Return the report.

    Args:
        device: "cuda", or "cpu" for a dry run on CPU tensors.
        budget: time limit for all stages, in seconds. A stage is skipped if its expected time
            exceeds the remaining time.
        previous: an earlier report to extend. Its litmus tests count.
        rank_context: creates a context manager that every rank enters. Tests use it to emulate
            GPUs.
        on_stage: called after each stage, with the report so far.
    """
    report, begin = previous or QualificationReport(), time.monotonic()
    for planned in stages:
        stage = planned.within(budget - (time.monotonic() - begin))
        world = str(stage.world)
        litmus_tests = report.litmus.get(world, {})
        outcome = _run_stage(stage, device, repeats, rank_context, litmus_tests)
        new = {world: {stage.name: outcome}}
        today = date.today().isoformat()
        report = report.extended(
            QualificationReport(today, litmus=new)
            if stage.is_litmus
            else QualificationReport(today, variants=new)
        )
        on_stage(stage, outcome, report)
    return report


def _run_stage(
    stage: Stage,
    device: str,
    repeats: int,
    rank_context: RankContext | None,
    litmus_tests: Mapping[str, StageOutcome],
) -> StageOutcome:
    if stage.skip_reason:
        return StageOutcome(NOT_RUN, why=stage.skip_reason)
    for test in stage.prerequisites:
        if device == "cpu" and test not in litmus_tests:
            continue
        outcome = litmus_tests.get(test, StageOutcome(NOT_RUN, why="not run"))
        if outcome.status != QUALIFIED:
            name = test if "/" in test else f"litmus test of {test}"
            return StageOutcome(NOT_RUN, why=f"{name}: {outcome.reason}")
    begin = time.monotonic()
    reports, rank_outcomes = _collect_reports(stage, device, repeats, rank_context)
    seconds = round(time.monotonic() - begin, 1)
    killed = stage.name.startswith("killed")  # the fault test kills a rank on purpose
    failures = [
        _make_failure(outcome, stage)
        for outcome in rank_outcomes
        if not outcome.ok
        and not (killed and outcome.rank == faults.CULPRIT and outcome.exitcode == -9)
    ]
    failures += [report.failure for report in reports if report.failure is not None]
    count = min((report.checks for report in reports), default=0)
    return make_outcome(failures, count, seconds)


def make_outcome(failures: Sequence[Failure], count: int, seconds: float) -> StageOutcome:
    """Return the outcome of a stage, given the failures of its ranks and the number of correct
    calls."""
    if not failures:
        return StageOutcome(QUALIFIED, count, seconds)
    first = min(failures, key=lambda failure: _FAILURE_KINDS.index(failure.kind))
    if first.kind == "unsupported":  # the last kind, so all failures are of this kind
        return StageOutcome(NOT_RUN, count, seconds, why=first.text)
    return StageOutcome(DISQUALIFIED, count, seconds, failure=first)


def _collect_reports(
    stage: Stage, device: str, repeats: int, rank_context: RankContext | None
) -> tuple[list[StageReport], list[Outcome]]:
    """Return the reports of the ranks, and the outcomes of all ranks if a rank did not report."""
    world, env = stage.world, {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    if stage.is_virtual:
        world, env = 1, env | virtual.ENVIRONMENT
    elif device == "cuda" and world > torch.cuda.device_count():
        env |= SHARED_GPU
    backend = "gloo" if device == "cpu" else stage.backend
    limit = max(_MIN_S, _GRACE * stage.seconds * repeats)
    try:
        with Ranks(
            world, backend=backend, env=env, start_timeout=_MIN_S, lost_grace=_REPORT_S
        ) as ranks:
            reports = ranks.run(
                run_on_rank, stage.name, device, repeats, rank_context, timeout=limit
            )
            return reports, []
    except RankError as error:
        return [outcome.value for outcome in error.outcomes if outcome.ok], list(error.outcomes)


def run_on_rank(
    name: str, device: str, repeats: int, rank_context: RankContext | None
) -> StageReport:
    """Run a stage on this rank."""
    with rank_context() if rank_context is not None else contextlib.nullcontext():
        if name.startswith(VIRTUAL):
            return virtual.check(name.removeprefix(VIRTUAL), device, repeats)
        if "/" in name:
            return checks.check_variant(name, device, repeats)
        if name in LITMUS:
            return litmus.check(name, device, repeats)
        return faults.check(name, device)


def _make_failure(outcome: Outcome, stage: Stage) -> Failure:
    """Return the failure of a rank that did not report."""
    call = f"{stage.name} on {stage.world} ranks"
    if outcome.timed_out:
        return Failure("hang", call, outcome.rank, text=f"no report after {outcome.seconds:.0f} s")
    if outcome.exitcode is not None:
        code = outcome.exitcode
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Failure("crash", call, outcome.rank, text=f"the process ended: {cause}")
    lines = (outcome.error or "").strip().splitlines()
    return Failure("error", call, outcome.rank, text=lines[-1] if lines else "")
