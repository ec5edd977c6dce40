"""Faults x moments: one rank is killed, stopped or interrupted, raises, or ends, before a call,
within it or during set-up, among ranks that share memory and ranks of two hosts. What the others
report, and how fast. Each kind is here once, and again for what takes another way; the campaign
(support/campaign.py) draws the rest, every op and algorithm."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.faults import AT_ONCE, CASES, CASES_APART, PROMPT, Ending, Report
from tests.support.ranked import apart, on_hosts, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.algorithms import unfused
from tpkernels.algorithms.hierarchical import cpu as hierarchical
from tpkernels.planning import store
from tpkernels.symm import host, rendezvous
from tpkernels.transport import point_to_point as links
from tpkernels.transport import waits as waiting

WORLD = 4
VICTIM = 2
TIMEOUT = 1.0  # of a group in which a rank is stopped, or misses the set-up
# Which ranks share memory.
MEMORY: dict[str, Callable[[], Any]] = {
    "shared": contextlib.nullcontext,
    "hosts": lambda: on_hosts("0011"),  # the victim's has another rank
    "apart": apart,
}


def _group(memory: str, timeout: float = faults.PATIENCE) -> dist.ProcessGroup:
    with MEMORY[memory]():
        group = faults.new_group(timeout)
    assert faults.shares_memory(group) == (memory == "shared")
    return group


def _repeat(call: Callable[[], None]) -> None:
    while True:
        call()


def _in_product(algorithm: str, then: Callable[[], object]) -> None:
    """Runs ``then()`` within the next local matmul; pipelined and ring have then passed on one part
    of several."""
    whole, left = torch.mm, [2 if algorithm in ("pipelined", "ring") else 1]

    def mm(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            then()
        return whole(*args, **options)

    torch.mm = mm


def _in_gloo(then: Callable[[], object]) -> None:
    """Runs ``then()`` when the others are in torch.distributed already."""

    def late(transport: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            then()
            return transport(*args)

        return wrapped

    unfused._gather = late(unfused._gather)  # type: ignore[assignment]
    unfused._exchange = late(unfused._exchange)  # type: ignore[assignment]


def _disturb(algorithm: str, moment: str, group: dist.ProcessGroup, number: int) -> None:
    """Makes this rank send itself a signal, at a moment:

    before  the others are in the call, this rank never enters it;
    inside  anywhere in one of many calls, with long delays in random places;
    matmul  within its local matmul;
    gloo    all have entered the call, and the others are in torch.distributed.
    """

    def disturb() -> None:
        time.sleep(0.1)
        faults.disturb_now(number)

    if moment == "before":
        disturb()
    elif moment == "inside":
        faults.workspace_of(group).set_chaos(seed=7, max_delay_us=20_000)
        faults.disturb_later(0.15, number)
    elif moment == "matmul":
        _in_product(algorithm, disturb)
    else:
        _in_gloo(disturb)


def disturbed_job(
    memory: str, op: str, algorithm: str, moment: str, number: int, timeout: float
) -> tuple[Report, float] | None:
    """Calls ``op`` until it fails."""
    group, rank = _group(memory, timeout), dist.get_rank()
    survivors = [r for r in range(WORLD) if r != VICTIM]
    others = [faults.new_group(ranks=survivors)] if rank != VICTIM else []
    call = functools.partial(faults.run_op, op, group, algorithm)
    call()
    if rank == VICTIM:
        _disturb(algorithm, moment, group, number)
    report = faults.report_of(functools.partial(_repeat, call), group, others)
    return None if rank == VICTIM else (report, faults.disturbed_at())


# (memory, op, algorithm, moment): each algorithm and moment, then every op by every algorithm.
KILLED = [
    ("shared", "all_gather", "direct", "inside"),
    ("shared", "matmul_reduce_scatter", "pipelined", "matmul"),
    ("shared", "matmul_all_reduce", "unfused", "gloo"),
    ("hosts", "all_gather", "unfused", "before"),
    ("hosts", "matmul_reduce_scatter", "ring", "matmul"),
    ("hosts", "matmul_all_reduce", "hierarchical", "matmul"),
]
KILLED += [("shared", *case, "inside") for case in [*CASES[1:], *CASES_APART]]


@pytest.mark.parametrize(("memory", "op", "algorithm", "moment"), sweep(KILLED, 6, later=4))
def test_a_killed_rank_is_reported(memory: str, op: str, algorithm: str, moment: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        pid = ranks.pids[VICTIM]
        job = (memory, op, algorithm, moment, signal.SIGKILL, faults.PATIENCE)
        outcomes = faults.collect(ranks, disturbed_job, *job)
        for rank, first in faults.require_killed(outcomes, VICTIM).items():
            assert first.error == "PeerLostError" and first.text.startswith(op), first
            assert f"rank {rank} " in first.text, first
            assert "The group is broken: make a new one" in first.text, first
            if memory == "shared":
                assert first.peer == VICTIM and f"rank {VICTIM} (pid {pid})" in first.text, first


# Call #1 is the agreement on measured times.
STOPPED = [
    ("shared", "matmul_reduce_scatter", "pipelined", "before", "expected call #3, seen #2"),
    ("hosts", "matmul_all_reduce", "unfused", "matmul", ""),
    ("shared", "matmul_reduce_scatter", "pipelined", "matmul", ", which is alive; expected"),
    ("shared", "matmul_all_reduce", "unfused", "gloo", ", which is alive; expected"),
    ("hosts", "all_reduce", "ring", "before", ""),
    ("hosts", "matmul_reduce_scatter", "hierarchical", "matmul", ""),
]


@pytest.mark.parametrize(
    ("memory", "op", "algorithm", "moment", "text"), sweep(STOPPED, 2, later=3)
)
def test_a_stopped_rank_is_a_timeout(
    memory: str, op: str, algorithm: str, moment: str, text: str
) -> None:
    """The others give up at their deadline. Then the victim goes on, and must notice as well."""
    with faults.watched_ranks(WORLD) as ranks:
        ranks.submit(disturbed_job, memory, op, algorithm, moment, signal.SIGSTOP, TIMEOUT)
        endings = list(faults.collect_stopped(ranks, VICTIM, TIMEOUT, TIMEOUT).values())
        os.kill(ranks.pids[VICTIM], signal.SIGCONT)
        continued_at = time.monotonic()
        outcome = ranks.collect(faults.COLLECT_SECONDS)[VICTIM]
        assert outcome.ok and time.monotonic() - continued_at < TIMEOUT + PROMPT, outcome
        late = {"CollectiveTimeoutError"}
        for first in endings:
            assert first.text.startswith(op), first
            assert first.error in (late if memory == "shared" else {*late, "PeerLostError"}), first
        assert any(first.error in late for first in endings), endings
        if memory == "shared":
            blamed = f"rank {VICTIM} (pid {ranks.pids[VICTIM]})"
            assert any(blamed in first.text and text in first.text for first in endings), endings
        if moment in ("before", "gloo"):
            assert any(first.peer == VICTIM for first in endings), endings


def failing_job(memory: str, op: str, algorithm: str) -> Report:
    """The victim's matmul raises; the others are in the call."""
    group = _group(memory)
    others = [faults.new_group()]
    call = functools.partial(faults.run_op, op, group, algorithm)
    call()

    def give_up() -> None:
        time.sleep(0.1)
        raise ArithmeticError("no luck with these numbers")

    if dist.get_rank() == VICTIM:
        _in_product(algorithm, give_up)
    report = faults.report_of(functools.partial(_repeat, call), group, others)
    new = _group(memory)
    report.others.append(faults.ending_of(lambda: faults.run_op(op, new, algorithm)))
    return report


