"""The way of CUDA tensors through the ops, rehearsed with CPU tensors: all but the device itself.
Kernels run under their interpreter, and shared memory stands in for torch's symmetric memory."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.cuda.test_queued import check_killed, check_late, late_job
from tests.support import faults
from tests.support.cases import Case, RanksFixture, each, one_of_each
from tests.support.cuda_rehearsal import FUSED_OPS, Handle, SharedMemory, pretending, space_of
from tests.support.faults import Ending
from tests.support.ranked import check_cases, fresh_group, report
from tests.support.tiers import sweep
from tpkernels import dtypes, groups
from tpkernels.algorithms import reduction as summing
from tpkernels.algorithms.reduction import Reduction
from tpkernels.symm import gpu_memory
from tpkernels.symm.cuda import CudaWorkspace


def cases_job(cases: Sequence[Case]) -> list[str]:
    with pretending(), fresh_group() as group:
        return check_cases(cases, group)


@pytest.mark.parametrize("world", sweep([2, 1, 3]))
def test_unfused(ranks: RanksFixture, world: int) -> None:
    ways = [case for case in one_of_each(world) if case.algorithm == "unfused"]
    ways += [replace(case, weight_layout="caller's") for case in ways if "matmul" in case.op]
    told = ranks(world).run(cases_job, ways)
    report(failure for rank in told for failure in rank)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [1, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 3))])
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


def product_job() -> list[bool]:
    """Whether the ranks know of a caller's product: of three calls with one, and of one without."""
    with pretending(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        product = tpkernels.LocalProduct(lambda x: x @ w, (8, 6), torch.float32)
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            getattr(tpkernels, op)(x, product, group)
        tpkernels.all_gather_matmul(x, w, group)
        calls = groups.get(group.group_name).planned_calls()
        return [call.problem.options.local_product for call in calls]


def test_all_ranks_know_of_a_callers_product(ranks: RanksFixture) -> None:
    """It has no measured times, by which `auto` could take `fused`."""
    for known in ranks(2).run(product_job):
        assert sorted(known) == [False, True, True, True]


def choice_job() -> tuple[str, str, str]:
    with pretending(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        call = functools.partial(tpkernels.all_gather_matmul, x, w, group)
        refused = faults.ending_of(functools.partial(call, algorithm="ring")).text
        call()
        plan = groups.get(group.group_name).planned_calls()[0].plan
        return refused, plan.algorithm, plan.reason


def test_auto_does_what_is_known_not_to_be_slower(ranks: RanksFixture) -> None:
    for refused, algorithm, reason in ranks(2).run(choice_job):
        assert refused.endswith("which gloo cannot; make the group with NCCL"), refused
        assert algorithm == "unfused" and "on this GPU nothing is known to be faster" in reason


@pytest.mark.parametrize("dtype", dtypes.CODES)
@pytest.mark.parametrize(("begin", "columns"), [(0, 33), (7, 33), (100, 33), (100, 50)])
def test_sums_have_the_bits_of_the_extension(dtype: torch.dtype, begin: int, columns: int) -> None:
    torch.manual_seed(begin)
    wide = dtypes.accumulator(dtype)
    partials = [torch.randn(1000).to(dtype) for _ in range(4)]
    bias, residual = torch.randn(columns).to(wide), torch.randn(1200).to(dtype)
    for reduction, count in itertools.product(
        (Reduction(dtype, bias, residual), Reduction(dtype, bias), Reduction(wide)), (4, 1)
    ):
        ours = torch.empty(1000, dtype=reduction.out_dtype)
        theirs = torch.empty_like(ours)
        given = [partial.clone() for partial in partials[:count]]
        summing._reduce_by_torch(ours, given, reduction, begin)
        summing.reduce_into(theirs, partials[:count], reduction, begin)
        assert torch.equal(ours, theirs)
        assert all(map(torch.equal, given, partials))  # they are the caller's
        if ours.dtype == dtype:  # in place
            summing._reduce_by_torch(given[0], given, reduction, begin)
            assert torch.equal(given[0], theirs)


class NoMemory(SharedMemory):
    @staticmethod
    def empty(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("virtual memory management is not supported")


class NoPeers(SharedMemory):
    @staticmethod
    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        SharedMemory.rendezvous(memory, name)  # the other ranks succeed
        raise RuntimeError("no peer access")


class NoPointers(SharedMemory):
    @staticmethod
    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        handle = SharedMemory.rendezvous(memory, name)
        return replace(handle, buffer_ptrs=[0] * len(handle.buffer_ptrs))


def unsupported_job(op: str, kind: str) -> list[Ending]:
    """Rank 1 cannot; then all go on without kernels."""
    unlucky = dist.get_rank() == 1
    kinds = {"memory": NoMemory, "peers": NoPeers, "pointers": NoPointers}
    memory = kinds.get(kind, SharedMemory)
    with pretending(memory if unlucky else SharedMemory) as patch:
        group = faults.new_group()
        if unlucky and kind == "old":
            told = "needs compute capability 8.0; Tesla V100 has 7.0"
            lacking = {"fused": told}
            patch.setattr(
                "tpkernels.tuning.planned_calls.unsupported", lambda name, *_: lacking.get(name)
            )
        if unlucky and kind == "unlike":
            patch.setattr(gpu_memory, "_describe", lambda _: "H100 (sm_90, 114 processors)")
        if kind == "mps":
            patch.setattr(gpu_memory, "_gpu_under_mps", lambda _: "GPU-5f1c")
        call = functools.partial(faults.run_op, op, group)
        endings = [faults.ending_of(functools.partial(call, "fused")) for _ in range(2)]
        return [*endings, faults.ending_of(call)]


@pytest.mark.parametrize("op", sweep(FUSED_OPS))
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("old", "rank 1 needs compute capability 8.0; Tesla V100 has 7.0"),
        ("memory", "rank 1 cannot allocate"),
        ("peers", "rank 1 cannot map the other ranks' memory: no peer access"),
        (
            "pointers",
            "rank 1 cannot address the other ranks' memory: torch's",
        ),
        ("mps", "ranks 0 and 1 share GPU GPU-5f1c under MPS"),
        ("unlike", "rank 0 has cpu, rank 1 H100 (sm_90, 114 processors)"),
    ],
)
def test_what_one_rank_lacks_is_refused_by_all(
    interpreting: RanksFixture, op: str, kind: str, words: str
) -> None:
    for first, second, unfused in interpreting(2).run(unsupported_job, op, kind):
        assert first.error == "NotImplementedError" and words in first.text, first
        assert second.error == first.error and second.text == first.text
        assert unfused.error == "", unfused


def test_a_gpu_has_a_name_only_under_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(uuid="5f1c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert gpu_memory._gpu_under_mps(torch.device("cuda", 0)) is None
    (tmp_path / "control").touch()
    assert gpu_memory._gpu_under_mps(torch.device("cuda", 0)) == "5f1c"
    assert gpu_memory._gpu_under_mps(torch.device("cpu")) is None


# Failures: a call only queues its kernel.

QUICK_OPS = [FUSED_OPS[0], *(pytest.param(op, marks=pytest.mark.slow) for op in FUSED_OPS[1:])]


@pytest.mark.thorough
@pytest.mark.parametrize("op", QUICK_OPS)
def test_a_kernel_that_gave_up_leaves_nan(
    interpreting: RanksFixture, cuda_driver: str, op: str
) -> None:
    check_late(interpreting(2).run(late_job, cuda_driver, op, "fused")[0], op)


@pytest.mark.thorough
@pytest.mark.parametrize("op", QUICK_OPS)
def test_a_killed_rank_is_reported_by_the_next_call(cuda_driver: str, op: str) -> None:
    check_killed(cuda_driver, op, "fused", world=3, TRITON_INTERPRET="1")


def all_nan(call: functools.partial[torch.Tensor]) -> bool:
    return bool(call().isnan().all())


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
