"""Runs a stage of the GPU suite in a process of its own: a fault that sticks to a CUDA context, a
crash or a hang ends that stage alone.

The process appends each result to a file as a line of JSON, so a stage that is killed keeps those
it had. When the time is over it is killed with what it has started; its ranks die with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.stage import Result, Setting

RAISED = 3  # exit code of a stage that raised an exception
_GRACE_S = 30.0  # for a stage to import torch, and to end after its budget
_LOOK_S = 0.2


@dataclass(frozen=True)
class Stage:
    """A stage that has ended. ``complete``: it came to its end, in time or at its budget."""

    results: list[Result]
    seconds: float
    complete: bool


def write_results(
    name: str, stage: Callable[[Setting], Iterator[Result]], setting: Setting, file: Path
) -> bool:
    """In the stage's process: runs it within its budget. False: it raised an exception."""
    begin = time.monotonic()
    with file.open("a", buffering=1) as out:

        def write(result: Result) -> None:
            out.write(json.dumps(asdict(result)) + "\n")
            print(f"   {result}", flush=True)

        try:
            for result in stage(setting):
                write(result)
                if time.monotonic() - begin > setting.budget_s:
                    write(Result(name, "budget exhausted: the rest was not run", ok=None))
                    break
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            print(text, flush=True)
            lines = text.splitlines()  # the last one of a RankError is the error of a rank
            write(Result(name, lines[0][:300], lines[-1][:300] if lines[1:] else "", ok=False))
            return False
    return True


def read_results(file: Path) -> list[Result]:
    """The results in a stage's file, without a line that a killed process left unfinished."""
    results = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            results.append(Result(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return results


def run_stage(name: str, arguments: Sequence[str], file: Path, seconds: float) -> Stage:
    """Runs ``benchmarks.gpu_suite --stage`` with these arguments, for at most ``seconds`` and a
    grace."""
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--stage", name, "--into", str(file)]
    begin = time.monotonic()
    process = subprocess.Popen([*command, *arguments], start_new_session=True)
    try:
        while (code := process.poll()) is None and time.monotonic() - begin < seconds + _GRACE_S:
            time.sleep(_LOOK_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # no rank is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    results = read_results(file)
    if code not in (0, RAISED):
        why = f"took more than {seconds + _GRACE_S:.0f} s" if code is None else f"exit code {code}"
        results.append(Result(name, f"the stage was lost: {why}", ok=False))
    return Stage(results, time.monotonic() - begin, code == 0)
