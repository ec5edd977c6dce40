"""Calls and streams of what ranks hold: they reach every rank; refusals leave the ranks usable."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.held import Held, make
from tpkernels.launch import RankError, Ranks, worker
from tpkernels.launch import ranks as pool_module


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, Held, 10) as ranks:
        yield ranks
        assert ranks.healthy, "a test has broken the executor"


# Calls.


def test_results_come_by_rank() -> None:
    with Ranks(3, "tests.support.held:Held", start=1, timeout=60) as ranks:
        for added in ranks.call("add", torch.zeros(2, 3)):
            assert torch.equal(added, torch.full((2, 3), 6.0))
        assert ranks.call("rank") == ranks.run(torch.distributed.get_rank) == [0, 1, 2]
        assert ranks.call("rank", rank=2) == 2
        assert len(ranks.pids) == 3 and ranks.healthy
    assert ranks.exitcodes == [0] * 3 and not ranks.healthy


def test_arguments_and_results_of_every_kind(two: Ranks) -> None:
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    for args, kwargs in two.call("echo", 1, (2.5, [None, "ü"]), x.t(), key={"b": b"\0", 3: True}):
        assert args[:2] == (1, (2.5, [None, "ü"])) and kwargs == {"key": {"b": b"\0", 3: True}}
        assert torch.equal(args[2], x.t()) and args[2].dtype == x.dtype
    added = two.call("add", x.float(), rank=0)
    assert torch.equal(added, x.float() * 2 + 21)
    assert torch.equal(x.flatten(), torch.arange(6).bfloat16())  # ranks change copies


def test_messages_larger_than_the_ring_go_in_parts(two: Ranks) -> None:
    nbytes = worker.RING_BYTES * 5 + 12345
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    text = "ü" * (nbytes // 2)
    for (got, got_text), kwargs in two.call("echo", x, text, more=[x[:7], x]):
        assert torch.equal(got, x) and got_text == text
        assert torch.equal(kwargs["more"][0], x[:7]) and torch.equal(kwargs["more"][1], x)
    for sizes in ([0, 3_000_000], [3_000_000, 1]):  # of the ranks' answers
        results = two.call("mine", sizes)
        assert [len(result) for result in results] == sizes
        assert all((result == rank).all() for rank, result in enumerate(results))


def test_waiting_costs_nothing(two: Ranks) -> None:
    def cpu_seconds() -> float:
        ticks = 0
        for pid in two.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    two.call("nothing")
    before, begin = cpu_seconds(), time.thread_time()
    two.call("sleep", 0.2)
    assert time.thread_time() - begin < 0.1  # the parent looks after the ranks
    time.sleep(0.2)
    assert cpu_seconds() - before < 0.2  # gloo's own threads poll


def test_calls_of_several_threads_take_turns(two: Ranks) -> None:
    spans: list[tuple[float, float]] = []

    def work() -> None:
        for _ in range(5):
            begin, end = two.call("sleep", 0.005, rank=0).split()
            spans.append((float(begin), float(end)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    spans.sort()
    assert len(spans) == 20
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    thread = threading.Thread(target=two.call, args=("sleep", 0.5))
    thread.start()
    time.sleep(0.1)
    assert two.healthy  # any thread may ask
    with pytest.raises(TimeoutError, match=r"calls of other threads took longer than 0\.2 s"):
        two.call("nothing", timeout=0.2)
    thread.join(30)
    assert two.call("rank") == [0, 1]


# Refusals and exceptions: the ranks stay usable.


def test_an_exception_comes_back_with_its_traceback(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"^fail failed on 1 of 2 ranks\n\nrank 1 \(pid ") as caught:
        two.call("fail", [1])
    good, bad = caught.value.outcomes
    assert good.ok and good.value == 0
    assert bad.error_type == "ArithmeticError" and bad.error.startswith("Traceback")
    assert "in fail\n" in bad.error and "tpkernels/launch" not in bad.error
    assert "closed" not in str(caught.value)
    with pytest.raises(RankError, match=r"failed on 2 of 2 ranks(?s:.*)SystemExit: 3"):
        two.call("fail", [0, 1], how="exit")
    text = r"the result of unsendable\[1\]\['a'\] is a builtins\.set, which cannot be sent"
    with pytest.raises(RankError, match=text) as caught:
        two.call("unsendable", [0, 1])
    assert "During handling" not in str(caught.value)
    assert two.call("unsendable", [1], rank=0) == 1  # rank 1's is not wanted


def test_refusals_send_nothing(two: Ranks) -> None:
    with pytest.raises(AttributeError, match=r"no public method 'ech' \(did you mean 'echo'\?\); "):
        two.call("ech")
    for name in ("_secret", "__init__", "limit", "costly", "start"):
        for use in (two.call, two.stream):
            with pytest.raises(AttributeError, match="no public method"):
                use(name)
    with pytest.raises(TypeError, match=r"^echo: args\[1\]\['x'\] is a builtins\.set, which"):
        two.call("echo", 1, {"x": set()})
    with pytest.raises(ValueError, match=r"^echo: kwargs\['n'\] is an integer of 65 bits"):
        two.call("echo", n=1 << 64)
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        two.call("rank", rank=2)
    for timeout in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout must be a number of seconds above 0"):
            two.call("rank", timeout=timeout)
    assert two.call("rank") == [0, 1]


@pytest.mark.parametrize(
    ("factory", "args", "error", "text"),
    [
        (lambda: None, (), ValueError, "must be a class or function that ranks can import"),
        ("tests.support.held", (), ValueError, "must be of the form 'module:Class'"),
        (Held, ({1},), TypeError, r"Held: args\[0\] is a builtins\.set"),
        ("tests.nowhere:Held", (), RankError, r"No module named 'tests\.nowhere'"),
        (Held, (0, 0), RankError, r"held:Held failed on 1 of 1(?s:.*)rank 0 was told to"),
    ],
)
def test_factories_that_make_nothing(
    factory: object, args: tuple[object, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Ranks(1, factory, *args)  # type: ignore[arg-type]


def test_closed_ranks_say_so() -> None:
    ranks = Ranks(1, make, 5, threads=2)
    assert ranks.call("add", torch.zeros(1))[0].item() == 5
    items = ranks.stream("count", 100)
    next(items)
    ranks.close()
    ranks.close()
    for use in (lambda: ranks.call("rank"), lambda: ranks.run(os.getpid), lambda: ranks.collect(1)):
        with pytest.raises(RuntimeError, match=r"is closed \(it was closed\); start a"):
            use()
    with pytest.raises(RuntimeError, match="this executor is closed"):
        next(items)
    items.close()


# Streams: all ranks make the same steps, whatever the consumer does.


def test_a_stream_yields_what_a_rank_yields(two: Ranks) -> None:
    assert list(two.stream("count", 20)) == [2.0 * step for step in range(20)]
    assert two.call("progress") == [(20, "exhausted")] * 2
    assert list(two.stream("uneven", [3, 5], rank=1)) == [0, 1, 2, 3, 4]
    assert list(two.stream("uneven", [3, 5])) == [0, 1, 2]
    assert list(two.stream("late", 0)) == list(two.stream("late", 1)) == [0, 1]
    assert list(two.stream("count", 0)) == []


@pytest.mark.parametrize("taken", [0, 1, 30])
def test_closing_a_stream_ends_all_ranks_after_the_same_step(two: Ranks, taken: int) -> None:
    two.call("progress")
    items = two.stream("count", 10_000)
    for step in range(taken):
        assert next(items) == 2.0 * step
    time.sleep(0.05)  # ranks do not run away from a slow consumer
    items.close()
    (steps, ended), other = two.call("progress")
    assert other == (steps, ended)
    if taken:
        assert ended == "closed" and taken <= steps <= taken + pool_module.STREAM_AHEAD


def test_items_larger_than_the_ring(two: Ranks) -> None:
    pad = worker.RING_BYTES // 2
    received = [(value, len(rest)) for value, rest in two.stream("count", 5, pad)]
    assert received == [(2.0 * step, pad) for step in range(5)]
    for _ in two.stream("count", 10_000, pad):
        break  # an abandoned stream is closed, here with rank 0 in the middle of an item
    assert two.call("progress")[1][1] == "closed"


def test_a_stream_keeps_other_calls_waiting(two: Ranks) -> None:
    items = two.stream("count", 3)
    next(items)
    for use in (lambda: two.call("nothing"), lambda: next(two.stream("count", 3))):
        with pytest.raises(RuntimeError, match="a stream is open; exhaust or close its iterator"):
            use()
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
