"""``tpkernels.autotune`` without memory, without shared memory, and what it leaves."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.ranked import apart, fresh_group, report
from tests.support.tiers import sweep
from tests.support.tuned import WORLD, call, own, plan_of, watched
from tpkernels.groups.group import Group
from tpkernels.tuning import planned_calls, tuner

FAULTY = 1


def skipped_job(what: str) -> list[str]:
    """Nothing is tuned where there is no memory for it; the call is made by the rule."""
    one = dist.get_rank() == FAULTY
    second, scratch = Group.second, tuner._scratch

    def no_second(self: Group, *args: Any) -> Group:
        made = second(self, *args)
        if what == "shares nothing":
            made.workspace = None
            return made
        made.close("a test")
        raise MemoryError("no room for the test")

    def no_scratch(*args: Any) -> torch.Tensor:
        if one:
            raise RuntimeError("not enough memory")
        return scratch(*args)

    patch = {
        "second": mock.patch.object(Group, "second", no_second),
        "shares nothing": mock.patch.object(Group, "second", no_second),
        "scratch": mock.patch.object(tuner, "_scratch", no_scratch),
    }[what]
    with fresh_group() as group, watched() as made, tpkernels.autotune(group), patch:
        expected = call("matmul_all_reduce", group, algorithm="unfused")
        made.clear()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            got = [call("matmul_all_reduce", group) for _ in range(2)]
    failures = [] if set(made) <= {"direct"} else [f"{made}"]
    failures += [] if all(torch.equal(each, expected) for each in got) else ["bits"]
    if any("not tuned: " in str(each.message) for each in given) != (dist.get_rank() == 0):
        failures.append(f"{[str(each.message) for each in given]}")
    return failures


@pytest.mark.parametrize("what", ["second", "shares nothing", "scratch"])
def test_nothing_is_tuned_without_memory(ranks: RanksFixture, what: str) -> None:
    report(f for rank in ranks(WORLD).run(skipped_job, what) for f in rank)


def planned_job() -> tuple[str, list[str]]:
    """One rank cannot plan an algorithm."""
    implementation = planned_calls.implementation

    def failing(problem: Any, plan: Any) -> Any:
        if plan.algorithm == "pipelined" and dist.get_rank() == FAULTY:
            raise MemoryError("no room for the test")
        return implementation(problem, plan)

    with (
        fresh_group() as group,
        watched(),
        tpkernels.autotune(group),
        mock.patch.object(planned_calls, "implementation", failing),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        call("matmul_all_reduce", group)
        (left,) = own(group).measured.left_out.values()
        return plan_of(group).algorithm, sorted(left)


def test_what_one_rank_cannot_plan_is_left_out(ranks: RanksFixture) -> None:
    for algorithm, left in ranks(WORLD).run(planned_job):
        assert left == ["pipelined"] and algorithm != "pipelined"


def apart_job(interrupted: bool) -> faults.Report:
    """Ranks that share no memory have only the process group."""

    def fail(name: str) -> None:
        if name == "ring" and dist.get_rank() == FAULTY:
            raise KeyboardInterrupt if interrupted else ValueError("a test")

    with apart():
        group = faults.new_group()
        with watched(before=fail), tpkernels.autotune(group):
            return faults.report_of(lambda: call("matmul_all_reduce", group), group, [])


@pytest.mark.parametrize("interrupted", sweep([False, True]))
def test_a_failure_between_ranks_that_share_no_memory(
    ranks: RanksFixture, interrupted: bool
) -> None:
    for rank, found in enumerate(ranks(WORLD).run(apart_job, interrupted)):
        own_error = "KeyboardInterrupt" if interrupted else "ValueError"
        assert found.first.error == (own_error if rank == FAULTY else "PeerLostError"), found
        assert found.first.seconds < faults.PROMPT, found
        assert found.again.error == "GroupBrokenError"


def left_job() -> tuple[int, int, int]:
    """Descriptors, mappings and keys of the store that more tuned problems leave."""
    store = dist.distributed_c10d._get_default_store()

    def tune(group: dist.ProcessGroup, rows: int) -> None:
        tpkernels.all_reduce(torch.ones(rows), group)

    def count() -> tuple[int, int, int]:
        gc.collect()
        dist.barrier()
        descriptors = len(os.listdir("/proc/self/fd"))
        mappings = Path("/proc/self/maps").read_text().count("memfd")
        found = descriptors, mappings, store.num_keys()
        dist.barrier()
        return found

    with fresh_group() as group, watched(), tpkernels.autotune(group):
        for rows in (100, 200):
            tune(group, rows)
        before = count()
        for power in range(2, 8):
            tune(group, 100 << power)
        after = count()
        assert len(own(group).measured.tables["cpu"].measurements) == 8
    descriptors, mappings, keys = (then - now for now, then in zip(before, after, strict=True))
    return descriptors, mappings, keys


@pytest.mark.thorough
def test_tuned_problems_leave_nothing(ranks: RanksFixture) -> None:
    for descriptors, mappings, keys in ranks(WORLD).run(left_job):
        assert (descriptors, mappings) == (0, 0) and keys <= 0, keys


def threads_job() -> list[str]:
    """Two threads make the same first call; on one rank the second comes when it is tuned."""
    failures: list[str] = []
    with fresh_group() as group, watched(), tpkernels.autotune(group):

        def work(seconds: float) -> None:
            time.sleep(seconds)
            try:
                call("all_gather", group)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

        late = 2.0 if dist.get_rank() == FAULTY else 0.0
        threads = [threading.Thread(target=work, args=(seconds,)) for seconds in (0.0, late)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failures


@pytest.mark.thorough
def test_a_thread_that_waits_while_another_tunes(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(WORLD).run(threads_job) for failure in rank)
