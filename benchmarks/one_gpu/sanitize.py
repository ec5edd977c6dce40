"""compute-sanitizer on small calls.

The tool slows kernels down and may serialize them. Then the waits of two virtual ranks fail, even
with correct kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.one_gpu.machine import Machine, open_virtual_ranks, opened, run_once
from benchmarks.one_gpu.stages import Case, Row
from tpkernels.qualification.checks import CheckedCall, get_checked_ops

# Pairs (tool, number of virtual ranks).
_TOOLS = (("memcheck", 1), ("racecheck", 1), ("synccheck", 1), ("memcheck", 2))
_VARIANTS = ("direct/two_shot", "direct/ll", "fused/all_gather", "fused/reduce_scatter")
_SHAPE = (61, 72, 136)
_TIMEOUT_S, _LIMIT_S = 5.0, 45.0
_CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed")


def cases(machine: Machine) -> Iterator[Case]:
    """Yield a case for each tool. A dry run makes the calls without a tool; the stub compiles
    their kernels."""
    if machine.kind == "stub":
        for world in (1, 2):
            yield f"calls W={world}", partial(_make_calls, machine, world)
        return
    for tool, world in machine.choose(_TOOLS, (("", 2),)):
        yield f"{tool} W={world}".strip(), partial(_sanitize, machine, tool, world)


def _sanitize(machine: Machine, tool: str, world: int) -> Row:
    command = [sys.executable, "-m", __spec__.name, machine.kind, str(world)]
    if tool:
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "5", *command]
    env = dict(os.environ)
    if world == 1:  # separate bounds per tensor; deadlocks with 2 ranks
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    result = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    output = result.stdout + result.stderr
    right = {f"{variant} right" for variant in _VARIANTS}
    clean = result.returncode == 0 and right <= {*output.splitlines()}
    clean = clean and (not tool or any(line in output for line in _CLEAN))
    marks = "SUMMARY", "Error", "Race", "Barrier", "wrong", "right"
    lines = [line for line in output.splitlines() if any(mark in line for mark in marks)]
    return {"bad": not clean, "code": result.returncode, "lines": lines[:10]}


def _make_calls(machine: Machine, world: int) -> Row:
    """Make the calls and print for each call whether its results are right."""
    for variant in _VARIANTS:
        call = CheckedCall(get_checked_ops(variant)[0], _SHAPE, torch.bfloat16, True, False, 1)
        with open_virtual_ranks(machine, variant, call, world, _TIMEOUT_S) as ranks:
            error = run_once(*ranks)
        print(variant, f"wrong: {error}" if error else "right", flush=True)
    return {}


if __name__ == "__main__":
    with opened(sys.argv[1], _LIMIT_S) as opened_machine:
        _make_calls(opened_machine, int(sys.argv[2]))
