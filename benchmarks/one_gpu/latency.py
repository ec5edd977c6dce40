"""Time of one all-reduce in a CUDA graph, by variant, number of ranks and size.

Virtual ranks have no link. The time covers the launch, and stores and flags in the memory of one
GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.one_gpu.machine import Machine, failed_wait, open_virtual_ranks, run_once
from benchmarks.one_gpu.stages import Case, Row
from tpkernels import cuda
from tpkernels.ops.tuner import capture_graph
from tpkernels.qualification.checks import CheckedCall
from tpkernels.qualification.virtual import WORLDS, Launch, Results

VARIANTS = ("ll", "ll_two_shot", "two_shot")
KIB = (8, 32, 128, 512, 2048)
_MAX_LL_KIB = 512  # one-shot LL sends the full tensor to every rank
_CALLS = 50  # per CUDA graph


def cases(machine: Machine) -> Iterator[Case]:
    """Yield an empty launch, then a case for each variant, number of ranks and size."""
    yield "empty launch", partial(_floor, machine)
    for world in machine.choose(WORLDS, WORLDS[:1]):
        for kib in machine.choose(KIB, KIB[:1]):
            for variant in VARIANTS:
                if variant != "ll" or kib <= _MAX_LL_KIB:
                    name = f"{variant} W={world} {kib} KiB"
                    yield name, partial(_measure, machine, variant, world, kib)


def _floor(machine: Machine) -> Row:
    """Time a kernel that sums one vector of 8 elements."""
    x = torch.zeros(8, device=machine.device)
    launch = partial(cuda.sum_partials, x, [x])
    launch()
    replay = capture_graph(launch, _CALLS) if machine.is_gpu else launch
    return {"us": round(machine.microseconds(replay) / _CALLS, 2)}


def _measure(machine: Machine, variant: str, world: int, kib: int) -> Row:
    call = CheckedCall("all_reduce", (kib, 512, 1), torch.bfloat16, True, False, 1)  # rows of 1 KiB
    with open_virtual_ranks(machine, f"direct/{variant}", call, world) as (
        ranks,
        launches,
        operands,
    ):
        row: Row = {"variant": variant, "world": world, "kib": kib}
        error = run_once(ranks, launches, operands)
        if machine.is_gpu and not error:
            replay = ranks.capture([partial(_repeat, launch) for launch in launches])
            row["us"] = round(machine.microseconds(replay) / _CALLS, 2)
            error = failed_wait(ranks)
        return row | {"bad": bool(error), "error": error}


def _repeat(launch: Launch) -> Results:
    """Run the calls of one rank back to back, without synchronizing with its peers.

    Keeps only the last results: CUDA must not allocate memory while ranks wait for each other.
    """
    for _ in range(_CALLS):
        results = launch()
    return results
