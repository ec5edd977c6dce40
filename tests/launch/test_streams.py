"""Streams: all ranks make the same steps, whatever the consumer does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.held import Held
from tpkernels.launch import RankError, Ranks, executor, worker


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, Held, 10) as ranks:
        yield ranks
        assert ranks.healthy, "a test has broken the executor"


def test_a_stream_yields_what_a_rank_yields(two: Ranks) -> None:
    assert list(two.stream("count", 20)) == [2.0 * step for step in range(20)]
    assert two.call("progress") == [(20, "exhausted")] * 2
    assert list(two.stream("uneven", [3, 5], rank=1)) == [0, 1, 2, 3, 4]
    assert list(two.stream("uneven", [3, 5])) == [0, 1, 2]
    assert list(two.stream("late", 0)) == list(two.stream("late", 1)) == [0, 1]
    assert list(two.stream("count", 0)) == []


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5, 30])
def test_closing_a_stream_ends_all_ranks_after_the_same_step(two: Ranks, taken: int) -> None:
    two.call("progress")
    items = two.stream("count", 10_000)
    for step in range(taken):
        assert next(items) == 2.0 * step
    items.close()
    (steps, ended), other = two.call("progress")
    assert other == (steps, ended)
    if taken:
        assert ended == "closed" and taken <= steps <= taken + executor.STREAM_AHEAD


def test_an_abandoned_stream_is_closed(two: Ranks) -> None:
    for _ in two.stream("count", 10_000):
        break
    assert two.call("progress", rank=0)[1] == "closed"


def test_ranks_do_not_run_away_from_a_slow_consumer(two: Ranks) -> None:
    items = two.stream("count", 10_000)
    next(items)
    time.sleep(0.3)
    items.close()
    assert two.call("progress", rank=0)[0] <= executor.STREAM_AHEAD + 1


def test_items_larger_than_the_ring(two: Ranks) -> None:
    pad = worker.RING_BYTES // 2
    got = [(value, len(rest)) for value, rest in two.stream("count", 5, pad)]
    assert got == [(2.0 * step, pad) for step in range(5)]
    items = two.stream("count", 10_000, pad)  # rank 0 is in the middle of an item
    next(items)
    items.close()
    assert two.call("progress")[1][1] == "closed"


def test_a_stream_keeps_other_calls_waiting(two: Ranks) -> None:
    items = two.stream("count", 3)
    next(items)
    with pytest.raises(RuntimeError, match="a stream is open; exhaust or close its iterator"):
        two.call("nothing")
    with pytest.raises(RuntimeError, match="a stream is open"):
        next(two.stream("count", 3))
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.extend(two.call("rank")))
    thread.start()
    time.sleep(0.1)
    assert not done
    assert list(items) == [2.0, 4.0]
    thread.join(30)
    assert done == [0, 1]


def test_failures_in_a_stream(two: Ranks) -> None:
    seen = []
    with pytest.raises(RankError, match=r"failed on 2 of 2 ranks(?s:.*)rank 1 was told to"):
        seen.extend(two.stream("fail_in_step", 2, [0, 1]))
    assert seen == [0, 1][: len(seen)]  # the error of rank 1 may come before items of rank 0
    with pytest.raises(RankError, match=r"failed on 1 of 2 ranks(?s:.*)rank 1 was told to"):
        list(two.stream("fail_in_step", 2, [1]))
    with pytest.raises(RankError, match=r"an item is a builtins\.set, which cannot be sent"):
        list(two.stream("unsendable_items"))
    with pytest.raises(RankError, match=r"rank returned a int; stream\(\) needs a generator"):
        list(two.stream("rank"))
    assert two.call("rank") == [0, 1]
