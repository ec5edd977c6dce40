"""Ranks that share no memory and die, stop, fail, or make different calls: only their connections
show it. Messages of different calls must not be confused, because gloo ends the process if sizes
differ."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT, Ending, Report
from tests.support.ranked import on_hosts
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.algorithms import parts
from tpkernels.op_spec import OPS

WORLD = 4
VICTIM = 2
TIMEOUT = 1.0
WAYS = ("unfused", "ring", "hierarchical")
HOSTS = "0011"  # the victim's has another rank
MATMULS = [op for op in OPS if "matmul" in op]
CLONE_NEWNET = 0x40000000


def _group(timeout: float = faults.PATIENCE) -> dist.ProcessGroup:
    with on_hosts(HOSTS):
        group = faults.new_group(timeout)
    assert not groups.get(group.group_name).shared_memory
    return group


def _repeat(call: Callable[[], None]) -> None:
    while True:
        call()


def _disturb_product(then: Callable[[], object]) -> None:
    """Makes ``then()`` run once, within the next local matmul."""
    whole, left = parts.local_matmul, [then]

    def local_matmul(*args: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return whole(*args, **options)

    parts.local_matmul = local_matmul


def disturbed_job(
    op: str, algorithm: str, where: str, number: int, timeout: float
) -> tuple[Report, float] | None:
    """The victim sends itself a signal: "before" the call, or in its "local_matmul", when all have
    entered the call and the others wait for the result."""
    group, rank = _group(timeout), dist.get_rank()
    survivors = [r for r in range(WORLD) if r != VICTIM]
    others = [faults.new_group(ranks=survivors)] if rank != VICTIM else []
    call = functools.partial(faults.run_op, op, group, algorithm)
    call()

    def disturb() -> None:
        time.sleep(0.1)
        faults.disturb_now(number)

    if rank == VICTIM and where == "before":
        disturb()
    elif rank == VICTIM:
        _disturb_product(disturb)
    report = faults.report_of(functools.partial(_repeat, call), group, others)
    return None if rank == VICTIM else (report, faults.disturbed_at())


WITHIN = [(op, way, "local_matmul") for op in MATMULS for way in WAYS]
CASES = [*((op, way, "before") for op in OPS for way in WAYS), *WITHIN]
CASES.remove(("all_to_all", "hierarchical", "before"))  # not supported
# Each algorithm, within a call and before it.
_EACH = [("all_gather", "unfused", "before"), ("matmul_reduce_scatter", "ring", "local_matmul")]
_EACH += [("matmul_all_reduce", "hierarchical", "local_matmul")]
KILLED = [*_EACH, *(case for case in CASES if case not in _EACH)]
QUICK_CASES = [
    *sweep(WITHIN),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in WITHIN),
]


@pytest.mark.parametrize(("op", "algorithm", "where"), sweep(KILLED, len(_EACH), later=3))
def test_a_killed_rank_is_reported(op: str, algorithm: str, where: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        outcomes = faults.collect(
            ranks, disturbed_job, op, algorithm, where, signal.SIGKILL, faults.PATIENCE
        )
        for rank, first in faults.require_killed(outcomes, VICTIM).items():
            assert first.error == "PeerLostError", first
            assert first.text.startswith(op) and f"rank {rank} waited for" in first.text, first
            assert "The group is broken: make a new one" in first.text, first


@pytest.mark.parametrize(("op", "algorithm", "where"), QUICK_CASES)
def test_a_stopped_rank_is_a_timeout(op: str, algorithm: str, where: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        ranks.submit(disturbed_job, op, algorithm, where, signal.SIGSTOP, TIMEOUT)
        endings = list(faults.collect_stopped(ranks, VICTIM, TIMEOUT).values())
        for first in endings:
            assert first.error in ("CollectiveTimeoutError", "PeerLostError"), first
            assert first.text.startswith(op), first
            assert re.search(rf"timeout {TIMEOUT:g} s|waited \d\.\d+ s for rank", first.text), first
        assert any(first.error == "CollectiveTimeoutError" for first in endings), endings
        if where == "before":
            assert any(first.peer == VICTIM for first in endings), endings
        os.kill(ranks.pids[VICTIM], signal.SIGCONT)
        assert ranks.collect(faults.COLLECT_SECONDS)[VICTIM].ok


def failing_job(op: str, algorithm: str) -> Report:
    """The victim's matmul raises; the others are in the call."""
    group, rank = _group(), dist.get_rank()
    others = [faults.new_group()]
    call = functools.partial(faults.run_op, op, group, algorithm)
    call()

    def give_up() -> None:
        time.sleep(0.1)
        raise ArithmeticError("no luck with these numbers")

    if rank == VICTIM:
        _disturb_product(give_up)
    report = faults.report_of(functools.partial(_repeat, call), group, others)
    new = _group()
    report.others.append(faults.ending_of(lambda: faults.run_op(op, new, algorithm)))
    return report


