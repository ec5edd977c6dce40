"""The launcher: jobs run on every rank, every failure is reported, no process survives."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpkernels import launch
from tpkernels.launch import RankError, Ranks
from tpkernels.launch import ranks as rank_group

# Jobs, run in the ranks.


def sum_of_ranks(*terms: int, scale: int = 1) -> float:
    total = torch.tensor([float(dist.get_rank() + sum(terms))])
    dist.all_reduce(total)
    return total.item() * scale


def surroundings() -> tuple[int, str | None, str | None, str | None]:
    names = ("OMP_NUM_THREADS", "TPKERNELS_TEST_GIVEN", "TPKERNELS_TEST_PARENT")
    return torch.get_num_threads(), *(os.environ.get(name) for name in names)


def raise_on(rank: int, then_wait: bool = False) -> int:
    if dist.get_rank() == rank:
        raise ArithmeticError(f"rank {rank} was told to")
    if then_wait:
        dist.barrier()
    return dist.get_rank()


def exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)


def signal_on(rank: int, number: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    return "went on"


def child_process() -> int:
    return subprocess.Popen(["sleep", "100"]).pid


def unpicklable() -> object:
    return lambda: None


def gone(pids: Iterable[int], within: float = 20.0) -> bool:
    """No process of ``pids`` is left; a zombie that waits for init to reap it does not count."""

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


# Jobs that succeed.


@pytest.mark.parametrize("world", [1, 2, 3])
def test_run_returns_the_results_in_rank_order(ranks, world):
    total = world * (world - 1) / 2
    assert ranks(world).run(sum_of_ranks) == [total] * world
    assert ranks(world).run(sum_of_ranks, 1, 2, scale=10) == [(total + 3 * world) * 10] * world
    assert ranks(world).run(dist.get_rank) == list(range(world))


def test_per_rank_arguments_follow_the_common_ones(ranks):
    pool = ranks(3)
    pool.submit(divmod, 100, per_rank=[(7,), (8,), (9,)])
    outcomes = pool.collect(30)
    assert [outcome.value for outcome in outcomes] == [divmod(100, d) for d in (7, 8, 9)]
    assert all(outcome.ok for outcome in outcomes)


def test_threads_and_environment_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("TPKERNELS_TEST_PARENT", "parent")  # long after the fork server started
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Ranks(1) as one:
        assert one.run(surroundings) == [(1, "1", None, "parent")]
    with Ranks(1, threads=2, env={"TPKERNELS_TEST_GIVEN": "given"}) as two:
        assert two.run(surroundings) == [(2, "2", "given", "parent")]
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_job_time_is_told_on_one_clock(ranks):
    pool = ranks(2)
    begin = time.monotonic()
    pool.submit(time.sleep, per_rank=[(0.05,), (0.15,)])
    short, long = pool.collect(30)
    assert 0.05 <= short.seconds < long.seconds
    assert begin + 0.15 <= long.ended <= time.monotonic()


def test_ranks_find_modules_by_the_path_of_the_moment(ranks, monkeypatch, tmp_path):
    pool = ranks(2)
    (tmp_path / "just_written.py").write_text("def job():\n    return 'found'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert pool.run(importlib.import_module("just_written").job) == ["found"] * 2


# Refusals: nothing is sent, and the ranks stay usable.


def test_refusals(ranks):
    with pytest.raises(ValueError, match="world=0"):
        Ranks(0)
    with pytest.raises(ValueError, match="threads=3, not OMP_NUM_THREADS"):
        Ranks(1, env={"OMP_NUM_THREADS": "3"})
    pool = ranks(2)
    with pytest.raises(ValueError, match="per_rank needs 2 entries, got 1"):
        pool.submit(sum_of_ranks, per_rank=[(1,)])
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        pool.run(sum_of_ranks, lambda: None)
    assert pool.run(sum_of_ranks) == [1.0, 1.0]
    pool.submit(time.sleep, 0.1)
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] are still busy"):
        pool.submit(sum_of_ranks)
    assert [outcome.ok for outcome in pool.collect(30)] == [True, True]


def test_closed_ranks_say_so():
    pool = Ranks(1)
    pool.close()
    pool.close()
    assert pool.exitcodes == [0] and not pool.healthy
    for use in (lambda: pool.run(sum_of_ranks), lambda: pool.collect(1)):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_rank_that_cannot_start():
    with pytest.raises(RankError, match="no_such_backend"):
        Ranks(2, backend="no_such_backend")


# Failures.


def test_an_exception_comes_back_with_its_traceback_and_is_not_printed(ranks, capfd):
    pool = ranks(3)
    pids = pool.pids
    with pytest.raises(RankError, match="raise_on failed on 1 of 3 ranks") as caught:
        pool.run(raise_on, 1)
    good, bad, other = caught.value.outcomes
    assert (good.value, other.value) == (0, 2)
    assert bad.error_type == "ArithmeticError" and not bad.ok
    assert bad.error.startswith("Traceback") and "in raise_on" in bad.error
    assert "ArithmeticError: rank 1 was told to" in str(caught.value)
    assert str(Path(launch.__file__).parent) not in bad.error  # only the job's own frames
    assert not pool.healthy and gone(pids)
    assert capfd.readouterr() == ("", "")


def test_run_does_not_wait_long_for_peers_of_a_failed_rank(monkeypatch):
    monkeypatch.setattr(rank_group, "GRACE_SECONDS", 0.3)
    begin = time.monotonic()
    with Ranks(2) as pool, pytest.raises(RankError) as caught:
        pool.run(raise_on, 0, then_wait=True)
    assert time.monotonic() - begin < 20  # the other would sleep for 100
    message = str(caught.value)
    assert "rank 0 was told to" in message
    assert "still running" in message and "in raise_on" in message  # where rank 1 was


def test_a_result_that_cannot_be_pickled_is_an_error(ranks):
    pool = ranks(2)
    pool.submit(unpicklable)
    assert all("pickle" in outcome.error for outcome in pool.collect(30))
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


def test_system_exit_in_a_job_is_an_error_too(ranks):
    pool = ranks(2)
    pool.submit(sys.exit, 3)
    assert [outcome.error_type for outcome in pool.collect(30)] == ["SystemExit"] * 2
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("job", "argument", "exitcode", "message"),
    [
        (exit_on, 3, 3, "exit code 3"),
        (exit_on, 0, 0, "exit code 0"),
        (signal_on, signal.SIGKILL, -signal.SIGKILL, "killed by SIGKILL"),
        (signal_on, signal.SIGSEGV, -signal.SIGSEGV, "killed by SIGSEGV"),
    ],
)
def test_a_dead_rank_is_reported(job, argument, exitcode, message):
    with Ranks(2) as pool:
        pool.submit(job, 1, argument)
        alive, dead = pool.collect(30)
        assert alive.ok and not dead.ok and dead.exitcode == exitcode
        pool.submit(dist.get_rank)  # the others can be asked all the same
        alive, dead = pool.collect(30)
        assert alive.value == 0 and dead.exitcode == exitcode
        with pytest.raises(RankError, match=message):
            pool.run(dist.get_rank)
    assert pool.exitcodes == [0, exitcode]


def test_a_stopped_rank_times_out_and_may_come_back():
    with Ranks(2) as pool:
        pool.submit(signal_on, 1, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while (outcomes := pool.collect(0.2))[0].timed_out and time.monotonic() < deadline:
            pass
        went_on, stopped = outcomes
        assert went_on.value == "went on" and stopped.timed_out and not stopped.ok
        os.kill(pool.pids[1], signal.SIGCONT)
        assert [outcome.value for outcome in pool.collect(30)] == ["went on", "went on"]
        pids = pool.pids
        with pytest.raises(RankError, match=r"no answer: stopped by a signal"):
            pool.run(signal_on, 1, signal.SIGSTOP, timeout=0.5)
        assert gone(pids)


# Nothing survives.


def test_close_takes_along_busy_stopped_and_grandchild_processes():
    with Ranks(3) as pool:
        pids = [*pool.pids, *pool.run(child_process)]
        pool.submit(time.sleep, 100)
        os.kill(pool.pids[1], signal.SIGSTOP)
        begin = time.monotonic()
    assert time.monotonic() - begin < 20  # they would sleep for 100
    assert pool.exitcodes == [-signal.SIGKILL] * 3
    assert gone(pids)


PARENT = """
import os, signal, sys, time
from tpkernels.launch import Ranks
ranks = Ranks(2)
print(*ranks.pids, flush=True)
if sys.argv[1] == "SIGKILL":
    ranks.submit(time.sleep, 100)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["SIGKILL", "exit without close"])
def test_ranks_do_not_outlive_the_parent(end, tmp_path):
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert parent.returncode == (-signal.SIGKILL if end == "SIGKILL" else 0)
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2 and gone(pids)
    deadline = time.monotonic() + 20  # for the fork server to notice, and to clean up
    while (left := list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_open_and_close_leak_no_file_descriptors():
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with Ranks(1):
        pass
    before = descriptors()
    for _ in range(10):
        with Ranks(2) as pool:
            pids = pool.pids
        assert gone(pids)
    assert descriptors() == before
