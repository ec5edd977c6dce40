"""``tpkernels.autotune`` with algorithms that fail, without memory, and with ranks that are
lost."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.ranked import apart, check_job, fresh_group, on_ranks
from tests.support.tuned import ROWS, WORLD, call, own, plan_of, watched
from tpkernels.errors import CollectiveTimeoutError
from tpkernels.groups.group import Group
from tpkernels.tuning import planned_calls, tuner

FAULTY = VICTIM = 1
OP = "matmul_all_reduce"


@pytest.mark.parametrize(
    ("op", "way", "late"),
    [
        ("all_gather_matmul", "direct", False),
        ("matmul_reduce_scatter", "pipelined", True),
        (OP, "direct", True),
        ("matmul_all_reduce_rms_norm", "pipelined", False),
    ],
)
@on_ranks(WORLD)
def test_what_fails_on_one_rank_is_left_out(op: str, way: str, late: bool) -> None:
    """An algorithm fails on one rank, in its first run or in a later one. It is not taken for
    nearly as many rows either."""
    runs = 0

    def fail(name: str) -> None:
        nonlocal runs
        runs += name == way
        if name == way and dist.get_rank() == FAULTY and runs > 3 * late:
            raise MemoryError("no room for the test")

    with fresh_group() as group, watched(before=fail) as made, tpkernels.autotune(group):
        expected = call(op, group, algorithm="ring")
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            results = [call(op, group), call(op, group)]
        (reason,) = own(group).measured.failures.values()
        assert all(torch.equal(result, expected) for result in results), "other bits"
        assert plan_of(group).algorithm != way, f"takes '{way}' all the same"
        made.clear()
        call(op, group)
        call(op, group, ROWS + WORLD)
        assert not made[way] and max(made.values(), default=0) <= 2, f"tries again {made}"
    texts = [str(each.message) for each in given]
    why = f"algorithm '{way}' failed when it was tuned: rank {FAULTY}: MemoryError: no room"
    assert list(reason) == [way] and f"algorithm '{way}' {reason[way]}" in f"{why} for the test", (
        f"left out {reason}"
    )
    assert any(why in text for text in texts) == (dist.get_rank() == 0), f"warnings {texts}"


def only_one_left_job() -> list[str]:
    """One of two algorithms fails, so there is nothing to compare; the rule would take it."""

    def fail(name: str) -> None:
        if name == "direct" and dist.get_rank() == FAULTY:
            raise ValueError("a test")

    two = mock.patch.object(planned_calls, "candidates", lambda *_: ["unfused", "direct"])
    with fresh_group() as group, watched(before=fail) as made, two, tpkernels.autotune(group):
        expected = call(OP, group, algorithm="unfused")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = call(OP, group)
        made.clear()
        again = call(OP, group, residual=torch.zeros_like(got))  # planned anew
        right = made == {"unfused": 1} and torch.equal(got, expected) and torch.equal(again, got)
        plan = plan_of(group)
        return [] if right and plan.algorithm != "direct" else [f"{made}, {plan.reason}"]


def hidden_failure_job() -> None:
    """`pipelined` cannot be planned on one rank; a failure of `direct` shows after the call, as
    that of a kernel on a GPU."""
    check, implementation = Group.check_kernels, planned_calls.implementation
    for way in ("pipelined", "direct"):

        def checked(self: Group, text: str, way: str = way) -> None:
            if f"[{way}" in text and way == "direct" and dist.get_rank() == FAULTY:
                raise CollectiveTimeoutError("of a test")
            check(self, text)

        def planned(problem: Any, plan: Any, way: str = way) -> Any:
            if plan.algorithm == way == "pipelined" and dist.get_rank() == FAULTY:
                raise MemoryError("no room for the test")
            return implementation(problem, plan)

        with (
            fresh_group() as group,
            watched(),
            tpkernels.autotune(group),
            mock.patch.object(planned_calls, "implementation", planned),
            mock.patch.object(Group, "check_kernels", checked),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            call(OP, group)
            (left,) = own(group).measured.failures.values()
            assert list(left) == [way] and plan_of(group).algorithm != way, (
                f"{way}: {left}, {plan_of(group).reason}"
            )


def process_group_job() -> faults.Report:
    """`unfused` goes through the process group, of which there is only one."""

    def fail(name: str) -> None:
        if name == "unfused" and dist.get_rank() == FAULTY:
            raise ValueError("a test")

    group = faults.new_group(5.0)
    other = faults.new_group(5.0)
    with watched(before=fail), tpkernels.autotune(group):
        return faults.report_of(lambda: call(OP, group), group, [other])


def apart_job(interrupted: bool) -> faults.Report:
    """Ranks that share no memory have only the process group."""

    def fail(name: str) -> None:
        if name == "ring" and dist.get_rank() == FAULTY:
            raise KeyboardInterrupt if interrupted else ValueError("a test")

    with apart():
        group, other = faults.new_group(), faults.new_group()
        with watched(before=fail), tpkernels.autotune(group):
            return faults.report_of(lambda: call(OP, group), group, [other])


@pytest.mark.parametrize(
    ("job", "arguments", "own_error"),
    [
        (process_group_job, (), "ValueError"),
        (apart_job, (False,), "ValueError"),
        pytest.param(apart_job, (True,), "KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_a_failure_in_the_process_group_is_raised_on_all_ranks(
    ranks: RanksFixture, job: Callable[..., faults.Report], arguments: Any, own_error: str
) -> None:
    for rank, found in enumerate(ranks(WORLD).run(job, *arguments)):
        assert found.first.error == (own_error if rank == FAULTY else "PeerLostError"), found
        assert found.first.seconds < faults.PROMPT, found
        assert found.again.error == "GroupBrokenError"
        assert [each.error for each in found.others] == [""]


def skipped_job(what: str) -> list[str]:
    """Nothing is tuned where there is no memory for it; the call is made by the rule."""
    second, scratch = Group.make_second_group, tuner._cache_flush_buffer

    def no_second(self: Group, *args: Any) -> Group:
        made = second(self, *args)
        if what == "shares nothing":
            made.workspace = None
            return made
        made.close("a test")
        raise MemoryError("no room for the test")

    def no_scratch(*args: Any) -> torch.Tensor:
        if dist.get_rank() == FAULTY:
            raise RuntimeError("not enough memory")
        return scratch(*args)

    patch = mock.patch.object(Group, "make_second_group", no_second)
    if what == "scratch":
        patch = mock.patch.object(tuner, "_cache_flush_buffer", no_scratch)
    with fresh_group() as group, watched() as made, tpkernels.autotune(group), patch:
        expected = call(OP, group, algorithm="unfused")
        made.clear()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            got = [call(OP, group) for _ in range(2)]
    failures = [] if set(made) <= {"direct"} else [f"{made}"]
    failures += [] if all(torch.equal(each, expected) for each in got) else ["bits"]
    assert any("not tuned: " in str(each.message) for each in given) == (dist.get_rank() == 0), (
        f"{[str(each.message) for each in given]}"
    )
    return failures


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        (only_one_left_job, ()),
        (hidden_failure_job, ()),
        *((skipped_job, (what,)) for what in ("second", "shares nothing", "scratch")),
    ],
)
def test_what_cannot_be_tuned(
    ranks: RanksFixture, job: Callable[..., list[str]], arguments: tuple[Any, ...]
) -> None:
    check_job(ranks(WORLD), job, *arguments)


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
            call(OP, group)

    return faults.report_of_survivors(tune, group, VICTIM)


def test_a_rank_that_dies_while_tuning_is_reported() -> None:
    with faults.watched_ranks(WORLD) as ranks:
        outcomes = faults.collect(ranks, lost_job, signal.SIGKILL, faults.PATIENCE)
        for first in faults.require_killed(outcomes, VICTIM).values():
            assert first.error == "PeerLostError" and first.peer == VICTIM, first
