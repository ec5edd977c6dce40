"""What ends an executor from outside, and what is left then: nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.launch.test_launch import gone
from tests.support.held import Held
from tpkernels.launch import Ranks


@pytest.mark.parametrize("how", ["call", "stream"])
def test_an_interrupt_ends_a_call(how: str) -> None:
    with Ranks(2, Held) as executor:
        pids = executor.pids
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            if how == "call":
                executor.call("sleep", 100)
            else:
                list(executor.stream("count", 1 << 40))
        if how == "call":
            with pytest.raises(RuntimeError, match=r"\(a call was left with KeyboardInterrupt\)"):
                executor.call("rank")
    assert 0.3 <= time.monotonic() - begin < 10
    assert gone(pids)


PARENT = """
import os, signal, sys, threading
import torch
from tpkernels.launch import Ranks
if __name__ == "__main__":
    executor = Ranks(2, "tests.support.held:Held")
    print(*executor.pids, flush=True)
    how = sys.argv[1]
    end = lambda: os.kill(os.getpid(), signal.SIGKILL)
    if how == "idle":
        end()
    elif how == "call":
        threading.Timer(0.3, end).start()
        executor.call("sleep", 100)
    elif how == "message":
        os.kill(executor.pids[0], signal.SIGSTOP)
        threading.Timer(0.3, end).start()
        executor.call("echo", torch.zeros(1 << 24))
    elif how == "stream":
        items = executor.stream("count", 1 << 40, 1 << 20)
        next(items)
        end()
"""


def start(script: str, tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, str(path), *args],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": str(tmp_path / "tmp"),
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def nothing_left(tmp_path: Path, pids: list[int]) -> None:
    assert gone(pids)
    deadline = time.monotonic() + 20  # for the fork server to notice, and to clean up
    while (left := list((tmp_path / "tmp").iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        "call",
        "message",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("idle", "stream", "exit")),
    ],
)
def test_a_killed_driver_leaves_nothing_behind(how: str, tmp_path: Path) -> None:
    with start(PARENT, tmp_path, how) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert parent.wait(60) == (0 if how == "exit" else -signal.SIGKILL)
    assert len(pids) == 2
    nothing_left(tmp_path, pids)


def test_a_fork_is_not_the_driver() -> None:
    with Ranks(1, Held) as executor:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                executor.call("rank")
            except RuntimeError as error:
                code = 0 if "this process is a fork" in str(error) else 2
            executor.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert executor.call("rank") == [0]


def test_closing_ends_the_call_of_another_thread() -> None:
    executor = Ranks(2, Held)
    pids, errors = executor.pids, list[BaseException]()

    def call() -> None:
        try:
            executor.call("sleep", 100)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    executor.close()
    thread.join(5)
    assert not thread.is_alive() and gone(pids)
    assert isinstance(errors[0], RuntimeError) and "closed during a call" in str(errors[0])


def test_executors_leave_no_descriptors_and_no_mappings() -> None:
    def held() -> tuple[int, int]:
        gc.collect()  # what earlier tests have left
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:tpkernels")

    def use() -> None:
        with Ranks(2, Held) as executor:
            executor.call("echo", torch.zeros(10))
            next(executor.stream("count", 100))

    use()
    before = held()
    for _ in range(4):
        use()
    assert held() == before


def test_ranks_hold_the_memory_without_a_descriptor() -> None:
    with Ranks(2, Held) as executor:
        for pid in [os.getpid(), *executor.pids]:
            links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
            assert not [link for link in links if "memfd:tpkernels (" in os.path.realpath(link)]
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "/memfd:tpkernels (deleted)" in maps
