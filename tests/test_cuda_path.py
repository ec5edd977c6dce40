"""The way of CUDA tensors through the ops, rehearsed with CPU tensors: all but the device itself.
Kernels run under their interpreter, and shared memory stands in for torch's symmetric memory."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
from cases import Case, RanksFixture, each, one_of_each
from faults import Ending
from ranked import check_cases, fresh_group, report

import tpkernels
from tpkernels import dtypes, groups
from tpkernels.algorithms import common
from tpkernels.algorithms.common import Reduction
from tpkernels.ops import _check
from tpkernels.symm import cuda, host
from tpkernels.symm.cuda import CudaSpace

FUSED_OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


@dataclass(frozen=True)
class Handle:
    buffer_ptrs: list[int]
    multicast_ptr: int
    arena: object


class SharedMemory:
    """torch's symmetric memory, as far as it is used."""

    empty = staticmethod(torch.empty)

    @staticmethod
    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        workspace = groups.get(name).workspace
        assert workspace is not None
        arena = workspace._further_arena("a rehearsal", memory.numel())
        return Handle([arena.region(r).address for r in range(workspace.member.world)], 0, arena)


@contextlib.contextmanager
def pretending(memory: Any = SharedMemory) -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors take the way of CUDA tensors, and the kernels know of no obstacle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_check, "device", lambda _: "cuda")
        patch.setattr("tpkernels.ops._library.obstacle", lambda _: None)
        patch.setattr(cuda, "symmetric", memory)
        patch.setattr(host, "_FIRST_WORDS", 4)  # and so have to grow
        patch.setattr(host, "_FIRST_BYTES", 1 << 12)
        yield patch


def space_of(group: dist.ProcessGroup) -> CudaSpace:
    return faults.workspace_of(group)._cuda[torch.device("cpu")]


def cases_job(cases: Sequence[Case]) -> list[str]:
    with pretending(), fresh_group() as group:
        return check_cases(cases, group)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_unfused(ranks: RanksFixture, world: int) -> None:
    ways = [case for case in one_of_each(world) if case.algorithm == "unfused"]
    told = ranks(world).run(cases_job, ways)
    report(failure for rank in told for failure in rank)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fused(interpreting: RanksFixture, world: int) -> None:
    """The second round needs more memory than there is."""
    rounds = []
    for rows in (12, 70):
        sizes = tuple(tpkernels.shard_sizes(rows, world))
        rounds += each(
            Case(op="all_gather_matmul", shape=(rows, 40), sizes=sizes, n=(33, 7)),
            Case(op="matmul_reduce_scatter", shape=(rows, 80), sizes=sizes, k=(20,)),
            Case(op="matmul_all_reduce", shape=(rows, 80), k=(20,)),
            dtypes=(torch.bfloat16,),
            algorithms=("fused",),
        )
    told = interpreting(world).run(cases_job, rounds, timeout=200)
    report(failure for rank in told for failure in rank)


def choice_job() -> tuple[list[str], str, str]:
    with pretending(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        call = functools.partial(tpkernels.all_gather_matmul, x, w, group)
        ways = [functools.partial(call, algorithm=name) for name in ("pipelined", "ring")]
        refused = [faults.ending_of(way).text for way in ways]
        call()
        plan = next(iter(groups.get(group.group_name).calls.values())).plan
        return refused, plan.algorithm, plan.reason


def test_auto_does_what_is_known_not_to_be_slower(ranks: RanksFixture) -> None:
    for refused, algorithm, reason in ranks(2).run(choice_job):
        assert refused[0].endswith("runs on CPU tensors only"), refused
        assert refused[1].endswith("which gloo cannot; make the group with NCCL"), refused
        assert algorithm == "unfused" and "on this GPU nothing is known to be faster" in reason


@pytest.mark.parametrize("dtype", dtypes.CODES)
@pytest.mark.parametrize("begin", [0, 7, 100])
def test_sums_have_the_bits_of_the_extension(dtype: torch.dtype, begin: int) -> None:
    torch.manual_seed(begin)
    wide = dtypes.accumulator(dtype)
    partials = [torch.randn(1000).to(dtype) for _ in range(4)]
    bias, residual = torch.randn(33).to(wide), torch.randn(1200).to(dtype)
    for reduction in (Reduction(dtype, bias, residual), Reduction(wide, None, None)):
        ours = torch.empty(1000, dtype=reduction.out_dtype)
        theirs = torch.empty_like(ours)
        common._reduce_by_torch(ours, partials, reduction, begin)
        common.reduce_into(theirs, partials, reduction, begin)
        assert torch.equal(ours, theirs)


class NoMemory(SharedMemory):
    @staticmethod
    def empty(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("virtual memory management is not supported")


class NoPeers(SharedMemory):
    @staticmethod
    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        SharedMemory.rendezvous(memory, name)  # the other ranks succeed
        raise RuntimeError("no peer access")


def obstacle_job(op: str, kind: str) -> list[Ending]:
    """Rank 1 cannot; then all go on without kernels."""
    unlucky = dist.get_rank() == 1
    memory = {"memory": NoMemory, "peers": NoPeers}.get(kind, SharedMemory)
    with pretending(memory if unlucky else SharedMemory) as patch:
        group = faults.new_group()
        if unlucky and kind == "old":
            told = "needs compute capability 8.0; Tesla V100 has 7.0"
            patch.setattr("tpkernels.ops._library.obstacle", lambda _: told)
        if unlucky and kind == "unlike":
            patch.setattr(cuda, "_describe", lambda _: "H100 (sm_90, 114 processors)")
        call = functools.partial(faults.run_op, op, group)
        endings = [faults.ending_of(functools.partial(call, "fused")) for _ in range(2)]
        return [*endings, faults.ending_of(call)]


@pytest.mark.parametrize("op", FUSED_OPS)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("old", "rank 1 needs compute capability 8.0; Tesla V100 has 7.0"),
        ("memory", "rank 1 cannot allocate"),
        ("peers", "rank 1 cannot map the other ranks' memory: no peer access"),
        ("unlike", "rank 0 has cpu, rank 1 H100 (sm_90, 114 processors)"),
    ],
)
def test_what_one_rank_lacks_is_refused_by_all(
    interpreting: RanksFixture, op: str, kind: str, words: str
) -> None:
    for first, second, unfused in interpreting(2).run(obstacle_job, op, kind):
        assert first.error == "NotImplementedError" and words in first.text, first
        assert second.error == first.error and second.text == first.text
        assert unfused.error == "", unfused


def all_nan(call: functools.partial[torch.Tensor]) -> bool:
    return bool(call().isnan().all())


def late_job(op: str) -> tuple[bool, Ending] | None:
    """Rank 1 does not come. The kernel of rank 0 gives up; its results and the next call say so."""
    with pretending():
        group = faults.new_group(timeout=1.5)
        faults.run_op(op, group, "fused", 12)
        if group.rank() == 1:
            time.sleep(4.0)
            return None
        x, w = torch.ones(12, 48), torch.ones(48, 40)
        call = functools.partial(getattr(tpkernels, op), x, w, group, algorithm="fused")
        return all_nan(call), faults.ending_of(call)


@pytest.mark.parametrize("op", FUSED_OPS)
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


@pytest.mark.parametrize("op", FUSED_OPS)
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
        space_of(group).check()
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
