"""The executor's faults: every one is reported in time, by rank, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.launch.test_launch import gone
from tests.support.held import Held
from tests.support.tiers import sweep
from tpkernels.launch import RankError, Ranks, executor, worker

BIG = worker.RING_BYTES * 8


def failure_of(ranks: Ranks, act: Callable[[], object]) -> RankError:
    """The error of a call that closes the executor and ends its ranks."""
    pids = ranks.pids
    with pytest.raises(RankError) as caught:
        act()
    assert "The executor is closed: start a new one." in str(caught.value)
    assert gone(pids)
    with pytest.raises(RuntimeError, match=r"this executor is closed \(.* failed\)"):
        ranks.call("rank")
    return caught.value


# Deaths.


@pytest.mark.parametrize(
    ("number", "text"), sweep([(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
)
def test_a_rank_that_dies_in_a_call_is_reported_within_a_second(number: int, text: str) -> None:
    with Ranks(3, Held) as ranks:
        begin, pid = time.monotonic(), ranks.pids[1]
        error = failure_of(ranks, lambda: ranks.call("signal", 1, int(number)))
    assert time.monotonic() - begin < 5  # closing too
    dead = error.outcomes[1]
    assert dead.seconds < 1
    assert dead.exitcode == -number
    assert f"rank 1 (pid {pid}), after 0." in str(error) and f"killed by {text}" in str(error)
    assert str(error).startswith("signal failed on 3 of 3 ranks\n\nrank 0: no answer\n\n")
    assert ranks.exitcodes[1] == -number


def test_a_rank_that_dies_while_idle_is_noticed() -> None:
    with Ranks(2, Held) as ranks:
        assert ranks.healthy
        os.kill(ranks.pids[1], signal.SIGKILL)
        begin = time.monotonic()
        while ranks.healthy:
            assert time.monotonic() - begin < 1
            time.sleep(0.01)
        error = failure_of(ranks, lambda: ranks.call("rank"))
    assert error.outcomes[0].value == 0 and error.outcomes[1].exitcode == -signal.SIGKILL
    assert not ranks.healthy


def test_a_reader_that_dies_does_not_block_the_writer() -> None:
    """The message does not fit into the ring, and one rank of two never reads it."""
    with Ranks(2, Held) as ranks:
        os.kill(ranks.pids[0], signal.SIGSTOP)
        pid = ranks.pids[0]
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        begin = time.monotonic()
        error = failure_of(ranks, lambda: ranks.call("echo", torch.zeros(BIG)))
    assert 0.3 < time.monotonic() - begin < 10
    assert error.outcomes[0].exitcode == -signal.SIGKILL


def test_a_writer_that_dies_in_a_message_is_reported() -> None:
    with Ranks(2, Held) as ranks:
        items = ranks.stream("count", 3, BIG)
        next(items)  # the next item fills the ring, and waits for room
        time.sleep(0.2)
        os.kill(ranks.pids[0], signal.SIGKILL)
        error = failure_of(ranks, lambda: list(items))
    assert error.outcomes[0].exitcode == -signal.SIGKILL


@pytest.mark.parametrize("step", sweep([2, 1, 40]))
def test_a_rank_that_dies_in_a_stream_is_reported(step: int) -> None:
    with Ranks(2, Held) as ranks:
        error = failure_of(ranks, lambda: list(ranks.stream("die_in_step", step, 1)))
    assert error.outcomes[1].exitcode == -signal.SIGKILL


def test_a_rank_that_dies_in_the_factory_is_reported() -> None:
    with pytest.raises(RankError, match=r"die failed on 2 of 2(?s:.*)rank 1 (?s:.*)SIGKILL"):
        Ranks(2, "tests.launch.test_executor_faults:die", 1)


def die(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


# Time.


def test_a_stopped_rank_is_reported_when_time_is_up() -> None:
    with Ranks(2, Held) as ranks:
        os.kill(ranks.pids[1], signal.SIGSTOP)
        begin = time.monotonic()
        error = failure_of(ranks, lambda: ranks.call("rank", timeout=0.5))
        took = time.monotonic() - begin
    assert 0.5 <= took < 10
    assert error.outcomes[0].ok and error.outcomes[1].timed_out
    assert "no answer: stopped by a signal" in str(error)


def test_a_stopped_rank_cannot_hold_a_large_message_up() -> None:
    with Ranks(2, Held) as ranks:
        os.kill(ranks.pids[1], signal.SIGSTOP)
        error = failure_of(ranks, lambda: ranks.call("echo", torch.zeros(BIG), timeout=0.5))
    assert error.outcomes[1].timed_out and "stopped by a signal" in str(error)


def test_a_call_that_takes_too_long_says_where_the_ranks_are() -> None:
    with Ranks(2, Held, timeout=0.5) as ranks:
        error = failure_of(ranks, lambda: ranks.call("sleep", 100))
    assert all(outcome.timed_out for outcome in error.outcomes)
    assert "still running" in str(error) and "in sleep" in str(error)


def test_a_rank_that_waits_for_one_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "GRACE_SECONDS", 0.3)
    with Ranks(2, Held) as ranks:
        begin = time.monotonic()
        error = failure_of(ranks, lambda: ranks.call("fail", [0], how="then wait"))
    assert time.monotonic() - begin < 10
    assert "rank 0 was told to" in str(error) and "in fail" in str(error)


@pytest.mark.thorough
def test_a_stream_waits_for_each_item_only() -> None:
    with Ranks(1, Held, timeout=0.6) as ranks:
        taken = 0
        for _ in ranks.stream("count", 3):
            time.sleep(0.5)
            taken += 1
        assert taken == 3
        assert list(ranks.stream("paced", 4, 0.25)) == [0, 1, 2, 3]  # 1 s in all
        error = failure_of(ranks, lambda: list(ranks.stream("late", 0, timeout=0.05)))
    assert error.outcomes[0].timed_out


@pytest.mark.slow
def test_ranks_killed_at_random_moments() -> None:
    """Every call ends in time, with its results or with an error that names the rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        delay = torch.rand(1, generator=generator).item() * 0.05
        victim = int(torch.randint(0, 2, (1,), generator=generator))
        with Ranks(2, Held, timeout=20) as ranks:
            ranks.call("kill_soon", victim, delay)
            begin = time.monotonic()
            with pytest.raises(RankError) as caught:
                while time.monotonic() - begin < 10:
                    ranks.call("echo", torch.zeros(400_000))
                    list(ranks.stream("uneven", [executor.STREAM_AHEAD * 3] * 2))
            assert time.monotonic() - begin < 5
            assert caught.value.outcomes[victim].exitcode == -signal.SIGKILL
