"""The ops on the code path of CUDA tensors, as a dry run on CPU tensors.

The processor runs the kernels of csrc/cuda (support/emulated.py), the Triton interpreter runs the
Triton kernels, and shared memory replaces the symmetric memory of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.conftest import require_interpreter
from tests.ops import test_moe
from tests.support import emulated, faults
from tests.support.cases import Case, expand_cases, one_of_each, uneven_splits
from tests.support.cuda_rehearsal import (
    FUSED_OPS,
    Handle,
    SharedMemory,
    cuda_code_path,
    get_cuda_workspace,
    memory_with_handle,
    use_copy_engines,
    use_symmetric_memory,
)
from tests.support.emulated import BF16, F32, interpreted, is_all_nan, on_ranks, require_no_failures
from tests.support.faults import Ending
from tests.support.ranked import check_cases, fresh_group
from tests.support.tiers import sweep, thorough
from tpkernels import groups
from tpkernels.algorithms import reduction as summing
from tpkernels.algorithms.reduction import Reduction
from tpkernels.common import dtypes
from tpkernels.planning.op_spec import OPS
from tpkernels.symm import gpu_memory
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import DeviceWorkspace
from tpkernels.symm.gpu_memory import Gpu

ALGORITHMS = ("direct", "pipelined")


def check_all(
    cases: Sequence[Case], max_delay_us: int = 0, ll: bool = True, copied: bool = False
) -> None:
    """Run the cases on this rank.

    Without ``ll`` small calls use the variants of large calls. ``copied``: copy engines gather for
    `fused`.
    """
    with cuda_code_path() as patch, fresh_group() as group:
        if copied:
            use_copy_engines(patch)
        if not ll:
            patch.setattr("tpkernels.cuda.layouts.LL_BYTES", -1)
            patch.setattr("tpkernels.cuda.calls.all_reduce_variant", lambda *_: "two_shot")
        chaos = {"seed": group.rank(), "max_delay_us": max_delay_us}
        faults.get_workspace(group).set_chaos(**chaos)
        require_no_failures(check_cases(cases, group))


@pytest.mark.parametrize("world", sweep([2, 1, 3]))
@on_ranks(driver=False)
def test_unfused() -> None:
    cases = [case for case in one_of_each(dist.get_world_size()) if case.algorithm == "unfused"]
    matmuls = [case for case in cases if "matmul" in case.op]
    check_all([*cases, *(replace(case, weight_layout="caller's") for case in matmuls)])


@pytest.mark.parametrize("world", sweep([3, 1, 2, 4]))
@on_ranks()
def test_matmuls() -> None:
    """Run uneven and empty shards and every epilogue. Later cases grow the workspace."""
    world, cases = dist.get_world_size(), []
    for rows in (5, 2 * world, 90):
        for sizes in uneven_splits(rows, world):
            cases += [
                Case(op="all_gather_matmul", shape=(rows, 40), sizes=sizes, n=(33, 7)),
                Case(op="matmul_reduce_scatter", shape=(rows, 70), sizes=sizes, k=(20, 9)),
            ]
        cases.append(Case(op="matmul_all_reduce", shape=(rows, 70), k=(20, 9)))
    shapes = {"shape": (24, 3, 66), "sizes": next(uneven_splits(24, world))}
    epilogue = {"biases": (F32,), "residual": F32, "out_dtype": F32}
    check_all(
        [
            Case(op="matmul_all_reduce", shape=(900, 70), k=(9,), algorithm="pipelined"),
            *expand_cases(*cases, dtypes=(BF16,), algorithms=ALGORITHMS, integers=(False,)),
            *expand_cases(
                Case(op="all_gather_matmul", **shapes, n=(4, 9), biases=(F32,),
                     return_gathered=True),
                Case(op="matmul_reduce_scatter", **shapes, k=(20,), **epilogue),
                Case(op="matmul_all_reduce", shape=(24, 3, 66), k=(20,), **epilogue),
                Case(op="matmul_all_reduce", shape=(24, 66), k=(20,), wire_dtype=F32),
                algorithms=ALGORITHMS,
                integers=(True,),
            ),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world", "ll"), [(4, True), (2, False), thorough(1, True), thorough(4, False)]
)
@on_ranks()
def test_collectives(ll: bool) -> None:
    cases = [Case(op="all_reduce", shape=(300, 40)), Case(op="all_reduce_", shape=(7, 5))]
    for total in (1, 50):
        for sizes in uneven_splits(total, dist.get_world_size()):
            cases += [
                Case(op=op, shape=shape, sizes=sizes)
                for op in ("all_gather", "reduce_scatter")
                for shape in ((total, 13), (total,))
            ]
    check_all(expand_cases(*cases, algorithms=("direct",)), ll=ll)


@pytest.mark.parametrize("world", sweep([3, 1, 2, 4], num_thorough=3))
@on_ranks()
def test_routed_rows() -> None:
    """Route under delays, with gradients.

    Covers fewer experts than ranks, empty experts, all tokens to one expert, ranks without tokens,
    and rows of any alignment. Later cases grow the workspace.
    """
    cases, widths = [], itertools.cycle([1, 37, 64, 200])
    for case in itertools.islice(test_moe.shapes(dist.get_world_size()), 0, None, 3):
        few = case.experts < 64
        dtype = emulated.DTYPES[len(cases) % 3] if few else F32
        odd = len(cases) % 2 > 0
        more = {"width": next(widths), "dtype": dtype, "integers": odd or not few}
        more["ids"] = torch.int32 if odd else torch.int64
        algorithm = "direct" if dist.get_world_size() > 1 or len(cases) % 3 else "unfused"
        cases.append(replace(case, algorithm=algorithm, **more))
    with cuda_code_path(), fresh_group() as group:
        faults.get_workspace(group).set_chaos(seed=group.rank(), max_delay_us=100)
        require_no_failures([test_moe.failure(case, group) for case in cases])


@pytest.mark.parametrize("broken", [{}, thorough({"single_buffer": True}), {"skip_waits": True}])
@on_ranks(3)
def test_delays_of_routed_rows_and_negative_controls(broken: dict[str, bool]) -> None:
    """The effect of a broken protocol depends on timing, so it has several tries."""
    with cuda_code_path():
        tries = range(10 if broken else 1)
        wrong = (test_moe.delayed_job(algorithm="direct", **broken) for _ in tries)
        assert any(map(emulated.sum_over_ranks, wrong)) == bool(broken)


@on_ranks(3)
def test_routed_sums_match_other_algorithms_bitwise() -> None:
    """Compare two widths: one uses vector loads, one loads of single elements."""
    with cuda_code_path():
        for width in (96, 100):
            test_moe.bits_job(3, width)


@on_ranks(2)
def test_dropped_assignments_make_their_tokens_nan() -> None:
    """Exceed max_rows and use invalid expert ids.

    The host does not check for either.
    """
    x, weights = torch.arange(1.0, 9.0).repeat(3, 1), torch.ones(6, 2)[:3]
    topk_ids = torch.tensor([[0, 2], [3, -1], [1, 1], [0, 3], [4, 2], [2, 0]])
    with cuda_code_path(), fresh_group() as group:
        ops, routing_args = torch.ops.tpkernels, (topk_ids, 4, group.group_name)
        rows, counts = ops.moe_dispatch(x, *routing_args, max_rows=4)
        first = 2 * group.rank()
        local_counts = [int((topk_ids == expert).sum()) for expert in (first, first + 1)]
        assert counts.tolist() == local_counts == [3, 2]
        y = ops.moe_combine(rows, weights, *routing_args, max_rows=4)
        # The fifth row exceeds the capacity: the last assignment to the last local expert.
        bad = [[1, 2], [0, 1]][group.rank()]
        assert y.isnan().all(1).nonzero().flatten().tolist() == bad, y
        good = [i for i in range(3) if i not in bad]
        assert torch.equal(rows, x[0].expand(4, 8)) and torch.equal(y[good], 2 * x[good])
        with pytest.raises(tpkernels.RoutingError, match=r"rank 0 contains expert -1 at \[1, 1\]"):
            ops.moe_dispatch(x, *routing_args, algorithm="direct")
        with pytest.raises(ValueError, match="x has 3 rows, but max_rows is 4"):
            ops.moe_combine(x, weights, *routing_args, max_rows=4)


@pytest.mark.parametrize("algorithm", ["direct", "unfused"])
@on_ranks(1)
def test_dropped_assignments_on_a_single_rank(algorithm: str) -> None:
    x, weights = torch.arange(12.0).view(3, 4), torch.ones(3, 2)
    topk_ids = torch.tensor([[0, 2], [-1, 4], [1, 1]])
    with cuda_code_path(), fresh_group() as group:
        ops, routing_args = torch.ops.tpkernels, (topk_ids, 4, group.group_name)
        options = {"max_rows": 8, "algorithm": algorithm}
        rows, counts = ops.moe_dispatch(x, *routing_args, **options)
        assert torch.equal(rows[:4], x[[0, 2, 2, 0]]) and counts.tolist() == [1, 2, 1, 0]
        y = ops.moe_combine(rows, weights, *routing_args, **options)
        assert torch.equal(y[::2], 2 * x[::2]) and y[1].isnan().all()
        if algorithm == "unfused":  # the host reads the counts
            with pytest.raises(
                tpkernels.RoutingError, match=r"6 \(token, expert\) assignments go to"
            ):
                ops.moe_dispatch(x, *routing_args, max_rows=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "max_delay_us"),
    [thorough(2, 500), *(pytest.param(3, delay, marks=pytest.mark.slow) for delay in (0, 500))],
)
@interpreted()
def test_copy_engines_gather_for_fused(max_delay_us: int) -> None:
    cases = [
        Case(op="all_gather_matmul", shape=(rows, 40), sizes=sizes, n=(33, 7), biases=(F32, None))
        for rows in (6, 150)
        for sizes in uneven_splits(rows, dist.get_world_size())
    ]
    cases = expand_cases(*cases, dtypes=(BF16,), algorithms=("fused",), integers=(False,))
    check_all(cases, max_delay_us, copied=True)


def batched_cases(world: int) -> list[Case]:
    """Create cases with even, uneven and empty shards of an inner dim."""
    cases = []
    for total in (2 * world, 5):
        for sizes in uneven_splits(total, world):
            for leading_dims, inner_dims in (((3,), ()), ((2, 3), ()), ((2,), (3,))):
                split: dict[str, Any] = {"sizes": sizes, "dim": len(leading_dims)}
                gathered, summed = (
                    (*leading_dims, total, *inner_dims, 12),
                    (*leading_dims, total, *inner_dims, 10),
                )
                epilogue = {"biases": (F32,), "n": (4, 9), "return_gathered": True}
                cases += [
                    Case(op="all_gather_matmul", shape=gathered, **split, n=(7,)),
                    Case(op="all_gather_matmul", shape=gathered, **split, **epilogue),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,)),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,), residual=F32,
                         out_dtype=F32, biases=(F32,), layout="transposed"),
                ]  # fmt: skip
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 1, 2])
@on_ranks()
def test_shards_of_an_inner_dim() -> None:
    check_all(
        expand_cases(*batched_cases(dist.get_world_size()), algorithms=ALGORITHMS, integers=(True,))
    )


@pytest.mark.parametrize("algorithm", sweep(ALGORITHMS))
@on_ranks(3)
def test_call_after_call_under_delays(algorithm: str) -> None:
    cases = expand_cases(
        Case(op="all_gather_matmul", shape=(12, 8), sizes=(3, 0, 9), n=(5,)),
        Case(op="matmul_reduce_scatter", shape=(12, 6), sizes=(3, 0, 9), k=(5,)),
        Case(op="matmul_all_reduce", shape=(12, 6), k=(5,)),
        algorithms=(algorithm,),
    )
    check_all(cases * 4, 500)


@pytest.mark.thorough
@pytest.mark.parametrize("ll", [True, False])
@interpreted(2)
def test_all_algorithms_share_a_workspace(ll: bool) -> None:
    reductions = [
        Case(op=op, shape=(12, 6), sizes=sizes, k=(5,), algorithm=algorithm)
        for op, sizes in (("matmul_reduce_scatter", (5, 7)), ("matmul_all_reduce", None))
        for algorithm in ("fused", *ALGORITHMS, "unfused")
    ]
    gathers = [
        Case(op="all_gather_matmul", shape=(12, 6), sizes=(5, 7), n=(4,), algorithm=algorithm)
        for algorithm in ("fused", *ALGORITHMS)
    ]
    check_all([*reductions, *gathers, *reductions], 200, ll)


@pytest.mark.parametrize("dtype", dtypes.CODES)
def test_torch_sums_match_the_extension_bitwise(dtype: torch.dtype) -> None:
    accumulator_dtype = dtypes.accumulator(dtype)
    for begin, columns in ((0, 33), (7, 33), (100, 50)):
        torch.manual_seed(begin)
        partials = [torch.randn(1000).to(dtype) for _ in range(4)]
        bias, residual = torch.randn(columns).to(accumulator_dtype), torch.randn(1200).to(dtype)
        for reduction, count in itertools.product(
            (
                Reduction(dtype, bias, residual),
                Reduction(dtype, bias),
                Reduction(accumulator_dtype),
            ),
            (4, 1),
        ):
            ours = torch.empty(1000, dtype=reduction.out_dtype)
            theirs = torch.empty_like(ours)
            copies = [partial.clone() for partial in partials[:count]]
            summing._reduce_by_torch(ours, copies, reduction, begin)
            summing.reduce_into(theirs, partials[:count], reduction, begin)
            assert torch.equal(ours, theirs)
            assert all(map(torch.equal, copies, partials))  # the inputs are unchanged
            if ours.dtype == dtype:  # in place
                summing._reduce_by_torch(copies[0], copies, reduction, begin)
                assert torch.equal(copies[0], theirs)


# Selected algorithms and refusals.


@on_ranks(2, driver=False)
def test_a_custom_matmul_is_part_of_the_problem() -> None:
    """Call three ops with a custom matmul, which their planned problems record.

    A custom matmul has no measured times, so `auto` does not select `fused`.
    """
    with cuda_code_path(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        custom_matmul = tpkernels.CustomMatmul(lambda x: x @ w, (8, 6), F32)
        for op in FUSED_OPS:
            getattr(tpkernels, op)(x, custom_matmul, group)
        tpkernels.all_gather_matmul(x, w, group)
        calls = groups.get(group.group_name).planned_calls()
    assert sorted(c.problem.options.local_product for c in calls) == [False, True, True, True]


@on_ranks(2, driver=False)
def test_auto_without_times_is_unfused() -> None:
    with cuda_code_path(), fresh_group() as group:
        tpkernels.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 6), group)
        plan = groups.get(group.group_name).planned_calls()[0].plan
    assert plan.algorithm == "unfused", plan
    assert "no algorithm is known to be faster on this GPU" in plan.reason, plan


@on_ranks(2)
def test_matmuls_that_hold_the_device_lock() -> None:
    """Record the lock during custom matmuls.

    Only a matmul whose sum may start early holds it, because calls of other groups wait meanwhile.
    """
    depth, seen = [0], []
    enter, leave = CudaWorkspace.__enter__, CudaWorkspace.__exit__

    def counted_enter(self: CudaWorkspace) -> CudaWorkspace:
        depth[0] += 1
        return enter(self)

    def counted_leave(self: CudaWorkspace, *error: Any) -> None:
        depth[0] -= 1
        leave(self, *error)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        seen.append(depth[0])
        return x @ torch.ones(8, 6)

    with cuda_code_path() as patch, fresh_group() as group:
        patch.setattr(CudaWorkspace, "__enter__", counted_enter)
        patch.setattr(CudaWorkspace, "__exit__", counted_leave)
        x, custom_matmul = torch.ones(4, 8), tpkernels.CustomMatmul(multiply, (8, 6), F32)
        want = torch.full((4, 6), 16.0)
        scattered = tpkernels.matmul_reduce_scatter(x, custom_matmul, group, algorithm="direct")
        reduced = tpkernels.matmul_all_reduce(x, custom_matmul, group, algorithm="direct")
        # Rows of 6 elements use a separate RMSNorm kernel.
        _, total = tpkernels.matmul_all_reduce_rms_norm(
            x, custom_matmul, torch.ones(6), group, algorithm="direct"
        )
    assert seen == [0, 1, 0], seen
    for got in (scattered, reduced, total):
        assert torch.equal(got, want[: len(got)])


@on_ranks(2)
def test_refusals() -> None:
    with cuda_code_path(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        gather = functools.partial(tpkernels.all_gather_matmul, group=group)
        columns = functools.partial(gather, x, torch.ones(16, 6), gather_dim=1)
        for call, message in (
            (
                functools.partial(gather, x, w, algorithm="ring"),
                "which gloo does not support; create the process group with NCCL",
            ),
            (
                functools.partial(columns, algorithm="direct"),
                "it can split shape [4, 16] along any dim except the last, not along dim 1",
            ),
            (
                functools.partial(gather, x.double(), w.double(), algorithm="pipelined"),
                "accumulates in float32 and does not support float64",
            ),
            (
                functools.partial(tpkernels.all_gather, x, group, algorithm="pipelined"),
                "overlaps communication with a matmul, but this op does not contain a matmul",
            ),
        ):
            ending = faults.record_ending(call)
            assert ending.message.endswith(message), ending


class NoMemory(SharedMemory):
    @staticmethod
    def empty(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("virtual memory management is not supported")


class NoPeers(SharedMemory):
    @staticmethod
    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        SharedMemory.rendezvous(memory, name)  # the other ranks succeed
        raise RuntimeError("no peer access")


def make_unsupported(algorithm: str, message: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a patch that makes the algorithm ``algorithm`` unsupported on this rank."""
    target, reasons = "tpkernels.ops.planned_calls.unsupported", {algorithm: message}
    return lambda patch: patch.setattr(target, lambda name, *_: reasons.get(name))


