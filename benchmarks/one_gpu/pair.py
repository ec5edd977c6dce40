"""`tpkernels qualify` on two processes that share the GPU in time slices, within the time budget.

The qualification report stays in the cache folder of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.one_gpu.machine import Machine
from benchmarks.one_gpu.stages import Case, Row

_END_S = 10.0  # time to end the running stage
_REHEARSED = ("direct/", "pipelined/all_gather")


def cases(machine: Machine) -> Iterator[Case]:
    """Yield the command as a case. Its rows are the output lines."""
    for only in machine.choose(("",), _REHEARSED):
        yield f"qualify --tp 2 {only}".strip(), partial(_qualify, machine, only)


def _qualify(machine: Machine, only: str) -> Iterator[Row]:
    budget = max(1.0, machine.seconds_left - _END_S)
    command = [sys.executable, "-m", "tpkernels", "qualify", "--tp", "2", "--budget", f"{budget:g}"]
    command += ["--device", machine.device.type, "--only", only]
    env = {**os.environ, "COLUMNS": "600"}  # one line per stage
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        assert process.stdout is not None
        for line in filter(None, map(str.strip, process.stdout)):
            yield {"bad": "disqualified" in line or "Error" in line, "line": line[:900]}
        code = process.wait()
    yield {"bad": code not in (0, 1), "line": f"exit code {code}"}
