"""Python in separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.support.paths import ROOT


def python(
    *arguments: object, seconds: float = 120, stdin: IO[str] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout and accept any exit code."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def python_output(*arguments: object, **options: Any) -> str:
    """Run Python in the checkout and return its output. ``options``: see `python`."""
    completed = python(*arguments, **options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def torchrun(ranks: int, *arguments: object, **options: Any) -> str:
    """Run a script or module under torchrun and return the output of the ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return python_output(*launcher, *arguments, **options)


def run_and_interrupt(
    *arguments: object, when: Callable[[subprocess.Popen[str]], object], seconds: float = 60
) -> tuple[int, str, str]:
    """Run Python, interrupt it when ``when`` returns, and wait for all its processes.

    The interrupt goes to the process group, as from a terminal. Returns the exit code and the
    output.
    """
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    when(process)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=seconds)
    deadline = time.monotonic() + seconds
    while any(candidate.session == process.pid for candidate in running_processes()):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)
    return process.returncode, *output


class Process(NamedTuple):
    """A process of this machine."""

    pid: int
    name: str
    parent: int
    group: int
    session: int


def running_processes() -> Iterator[Process]:
    """Yield all processes except zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(") ")
            pid, _, name = head.partition(" (")
            state, *ids = tail.split()[:4]
            if state != "Z":
                yield Process(int(pid), name, *map(int, ids))
