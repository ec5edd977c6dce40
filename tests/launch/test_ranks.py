"""Executors: functions, calls and streams on ranks, and faults. Each fault is reported in time and
by rank, and no process, file or descriptor is left over."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import RanksFixture
from tests.support.faults import run_concurrently, run_in_child
from tests.support.held import Held, make
from tests.support.tiers import sweep
from tpkernels import launch
from tpkernels.launch import RankError, Ranks
from tpkernels.launch import ranks as ranks_module

BIG = 1 << 23  # bytes; exceeds the capacity of a pipe

# Functions that run in the ranks.


def sum_of_ranks(*terms: int, scale: int = 1) -> float:
    total = torch.tensor([float(dist.get_rank() + sum(terms))])
    dist.all_reduce(total)
    return total.item() * scale


def thread_settings() -> tuple[int, str | None, str | None, str | None]:
    names = ("OMP_NUM_THREADS", "TPKERNELS_TEST_GIVEN", "TPKERNELS_TEST_PARENT")
    return torch.get_num_threads(), *(os.environ.get(name) for name in names)


def raise_on(rank: int, then_wait: bool = False) -> int:
    if dist.get_rank() == rank:
        raise ArithmeticError(f"rank {rank} was told to")
    if then_wait:
        dist.barrier()
    return dist.get_rank()


def act_on_rank(rank: int, act: Callable[[int], object], argument: int) -> str:
    if dist.get_rank() == rank:
        act(argument)
    return "went on"


def send_signal(number: int) -> None:
    os.kill(os.getpid(), number)


def start_child_process() -> int:
    return subprocess.Popen(["sleep", "100"]).pid


def echo(value: Any) -> Any:
    return value


def die_on(rank: int) -> None:
    """Kill this process on one rank. Used as a function and as a factory."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def wait_until_gone(pids: Iterable[int], within: float = 20.0) -> bool:
    """Return whether all processes end in time; zombies that init has to reap count as ended."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + within
    while left := [pid for pid in pids if runs(pid)]:
        if time.monotonic() > deadline:
            print("still there:", left)
            return False
        time.sleep(0.02)
    return True


def require_failure(ranks: Ranks, act: Callable[[], object]) -> RankError:
    """Return the error of a call that must fail and close the executor."""
    pids = ranks.pids
    with pytest.raises(RankError) as caught:
        act()
    assert "The executor is closed: start a new one." in str(caught.value)
    assert wait_until_gone(pids) and not ranks.healthy
    with pytest.raises(RuntimeError, match=r"this executor is closed \(.* failed\)"):
        ranks.call("rank")
    return caught.value


# Functions.


def test_run_returns_the_results_in_rank_order(ranks: RanksFixture) -> None:
    for world in (1, 3):
        total = world * (world - 1) / 2
        assert ranks(world).run(sum_of_ranks) == [total] * world
        assert ranks(world).run(sum_of_ranks, 1, 2, scale=10) == [(total + 3 * world) * 10] * world
    big = {"any": {torch.float16, Path}, "more": bytes(BIG)}  # exceeds the capacity of a pipe
    assert ranks(2).run(echo, big) == [big, big]


def test_threads_and_environment_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # set long after the start of the fork server
    monkeypatch.setenv("TPKERNELS_TEST_PARENT", "parent")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Ranks(1) as ranks:
        assert ranks.run(thread_settings) == [(1, "1", None, "parent")]
    with Ranks(1, threads=2, env={"TPKERNELS_TEST_GIVEN": "given"}) as ranks:
        assert ranks.run(thread_settings) == [(2, "2", "given", "parent")]
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_ranks_import_with_the_current_sys_path(
    ranks: RanksFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = ranks(2)
    (tmp_path / "just_written.py").write_text("def job():\n    return 'found'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert pool.run(importlib.import_module("just_written").job) == ["found"] * 2


def test_refusals_leave_the_ranks_usable(ranks: RanksFixture) -> None:
    with pytest.raises(ValueError, match="world=0"):
        Ranks(0)
    with pytest.raises(ValueError, match="threads=3, not OMP_NUM_THREADS"):
        Ranks(1, env={"OMP_NUM_THREADS": "3"})
    with pytest.raises(ValueError, match="timeout"):
        Ranks(1, timeout=0)
    with pytest.raises(RankError, match=r"start failed on 2(?s:.*)no_such_backend"):
        Ranks(2, backend="no_such_backend")
    pool = ranks(2)
    with pytest.raises(TypeError, match="local object"):
        pool.run(sum_of_ranks, lambda: None)
    pool.submit(time.sleep, 0.1)
    for attempt in (pool.submit, pool.run):
        with pytest.raises(
            RuntimeError, match=r"ranks \[0, 1\] are still running the submitted call"
        ):
            attempt(sum_of_ranks)
    assert not pool.healthy
    assert all(outcome.ok and outcome.seconds >= 0.1 for outcome in pool.collect(30))
    pool.submit(threading.Lock)
    assert all("pickle" in str(outcome.error) for outcome in pool.collect(30))
    pool.submit(sys.exit, 3)
    assert [outcome.error_type for outcome in pool.collect(30)] == ["SystemExit"] * 2
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


def test_a_rank_that_waits_for_a_failed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 0.3)
    for use in ("run", "call"):
        with Ranks(2, Held) as pool:
            pool.run(sum_of_ranks)  # imports this module
            start = time.monotonic()
            act: Callable[[], object] = partial(pool.run, raise_on, 0, then_wait=True)
            if use == "call":
                act = partial(pool.call, "fail", [0], how="then wait")
            message = str(require_failure(pool, act))
        assert time.monotonic() - start < 20
        assert "rank 0 was told to" in message and "still running" in message
        assert "in raise_on" in message or "in fail" in message  # the stack of rank 1


# Deaths.


@pytest.mark.parametrize(
    ("job", "argument", "exitcode", "message"),
    [
        (send_signal, signal.SIGSEGV, -signal.SIGSEGV, "killed by SIGSEGV"),
        (os._exit, 0, 0, "exit code 0"),
    ],
)
def test_a_dead_rank_is_reported(job: Any, argument: int, exitcode: int, message: str) -> None:
    with Ranks(2) as pool:
        pool.submit(act_on_rank, 1, job, argument)
        alive, dead = pool.collect(30)
        assert alive.ok and not dead.ok and dead.exitcode == exitcode
        pool.submit(dist.get_rank)  # the executor still serves the remaining ranks
        alive, dead = pool.collect(30)
        assert alive.value == 0 and dead.exitcode == exitcode
        os.kill(pool.pids[0], signal.SIGSTOP)  # while rank 0 is not reading
        threading.Timer(0.3, os.kill, (pool.pids[0], signal.SIGCONT)).start()
        pool.submit(echo, bytes(BIG))
        alive, dead = pool.collect(30)
        assert alive.value == bytes(BIG) and dead.exitcode == exitcode
        with pytest.raises(RankError, match=message):
            pool.run(dist.get_rank)
    assert pool.exitcodes == [-signal.SIGKILL, exitcode]


@pytest.mark.parametrize("where", ["function", "call", "step", "item", "message"])
def test_a_rank_that_dies_at_work_is_reported_within_a_second(where: str) -> None:
    """Rank 1 is killed in a function, in a call, in a step, while an item fills the pipe, or with
    half of a message read. The executor never blocks."""
    with Ranks(2, Held) as ranks:
        pid = ranks.pids[1]
        act: Callable[[], object] = partial(ranks.call, "signal", 1, int(signal.SIGKILL))
        if where == "function":
            ranks.run(sum_of_ranks)  # imports this module
            act = partial(ranks.run, die_on, 1)
        elif where == "step":
            act = partial(list, ranks.stream("die_in_step", 2, 1))
        elif where == "item":
            items = ranks.stream("count", 3, BIG, rank=1)
            next(items)  # the next item waits for space in the pipe
            time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            act = partial(list, items)
        elif where == "message":
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
            act = partial(ranks.call, "echo", torch.zeros(BIG))
        error = require_failure(ranks, act)
    dead = error.outcomes[1]
    assert dead.seconds < 1 and dead.exitcode == -signal.SIGKILL == ranks.exitcodes[1]
    assert f"rank 1 (pid {pid}), after 0." in str(error) and "killed by SIGKILL" in str(error)
    if where == "call":  # The cause is known, so the error has no stack of rank 0.
        assert str(error).startswith("signal failed on 2 of 2 ranks\n\nThe executor")
        assert "\n\nrank 0: no response\n\n" in str(error)


def test_a_rank_that_dies_in_a_factory_or_while_idle_is_noticed() -> None:
    with pytest.raises(RankError, match=r"die_on failed on 2 of 2(?s:.*)rank 1 (?s:.*)SIGKILL"):
        Ranks(2, die_on, 1)
    with Ranks(2, Held) as ranks:
        os.kill(ranks.pids[1], signal.SIGKILL)
        start = time.monotonic()
        while ranks.healthy:
            assert time.monotonic() - start < 1
            time.sleep(0.01)
        error = require_failure(ranks, lambda: ranks.call("rank"))
    assert error.outcomes[0].value == 0 and error.outcomes[1].exitcode == -signal.SIGKILL


# Timeouts and stopped ranks.


@pytest.mark.parametrize("use", ["call", "run"])
def test_a_stopped_rank_is_reported_when_time_is_up(use: str) -> None:
    """Rank 1 is stopped and receives a message larger than the pipe. The call still times out."""
    with Ranks(2, Held) as ranks:
        ranks.run(sum_of_ranks)  # imports this module
        call = partial(ranks.call, "echo") if use == "call" else partial(ranks.run, echo)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        start = time.monotonic()
        error = require_failure(ranks, lambda: call(torch.zeros(BIG), timeout=0.3))
    assert 0.3 <= time.monotonic() - start < 10
    assert error.outcomes[1].timed_out
    assert "no response: stopped by a signal" in str(error)


def test_a_stopped_rank_may_continue() -> None:
    with Ranks(2) as pool:
        pool.submit(act_on_rank, 1, send_signal, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while (outcomes := pool.collect(0.2))[0].timed_out and time.monotonic() < deadline:
            pass
        went_on, stopped = outcomes
        assert went_on.value == "went on" and stopped.timed_out and not stopped.ok
        stat = Path(f"/proc/{pool.pids[1]}/stat")  # a SIGCONT before the rank has stopped is lost
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(pool.pids[1], signal.SIGCONT)
        assert [outcome.value for outcome in pool.collect(30)] == ["went on", "went on"]


def test_a_timeout_reports_the_stacks_of_the_ranks() -> None:
    with Ranks(2, Held, timeout=0.3) as ranks:
        error = require_failure(ranks, lambda: ranks.call("sleep", 100))
    assert all(outcome.timed_out for outcome in error.outcomes)
    assert "still running" in str(error) and "in sleep" in str(error)


# The end of ranks: interrupts, close() and the death of the parent.


def test_an_interrupt_ends_a_call_but_no_submitted_function() -> None:
    with Ranks(2, Held, timeout=1e10) as ranks:  # exceeds the largest timeout of a lock
        pids = ranks.pids
        ranks.submit(time.sleep, 1.0)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ranks.collect(30)
        assert all(outcome.ok for outcome in ranks.collect(30))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ranks.call("sleep", 100)
        with pytest.raises(RuntimeError, match=r"\(a call was interrupted by KeyboardInterrupt\)"):
            ranks.call("rank")
    assert wait_until_gone(pids)


def test_closing_ends_the_call_of_another_thread() -> None:
    ranks = Ranks(2, Held)
    pids = ranks.pids
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(ranks.call, "sleep", 100)
        time.sleep(0.2)
        ranks.close()
        with pytest.raises(RuntimeError, match="closed during a call"):
            call.result(5)
    assert wait_until_gone(pids)


def test_close_ends_busy_stopped_and_grandchild_processes() -> None:
    with Ranks(3) as pool:
        pids = [*pool.pids, *pool.run(start_child_process)]
        pool.submit(time.sleep, 100)
        os.kill(pool.pids[1], signal.SIGSTOP)
        start = time.monotonic()
    assert time.monotonic() - start < 20  # the ranks would sleep for 100 s
    assert pool.exitcodes == [-signal.SIGKILL] * 3
    assert wait_until_gone(pids)


PARENT = """
import os, signal, sys, threading
import torch
from tests.support.held import Held
from tpkernels.launch import Ranks
if __name__ == "__main__":
    ranks = Ranks(2, Held)
    print(*ranks.pids, flush=True)
    how = sys.argv[1]
    if how != "exit":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        os.kill(ranks.pids[0], signal.SIGSTOP)
        ranks.call("echo", torch.zeros(1 << 24))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", sweep(["stopped", "exit"]))
