"""Several threads on one group."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.ranked import report
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.planning import store

WORLD = 2


def first_calls_job(rounds: int, look: float, autotune: bool | None) -> list[str]:
    """Two threads make the same first call on a new group at once. Rank 0 takes a while to read
    the measured times of the machine."""
    load, failures = store.load, list[str]()

    def load_slowly(machine: Any) -> Any:
        time.sleep(look)
        return load(machine)

    store.load = load_slowly
    for _ in range(rounds):
        group = faults.group_of(dist.new_group())
        if autotune is not None:
            tpkernels.init(group, autotune=autotune)
        start = threading.Barrier(2)

        def work(group: dist.ProcessGroup = group, start: threading.Barrier = start) -> None:
            x = torch.ones(40)
            start.wait()
            try:
                got = tpkernels.all_reduce(x, group)
                if not torch.equal(got, torch.full((40,), float(WORLD))):
                    failures.append(f"wrong: {got}")
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.destroy_process_group(group)
    store.load = load
    return failures


@pytest.mark.parametrize("autotune", sweep([True, None]))
def test_two_threads_make_a_groups_first_call(ranks: RanksFixture, autotune: bool | None) -> None:
    results = ranks(WORLD).run(first_calls_job, 2, 0.02, autotune, timeout=100)
    report(failure for rank in results for failure in rank)


def finalize_job() -> list[str]:
    """One thread waits in a call, another calls ``finalize``, which runs after the call."""
    group, rank = faults.new_group(), dist.get_rank()
    faults.run_op("all_gather", group)
    endings: list[Any] = []
    if rank == 1:
        time.sleep(0.5)
        faults.run_op("all_gather", group)
        return []
    call = threading.Thread(
        target=lambda: endings.append(faults.ending_of(lambda: faults.run_op("all_gather", group)))
    )
    call.start()
    while not groups.get(group.group_name).in_call:
        time.sleep(0.001)
    tpkernels.finalize()
    call.join()
    return [str(ending) for ending in endings if ending.error] + ["no call"] * (not endings)


def test_finalize_waits_for_calls() -> None:
    with faults.watched_ranks(WORLD) as ranks:  # it closes the groups of one rank only
        report(failure for rank in ranks.run(finalize_job) for failure in rank)