@pytest.mark.parametrize(("op", "algorithm"), sweep(product(MATMULS, WAYS)))
def test_an_exception_in_one_rank_ends_the_call_of_all(op: str, algorithm: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        reports = faults.values(faults.collect(ranks, failing_job, op, algorithm))
        raised_at = reports[VICTIM].first.at
        for rank, report in reports.items():
            faults.require_broken(report)
            first = report.first
            if rank == VICTIM:
                assert first.error == "ArithmeticError" and "no luck" in first.text, first
                continue
            assert first.error == "PeerLostError", first
            assert first.at - raised_at < PROMPT, first


# Different calls.

PAIRS = {
    "size": (
        lambda g, way: tpkernels.all_gather(torch.ones(6, 8), g, algorithm=way),
        lambda g, way: tpkernels.all_gather(torch.ones(600, 800), g, algorithm=way),
    ),
    "same bytes": (
        lambda g, way: tpkernels.all_gather(torch.ones(8, 8), g, algorithm=way),
        lambda g, way: tpkernels.all_reduce(torch.ones(32, 8), g, algorithm=way),
    ),
    "dtype": (
        lambda g, way: tpkernels.reduce_scatter(torch.ones(8, 8), g, algorithm=way),
        lambda g, way: tpkernels.reduce_scatter(
            torch.ones(8, 8, dtype=torch.float16), g, algorithm=way
        ),
    ),
    "algorithm": (
        lambda g, way: tpkernels.all_gather(torch.ones(8, 8), g, algorithm="unfused"),
        lambda g, way: tpkernels.all_gather(torch.ones(8, 8), g, algorithm="ring"),
    ),
    "matmul or not": (
        lambda g, way: tpkernels.matmul_reduce_scatter(
            torch.ones(8, 8), torch.ones(8, 8), g, algorithm=way
        ),
        lambda g, way: tpkernels.reduce_scatter(torch.ones(8, 8), g, algorithm=way),
    ),
}
# Every pair, and every algorithm.
MISMATCHES = [(pair, WAYS[i % 3]) for i, pair in enumerate(PAIRS)]
_TEXT = re.compile(
    r"^rank (\d) is in (.+), but rank (\d)(?: \(pid \d+\))? is in (.+?)"
    r"(?:, both as call #\d+ of the group)?\. The group is broken"
)


def mismatch_job(pair: str, algorithm: str) -> Report:
    group, rank = _group(), dist.get_rank()
    others = [faults.new_group()]
    faults.run_op("all_gather", group, algorithm)
    usual, odd = PAIRS[pair]
    run = odd if rank == VICTIM else usual
    report = faults.report_of(lambda: run(group, algorithm), group, others)
    new = _group()
    report.others.append(faults.ending_of(lambda: usual(new, algorithm)))
    return report


@pytest.mark.parametrize(("pair", "algorithm"), sweep(MISMATCHES, 3, later=2))
def test_different_calls_are_reported(ranks: RanksFixture, pair: str, algorithm: str) -> None:
    named = set()
    for rank, report in enumerate(ranks(WORLD).run(mismatch_job, pair, algorithm)):
        faults.require_broken(report)
        first = report.first
        assert first.error == "CollectiveMismatchError" and first.seconds < PROMPT, first
        match = _TEXT.match(first.text)
        assert match is not None and int(match[1]) == rank and int(match[3]) == first.peer, first
        assert (rank == VICTIM) != (first.peer == VICTIM), first
        named.add((match[2], match[4]) if first.peer == VICTIM else (match[4], match[2]))
    (both,) = named
    assert both[0] != both[1]


# Which ranks share memory.


def cloned_job() -> tuple[bool, Ending] | str:
    """Rank 1 moves to its own network namespace once the ranks are connected: same boot ID, same
    machine, but no socket reaches the other."""
    group = faults.group_of(dist.new_group())
    if group.rank() == 1 and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return os.strerror(ctypes.get_errno())
    tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    ending = faults.ending_of(lambda: faults.run_op("matmul_all_reduce", group))
    return groups.get(group.group_name).shared_memory, ending


def test_a_rank_that_is_not_reached_shares_no_memory() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can leave a network namespace")
    with faults.watched_ranks(3) as ranks:
        outcomes = faults.collect(ranks, cloned_job)
        if isinstance(outcomes[1].value, str):
            pytest.skip(f"cannot make a network namespace: {outcomes[1].value}")
        for shared, ending in faults.values(outcomes).values():
            assert not shared and not ending.error, ending


def other_user_job() -> tuple[bool, Ending]:
    """Rank 2 runs as another user, whom the memory's owner does not let in."""
    group = faults.group_of(dist.new_group())
    if group.rank() == 2:
        os.setresuid(65534, 65534, 0)
    tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    ending = faults.ending_of(lambda: faults.run_op("all_reduce", group))
    os.setresuid(0, 0, 0)
    return groups.get(group.group_name).shared_memory, ending


def test_different_users_share_no_memory() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with faults.watched_ranks(3) as ranks:
        for shared, ending in faults.values(faults.collect(ranks, other_user_job)).values():
            assert not shared and not ending.error, ending
