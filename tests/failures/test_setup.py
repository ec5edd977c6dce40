"""Ranks that are missing, die, stop or lack memory during the set-up of shared memory: the first
workspace, a larger one, symmetric tensors."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT, Ending, Report
from tests.support.tiers import sweep
from tpkernels.symm import host, rendezvous

WORLD = 4
TIMEOUT = 1.0


def _grow(group: dist.ProcessGroup) -> None:
    x, w = torch.ones(512, 1024), torch.ones(1024, 2)
    tpkernels.all_gather_matmul(x, w, group, algorithm="pipelined")


STEPS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "init": lambda group: tpkernels.init(group, TIMEOUT, faults.WORKSPACE_BYTES),
    "growth": _grow,
    "empty": lambda group: tpkernels.empty(1 << 20, group=group),
}


def disturbed_job(
    step: str, where: str, victim: int, number: int, timeout: float
) -> tuple[Report, float] | None:
    """The victim sends itself a signal, "before" it meets the others or instead of the "map" of
    memory."""
    group, rank = faults.group_of(dist.new_group()), dist.get_rank()
    survivors = [r for r in range(WORLD) if r != victim]
    others = [faults.new_group(ranks=survivors)] if rank != victim else []
    if step != "init":
        tpkernels.init(group, timeout, 8 << 20 if step == "growth" else faults.WORKSPACE_BYTES)
    call = STEPS[step]

    def disturb(*_: Any) -> None:
        time.sleep(0.1)
        faults.disturb_now(number)

    if rank == victim and step == "growth":
        name = "_commit" if where == "map" else "grow"
        setattr(host.HostWorkspace, name, disturb)
    elif rank == victim and where == "map":
        rendezvous._Arena._map = disturb  # type: ignore[assignment]
    elif rank == victim and step == "init":
        call = disturb
    elif rank == victim:
        host.make_arena = disturb  # type: ignore[assignment]
    report = faults.report_of(lambda: call(group), group, others)
    if rank == victim:
        return None
    new = faults.new_group(ranks=survivors)
    report.others.append(faults.ending_of(lambda: STEPS[step](new) if step != "init" else None))
    return report, faults.disturbed_at()


# First each step, and then what takes another way.
CASES = [("growth", "map", 2), ("empty", "before", 0), ("init", "map", 0), ("init", "before", 2)]
CASES += [("init", "before", 0), ("growth", "before", 0), ("growth", "before", 2)]
CASES += [("growth", "map", 0), ("init", "map", 2), ("empty", "before", 2), ("empty", "map", 0)]
CASES += [("empty", "map", 2)]


@pytest.mark.parametrize(("step", "where", "victim"), sweep(CASES, 2, later=2))
def test_a_killed_rank_is_reported(step: str, where: str, victim: int) -> None:
    alone = step == "init" and where == "before"  # nobody knows its process yet
    timeout = TIMEOUT if step == "init" else faults.PATIENCE
    with faults.watched_ranks(WORLD) as ranks:
        outcomes = faults.collect(
            ranks, disturbed_job, step, where, victim, signal.SIGKILL, timeout
        )
        endings = faults.require_killed(outcomes, victim, late=TIMEOUT if alone else 0.0)
        for first in endings.values():
            assert first.error == ("CollectiveTimeoutError" if alone else "PeerLostError"), first
            assert first.peer == victim and f"rank {victim}" in first.text, first
            if step != "init":
                assert f"rank {victim} (pid {ranks.pids[victim]})" in first.text, first


@pytest.mark.parametrize(
    ("step", "where", "victim"),
    sweep(CASES),
)
def test_a_stopped_rank_is_a_timeout(step: str, where: str, victim: int) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        ranks.submit(disturbed_job, step, where, victim, signal.SIGSTOP, TIMEOUT)
        endings = faults.collect_stopped(ranks, victim, TIMEOUT, rendezvous._GRACE)
        for first in endings.values():
            assert first.error == "CollectiveTimeoutError", first
            assert first.peer == victim and f"rank {victim}" in first.text, first


def late_job(victim: int) -> tuple[Ending, Ending]:
    """A rank that arrives after the others gave up."""
    group = faults.group_of(dist.new_group())
    if group.rank() == victim:
        time.sleep(2 * TIMEOUT)
    first = faults.ending_of(lambda: STEPS["init"](group))
    return first, faults.ending_of(lambda: faults.run_op("all_reduce", group))


@pytest.mark.slow
def test_a_late_rank_gives_up_as_well(ranks: RanksFixture) -> None:
    for rank, (first, again) in enumerate(ranks(WORLD).run(late_job, 2)):
        assert first.error == "CollectiveTimeoutError", first
        assert first.seconds < TIMEOUT + PROMPT and "which did not arrive" in first.text, first
        assert (first.peer == 2) == (rank != 2), first
        assert again.error == "GroupBrokenError" and again.seconds < PROMPT / 2, again


# Memory.


def too_much_job(nbytes: int) -> tuple[Ending, Ending]:
    group = faults.group_of(dist.new_group())
    first = faults.ending_of(lambda: tpkernels.init(group, faults.PATIENCE, nbytes))
    tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    return first, faults.ending_of(lambda: faults.run_op("matmul_all_reduce", group))


@pytest.mark.parametrize("nbytes", sweep([1 << 50, 1 << 44, 1 << 56]))
def test_too_large_a_workspace_is_an_error_on_all_ranks(ranks: RanksFixture, nbytes: int) -> None:
    for first, then in ranks(WORLD).run(too_much_job, nbytes):
        assert first.error == "MemoryError" and first.seconds < PROMPT, first
        assert "cannot map" in first.text or "cannot size" in first.text, first
        assert "give tpkernels.init a smaller workspace_bytes" in first.text, first
        assert not then.error, then


@contextlib.contextmanager
def little_address_space(room: int) -> Any:
    """Lets this process map only ``room`` more bytes during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def too_much_on_some_job(poor: tuple[int, ...], step: str) -> tuple[Ending, Ending]:
    """Some ranks cannot map what the others can."""
    group, other = faults.group_of(dist.new_group()), faults.new_group()
    if step == "empty":
        tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)

    def call() -> None:
        if step == "empty":
            tpkernels.empty(32 << 20, group=group)
        else:
            tpkernels.init(group, faults.PATIENCE, 64 << 20)

    if group.rank() in poor:
        with little_address_space(100 << 20):
            first = faults.ending_of(call)
    else:
        first = faults.ending_of(call)
    faults.run_op("all_gather", other)
    if step == "init":
        tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    return first, faults.ending_of(lambda: faults.run_op("all_gather", group))


@pytest.mark.parametrize(
    ("poor", "step"), sweep([((1, 3), "init"), ((0,), "empty"), ((0, 1, 2, 3), "init")], later=2)
)
def test_memory_that_one_rank_lacks_is_an_error_on_all(
    ranks: RanksFixture, poor: tuple[int, ...], step: str
) -> None:
    for first, then in ranks(WORLD).run(too_much_on_some_job, poor, step):
        assert first.error == "MemoryError" and first.seconds < PROMPT, first
        assert "no shared memory for the group: rank" in first.text, first
        assert "cannot map" in first.text and "Cannot allocate memory" in first.text, first
        assert not then.error, then
