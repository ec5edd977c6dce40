"""Forks of a rank: they cannot take its place in a call, and their exit does it no harm."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels import groups

WORLD = 2


def refused(use: Callable[[], object]) -> str:
    """Returns "" if the group says that it belongs to another process."""
    ending = faults.ending_of(use)
    if ending.error != "GroupBrokenError" or "was forked from it" not in ending.text:
        return str(ending)
    return "" if f"belongs to process {os.getppid()}" in ending.text else ending.text


def uses(group: dist.ProcessGroup) -> list[Callable[[], object]]:
    return [
        lambda: tpkernels.all_reduce(torch.full((9,), 100.0), group),
        lambda: tpkernels.all_gather(torch.ones(2, 3), group, algorithm="unfused"),
        lambda: tpkernels.matmul_all_reduce(torch.ones(9, 9), torch.ones(9, 9), group),
        lambda: tpkernels.empty(4, group=group),
        lambda: tpkernels.init(group, timeout=5.0),
    ]


@pytest.mark.parametrize(("used_before", "ends"), sweep([(True, True), (False, False)]))
@on_ranks(WORLD)
def test_a_fork_is_not_a_rank(used_before: bool, ends: bool) -> list[str]:
    """Rank 0's child tries to use the group and finalizes; then the ranks go on."""
    group, rank = faults.group_of(dist.new_group()), dist.get_rank()
    failures = []
    if used_before:
        faults.run_op("all_reduce", group)

    def child() -> str:
        errors = "".join(refused(use) for use in uses(group))
        if ends:
            tpkernels.finalize()
            gc.collect()
        return errors

    if rank == 0:
        outcome = faults.in_child(child)
        failures += [outcome] if outcome != "fine" else []
    for _ in range(3):
        got = tpkernels.all_reduce(torch.ones(9), group)
        assert torch.equal(got, torch.full((9,), float(WORLD))), f"wrong: {got}"
        faults.run_op("all_gather", group)
    return failures


@on_ranks(WORLD)
def test_a_fork_during_a_call_of_another_thread() -> list[str]:
    """A thread of rank 0 waits in a call, so the fork inherits the lock in its locked state."""
    group, rank = faults.new_group(), dist.get_rank()
    faults.run_op("all_reduce", group)
    if rank == 1:
        time.sleep(0.5)
        faults.run_op("all_reduce", group)
        return []
    failures: list[str] = []
    call = threading.Thread(target=lambda: faults.run_op("all_reduce", group))
    call.start()
    while not groups.get(group.group_name).in_call:
        time.sleep(0.001)
    outcome = faults.in_child(lambda: "".join(refused(use) for use in uses(group)))
    call.join()
    return failures + ([outcome] if outcome != "fine" else [])