def replace_gpus(*gpus: Gpu) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a patch that replaces the GPU of each rank."""
    return lambda patch: patch.setattr(Gpu, "of", lambda _: gpus[dist.get_rank()])


def fail_state_allocation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu_memory, "DeviceWorkspace", NoMemory.empty)


def replace_memory(memory: type[SharedMemory]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: use_symmetric_memory(patch, memory)


OTHER = "H100 (sm_90, 114 processors)"
# Per case: algorithm, obstacle on rank 1, expected message on both ranks.
OBSTACLES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], object], str]] = {
    "kernels": (
        "direct",
        make_unsupported("direct", "needs the CUDA kernels"),
        "1 needs the CUDA kernels",
    ),
    "sm_80": (
        "fused",
        make_unsupported("fused", "needs capability 8.0"),
        "rank 1 needs capability 8.0",
    ),
    "memory": ("fused", replace_memory(NoMemory), "rank 1 cannot allocate"),
    "peers": (
        "fused",
        replace_memory(NoPeers),
        "rank 1 cannot map the memory of its peers: no peer access. The GPUs need peer access",
    ),
    "pointers": (
        "fused",
        replace_memory(memory_with_handle(lambda handle: replace(handle, buffer_ptrs=[0, 0]))),
        "rank 1 cannot address the memory of its peers: with this backend, torch",
    ),
    "state": ("fused", fail_state_allocation, "rank 1 cannot allocate the state of a workspace"),
    "alignment": (
        "fused",
        replace_memory(
            memory_with_handle(lambda handle: replace(handle, offset=handle.offset + 128))
        ),
        "these must be multiples of 256",
    ),
    "same GPU": (
        "fused",
        replace_gpus(Gpu(OTHER), Gpu(OTHER)),
        f"rank 0 has cpu, rank 1 has {OTHER}",
    ),
}
SHARED = [Gpu("H100", "GPU-5f1c", 0)] * 2
# Per case: GPUs of the ranks, expected message on both ranks. Rank 1 cannot map the memory of
# rank 0, except under MPS.
SHARING: dict[str, tuple[list[Gpu], str]] = {
    "MPS": ([gpu._replace(under_mps=True) for gpu in SHARED], "share GPU GPU-5f1c under MPS"),
    "one GPU": (SHARED, "Ranks 0 and 1 share GPU GPU-5f1c: give each rank a separate GPU"),
    "one visible GPU each": (
        [SHARED[0], SHARED[0]._replace(uuid="GPU-77aa")],
        "Ranks 0 and 1 use different GPUs, but each sees its GPU as cuda:0",
    ),
}


@pytest.mark.parametrize("case", OBSTACLES)
@interpreted(2, driver=False)
def test_an_obstacle_on_one_rank_is_refused_by_all(case: str) -> None:
    """Disable an algorithm on rank 1. All ranks raise, and later calls run without kernels."""
    algorithm, disable, message = OBSTACLES[case]
    with cuda_code_path() as patch:
        group = faults.new_group()
        if group.rank() == 1:
            disable(patch)
        call = functools.partial(faults.run_op, "all_gather_matmul", group)
        first, second = (faults.record_ending(lambda: call(algorithm)) for _ in range(2))
        assert first.error == "NotImplementedError" and message in first.message, first
        assert (second.error, second.message) == (first.error, first.message), second
        call()


@pytest.mark.parametrize("case", SHARING)
@interpreted(2, driver=False)
def test_gpus_that_torch_cannot_distinguish(case: str) -> None:
    gpus, message = SHARING[case]
    with cuda_code_path() as patch:
        group = faults.new_group()
        replace_gpus(*gpus)(patch)
        if group.rank() == 1:
            replace_memory(NoPeers)(patch)
        ending = faults.record_ending(
            lambda: faults.run_op("all_gather_matmul", group, algorithm="fused")
        )
        assert ending.error == "NotImplementedError" and message in ending.message, ending


def test_gpu_description(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, uuid="5f1c"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    gpu = Gpu("H100 (sm_90, 132 processors)", "GPU-5f1c", 3, under_mps=False)
    assert Gpu.of(torch.device("cuda", 3)) == gpu
    (tmp_path / "control").touch()
    assert Gpu.of(torch.device("cuda", 3)) == gpu._replace(under_mps=True)
    assert Gpu.of(torch.device("cpu")) == Gpu("cpu")


def test_allocation_synchronizes_a_separate_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocate symmetric memory on a separate thread, and synchronize only its stream.

    The stream of the caller may contain a receive whose peer sends only after its allocation.
    """
    waits, stream = list[str](), SimpleNamespace(synchronize=lambda: waits.append("stream"))
    threads = list[int]()

    def empty(*_: Any, **__: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        return torch.empty(8)

    monkeypatch.setattr(NoPeers, "empty", empty)
    use_symmetric_memory(monkeypatch, NoPeers)
    monkeypatch.setattr(NoPeers, "rendezvous", NoMemory.empty)  # later steps are not needed
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waits.append("device"))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(Gpu, "of", lambda _: Gpu("H100"))
    participant = SimpleNamespace(
        world=2, group="g", process_group="g", exchange=lambda _, mine: [mine] * 2
    )
    with pytest.raises(NotImplementedError, match="cannot map"):
        gpu_memory.make_symmetric(participant, 8, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert waits == ["stream"] and threading.get_ident() not in threads


def test_workspaces_are_allocated_on_a_separate_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Create a workspace in inference mode. Its tensors are no inference tensors.

    The thread of the caller may also be warming up a graph.
    """
    threads = list[int]()

    def spied(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **options: Any) -> torch.Tensor:
            threads.append(threading.get_ident())
            return make(*args, **options)

        return run

    region = torch.zeros(1 << 10, dtype=torch.uint8)
    for name in ("zeros", "empty", "tensor"):
        monkeypatch.setattr(torch, name, spied(getattr(torch, name)))
    with torch.inference_mode():
        workspace = DeviceWorkspace([region.data_ptr()], region, 0, 8, 8, 1.0)
        tensors = [
            workspace.regions,
            workspace.state,
            workspace.control,
            workspace.scratch,
            workspace.starts((2, 3)),
        ]
    assert len(threads) == len(tensors) and threading.get_ident() not in threads
    assert not any(tensor.is_inference() for tensor in tensors)


# Failures. A call only queues kernels, so its results are NaN and the next call raises the cause.

CALLS = [
    *itertools.product(FUSED_OPS, ALGORITHMS),
    *itertools.product(["all_gather", "reduce_scatter", "all_reduce", "moe_dispatch"], ["direct"]),
]
FUSED_CALLS = [
    thorough("all_gather_matmul", "fused"),
    *(pytest.param(op, "fused", marks=pytest.mark.slow) for op in FUSED_OPS[1:]),
]


THOROUGH_CALLS = [("all_gather_matmul", "copied"), ("moe_combine", "direct")]


def make_call(
    op: str, algorithm: str, group: dist.ProcessGroup
) -> Callable[[], list[torch.Tensor]]:
    """Return a call that returns its results as a list.

    "copied" is `fused` by copy engines with several weights.
    """
    x, w = torch.ones(70 if algorithm == "copied" else 12, 48), torch.ones(48, 40)
    operands: Any = (x, w) if "matmul" in op else (w,)
    options: dict[str, Any] = {"algorithm": algorithm}
    if algorithm == "copied":
        operands = x, [w[:, :n].contiguous() for n in (4, 33, 1)]
        options = {"algorithm": "fused", "return_gathered": True}

    function, op_group = getattr(tpkernels, op), group
    if OPS[op].routed:
        function, op_group = getattr(torch.ops.tpkernels, op), group.group_name
        weights = [torch.ones(48, 2)] if OPS[op].combines else []
        operands = w[:, :8], *weights, torch.arange(192).view(96, 2) % 2, 2
        if weights:
            operands = torch.ones(96, 8), *operands[1:]

    def call() -> list[torch.Tensor]:
        results = function(*operands, op_group, **options)
        if algorithm == "copied":
            return [results[0], *results[1]]
        return [results[0] if op == "moe_dispatch" else results]

    return call


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [*sweep(CALLS), *FUSED_CALLS, *(thorough(*case) for case in THOROUGH_CALLS)],
)
@interpreted(2)
def test_an_abandoned_call_leaves_nan(op: str, algorithm: str) -> None:
    """Rank 1 skips the call. Rank 0 gets NaN, and its next call raises."""
    with cuda_code_path() as patch:
        if algorithm == "copied":
            use_copy_engines(patch)
        group = faults.new_group(timeout=1.0)
        call = make_call(op, algorithm, group)
        call()
        if group.rank() == 0:
            assert is_all_nan(call())
            after = faults.record_ending(call)
            assert after.error == "CollectiveTimeoutError" and after.peer == 1, after
            assert f"an earlier call of the group (detected by {op}" in after.message, after
        dist.barrier()


def killed_job(driver: str, op: str, algorithm: str) -> Ending | None:
    """Kill rank 1 before its kernel starts. The watcher thread ends the waits of its peers.

    A slow rank may detect the loss before its kernel starts. Then that call raises.
    """
    emulated.load(driver)
    with cuda_code_path():
        group = faults.new_group()
        call = make_call(op, algorithm, group)
        call()
        get_cuda_workspace(group).check("a test")
        if group.rank() == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        all_nan: list[bool] = []
        begin = time.monotonic()
        ending = faults.record_ending(lambda: all_nan.append(is_all_nan(call())))
        if not ending.error:
            ending = faults.record_ending(call)
        assert all(all_nan) and time.monotonic() - begin < faults.PATIENCE / 2, all_nan
        return ending


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [
        *sweep([("matmul_reduce_scatter", algorithm) for algorithm in reversed(ALGORITHMS)]),
        *FUSED_CALLS,
    ],
)
def test_a_killed_rank_ends_the_wait(cuda_driver: str, op: str, algorithm: str) -> None:
    fused = algorithm == "fused"
    env = {"TRITON_INTERPRET": "1"} if fused else {}
    if fused:
        require_interpreter()
    with faults.watched_ranks(2 + fused, **env) as ranks:
        outcomes = faults.collect(ranks, killed_job, cuda_driver, op, algorithm)
        assert outcomes[1].exitcode == -signal.SIGKILL
        for ending in faults.values(outcomes, 1).values():
            assert ending.error == "PeerLostError" and ending.peer == 1, ending
            assert f"pid {ranks.pids[1]}" in ending.message, ending


@interpreted(2, driver=False)
def test_a_mismatch_is_found_by_the_kernels() -> None:
    with cuda_code_path():
        group = faults.new_group()
        faults.run_op("matmul_all_reduce", group, "fused", 40)
        x, w = torch.ones(40, 8), torch.ones(8, 32 + 8 * (group.rank() == 1))
        call = functools.partial(tpkernels.matmul_all_reduce, x, w, group, algorithm="fused")
        assert is_all_nan([call()])
        after = faults.record_ending(call)
    assert after.error == "CollectiveMismatchError" and after.peer == 1 - group.rank(), after


@pytest.mark.parametrize(("op", "algorithm"), FUSED_CALLS)
@interpreted(2)
def test_calls_after_a_failure_write_no_buffer(op: str, algorithm: str) -> None:
    """Rank 1 skips a call, and rank 0 continues without a check.

    A successful call would change the buffers of rank 1.
    """
    with cuda_code_path() as patch:
        group = faults.new_group(timeout=1.5)
        call = make_call(op, algorithm, group)
        call()
        workspace = get_cuda_workspace(group).current
        memory = (ctypes.c_uint8 * (2 * workspace.buffer_bytes)).from_address(
            workspace.buffers(group.rank())
        )
        buffers = torch.frombuffer(memory, dtype=torch.uint8)
        buffers.fill_(0xA5)
        dist.barrier()
        call()
        num_changed = int((buffers != 0xA5).sum())
        patch.setattr(CudaWorkspace, "check", lambda *_: None)
        if group.rank() == 0:
            call()  # fails
        dist.barrier()
        buffers.fill_(0xA5)
        dist.barrier()
        if group.rank() == 0:
            assert all(is_all_nan(call()) for _ in range(2))
        dist.barrier()
        assert bool((buffers == 0xA5).all()) and num_changed > 0
