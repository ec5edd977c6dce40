"""Ranks that die, stop or fail in the middle of an op: what the others report, and how fast."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import faults
from tests.support.faults import CASES, MATMUL_CASES, PROMPT, SCALED_CASES, Ending, Report
from tests.support.tiers import sweep
from tpkernels.algorithms import unfused
from tpkernels.transport import point_to_point as links
from tpkernels.transport import waits as waiting

WORLD = 4
VICTIM = 2
STOP_TIMEOUT = 1.0
# One op by each algorithm; then the others.
_EACH = [("all_gather", "direct"), ("matmul_reduce_scatter", "pipelined")]
_EACH += [("all_reduce", "ring"), ("matmul_all_reduce", "unfused")]
KILLED = [*_EACH, *(case for case in [*CASES, *SCALED_CASES] if case not in _EACH)]
STOPPED = [*_EACH[1::2], *(case for case in CASES if case not in _EACH[1::2])]


def _break_product(on_call: int, then: Any) -> None:
    """Replaces the n-th call of the local matmul, counted from now on, with ``then()``."""
    calls = 0
    whole = torch.mm

    def mm(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return then() if calls == on_call else whole(*args, **options)

    torch.mm = mm


def _break_gloo(first: Callable[[], object]) -> None:
    """Makes this rank run ``first()`` when the others are in torch.distributed already."""

    def late(transport: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            time.sleep(0.1)
            first()
            return transport(*args)

        return wrapped

    unfused._gather = late(unfused._gather)  # type: ignore[assignment]
    unfused._exchange = late(unfused._exchange)  # type: ignore[assignment]


def _repeat(call: Callable[[], None]) -> None:
    while True:
        call()


def disturbed_job(
    op: str, algorithm: str, where: str, number: int, timeout: float
) -> tuple[Report, float] | None:
    """Calls ``op`` until it fails; the victim sends itself a signal, depending on ``where``:

    before        the others are in the call, the victim never enters it;
    inside        anywhere in one of many calls, with long delays in random places;
    local_matmul  within its matmul; pipelined and ring have then passed on one part of several;
    gloo          all have entered the call, and the others are in torch.distributed.
    """
    group, rank = faults.new_group(timeout), dist.get_rank()
    survivors = [r for r in range(WORLD) if r != VICTIM]
    others = [faults.new_group(ranks=survivors)] if rank != VICTIM else []
    call = functools.partial(faults.run_op, op, group, algorithm)
    call()
    disturb = functools.partial(faults.disturb_now, number)
    if rank == VICTIM and where == "before":
        time.sleep(0.1)
        disturb()
    if rank == VICTIM and where == "local_matmul":
        _break_product(2 if algorithm in ("pipelined", "ring") else 1, disturb)
    if rank == VICTIM and where == "gloo":
        _break_gloo(disturb)
    if rank == VICTIM and where == "inside":
        faults.workspace_of(group).set_chaos(seed=7, max_delay_us=20_000)
        faults.disturb_later(0.15, number)

    report = faults.report_of(functools.partial(_repeat, call), group, others)
    if rank == VICTIM:
        return None
    new = faults.new_group(ranks=survivors)
    report.others.append(faults.ending_of(lambda: faults.run_op(op, new, algorithm)))
    return report, faults.disturbed_at()


def _kill(op: str, algorithm: str, where: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        pid = ranks.pids[VICTIM]
        outcomes = faults.collect(
            ranks, disturbed_job, op, algorithm, where, signal.SIGKILL, faults.PATIENCE
        )
        for rank, first in faults.require_killed(outcomes, VICTIM).items():
            assert first.error == "PeerLostError" and first.peer == VICTIM, first
            assert f"rank {VICTIM} (pid {pid})" in first.text, first
            assert first.text.startswith(op) and f"rank {rank} " in first.text, first


@pytest.mark.parametrize(("op", "algorithm"), sweep(KILLED, len(_EACH), later=3))
@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.slow), "inside"])
def test_a_killed_rank_is_reported(op: str, algorithm: str, where: str) -> None:
    _kill(op, algorithm, where)


@pytest.mark.parametrize(("op", "algorithm"), sweep(MATMUL_CASES))
def test_a_rank_killed_in_its_matmul_is_reported(op: str, algorithm: str) -> None:
    _kill(op, algorithm, "local_matmul")


@pytest.mark.parametrize("op", sweep(op for op, algorithm in CASES if algorithm == "unfused"))
def test_a_rank_killed_while_others_are_in_gloo_is_reported(op: str) -> None:
    _kill(op, "unfused", "gloo")


def _stop(op: str, algorithm: str, where: str) -> list[Ending]:
    """How the survivors' calls end, which give up at their deadline. Then the victim is continued,
    and must notice as well."""
    with faults.watched_ranks(WORLD) as ranks:
        ranks.submit(disturbed_job, op, algorithm, where, signal.SIGSTOP, STOP_TIMEOUT)
        endings = list(faults.collect_stopped(ranks, VICTIM, STOP_TIMEOUT, STOP_TIMEOUT).values())
        for first in endings:
            assert first.error == "CollectiveTimeoutError" and first.text.startswith(op), first
        os.kill(ranks.pids[VICTIM], signal.SIGCONT)
        continued_at = time.monotonic()
        outcome = ranks.collect(faults.COLLECT_SECONDS)[VICTIM]
        assert outcome.ok and time.monotonic() - continued_at < STOP_TIMEOUT + PROMPT, outcome
        blamed = re.compile(
            rf"rank {VICTIM} \(pid {ranks.pids[VICTIM]}\), which is alive; expected"
        )
        assert any(blamed.search(first.text) for first in endings), endings
        return endings


@pytest.mark.parametrize(("op", "algorithm"), sweep(STOPPED))
def test_a_stopped_rank_is_a_timeout(op: str, algorithm: str) -> None:
    for first in _stop(op, algorithm, "before"):
        assert first.peer == VICTIM, first
        # Call #1 is the agreement on measured times.
        assert "expected call #3, seen #2" in first.text, first


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["local_matmul", pytest.param("inside", marks=pytest.mark.slow)])
def test_a_rank_stopped_within_a_call_is_a_timeout(where: str) -> None:
    for first in _stop("matmul_reduce_scatter", "pipelined", where):
        assert first.peer is not None, first


@pytest.mark.thorough
def test_a_rank_stopped_while_others_are_in_gloo_is_a_timeout() -> None:
    for first in _stop("matmul_all_reduce", "unfused", "gloo"):
        assert first.peer == VICTIM, first


def failing_job(op: str, algorithm: str) -> Report:
    """The victim's matmul raises; the others are in the call."""
    group, rank = faults.new_group(), dist.get_rank()
    others = [faults.new_group()]
    call = functools.partial(faults.run_op, op, group, algorithm)
    call()

    def give_up() -> None:
        time.sleep(0.1)
        raise ArithmeticError("no luck with these numbers")

    if rank == VICTIM:
        _break_product(2 if algorithm in ("pipelined", "ring") else 1, give_up)
    report = faults.report_of(functools.partial(_repeat, call), group, others)
    new = faults.new_group()
    report.others.append(faults.ending_of(lambda: faults.run_op(op, new, algorithm)))
    return report


