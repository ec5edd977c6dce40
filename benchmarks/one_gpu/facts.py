"""Facts of the machine: GPU, driver, versions, clocks and copy bandwidth."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.one_gpu.machine import Machine
from benchmarks.one_gpu.stages import Case, Row
from tpkernels.planning.machine import versions

_QUERY = (
    *("driver_version", "clocks.sm", "clocks.mem", "power.draw", "power.limit"),
    *("temperature.gpu", "mig.mode.current"),
)


def cases(machine: Machine) -> Iterator[Case]:
    """Yield the cases. The first case provides the card name for the report."""
    yield "machine", partial(_machine, machine)
    yield "tpkernels info", _info
    if machine.is_gpu:
        yield "copy of 1 GiB", partial(_copy, machine)


def _machine(machine: Machine) -> Row:
    row: Row = {"card": machine.kind, "multiprocessors": machine.multiprocessors, **versions()}
    if machine.is_gpu:
        row["card"] = torch.cuda.get_device_name(machine.device)
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            )
            row |= dict(zip(_QUERY, result.stdout.strip().split(", "), strict=False))
    return row


def _info() -> Row:
    command = [sys.executable, "-m", "tpkernels", "info"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"bad": result.returncode != 0, "text": (result.stdout or result.stderr)[-4000:]}


def _copy(machine: Machine) -> Row:
    x = torch.empty(1 << 30, dtype=torch.uint8, device=machine.device)
    us = machine.microseconds(partial(torch.empty_like(x).copy_, x))
    return {"GB/s, read and written": round(2 * x.nbytes / us / 1e3)}
