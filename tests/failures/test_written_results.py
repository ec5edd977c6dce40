"""Results that the peer writes: what a stopped peer, a fork and the end of a group do to them."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.written import LARGE, WORLD, shared, shared_at_once
from tpkernels import _C
from tpkernels.launch import Ranks


@shared_at_once()
def forked_job() -> list[str]:
    """A child keeps the results of before the fork, while the parent goes on."""
    failures = []
    with fresh_group() as group:
        tpkernels.all_reduce(torch.ones(LARGE), group)  # plans
        kept = tpkernels.all_reduce(torch.full((LARGE,), 3.0), group)
        read, write = os.pipe()
        gc.collect()  # process groups that earlier tests have left: gloo cannot free them in a fork
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os.close(write)
            os.read(read, 1)  # the parent has overwritten it
            same = bool((kept == 6).all())
            kept.fill_(9)
            ending = faults.ending_of(lambda: tpkernels.all_reduce(torch.ones(LARGE), group))
            os._exit(0 if same and "was forked from it" in ending.text else 1)
        kept.fill_(7)
        os.close(write)
        os.close(read)
        if (status := os.waitpid(pid, 0)[1]) != 0:
            failures.append(f"the child ended with status {status}")
        if not (kept == 7).all():
            failures.append("the child wrote to the parent's result")
        for value in range(4):
            y = tpkernels.all_reduce(torch.full((LARGE,), float(value)), group)
            failures += [] if (y == 2 * value).all() else ["a wrong sum after the fork"]
    return failures


def test_a_fork_has_copies(ranks: RanksFixture) -> None:
    report(itertools.chain(*ranks(WORLD).run(forked_job)))


def stop_in_next_wait(group: dist.ProcessGroup) -> None:
    """Has this rank stop itself when it next waits for a peer."""
    waits = itertools.count()

    def on_wait(begins: bool) -> None:
        if next(waits) == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    faults.workspace_of(group).channel.set_on_wait(on_wait)


@shared_at_once()
def stopped_job() -> tuple[list[str], int]:
    """Rank 1 stops within a call, rank 0 gives up, and rank 1 then goes on: what it still writes
    is in memory that rank 0 does not use again. Returns what is wrong and how much was written."""
    group = faults.new_group(timeout=1.5)
    rank, failures = dist.get_rank(), []
    usual = faults.new_group()
    other = tpkernels.all_reduce(torch.ones(LARGE), usual)
    before = _C.calls.result_pool()["idle"]
    kept = tpkernels.all_reduce(torch.ones(LARGE), group)
    spare = tpkernels.all_reduce(torch.ones(LARGE), group)
    address = spare.data_ptr()
    if not all(map(shared, (kept, other, spare))):
        failures.append("the results are not where the test looks for them")
    del spare  # the failing call takes this block
    if rank == 1:
        dist.distributed_c10d._get_default_store().set("pid", str(os.getpid()))
        stop_in_next_wait(group)
    else:
        time.sleep(0.3)  # rank 1 waits: it has said where its result is
    x = torch.full((LARGE,), 5.0)
    ending = faults.ending_of(lambda: tpkernels.all_reduce(x, group))
    if rank == 1:
        return failures + ([] if ending.error else ["rank 1 succeeded"]), 0
    if ending.error != "CollectiveTimeoutError":
        failures.append(str(ending))
    if (idle := _C.calls.result_pool()["idle"]) != before:
        failures.append(f"{idle - before} bytes of the broken group stay idle")
    ctypes.memset(address, 0xEE, 4 * LARGE)
    taken = [_C.calls.empty((LARGE,), torch.float32).fill_(2.0) for _ in range(8)]
    if address in [each.data_ptr() for each in taken]:
        failures.append("the memory was handed out")
    os.kill(int(dist.distributed_c10d._get_default_store().get("pid")), signal.SIGCONT)
    deadline, late = time.monotonic() + faults.PROMPT, 0
    while late == 0 and time.monotonic() < deadline:
        late = sum(byte != 0xEE for byte in ctypes.string_at(address, 4 * LARGE))
        time.sleep(0.2)
    if not all((each == 2).all() for each in (*taken, kept, other)):
        failures.append("a stopped peer wrote to a result")
    return failures, late


def test_a_stopped_rank_writes_to_no_other_result() -> None:
    with faults.watched_ranks(WORLD) as ranks:
        (wrong, late), (wrong_there, _) = ranks.run(stopped_job, timeout=60)
    report([*wrong, *wrong_there])
    assert late > 0, "the stopped rank wrote nothing after all: the test shows nothing"


@shared_at_once()
def left_job() -> list[str]:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:tpkernels")

    def use_one() -> torch.Tensor:
        with fresh_group() as group:
            tpkernels.all_reduce(torch.ones(LARGE), group)  # plans
            kept = tpkernels.all_reduce(torch.ones(LARGE), group)
            tpkernels.all_reduce(torch.ones(2 * LARGE), group)
            return kept

    use_one()
    gc.collect()
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    failures = []
    for _ in range(2):
        kept = use_one()
        gc.collect()
        if mapped() != before + 1 or not (kept == 2).all():
            failures.append(f"{mapped()} mappings with a result, {before} without")
        del kept
        if (mapped(), len(os.listdir("/proc/self/fd"))) != (before, files):
            failures.append(f"{mapped()} mappings, {before} before; {files} descriptors before")
    return failures


def test_they_outlive_their_group_and_leave_nothing_behind() -> None:
    with Ranks(WORLD) as ranks:
        report(itertools.chain(*ranks.run(left_job)))
