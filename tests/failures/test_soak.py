"""Many calls in a row under random delays: every result is exact, the epochs do not drift.

The negative controls run the same calls on a broken protocol, and must detect that.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import soak
from tests.support.cases import RanksFixture
from tests.support.soak import Calls, Outcome, Task
from tests.support.tiers import sweep

WORLD = 4
TIMEOUT = 20.0  # of one wait


def _poison(group: dist.ProcessGroup, which: str) -> None:
    """Fills one of this rank's two buffers with NaN. When a call has returned, nobody reads the
    "next" one any more, but peers may still be reading the "last" one."""
    workspace = soak.workspace_of(group)
    channel = workspace.channel
    parity = (channel.epoch + (which == "next")) & 1
    floats = channel.capacity // 4
    offset = channel.buffer_offset(parity)
    workspace._at(channel.rank, torch.float32, (floats,), offset).fill_(math.nan)


def run_task(task: Task) -> Outcome:
    """Runs the calls on a group of its own; a wrong result does not end them."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group, timeout=TIMEOUT, workspace_bytes=soak.WORKSPACE_BYTES)
    calls = Calls(group, task.seed)
    chaos = (task.max_delay_us, task.single_buffer, task.skip_waits)
    if any(chaos):
        soak.workspace_of(group).set_chaos(
            seed=task.seed * 100 + group.rank(),
            max_delay_us=task.max_delay_us,
            single_buffer=task.single_buffer,
            skip_waits=task.skip_waits,
        )
    wrong: list[str] = []
    failed = ""
    for _ in range(task.calls):
        if group.rank() == task.slow_rank:
            time.sleep(calls.own.random() * task.slow_seconds)
        try:
            error = calls.one()
        except Exception as failure:  # after which no more calls can run
            failed = f"{type(failure).__name__}: {failure}"
            break
        if error is not None and len(wrong) < 5:
            wrong.append(error)
        if task.poison:
            _poison(group, task.poison)
    outcome = Outcome(soak.workspace_of(group).epoch, wrong, failed)
    del calls
    dist.destroy_process_group(group)
    return outcome


def _require_exact(outcomes: list[Outcome]) -> None:
    wrong = [what for outcome in outcomes for what in [*outcome.wrong, outcome.failed] if what]
    assert not wrong, "\n".join(wrong)
    assert len({outcome.epoch for outcome in outcomes}) == 1, outcomes
    assert outcomes[0].epoch > 0


def _soak(ranks: RanksFixture, task: Task, timeout: float) -> None:
    outcomes = ranks(WORLD).run(run_task, task, timeout=timeout)
    _require_exact(outcomes)
    assert outcomes[0].epoch >= task.calls  # a call takes at least one


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_delay_us", [0, 200])
def test_more_calls_with_other_seeds(ranks: RanksFixture, max_delay_us: int) -> None:
    _soak(ranks, Task(seed=11 + max_delay_us, calls=40_000, max_delay_us=max_delay_us), 840)


@pytest.mark.slow
def test_a_rank_that_lags_behind_gets_the_same(ranks: RanksFixture) -> None:
    for slow_rank in (0, WORLD - 1):
        task = Task(seed=3 + slow_rank, calls=50, slow_rank=slow_rank, slow_seconds=0.01)
        _soak(ranks, task, 100)


def test_nothing_is_read_that_was_not_written(ranks: RanksFixture) -> None:
    _soak(ranks, Task(seed=4, calls=150, max_delay_us=200, poison="next"), 100)


@pytest.mark.parametrize(
    "broken",
    sweep(
        [
            Task(seed=7, calls=150, max_delay_us=1_000, single_buffer=True),
            Task(seed=8, calls=150, max_delay_us=1_000, skip_waits=True),
            Task(seed=9, calls=150, max_delay_us=1_000, poison="last"),
        ]
    ),
    ids=["single_buffer", "skip_waits", "poison_what_is_read"],
)
def test_a_broken_protocol_is_detected(ranks: RanksFixture, broken: Task) -> None:
    """So few calls are enough to detect it; the correct protocol passes them."""
    outcomes = ranks(WORLD).run(run_task, broken, timeout=100)
    assert any(outcome.wrong for outcome in outcomes), outcomes