FAILING = [
    ("shared", "matmul_reduce_scatter", "pipelined"),
    ("hosts", "all_gather_matmul", "unfused"),
    ("shared", "matmul_all_reduce", "unfused"),
    ("hosts", "matmul_reduce_scatter", "hierarchical"),
    ("shared", "all_gather_matmul", "direct"),
    ("hosts", "matmul_all_reduce", "ring"),
]


@pytest.mark.parametrize(("memory", "op", "algorithm"), sweep(FAILING, 2, later=2))
def test_an_exception_in_one_rank_reaches_all(memory: str, op: str, algorithm: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        reports = faults.values(faults.collect(ranks, failing_job, memory, op, algorithm))
        raised_at = reports[VICTIM].first.at
        for rank, report in reports.items():
            faults.require_broken(report)
            first = report.first
            if rank == VICTIM:
                assert first.error == "ArithmeticError" and "no luck" in first.text, first
                continue
            assert first.error == "PeerLostError" and first.at - raised_at < PROMPT, first
            if memory == "shared":
                assert first.peer == VICTIM, first
                assert f"rank {VICTIM} (pid {ranks.pids[VICTIM]})" in first.text, first
                assert "ArithmeticError: no luck with these numbers" in first.text, first


def interrupted_job(algorithm: str, in_gloo: bool) -> tuple[Report, float]:
    """The victim is interrupted while it waits for the others, which come later."""
    group, rank = faults.new_group(), dist.get_rank()
    others = [faults.new_group()]
    call = functools.partial(faults.run_op, "all_gather_matmul", group, algorithm)
    call()
    at = time.monotonic() + 0.2
    if rank == VICTIM:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faults.disturb_later(0.2, signal.SIGINT)
    elif in_gloo:
        _in_gloo(lambda: time.sleep(0.6))
    else:
        time.sleep(0.5)
    return faults.report_of(functools.partial(_repeat, call), group, others), at


@pytest.mark.parametrize(
    ("algorithm", "in_gloo"), sweep([("direct", False), ("unfused", True), ("pipelined", False)])
)
def test_an_interrupt_ends_a_wait(algorithm: str, in_gloo: bool) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        reports = faults.values(faults.collect(ranks, interrupted_job, algorithm, in_gloo))
        for rank, (report, at) in reports.items():
            faults.require_broken(report)
            first = report.first
            if rank == VICTIM:
                assert first.error == "KeyboardInterrupt" and first.at - at < PROMPT, first
                continue
            assert first.error == "PeerLostError" and first.peer == VICTIM, first
            assert "it left the call with KeyboardInterrupt" in first.text, first
            assert first.seconds < PROMPT, first


class _SlowWork:
    """A torch.distributed work that seems to take half a second longer than it does."""

    def __init__(self, work: Any) -> None:
        self.work, self.until = work, time.monotonic() + 0.5

    def is_completed(self) -> bool:
        return time.monotonic() > self.until and self.work.is_completed()

    def wait(self, *_: Any) -> None:
        if not self.is_completed():
            time.sleep(0.02)
            raise RuntimeError("Operation timed out!")
        self.work.wait()


def leaving_job(op: str, algorithm: str) -> Ending:
    """All but the victim exit after their last call, while the victim still has data to receive."""
    group, rank = faults.new_group(), dist.get_rank()
    finish = waiting.finish
    if rank == VICTIM:
        for module in (unfused, links):
            module.finish = lambda call, work: finish(call, _SlowWork(work))
    ending = faults.ending_of(lambda: faults.run_op(op, group, algorithm))
    if rank != VICTIM and not ending.error:
        os._exit(0)
    return ending


@pytest.mark.parametrize(
    ("op", "algorithm"), sweep([("reduce_scatter", "ring"), ("all_gather", "unfused")])
)
def test_a_rank_that_has_finished_may_exit(op: str, algorithm: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        for outcome in faults.collect(ranks, leaving_job, op, algorithm):
            if outcome.rank == VICTIM:
                assert outcome.ok and not outcome.value.error, outcome
            else:
                assert outcome.exitcode == 0, outcome


def returning_job(seconds: float, number: int) -> tuple[Ending, float]:
    """Rank 1 gets its sum late: with four ranks on the second host it returns from there, after the
    last step. Meanwhile rank 0, on the same host, has finished and ends, or it gets a signal while
    its own sum is under way."""
    rank, send, finish = dist.get_rank(), hierarchical.Shared.send, hierarchical.Sums._finish

    def late(levels: hierarchical.Shared, data: torch.Tensor, to: int) -> None:
        if to == 1:
            time.sleep(seconds)
        send(levels, data, to)

    def disturbed(ours: hierarchical.Sums) -> None:
        if number and rank == 0:
            time.sleep(0.2)  # rank 1 waits
            faults.disturb_now(number)
        finish(ours)

    with on_hosts("001111"):
        group = faults.new_group()
    hierarchical.Shared.send = late  # type: ignore[method-assign]
    hierarchical.Sums._finish = disturbed  # type: ignore[method-assign]

    def call() -> None:
        result = tpkernels.reduce_scatter(torch.ones(6), group, algorithm="hierarchical")
        assert result.tolist() == [6.0]

    ending = faults.ending_of(call)
    if rank == 0:
        os._exit(0)
    return ending, faults.disturbed_at() if number else 0.0


@pytest.mark.thorough
def test_hierarchical_watches_the_ranks_of_its_host_while_it_waits_for_another() -> None:
    with faults.watched_ranks(6) as ranks:
        outcomes = faults.collect(ranks, returning_job, 0.5, 0)
        assert outcomes[0].exitcode == 0, outcomes[0]  # it has finished, and may end
        assert not any(ending.error for ending, _ in faults.values(outcomes, 0).values()), outcomes
    with faults.watched_ranks(6) as ranks:
        outcomes = faults.collect(ranks, returning_job, 2.0, signal.SIGKILL)
        ending, killed_at = faults.values(outcomes, 0)[1]
        assert ending.error == "PeerLostError" and ending.peer == 0, ending
        assert "rank 1 waited for rank 0 (pid " in ending.text, ending
        assert ending.at - killed_at < AT_ONCE, ending


@pytest.mark.parametrize("memory", sweep(["apart", "shared", "hosts"], 2))
@on_ranks(WORLD)
def test_all_learn_that_a_rank_has_failed_alone(memory: str) -> None:
    """A step that all ranks take together between calls fails on rank 0 alone, which reads its file
    of measured times; then a call."""
    group = _group(memory)
    with mock.patch.object(store, "load", side_effect=OSError("a damaged disk")):
        first = faults.ending_of(lambda: groups.get(group.group_name).tuned("cpu"))
    rank = dist.get_rank()
    again = faults.ending_of(lambda: tpkernels.all_reduce(torch.ones(4), group))
    assert first.error == ("PeerLostError" if rank else "OSError"), first
    assert "a damaged disk" in first.text and first.seconds < PROMPT, first
    assert first.peer == (0 if rank else None), first
    assert again.error == "GroupBrokenError" and again.seconds < PROMPT, again


# Set-up: the first workspace, a larger one, symmetric tensors.


def _grow(group: dist.ProcessGroup) -> None:
    x, w = torch.ones(512, 1024), torch.ones(1024, 2)
    tpkernels.all_gather_matmul(x, w, group, algorithm="pipelined")


STEPS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "init": lambda group: tpkernels.init(group, TIMEOUT, faults.WORKSPACE_BYTES),
    "growth": _grow,
    "empty": lambda group: tpkernels.empty(1 << 20, group=group),
}


def set_up_job(
    step: str, moment: str, victim: int, number: int, timeout: float
) -> tuple[Report, float] | None:
    """The victim sends itself a signal, "before" it meets the others or instead of the "map" of
    memory."""
    group, rank = faults.group_of(dist.new_group()), dist.get_rank()
    if step != "init":
        tpkernels.init(group, timeout, 8 << 20 if step == "growth" else faults.WORKSPACE_BYTES)
    call = STEPS[step]

    def disturb(*_: Any) -> None:
        time.sleep(0.1)
        faults.disturb_now(number)

    if rank == victim:
        if step == "growth":
            name = "_commit" if moment == "map" else "grow"
            setattr(host.HostWorkspace, name, disturb)
        elif moment == "map":
            rendezvous._Arena._map = disturb  # type: ignore[method-assign, assignment]
        elif step == "init":
            call = disturb
        else:
            host.make_arena = disturb  # type: ignore[assignment]
    return faults.report_of_survivors(lambda: call(group), group, victim)


# (step, moment, victim): first each step, and then what takes another way.
SET_UPS = [("growth", "map", 2), ("empty", "before", 0), ("init", "map", 0), ("init", "before", 2)]
SET_UPS += [("growth", "before", 0), ("init", "map", 2), ("empty", "map", 0)]


@pytest.mark.parametrize(("step", "moment", "victim"), sweep(SET_UPS, 2, later=2))
def test_a_rank_killed_in_a_set_up_is_reported(step: str, moment: str, victim: int) -> None:
    alone = step == "init" and moment == "before"  # nobody knows its process yet
    timeout = TIMEOUT if step == "init" else faults.PATIENCE
    with faults.watched_ranks(WORLD) as ranks:
        job = (step, moment, victim, signal.SIGKILL, timeout)
        outcomes = faults.collect(ranks, set_up_job, *job)
        endings = faults.require_killed(outcomes, victim, late=TIMEOUT if alone else 0.0)
        for first in endings.values():
            assert first.error == ("CollectiveTimeoutError" if alone else "PeerLostError"), first
            assert first.peer == victim and f"rank {victim}" in first.text, first
            if step != "init":
                assert f"rank {victim} (pid {ranks.pids[victim]})" in first.text, first


@pytest.mark.parametrize(("step", "moment", "victim"), sweep(SET_UPS, 1, later=1))
def test_a_rank_stopped_in_a_set_up_is_a_timeout(step: str, moment: str, victim: int) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        ranks.submit(set_up_job, step, moment, victim, signal.SIGSTOP, TIMEOUT)
        endings = faults.collect_stopped(ranks, victim, TIMEOUT, rendezvous._GRACE)
        for first in endings.values():
            assert first.error == "CollectiveTimeoutError", first
            assert first.peer == victim and f"rank {victim}" in first.text, first
