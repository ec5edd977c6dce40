"""Python in a process of its own."""

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
    """Run Python in the checkout, whatever its exit code."""
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


def output_of(*arguments: object, **options: Any) -> str:
    """Run Python in the checkout; return its output. ``options`` are those of `python`."""
    ended = python(*arguments, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def torchrun(ranks: int, *arguments: object, **options: Any) -> str:
    """Run a script or module on ranks of torchrun; return what they print."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return output_of(*launcher, *arguments, **options)


def interrupted(
    *arguments: object, when: Callable[[subprocess.Popen[str]], object], seconds: float = 60
) -> tuple[int, str, str]:
    """Run Python, interrupt it as a terminal does when ``when`` returns, and wait until it has left
    no process; return the exit code and the output."""
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    when(process)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=seconds)
    deadline = time.monotonic() + seconds
    while any(one.session == process.pid for one in running()):
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


def running() -> Iterator[Process]:
    """All processes, except zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(") ")
            pid, _, name = head.partition(" (")
            state, *ids = tail.split()[:4]
            if state != "Z":
                yield Process(int(pid), name, *map(int, ids))
