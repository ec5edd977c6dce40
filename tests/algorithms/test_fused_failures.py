"""The fused ops when a rank dies, stops, comes with another call, or cannot run them at all."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT, Ending, Report
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.symm import cuda, device

WORLD = 3
VICTIM = 1
OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
QUICK_OPS = [OPS[0], *(pytest.param(op, marks=pytest.mark.slow) for op in OPS[1:])]
STOP_TIMEOUT = 2.0  # a call of the interpreter takes up to half a second


def disturbed_job(op: str, number: int, timeout: float) -> tuple[Report, float] | None:
    """The victim sends itself a signal while its kernel runs: at one of its waits."""
    from tpkernels.kernels import sync

    group, rank = faults.new_group(timeout), dist.get_rank()
    survivors = [r for r in range(WORLD) if r != VICTIM]
    others = [faults.new_group(ranks=survivors)] if rank != VICTIM else []
    call = functools.partial(faults.run_op, op, group, "fused", 12)
    call()

    def disturb() -> None:
        sync.pause_for = lambda _: None
        faults.disturb_now(number)

    if rank == VICTIM:
        faults.workspace_of(group).set_chaos(seed=1, max_delay_us=1)
        sync.pause_for = lambda _: disturb()
    report = faults.report_of(call, group, others)
    return None if rank == VICTIM else (report, faults.disturbed_at())


@pytest.mark.parametrize("op", QUICK_OPS)
def test_a_killed_rank_is_reported(op: str) -> None:
    with faults.watched_ranks(WORLD, TRITON_INTERPRET="1") as ranks:
        pid = ranks.pids[VICTIM]
        outcomes = faults.collect(ranks, disturbed_job, op, signal.SIGKILL, faults.PATIENCE)
        # Each runs its kernel to the end after a failure.
        endings = faults.require_killed(outcomes, VICTIM, at_once=PROMPT)
        for first in endings.values():
            assert first.error == "PeerLostError" and first.peer == VICTIM, first
            assert f"rank {VICTIM} (pid {pid})" in first.text and first.text.startswith(op), first


@pytest.mark.thorough
@pytest.mark.parametrize("op", QUICK_OPS)
def test_a_stopped_rank_is_a_timeout(op: str) -> None:
    with faults.watched_ranks(WORLD, TRITON_INTERPRET="1") as ranks:
        ranks.submit(disturbed_job, op, signal.SIGSTOP, STOP_TIMEOUT)
        endings = faults.collect_stopped(ranks, VICTIM, STOP_TIMEOUT, STOP_TIMEOUT)
        for first in endings.values():
            assert first.error == "CollectiveTimeoutError" and first.peer is not None, first
        os.kill(ranks.pids[VICTIM], signal.SIGCONT)
        ranks.collect(faults.COLLECT_SECONDS)


def woken_job(delay_at: int) -> list[Ending]:
    """Rank 1 sleeps through the others' deadline, then goes on; nobody may return wrong numbers."""
    from tpkernels.kernels import matmul_all_reduce, sync

    matmul_all_reduce.ONE_SHOT_BYTES = 0
    cuda.LOOK_S = faults.COLLECT_SECONDS  # the kernels alone
    group = faults.new_group(timeout=1.0)
    call = functools.partial(faults.run_op, "matmul_all_reduce", group, "fused", 100)
    call()
    places = 0

    def nap(_: object) -> None:
        nonlocal places
        places += 1
        if places == delay_at:
            time.sleep(3)

    if group.rank() == 1:
        faults.workspace_of(group).set_chaos(seed=1, max_delay_us=1)
        sync.pause_for = nap
    return [faults.ending_of(call)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay_at", [5, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 9))]
)
def test_a_rank_that_overslept_gets_no_wrong_result(delay_at: int) -> None:
    """Of a two-shot, whose results come from ranks that may have given up."""
    with faults.watched_ranks(2, TRITON_INTERPRET="1") as ranks:
        told = faults.values(faults.collect(ranks, woken_job, delay_at))
        errors = [told[rank][0].error for rank in range(2)]
        assert errors[0] == "CollectiveTimeoutError", told
        assert errors[1] in ("CollectiveTimeoutError", "PeerLostError"), told


def mismatched_job(watched: bool) -> tuple[Ending, tuple[int, ...] | None]:
    """Rank 1 has other columns in its all-reduce. Without the thread that watches the peers, the
    kernels must find it by themselves."""
    group, rank = faults.new_group(), dist.get_rank()
    faults.run_op("matmul_all_reduce", group, "fused", 40)
    if not watched:
        cuda.LOOK_S = faults.COLLECT_SECONDS
    x, w = torch.ones(40, 8), torch.ones(8, 32 + 8 * (rank == 1))
    call = functools.partial(tpkernels.matmul_all_reduce, x, w, group, algorithm="fused")
    ending = faults.ending_of(call)
    space = faults.workspace_of(group)._device
    assert space is not None
    return ending, space.failure()


@pytest.mark.thorough
@pytest.mark.parametrize("watched", sweep([True, False]))
def test_a_mismatch_is_found_on_all_ranks(interpreting: RanksFixture, watched: bool) -> None:
    told = interpreting(2).run(mismatched_job, watched)
    if not watched:  # by one of the kernels at least, which may end the wait of the other
        assert any(failure and failure[0] == device.MISMATCH for _, failure in told), told
    for rank, (first, failure) in enumerate(told):
        assert first.error == "CollectiveMismatchError", first
        assert first.peer == 1 - rank and first.seconds < PROMPT, first
        assert "[40, 32]" in first.text and "[40, 40]" in first.text, first
        if failure is not None and failure[0] == device.MISMATCH:
            assert failure[1] == 1 - rank, failure
            expected, seen = failure[2:]
            assert expected & 0xFFFFFFFF == seen & 0xFFFFFFFF and expected != seen


@on_ranks(2)
def test_without_the_interpreter_it_says_so() -> None:
    group = faults.new_group()
    for op, dtype in itertools.product(OPS, (torch.float32, torch.float64)):
        factors = torch.ones(8, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype)
        call = functools.partial(getattr(tpkernels, op), *factors, group, algorithm="fused")
        ending = faults.ending_of(call)
        assert ending.error == "NotImplementedError", ending
        if dtype == torch.float64:
            assert "takes no float64" in ending.text, ending
        else:
            assert ending.text.startswith(f"algorithm 'fused' of {op} runs Triton"), ending
            assert "TRITON_INTERPRET=1" in ending.text, ending
    faults.run_op("all_gather_matmul", group)
    assert groups.get(group.group_name).workspace is not None