@pytest.mark.parametrize(("op", "algorithm"), sweep([*_EACH[1::2], *MATMUL_CASES]))
def test_an_exception_in_one_rank_reaches_all(op: str, algorithm: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        reports = faults.values(faults.collect(ranks, failing_job, op, algorithm))
        raised_at = reports[VICTIM].first.at
        for rank, report in reports.items():
            faults.require_broken(report)
            first = report.first
            if rank == VICTIM:
                assert first.error == "ArithmeticError" and "no luck" in first.text, first
                continue
            assert first.error == "PeerLostError" and first.peer == VICTIM, first
            assert f"rank {VICTIM} (pid {ranks.pids[VICTIM]})" in first.text, first
            assert "ArithmeticError: no luck with these numbers" in first.text, first
            assert first.at - raised_at < PROMPT, first


def interrupted_job(algorithm: str, in_gloo: bool) -> tuple[Report, float]:
    """The victim is interrupted while it waits for the others, which come later."""
    group, rank = faults.new_group(), dist.get_rank()
    others = [faults.new_group()]
    call = functools.partial(faults.run_op, "all_gather_matmul", group, algorithm)
    call()
    at = 0.0
    if rank == VICTIM:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        at = time.monotonic() + 0.2
        faults.disturb_later(0.2, signal.SIGINT)
    elif in_gloo:
        _break_gloo(lambda: time.sleep(0.5))
    else:
        time.sleep(0.5)
    return faults.report_of(functools.partial(_repeat, call), group, others), at


@pytest.mark.parametrize(
    ("algorithm", "in_gloo"),
    sweep([("direct", False), ("unfused", True), ("unfused", False), ("pipelined", False)]),
)
def test_an_interrupt_ends_a_wait(algorithm: str, in_gloo: bool) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        reports = faults.values(faults.collect(ranks, interrupted_job, algorithm, in_gloo))
        for rank, (report, at) in reports.items():
            faults.require_broken(report)
            first = report.first
            if rank == VICTIM:
                faults.require_interrupted(first, at)
                continue
            assert first.error == "PeerLostError" and first.peer == VICTIM, first
            assert f"rank {VICTIM} (pid {ranks.pids[VICTIM]})" in first.text, first
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
