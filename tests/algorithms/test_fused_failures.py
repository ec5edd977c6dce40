"""The fused ops when a rank dies, stops, comes with another call, or cannot run them at all."""

from __future__ import annotations

import functools
import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.faults import PROMPT, Report
from tests.support.ranked import on_ranks
from tpkernels import groups

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