def test_a_killed_parent_leaves_nothing_behind(how: str, tmp_path: Path) -> None:
    script, temporary = tmp_path / "script.py", tmp_path / "tmp"
    script.write_text(PARENT)
    temporary.mkdir()
    path = os.pathsep.join(sys.path)
    parent = subprocess.run(
        [sys.executable, str(script), how],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert parent.returncode == (0 if how == "exit" else -signal.SIGKILL)
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2 and wait_until_gone(pids)
    deadline = time.monotonic() + 20  # the fork server needs time to notice and to clean up
    while (left := list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_a_fork_is_not_the_parent() -> None:
    with Ranks(1, Held) as ranks:

        def call_in_fork() -> str:
            with pytest.raises(
                RuntimeError,
                match="this process was forked and cannot use the executor of its parent",
            ):
                ranks.call("rank")
            ranks.close()
            return ""

        assert run_in_child(call_in_fork) == "fine"
        assert ranks.call("rank") == [0]


def test_ranks_leak_no_descriptors() -> None:
    def count_descriptors() -> int:
        gc.collect()  # frees objects of earlier tests
        return len(os.listdir("/proc/self/fd"))

    def run_and_close() -> None:
        with Ranks(2, Held) as ranks:
            ranks.call("echo", torch.zeros(10))
            next(ranks.stream("count", 100))

    run_and_close()
    before = count_descriptors()
    for _ in range(2):
        run_and_close()
    assert count_descriptors() == before


# Calls and streams of objects that the ranks hold.


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2, Held, 10) as ranks:
        yield ranks
        assert ranks.healthy, "a test has broken the executor"


# Calls.


def test_results_are_in_rank_order() -> None:
    with Ranks(3, Held, start=1, timeout=60) as ranks:
        for added in ranks.call("add", torch.zeros(2, 3)):
            assert torch.equal(added, torch.full((2, 3), 6.0))
        assert ranks.call("rank") == ranks.run(torch.distributed.get_rank) == [0, 1, 2]
        assert ranks.call("rank", rank=2) == 2
        assert len(ranks.pids) == 3 and ranks.healthy
    assert ranks.exitcodes == [0] * 3 and not ranks.healthy


def test_arguments_and_results_of_every_kind(two_ranks: Ranks) -> None:
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    for args, kwargs in two_ranks.call(
        "echo", 1, (2.5, [None, "ü"]), x.t(), key={"b": b"\0", 3: True}
    ):
        assert args[:2] == (1, (2.5, [None, "ü"])) and kwargs == {"key": {"b": b"\0", 3: True}}
        assert torch.equal(args[2], x.t()) and args[2].dtype == x.dtype
    added = two_ranks.call("add", x.float(), rank=0)
    assert torch.equal(added, x.float() * 2 + 21)
    assert torch.equal(x.flatten(), torch.arange(6).bfloat16())  # the ranks modify copies


def test_messages_larger_than_the_pipe(two_ranks: Ranks) -> None:
    nbytes = (5 << 20) + 12345
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    string = "ü" * (nbytes // 2)
    for (got, got_string), kwargs in two_ranks.call("echo", x, string, more=[x[:7], x]):
        assert torch.equal(got, x) and got_string == string
        assert torch.equal(kwargs["more"][0], x[:7]) and torch.equal(kwargs["more"][1], x)
    for sizes in ([0, 3_000_000], [3_000_000, 1]):  # sizes of the results by rank
        results = two_ranks.call("mine", sizes)
        assert [len(result) for result in results] == sizes
        assert all((result == rank).all() for rank, result in enumerate(results))


def test_waiting_uses_no_cpu_time(two_ranks: Ranks) -> None:
    def cpu_seconds() -> float:
        ticks = 0
        for pid in two_ranks.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    two_ranks.call("nothing")
    before, start = cpu_seconds(), time.thread_time()
    two_ranks.call("sleep", 0.2)
    assert time.thread_time() - start < 0.1  # the parent polls the ranks
    time.sleep(0.2)
    assert cpu_seconds() - before < 0.2  # the gloo threads poll


def test_calls_of_several_threads_are_serialized(two_ranks: Ranks) -> None:
    spans: list[tuple[float, float]] = []

    def work() -> None:
        for _ in range(5):
            begin, end = two_ranks.call("sleep", 0.005, rank=0).split()
            spans.append((float(begin), float(end)))

    assert run_concurrently([work] * 4) == [None] * 4
    spans.sort()
    assert len(spans) == 20
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    with ThreadPoolExecutor(1) as threads:
        threads.submit(two_ranks.call, "sleep", 0.5)
        time.sleep(0.1)
        assert two_ranks.healthy  # readable from any thread
        with pytest.raises(TimeoutError, match=r"timed out after 0\.2 s: calls of other threads"):
            two_ranks.call("nothing", timeout=0.2)
    assert two_ranks.call("rank") == [0, 1]


# Refusals and exceptions leave the ranks usable.


def test_an_exception_is_raised_with_its_traceback_and_not_printed(
    two_ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match=r"^fail failed on 1 of 2 ranks\n\nrank 1 \(pid ") as caught:
        two_ranks.call("fail", [1])
    good, bad = caught.value.outcomes
    assert good.ok and good.value == 0
    assert bad.error_type == "ArithmeticError" and bad.error.startswith("Traceback")
    assert "in fail\n" in bad.error and str(Path(launch.__file__).parent) not in bad.error
    assert "closed" not in str(caught.value)
    with pytest.raises(RankError, match=r"failed on 2 of 2 ranks(?s:.*)SystemExit: 3"):
        two_ranks.call("fail", [0, 1], how="exit")
    message = r"the result of unsendable cannot be sent: cannot pickle '_thread\.lock' object"
    with pytest.raises(RankError, match=message) as caught:
        two_ranks.call("unsendable", [0, 1])
    assert "During handling" not in str(caught.value)
    assert two_ranks.call("unsendable", [1], rank=0) == 1  # the result of rank 1 is not requested
    assert capfd.readouterr() == ("", "")


def test_refusals_send_nothing(two_ranks: Ranks) -> None:
    with pytest.raises(AttributeError, match=r"no public method 'ech' \(did you mean 'echo'\?\); "):
        two_ranks.call("ech")
    for name in ("_secret", "__init__", "limit", "costly", "start"):
        for attempt in (two_ranks.call, two_ranks.stream):
            with pytest.raises(AttributeError, match="no public method"):
                attempt(name)
    with pytest.raises(TypeError, match=r"^the call of echo cannot be sent: cannot pickle"):
        two_ranks.call("echo", 1, {"x": threading.Lock()})
    with pytest.raises(ValueError, match="rank is 2; expected 0 to 1"):
        two_ranks.call("rank", rank=2)
    for timeout in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(
            ValueError, match="timeout must be a positive, finite number of seconds"
        ):
            two_ranks.call("rank", timeout=timeout)
    assert two_ranks.call("rank") == [0, 1]


def test_factories_that_fail() -> None:
    with pytest.raises(TypeError, match="lambda"):
        Ranks(1, lambda: None)
    with pytest.raises(RankError, match=r"Held failed on 1 of 1(?s:.*)rank 0 was told to"):
        Ranks(1, Held, 0, 0)


def test_a_closed_executor_refuses_calls() -> None:
    ranks = Ranks(1, make, 5, threads=2)
    assert ranks.call("add", torch.zeros(1))[0].item() == 5
    items = ranks.stream("count", 100)
    next(items)
    ranks.close()
    ranks.close()
    for attempt in (
        lambda: ranks.call("rank"),
        lambda: ranks.run(os.getpid),
        lambda: ranks.collect(1),
    ):
        with pytest.raises(RuntimeError, match=r"is closed \(close\(\) was called\); start a"):
            attempt()
    with pytest.raises(RuntimeError, match="this executor is closed"):
        next(items)
    items.close()


# Streams: all ranks run the same number of steps, whatever the consumer does.


def test_a_stream_yields_the_items_of_a_rank(two_ranks: Ranks) -> None:
    assert list(two_ranks.stream("count", 20)) == [2.0 * step for step in range(20)]
    assert two_ranks.call("progress") == [(20, "exhausted")] * 2
    assert list(two_ranks.stream("uneven", [3, 5], rank=1)) == [0, 1, 2, 3, 4]
    assert list(two_ranks.stream("uneven", [3, 5])) == [0, 1, 2]
    assert list(two_ranks.stream("late", 0)) == list(two_ranks.stream("late", 1)) == [0, 1]
    assert list(two_ranks.stream("count", 0)) == []


@pytest.mark.parametrize("num_items", [0, 1, 30])
def test_closing_a_stream_ends_all_ranks_after_the_same_step(
    two_ranks: Ranks, num_items: int
) -> None:
    two_ranks.call("progress")
    items = two_ranks.stream("count", 10_000)
    for step in range(num_items):
        assert next(items) == 2.0 * step
    time.sleep(0.05)  # the ranks stay close to a slow consumer
    items.close()
    (steps, ended), other_rank = two_ranks.call("progress")
    assert other_rank == (steps, ended)
    if num_items:
        assert ended == "closed" and num_items <= steps <= num_items + ranks_module.STREAM_AHEAD


def test_items_larger_than_the_pipe(two_ranks: Ranks) -> None:
    pad = 1 << 19
    received = [(value, len(rest)) for value, rest in two_ranks.stream("count", 5, pad)]
    assert received == [(2.0 * step, pad) for step in range(5)]
    for _ in two_ranks.stream("count", 10_000, pad):
        break  # abandoning a stream closes it, here while rank 0 sends an item
    assert two_ranks.call("progress")[1][1] == "closed"


def test_calls_wait_for_an_open_stream(two_ranks: Ranks) -> None:
    items = two_ranks.stream("count", 3)
    next(items)
    for attempt in (lambda: two_ranks.call("nothing"), lambda: next(two_ranks.stream("count", 3))):
        with pytest.raises(RuntimeError, match="a stream is open; exhaust or close its iterator"):
            attempt()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(two_ranks.call, "rank")
        time.sleep(0.1)
        assert not call.done()
        assert list(items) == [2.0, 4.0]
        assert call.result(30) == [0, 1]


def test_failures_in_a_stream(two_ranks: Ranks) -> None:
    seen = []
    with pytest.raises(RankError, match=r"failed on 2 of 2 ranks(?s:.*)rank 1 was told to"):
        seen.extend(two_ranks.stream("fail_in_step", 2, [0, 1]))
    assert seen == [0, 1][: len(seen)]  # the error of rank 1 may arrive before items of rank 0
    with pytest.raises(RankError, match=r"failed on 1 of 2 ranks(?s:.*)rank 1 was told to"):
        list(two_ranks.stream("fail_in_step", 2, [1]))
    with pytest.raises(RankError, match=r"an item cannot be sent: cannot pickle '_thread\.lock'"):
        list(two_ranks.stream("unsendable_items"))
    with pytest.raises(RankError, match=r"rank returned a int; stream\(\) needs a generator"):
        list(two_ranks.stream("rank"))
    assert two_ranks.call("rank") == [0, 1]
