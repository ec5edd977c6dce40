"""Tests of single faults: one rank is killed, stopped or interrupted, raises, or exits, before a
call, during it or during setup.

The ranks share memory or simulate two hosts. The tests check the error on every surviving rank and
the time until it is raised. Each kind of fault runs once per code path; the campaign
(support/campaign.py) draws ops, algorithms and moments at random.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.campaign import KINDS, MEMORY, Trial, run_trial
from tests.support.faults import CASES, IMMEDIATE, PROMPT, SCALED_AND_ROUTED_CASES, Ending
from tests.support.ranked import on_hosts, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.algorithms import hierarchical, unfused
from tpkernels.algorithms import point_to_point as links
from tpkernels.algorithms import waits as waiting
from tpkernels.planning import store

WORLD = 4
VICTIM = 2


def _trials(kind: str, rows: list[tuple[Any, ...]], *fields: str) -> list[Trial]:
    return [Trial(kind=kind, **dict(zip(fields, row, strict=False))) for row in rows]


@pytest.mark.parametrize("kind", sweep(KINDS, num_thorough=2))
def test_a_fault_of_each_kind(kind: str) -> None:
    """Run the first random trial of this kind with a fault during calls, not during setup."""
    drawn = map(Trial.drawn, itertools.count())
    wrong, _ = run_trial(next(trial for trial in drawn if trial.kind == kind and not trial.step))
    assert not wrong, wrong


@pytest.mark.thorough
def test_a_fault_in_the_set_up() -> None:
    drawn = map(Trial.drawn, itertools.count())
    wrong, _ = run_trial(next(trial for trial in drawn if trial.step and trial.kind == "kill"))
    assert not wrong, wrong


# Each algorithm and moment first, then every op with every algorithm.
KILLED = [
    ("shared", "matmul_reduce_scatter", "pipelined", "matmul"),
    ("shared", "matmul_all_reduce", "unfused", "gloo"),
    ("hosts", "all_gather", "unfused", "before"),
    ("hosts", "matmul_reduce_scatter", "ring", "matmul"),
    ("hosts", "matmul_all_reduce", "hierarchical", "matmul"),
]
KILLED += [("shared", *case, 0.15) for case in [*CASES, *SCALED_AND_ROUTED_CASES]]
STOPPED = [
    ("shared", "matmul_reduce_scatter", "pipelined", "before", "expected call #2, seen #1"),
    ("hosts", "matmul_all_reduce", "unfused", "matmul"),
    ("shared", "matmul_reduce_scatter", "pipelined", "matmul", ", which is alive; expected"),
    ("shared", "matmul_all_reduce", "unfused", "gloo", ", which is alive; expected"),
    ("hosts", "all_reduce", "ring", "before"),
    ("hosts", "matmul_reduce_scatter", "hierarchical", "matmul"),
]
FAILING = [
    ("shared", "matmul_reduce_scatter", "pipelined", "matmul"),
    ("hosts", "all_gather_matmul", "unfused", "matmul"),
    ("shared", "matmul_all_reduce", "unfused", "matmul"),
    ("hosts", "matmul_reduce_scatter", "hierarchical", "matmul"),
    ("shared", "all_gather_matmul", "direct", "matmul"),
    ("hosts", "matmul_all_reduce", "ring", "matmul"),
]
INTERRUPTED = [
    ("shared", "all_gather_matmul", algorithm, "waiting")
    for algorithm in ("direct", "unfused", "pipelined")
]
FIELDS = "memory", "op", "algorithm", "moment", "message", "world"
# Each step first, then the remaining code paths of these steps.
SET_UPS = [("growth", "map", 2), ("empty", "before", 0), ("init", "map", 0), ("init", "before", 2)]
SET_UPS += [("growth", "before", 0), ("init", "map", 2), ("empty", "map", 0)]
LATER = [
    ("autotune", "run"),
    ("autotune", "times", 1, "' for matmul_all_reduce"),
    ("backward", "before"),
]
FUSED = [
    ("shared", op, "fused", "kernel", "", 3)
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
]
STEP = "step", "moment", "victim", "message"


@pytest.mark.parametrize(
    "trial",
    [
        *sweep(_trials("kill", KILLED, *FIELDS), 6, num_thorough=2),
        *sweep(_trials("stop", STOPPED, *FIELDS), 2, num_thorough=1),
        *sweep(_trials("exception", FAILING, *FIELDS), 2, num_thorough=2),
        *sweep(_trials("interrupt", INTERRUPTED, *FIELDS)),
        *sweep(_trials("kill", SET_UPS, *STEP), 2, num_thorough=2),
        *sweep(_trials("stop", SET_UPS, *STEP), 1, num_thorough=1),
        *_trials("kill", LATER, *STEP),
        *sweep(_trials("kill", FUSED, *FIELDS)),
        *sweep(_trials("stop", FUSED, *FIELDS), 0, num_thorough=1),
    ],
    ids=lambda it: f"{it.kind}-{it.step or it.op}-{it.algorithm}-{it.moment}",
)
def test_a_fault_at_its_moment(trial: Trial) -> None:
    """One rank is killed, stopped, interrupted or raises at a fixed moment. Every rank raises the
    expected error, including a stopped rank after it resumes."""
    wrong, _ = run_trial(trial)
    assert not wrong, wrong


class _SlowWork:
    """A torch.distributed work that reports completion half a second late."""

    def __init__(self, work: Any) -> None:
        self.work, self.until = work, time.monotonic() + 0.5

    def is_completed(self) -> bool:
        return time.monotonic() > self.until and self.work.is_completed()

    def wait(self, *_: Any) -> None:
        if not self.is_completed():
            time.sleep(0.02)
            raise RuntimeError("Operation timed out!")
        self.work.wait()


def early_exit_job(op: str, algorithm: str) -> Ending:
    """The victim receives its data late; every other rank exits after its last call."""
    group, rank = faults.new_group(), dist.get_rank()
    finish = waiting.finish
    if rank == VICTIM:
        for module in (unfused, links):
            module.finish = lambda call, work: finish(call, _SlowWork(work))
    ending = faults.record_ending(lambda: faults.run_op(op, group, algorithm))
    if rank != VICTIM and not ending.error:
        os._exit(0)
    return ending


@pytest.mark.parametrize(
    ("op", "algorithm"), sweep([("reduce_scatter", "ring"), ("all_gather", "unfused")])
)
def test_finished_ranks_may_exit(op: str, algorithm: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        for outcome in faults.collect(ranks, early_exit_job, op, algorithm):
            if outcome.rank == VICTIM:
                assert outcome.ok and not outcome.value.error, outcome
            else:
                assert outcome.exitcode == 0, outcome


def late_result_job(seconds: float, number: int) -> tuple[Ending, float]:
    """Delay the result of rank 1, which a rank of the second host sends to it in the last step.
    Meanwhile rank 0, on the host of rank 1, exits after its call, or sends itself signal ``number``
    during it."""
    rank, send, finish = (
        dist.get_rank(),
        hierarchical.Hierarchical.send,
        hierarchical.HostReduction._finish,
    )

    def send_late(levels: hierarchical.Hierarchical, data: torch.Tensor, dst: int) -> None:
        if dst == 1:
            time.sleep(seconds)
        send(levels, data, dst)

    def finish_disturbed(reduction: hierarchical.HostReduction) -> None:
        if number and rank == 0:
            time.sleep(0.2)  # rank 1 is waiting by then
            faults.disturb_now(number)
        finish(reduction)

    with on_hosts("001111"):
        group = faults.new_group()
    hierarchical.Hierarchical.send = send_late  # type: ignore[method-assign]
    hierarchical.HostReduction._finish = finish_disturbed  # type: ignore[method-assign]

    def call() -> None:
        result = tpkernels.reduce_scatter(torch.ones(6), group, algorithm="hierarchical")
        assert result.tolist() == [6.0]

    ending = faults.record_ending(call)
    if rank == 0:
        os._exit(0)
    return ending, faults.get_disturbance_time() if number else 0.0


@pytest.mark.thorough
def test_hierarchical_detects_a_killed_peer_while_it_waits_for_another_host() -> None:
    with faults.watched_ranks(6) as ranks:
        outcomes = faults.collect(ranks, late_result_job, 0.5, 0)
        assert outcomes[0].exitcode == 0, outcomes[0]  # exits after its call has finished
        assert not any(ending.error for ending, _ in faults.values(outcomes, 0).values()), outcomes
    with faults.watched_ranks(6) as ranks:
        outcomes = faults.collect(ranks, late_result_job, 2.0, signal.SIGKILL)
        ending, kill_time = faults.values(outcomes, 0)[1]
        assert ending.error == "PeerLostError" and ending.peer == 0, ending
        assert "rank 1 waited for rank 0 (pid " in ending.message, ending
        assert ending.time - kill_time < IMMEDIATE, ending


@pytest.mark.parametrize("memory", sweep(["apart", "shared", "hosts"], 2))
@on_ranks(WORLD)
def test_a_failure_on_one_rank_between_calls_reaches_all_ranks(memory: str) -> None:
    """Rank 0 fails to read its timing table in a collective step between calls. All ranks raise an
    error, and the next call raises `GroupBrokenError`."""
    with MEMORY[memory]():
        group = faults.new_group()
    with mock.patch.object(store, "load", side_effect=OSError("a damaged disk")):
        first = faults.record_ending(lambda: groups.get(group.group_name).timing_table("cpu"))
    rank = dist.get_rank()
    again = faults.record_ending(lambda: tpkernels.all_reduce(torch.ones(4), group))
    assert first.error == ("PeerLostError" if rank else "OSError"), first
    assert "a damaged disk" in first.message and first.seconds < PROMPT, first
    assert first.peer == (0 if rank else None), first
    assert again.error == "GroupBrokenError" and again.seconds < PROMPT, again
