"""Several threads, and signal handlers, on one group."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
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
from tpkernels.groups import agreements

WORLD = 2


def first_calls_job(rounds: int, look: float, autotune: bool | None) -> list[str]:
    """Two threads make the same first call on a new group at once. Rank 0 takes a while to read
    the measured times of the machine."""
    load, failures = agreements.store.load, list[str]()

    def load_slowly(machine: Any) -> Any:
        time.sleep(look)
        return load(machine)

    agreements.store.load = load_slowly
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
    agreements.store.load = load
    return failures


@pytest.mark.parametrize("autotune", [None, True])
def test_two_threads_make_a_groups_first_call(ranks: RanksFixture, autotune: bool | None) -> None:
    results = ranks(WORLD).run(first_calls_job, 2, 0.02, autotune, timeout=100)
    report(failure for rank in results for failure in rank)


@contextlib.contextmanager
def handler(handle: Callable[[], None]) -> Any:
    before = signal.signal(signal.SIGUSR2, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def handled_job(algorithm: str, again: str) -> list[str]:
    """Rank 0 waits for rank 1 in an op; its signal handler uses the same group, or closes it."""
    other, rank = faults.new_group(), dist.get_rank()
    group = faults.new_group()
    uses: dict[str, Callable[[], object]] = {
        "op": lambda: tpkernels.all_reduce(torch.ones(5), group),
        "new op": lambda: tpkernels.all_gather(torch.ones(7, 7), group),
        "empty": lambda: tpkernels.empty(4, group=group),
        "finalize": tpkernels.finalize,
    }
    faults.run_op("matmul_all_reduce", group, algorithm)
    tpkernels.all_reduce(torch.ones(5), group)
    outcomes: list[str] = []

    def handle() -> None:
        try:
            uses[again]()
            outcomes.append("not refused")
        except RuntimeError as error:
            outcomes.append(str(error))

    failures = []
    with handler(handle):
        if rank == 0:
            timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR2))
            timer.start()
        else:
            time.sleep(0.6)
        ending = faults.ending_of(lambda: faults.run_op("matmul_all_reduce", group, algorithm))
    if ending.error:
        failures.append(f"the call that waited: {ending}")
    if rank == 0 and (len(outcomes) != 1 or " within a call" not in outcomes[0]):
        failures.append(f"the handler: {outcomes}")
    faults.run_op("all_gather", group)
    faults.run_op("all_gather", other)
    return failures


@pytest.mark.parametrize("again", sweep(["op", "new op", "empty", "finalize"]))
def test_a_signal_handler_cannot_use_the_group_that_waits(ranks: RanksFixture, again: str) -> None:
    results = ranks(WORLD).run(handled_job, "direct", again)
    report(failure for rank in results for failure in rank)


@pytest.mark.parametrize("algorithm", sweep(["unfused", "pipelined"]))
def test_a_signal_handler_during_other_waits(ranks: RanksFixture, algorithm: str) -> None:
    results = ranks(WORLD).run(handled_job, algorithm, "op")
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
