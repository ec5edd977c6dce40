"""``tpkernels.autotune`` with algorithms that fail, and ranks that are lost."""

from __future__ import annotations

import itertools
import signal
import warnings
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.tiers import covering, sweep
from tests.support.tuned import MATMULS, ROWS, WORLD, call, own, plan_of, watched
from tpkernels.errors import CollectiveTimeoutError
from tpkernels.groups.group import Group
from tpkernels.tuning import planned_calls

FAULTY = 1


def failure_job(op: str, way: str, late: bool) -> list[str]:
    """An algorithm fails on one rank, in its first run or in a later one."""
    runs = 0

    def fail(name: str) -> None:
        nonlocal runs
        runs += name == way
        if name == way and dist.get_rank() == FAULTY and runs > 3 * late:
            raise MemoryError("no room for the test")

    failures = []
    with fresh_group() as group, watched({"unfused": 0.01}, fail), tpkernels.autotune(group):
        expected = call(op, group, algorithm="ring")
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            results = [call(op, group), call(op, group)]
        (reason,) = own(group).measured.left_out.values()
        if not all(torch.equal(result, expected) for result in results):
            failures.append("other bits")
        if plan_of(group).algorithm == way:
            failures.append(f"takes '{way}' all the same")
        after = Counter({way: runs})
        call(op, group)
        if runs != after[way]:
            failures.append("tries it again")
    texts = [str(each.message) for each in given]
    why = f"algorithm '{way}' failed when it was tuned: rank {FAULTY}: MemoryError: no room"
    if list(reason) != [way] or f"algorithm '{way}' {reason[way]}" not in f"{why} for the test":
        failures.append(f"left out {reason}")
    if any(why in text for text in texts) != (dist.get_rank() == 0):
        failures.append(f"warnings {texts}")
    return failures


@pytest.mark.parametrize(
    ("op", "way"), covering([*itertools.product(MATMULS, ["direct", "pipelined"])])
)
@pytest.mark.parametrize("late", sweep([False, True]))
def test_what_fails_on_one_rank_is_left_out(
    ranks: RanksFixture, op: str, way: str, late: bool
) -> None:
    report(f for rank in ranks(WORLD).run(failure_job, op, way, late) for f in rank)


def only_one_left_job() -> tuple[bool, str]:
    """One of two algorithms fails, so there is nothing to compare; the rule would take it."""

    def fail(name: str) -> None:
        if name == "direct" and dist.get_rank() == FAULTY:
            raise ValueError("a test")

    two = mock.patch.object(planned_calls, "candidates", lambda *_: ["unfused", "direct"])
    with fresh_group() as group, watched(before=fail) as made, two, tpkernels.autotune(group):
        expected = call("matmul_all_reduce", group, algorithm="unfused")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = call("matmul_all_reduce", group)
        made.clear()
        again = call("matmul_all_reduce", group, residual=torch.zeros_like(got))  # planned anew
        assert made == {"unfused": 1}, made
        return torch.equal(got, expected) and torch.equal(again, got), plan_of(group).algorithm


def test_what_failed_is_not_taken_by_rule(ranks: RanksFixture) -> None:
    told = ranks(WORLD).run(only_one_left_job)
    assert len(set(told)) == 1 and told[0][0] and told[0][1] != "direct", told


def process_group_job() -> faults.Report:
    """`unfused` goes through the process group, of which there is only one."""

    def fail(name: str) -> None:
        if name == "unfused" and dist.get_rank() == FAULTY:
            raise ValueError("a test")

    group = faults.new_group(5.0)
    other = faults.new_group(5.0)
    with watched(before=fail), tpkernels.autotune(group):
        return faults.report_of(lambda: call("matmul_all_reduce", group), group, [other])


def test_a_failure_in_the_process_group_is_raised_on_all_ranks(ranks: RanksFixture) -> None:
    for rank, found in enumerate(ranks(WORLD).run(process_group_job)):
        assert found.first.error == ("ValueError" if rank == FAULTY else "PeerLostError"), found
        assert found.again.error == "GroupBrokenError"
        assert [each.error for each in found.others] == [""]


def nearby_job() -> tuple[list[str], bool]:
    """What fails at one number of rows is not taken at nearly the same."""

    def fail(name: str) -> None:
        if name == "direct" and dist.get_rank() == FAULTY:
            raise ValueError("a test")

    with fresh_group() as group, watched(before=fail) as made, tpkernels.autotune(group):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call("matmul_all_reduce", group)
        made.clear()
        got = call("matmul_all_reduce", group, ROWS + 3)
        taken = sorted(made)
        expected = call("matmul_all_reduce", group, ROWS + 3, algorithm="unfused")
        return taken, torch.equal(got, expected)


def test_what_failed_is_not_taken_for_nearly_as_many_rows(ranks: RanksFixture) -> None:
    for taken, right in ranks(WORLD).run(nearby_job):
        assert len(taken) == 1 and taken != ["direct"] and right, taken


def late_failure_job() -> tuple[str, list[str]]:
    """A failure that shows after the call, as that of a kernel on a GPU."""
    check = Group.check_kernels

    def failing(self: Group, text: str) -> None:
        if "[direct" in text and dist.get_rank() == FAULTY:
            raise CollectiveTimeoutError("of a test")
        check(self, text)

    with fresh_group() as group, watched({"unfused": 0.01}), tpkernels.autotune(group):
        with (
            mock.patch.object(Group, "check_kernels", failing),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            call("matmul_all_reduce", group)
        (left,) = own(group).measured.left_out.values()
        return plan_of(group).algorithm, sorted(left)


def test_a_failure_that_shows_after_the_run(ranks: RanksFixture) -> None:
    for algorithm, left in ranks(WORLD).run(late_failure_job):
        assert left == ["direct"] and algorithm != "direct"


VICTIM = 1


def lost_job(number: int, timeout: float) -> tuple[faults.Report, float] | None:
    """One rank is disturbed in the third run of an algorithm."""
    group, runs = faults.new_group(timeout), 0

    def disturb(name: str) -> None:
        nonlocal runs
        runs += name == "direct"
        if runs == 3 and dist.get_rank() == VICTIM:
            faults.disturb_now(number)

    def tune() -> None:
        with watched(before=disturb), tpkernels.autotune(group):
            call("matmul_all_reduce", group)

    return faults.report_of_survivors(tune, group, VICTIM)


def test_a_rank_that_dies_while_tuning_is_reported() -> None:
    with faults.watched_ranks(WORLD) as ranks:
        outcomes = faults.collect(ranks, lost_job, signal.SIGKILL, faults.PATIENCE)
        for first in faults.require_killed(outcomes, VICTIM).values():
            assert first.error == "PeerLostError" and first.peer == VICTIM, first


@pytest.mark.slow
def test_a_rank_that_stops_while_tuning_is_a_timeout() -> None:
    with faults.watched_ranks(WORLD) as ranks:
        ranks.submit(lost_job, signal.SIGSTOP, 3.0)
        for first in faults.collect_stopped(ranks, VICTIM, 3.0).values():
            assert first.error == "CollectiveTimeoutError", first
