"""Faults x moments: one rank is killed, stopped or interrupted, raises, or ends, before a call,
within it or during set-up, among ranks that share memory and ranks of two hosts. What the others
report, and how fast. Each kind is tested once per code path. The campaign (support/campaign.py)
runs the same trials, with ops, algorithms and moments drawn at random."""

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
from tests.support.faults import AT_ONCE, CASES, CASES_APART, PROMPT, Ending
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


@pytest.mark.parametrize("kind", sweep(KINDS, later=2))
def test_a_fault_of_each_kind(kind: str) -> None:
    """At a random moment, not in the set-up."""
    drawn = map(Trial.drawn, itertools.count())
    wrong, _ = run_trial(next(one for one in drawn if one.kind == kind and not one.step))
    assert not wrong, wrong


@pytest.mark.thorough
def test_a_fault_in_the_set_up() -> None:
    drawn = map(Trial.drawn, itertools.count())
    wrong, _ = run_trial(next(one for one in drawn if one.step and one.kind == "kill"))
    assert not wrong, wrong


# Each algorithm and moment, then every op by every algorithm.
KILLED = [
    ("shared", "matmul_reduce_scatter", "pipelined", "matmul"),
    ("shared", "matmul_all_reduce", "unfused", "gloo"),
    ("hosts", "all_gather", "unfused", "before"),
    ("hosts", "matmul_reduce_scatter", "ring", "matmul"),
    ("hosts", "matmul_all_reduce", "hierarchical", "matmul"),
]
KILLED += [("shared", *case, 0.15) for case in [*CASES, *CASES_APART]]
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
FIELDS = "memory", "op", "algorithm", "moment", "text", "world"
# Each step once, then the same steps by their other code paths.
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
STEP = "step", "moment", "victim", "text"


@pytest.mark.parametrize(
    "trial",
    [
        *sweep(_trials("kill", KILLED, *FIELDS), 6, later=2),
        *sweep(_trials("stop", STOPPED, *FIELDS), 2, later=1),
        *sweep(_trials("exception", FAILING, *FIELDS), 2, later=2),
        *sweep(_trials("interrupt", INTERRUPTED, *FIELDS)),
        *sweep(_trials("kill", SET_UPS, *STEP), 2, later=2),
        *sweep(_trials("stop", SET_UPS, *STEP), 1, later=1),
        *_trials("kill", LATER, *STEP),
        *sweep(_trials("kill", FUSED, *FIELDS)),
        *sweep(_trials("stop", FUSED, *FIELDS), 0, later=1),
    ],
    ids=lambda it: f"{it.kind}-{it.step or it.op}-{it.algorithm}-{it.moment}",
)
def test_a_fault_at_its_moment(trial: Trial) -> None:
    """A rank is killed, stopped (then it goes on, and must notice as well) or interrupted, or
    raises."""
    wrong, _ = run_trial(trial)
    assert not wrong, wrong


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
    with MEMORY[memory]():
        group = faults.new_group()
    with mock.patch.object(store, "load", side_effect=OSError("a damaged disk")):
        first = faults.ending_of(lambda: groups.get(group.group_name).tuned("cpu"))
    rank = dist.get_rank()
    again = faults.ending_of(lambda: tpkernels.all_reduce(torch.ones(4), group))
    assert first.error == ("PeerLostError" if rank else "OSError"), first
    assert "a damaged disk" in first.text and first.seconds < PROMPT, first
    assert first.peer == (0 if rank else None), first
    assert again.error == "GroupBrokenError" and again.seconds < PROMPT, again
