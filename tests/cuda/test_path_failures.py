"""Failures on the way of CUDA tensors, rehearsed on CPU tensors: a call only queues its kernel."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import FUSED_OPS, pretending, space_of
from tests.support.faults import Ending
from tpkernels.symm.cuda import CudaWorkspace

QUICK_OPS = [FUSED_OPS[0], *(pytest.param(op, marks=pytest.mark.slow) for op in FUSED_OPS[1:])]


def all_nan(call: functools.partial[torch.Tensor]) -> bool:
    return bool(call().isnan().all())


def late_job(op: str) -> tuple[bool, Ending] | None:
    """Rank 1 does not come. The kernel of rank 0 gives up; its results and the next call say so."""
    with pretending():
        group = faults.new_group(timeout=1.5)
        faults.run_op(op, group, "fused", 12)
        if group.rank() == 1:
            dist.barrier()  # the other one has given up
            return None
        x, w = torch.ones(12, 48), torch.ones(48, 40)
        call = functools.partial(getattr(tpkernels, op), x, w, group, algorithm="fused")
        told = all_nan(call), faults.ending_of(call)
        dist.barrier()
        return told


@pytest.mark.thorough
@pytest.mark.parametrize("op", QUICK_OPS)
def test_a_kernel_that_gave_up_leaves_nan(interpreting: RanksFixture, op: str) -> None:
    told = interpreting(2).run(late_job, op)[0]
    assert told is not None
    spoilt, after = told
    assert spoilt
    assert after.error == "CollectiveTimeoutError" and after.peer == 1, after
    assert "an earlier call of the group, found by " + op in after.text


def killed_job(op: str) -> tuple[list[bool], Ending, float] | None:
    """Rank 1 is killed before its kernel starts; the thread that watches ends the others' waits.
    (Where a rank is so slow that it sees it before its kernel starts, that call raises already.)"""
    with pretending():
        group = faults.new_group()
        faults.run_op(op, group, "fused", 12)
        x, w = torch.ones(12, 48), torch.ones(48, 40)
        call = functools.partial(getattr(tpkernels, op), x, w, group, algorithm="fused")
        if group.rank() == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        spoilt: list[bool] = []
        begin = time.monotonic()
        ending = faults.ending_of(lambda: spoilt.append(all_nan(call)))
        if not ending.error:
            ending = faults.ending_of(call)
        return spoilt, ending, time.monotonic() - begin


@pytest.mark.thorough
@pytest.mark.parametrize("op", QUICK_OPS)
def test_a_killed_rank_is_reported_by_the_next_call(op: str) -> None:
    with faults.watched_ranks(3, TRITON_INTERPRET="1") as ranks:
        outcomes = faults.collect(ranks, killed_job, op)
        assert outcomes[1].exitcode == -signal.SIGKILL
        for spoilt, after, seconds in faults.values(outcomes, 1).values():
            assert all(spoilt)
            assert after.error == "PeerLostError" and after.peer == 1, after
            assert f"pid {ranks.pids[1]}" in after.text, after
            assert seconds < faults.PATIENCE / 2, seconds


def mismatched_job() -> tuple[bool, Ending]:
    with pretending():
        group = faults.new_group()
        faults.run_op("matmul_all_reduce", group, "fused", 40)
        x, w = torch.ones(40, 8), torch.ones(8, 32 + 8 * (group.rank() == 1))
        call = functools.partial(tpkernels.matmul_all_reduce, x, w, group, algorithm="fused")
        return all_nan(call), faults.ending_of(call)


def test_a_mismatch_is_found_by_the_kernels(interpreting: RanksFixture) -> None:
    for rank, (spoilt, after) in enumerate(interpreting(2).run(mismatched_job)):
        assert spoilt
        assert after.error == "CollectiveMismatchError", after
        assert after.peer == 1 - rank, after


def closed_job() -> Ending:
    """Rank 1 gives its workspaces back; the others' next call says so."""
    with pretending():
        group = faults.new_group()
        faults.run_op("matmul_all_reduce", group, "fused", 12)
        space_of(group).check("a test")
        dist.barrier()
        if group.rank() == 1:
            tpkernels.finalize()
        time.sleep(0.3)
        dist.barrier()
        if group.rank() == 1:
            return Ending("", "", None, 0.0, 0.0)
        return faults.ending_of(lambda: faults.run_op("matmul_all_reduce", group, "fused", 12))


def test_a_rank_that_left_is_reported() -> None:
    with faults.watched_ranks(2, TRITON_INTERPRET="1") as ranks:
        first = faults.values(faults.collect(ranks, closed_job))[0]
        assert first.error == "PeerLostError" and "tpkernels.finalize" in first.text, first


def queued_job(op: str) -> tuple[int, int]:
    """(bytes that calls behind a failed one changed in this rank's buffers, the same at the end of
    a call that is in order). Rank 1 stays away; rank 0 goes on as if it had not looked."""
    with pretending() as patch:
        group = faults.new_group(timeout=1.5)
        x, w = torch.ones(12, 48), torch.ones(48, 40)
        call = functools.partial(getattr(tpkernels, op), x, w, group, algorithm="fused")
        call()
        space = space_of(group).current
        address, nbytes = space.buffers(group.rank()), 2 * space.buffer_bytes
        buffers = torch.frombuffer(
            (ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8
        )
        buffers.fill_(0xA5)
        dist.barrier()
        call()
        in_order = int((buffers != 0xA5).sum())
        patch.setattr(CudaWorkspace, "check", lambda *_: None)
        if group.rank() == 0:
            call()  # fails
        dist.barrier()
        buffers.fill_(0xA5)
        dist.barrier()
        if group.rank() == 0:
            assert all(all_nan(call) for _ in range(2))
        dist.barrier()
        return int((buffers != 0xA5).sum()), in_order


@pytest.mark.thorough
@pytest.mark.parametrize("op", QUICK_OPS)
def test_calls_behind_a_failed_one_touch_no_buffer(interpreting: RanksFixture, op: str) -> None:
    for behind, in_order in interpreting(2).run(queued_job, op):
        assert behind == 0 and in_order > 0
