"""The executor over a process group: the same calls, streams and errors."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import RanksFixture
from tests.support.held import Held
from tpkernels.launch import GroupExecutor, RankError, Ranks, serve_group

TIMEOUT = 20.0


def driving(body: Any, group: Any = None, timeout: float = TIMEOUT) -> Any:
    """Rank 0 runs ``body`` with an executor, the others serve."""
    if dist.get_rank(group) != 0:
        return serve_group(group, timeout)
    with GroupExecutor(Held, 10, group=group, timeout=timeout) as executor:
        return body(executor)


def calls_job() -> None:
    def body(executor: GroupExecutor) -> None:
        world = dist.get_world_size()
        x = torch.zeros(3)
        total = sum(rank + 10.0 for rank in range(world))
        assert executor.call("add", x, rank=world - 1).tolist() == [total] * 3
        assert x.sum() == 0 and executor.call("rank") == list(range(world))
        for size in (0, 1, 12_345, 3_000_000):
            big, text = torch.randint(0, 256, (size,), dtype=torch.uint8), "x" * (size // 9)
            for (got, got_text), kwargs in executor.call("echo", big, text, key=(big[:5], None)):
                assert torch.equal(got, big) and got_text == text
                assert torch.equal(kwargs["key"][0], big[:5]) and kwargs["key"][1] is None

    driving(body)


def streams_job() -> None:
    def body(executor: GroupExecutor) -> None:
        world = dist.get_world_size()
        assert list(executor.stream("count", 7)) == [float(world * step) for step in range(7)]
        assert executor.call("progress") == [(7, "exhausted")] * world
        assert list(executor.stream("count", 0)) == []
        assert list(executor.stream("late", 1)) == list(executor.stream("late", 0)) == [0, 1]
        assert list(executor.stream("uneven", [3] + [5] * (world - 1))) == [0, 1, 2]
        for taken in (1, 4):
            items = executor.stream("count", 1000)
            for _ in range(taken):
                next(items)
            items.close()
            assert executor.call("progress") == [(taken, "closed")] * world
        with pytest.raises(RankError, match=f"fail_in_step failed on {world} of {world} ranks"):
            list(executor.stream("fail_in_step", 2, list(range(world))))
        with pytest.raises(NotImplementedError, match="items of rank 1: a group's stream yields"):
            executor.stream("count", 3, rank=1)
        assert executor.call("rank") == list(range(world))

    driving(body)


def errors_job() -> None:
    def body(executor: GroupExecutor) -> None:
        for bad in ([0], [1], [0, 1]):
            with pytest.raises(RankError) as caught:
                executor.call("fail", bad)
            outcomes = caught.value.outcomes
            assert [outcome.rank for outcome in outcomes if not outcome.ok] == bad
            assert f"rank {bad[-1]} was told to" in str(caught.value)
            assert "in fail\n" in outcomes[bad[0]].error and "closed" not in str(caught.value)
        with pytest.raises(AttributeError, match="no public method"):
            executor.call("ech")
        with pytest.raises(RankError, match=r"the result of unsendable\[1\]"):
            executor.call("unsendable", [1])
        assert executor.call("rank")[:2] == [0, 1]

    driving(body)


def idle_job(timeout: float) -> None:
    def body(executor: GroupExecutor) -> None:
        for _ in range(2):
            time.sleep(timeout * 2)
            assert executor.call("rank")[0] == 0

    driving(body, timeout=timeout)


def test_it_does_what_the_other_executor_does(ranks: RanksFixture) -> None:
    for job in (calls_job, streams_job, errors_job):
        ranks(3).run(job)
    assert ranks(1).run(driving, rank_of_all) == [[0]]


def rank_of_all(executor: GroupExecutor) -> Any:
    return executor.call("rank")


@pytest.mark.thorough
def test_idle_ranks_outlast_the_timeout(ranks: RanksFixture) -> None:
    ranks(2).run(idle_job, 0.5)


def groups_job() -> list[int] | None:
    """One executor after the other, for which one rank comes late: the others must not take the
    addresses of its last executor. Then one of some ranks, and the wrong sides."""
    for late in (0, 1):
        if dist.get_rank() == late:
            time.sleep(0.1)
        driving(rank_of_all)
    with pytest.raises(ValueError, match="rank 0 drives"):
        serve_group() if dist.get_rank() == 0 else GroupExecutor(Held)
    group = dist.new_group([1, 2])
    return None if dist.get_rank() == 0 else driving(rank_of_all, group)


def test_executors_one_after_the_other_and_of_some_ranks(ranks: RanksFixture) -> None:
    assert ranks(3).run(groups_job) == [None, [1, 2], None]


# Faults.


def lost_job(how: str, timeout: float) -> tuple[str, str, float]:
    """The error with which a rank's part ended, its text, and after how many seconds."""
    begin = time.monotonic()
    try:
        if dist.get_rank() != 0:
            serve_group(timeout=timeout)
            return "", "", time.monotonic() - begin
        with GroupExecutor(Held, timeout=timeout) as executor:
            begin = time.monotonic()
            try:
                if how == "idle":
                    os.kill(executor.call("pid", rank=1), signal.SIGKILL)
                    time.sleep(timeout)
                    executor.call("rank")
                else:
                    executor.call("kill_other", 1, how)
            except (RankError, RuntimeError) as error:
                took, text = time.monotonic() - begin, str(error)
                with pytest.raises(RuntimeError, match="this executor is closed"):
                    executor.call("rank")
                return type(error).__name__, text, took
    except ConnectionError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_in_a_call_is_reported(how: str) -> None:
    timeout = 2.0
    with Ranks(3) as ranks:
        ranks.submit(lost_job, how, timeout)
        deadline = time.monotonic() + 60
        while not ((outcomes := ranks.collect(0.1))[0].ok and outcomes[2].ok):
            assert time.monotonic() < deadline, outcomes
    first, other = outcomes[0], outcomes[2]
    kind, text, took = first.value
    assert kind == "RankError" and "rank 1, after" in text and "no answer: " in text
    assert took < 1.0 if how == "SIGKILL" else timeout <= took < timeout + 5
    assert other.value[0] == "ConnectionError"
    assert "rank 2 lost rank 0, which is gone or has closed the executor" in other.value[1]


@pytest.mark.thorough
def test_a_rank_that_dies_while_idle_is_reported() -> None:
    with Ranks(2) as ranks:
        ranks.submit(lost_job, "idle", 1.0)
        first = ranks.collect(60)[0]
    assert first.ok, first
    assert first.value[0] == "RuntimeError" and "(a rank was lost: " in first.value[1]


def test_ranks_notice_that_rank_0_died() -> None:
    with Ranks(2) as ranks:
        ranks.submit(orphan_job)
        dead, other = ranks.collect(60)
    assert dead.exitcode == -signal.SIGKILL
    assert other.ok and "rank 1 lost rank 0" in other.value


def orphan_job() -> str:
    if dist.get_rank() == 0:
        GroupExecutor(Held, timeout=TIMEOUT)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        serve_group(timeout=TIMEOUT)
    except ConnectionError as error:
        return str(error)
    return "no error"
