"""The executor: calls reach every rank, and refusals leave it usable."""

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


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, Held, 10) as executor:
        yield executor
        assert executor.healthy, "a test has broken the executor"


# Calls.


@pytest.mark.parametrize("world", [1, 3])
def test_results_come_by_rank(world: int) -> None:
    with Ranks(world, "tests.support.held:Held", start=1, timeout=60) as executor:
        total = sum(rank + 1.0 for rank in range(world))
        for added in executor.call("add", torch.zeros(2, 3)):
            assert torch.equal(added, torch.full((2, 3), total))
        assert executor.call("rank") == list(range(world))
        assert executor.call("rank", rank=world - 1) == world - 1
        assert len(executor.pids) == world and executor.healthy
    assert executor.exitcodes == [0] * world and not executor.healthy


def test_arguments_and_results_of_every_kind(two: Ranks) -> None:
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    for args, kwargs in two.call("echo", 1, (2.5, [None, "ü"]), x.t(), key={"b": b"\0", 3: True}):
        assert args[:2] == (1, (2.5, [None, "ü"])) and kwargs == {"key": {"b": b"\0", 3: True}}
        assert torch.equal(args[2], x.t()) and args[2].dtype == x.dtype


def test_ranks_change_copies_of_the_arguments(two: Ranks) -> None:
    x = torch.zeros(3)
    assert two.call("add", x, rank=0).tolist() == [21.0] * 3
    assert x.tolist() == [0.0] * 3


@pytest.mark.parametrize("nbytes", [worker.RING_BYTES - 8, worker.RING_BYTES * 5 + 12345])
def test_messages_larger_than_the_ring_go_in_parts(two: Ranks, nbytes: int) -> None:
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    text = "ü" * (nbytes // 2)
    for (got, got_text), kwargs in two.call("echo", x, text, more=[x[:7], x]):
        assert torch.equal(got, x) and got_text == text
        assert torch.equal(kwargs["more"][0], x[:7]) and torch.equal(kwargs["more"][1], x)


def test_ranks_may_answer_with_different_sizes(two: Ranks) -> None:
    for sizes in ([0, 3_000_000], [3_000_000, 1]):
        got = two.call("mine", sizes)
        assert [len(one) for one in got] == sizes
        assert all((one == rank).all() for rank, one in enumerate(got))


def test_many_calls_in_a_row(two: Ranks) -> None:
    for i in range(300):
        assert two.call("echo", i, rank=i % 2) == ((i,), {})


def test_a_wake_up_is_not_lost(two: Ranks) -> None:
    """A message that nobody is woken for would be seen when a slice ends: after 10 s by ranks."""
    begin = time.monotonic()
    for i in range(200):
        two.call("nothing")
        if i % 20 == 0:
            time.sleep(0.01)  # everybody is asleep by now
    assert time.monotonic() - begin < 8


def test_waiting_costs_nothing(two: Ranks) -> None:
    def cpu_seconds() -> float:
        ticks = 0
        for pid in two.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    two.call("nothing")
    before, begin = cpu_seconds(), time.thread_time()
    two.call("sleep", 0.5)
    assert time.thread_time() - begin < 0.1  # the driver looks after the ranks
    time.sleep(0.5)
    assert cpu_seconds() - before < 0.25  # gloo's own threads poll


def test_threads_environment_and_a_function_as_factory() -> None:
    given = {"TPKERNELS_TEST_GIVEN": "given"}
    with Ranks(1, make, 5, threads=2, env=given) as executor:
        assert executor.call("surroundings") == [(2, "given")]
        assert executor.call("add", torch.zeros(1))[0].item() == 5


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


def test_a_call_waits_for_its_turn_for_as_long_as_it_may(two: Ranks) -> None:
    thread = threading.Thread(target=two.call, args=("sleep", 1.0))
    thread.start()
    time.sleep(0.1)
    assert two.healthy  # any thread may ask
    with pytest.raises(TimeoutError, match=r"calls of other threads took longer than 0\.2 s"):
        two.call("nothing", timeout=0.2)
    thread.join(30)
    assert two.call("rank") == [0, 1]


# Refusals and exceptions: the executor stays usable.


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
    assert two.call("rank") == [0, 1]


def test_a_result_that_cannot_be_sent(two: Ranks) -> None:
    text = r"the result of unsendable\[1\]\['a'\] is a builtins\.set, which cannot be sent"
    with pytest.raises(RankError, match=text) as caught:
        two.call("unsendable", [0, 1])
    assert "During handling" not in str(caught.value)
    assert two.call("unsendable", [1], rank=0) == 1  # rank 1's is not wanted


def test_refusals_send_nothing(two: Ranks) -> None:
    with pytest.raises(AttributeError, match=r"no public method 'ech' \(did you mean 'echo'\?\); "):
        two.call("ech")
    for name in ("_secret", "__init__", "limit", "costly", "start"):
        with pytest.raises(AttributeError, match="no public method"):
            two.call(name)
        with pytest.raises(AttributeError, match="no public method"):
            two.stream(name)
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
    ("factory", "text"),
    [
        (lambda: None, "must be a class or function that ranks can import"),
        ("tests.support.held", "must be of the form 'module:Class'"),
        (object(), "must be a class or function"),
    ],
)
def test_factories_that_ranks_cannot_find(factory: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Ranks(1, factory)  # type: ignore[arg-type]


def test_bad_arguments_of_the_executor() -> None:
    with pytest.raises(ValueError, match="world=0"):
        Ranks(0, Held)
    with pytest.raises(TypeError, match=r"Held: args\[0\] is a builtins\.set"):
        Ranks(1, Held, {1})
    with pytest.raises(ValueError, match="timeout"):
        Ranks(1, Held, timeout=0)


def test_a_factory_that_fails_ends_the_ranks() -> None:
    with pytest.raises(RankError, match=r"held:Held failed on 1 of 2(?s:.*)rank 1 was told to"):
        Ranks(2, Held, fail_on=1)
    with pytest.raises(RankError, match=r"No module named 'tests\.nowhere'"):
        Ranks(1, "tests.nowhere:Held")


def test_a_closed_executor_says_so() -> None:
    executor = Ranks(1, Held)
    items = executor.stream("count", 100)
    next(items)
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match=r"this executor is closed \(it was closed\); start a"):
        executor.call("rank")
    with pytest.raises(RuntimeError, match="this executor is closed"):
        next(items)
    items.close()
