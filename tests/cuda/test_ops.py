"""The ops on the way of CUDA tensors, rehearsed: CPU tensors, the kernels of csrc/cuda run by the
processor (support/emulated.py), those of Triton by their interpreter, shared memory for torch's
symmetric memory."""

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
from tests.support.cases import Case, each, one_of_each, uneven_splits
from tests.support.cuda_rehearsal import (
    FUSED_OPS,
    Handle,
    SharedMemory,
    copy_engines,
    pretending,
    space_of,
    use_memory,
    with_handle,
)
from tests.support.emulated import BF16, F32, interpreted, is_spoilt, on_ranks, require_none
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

VARIANTS = ("direct", "pipelined")


def check_all(
    cases: Sequence[Case], max_delay_us: int = 0, ll: bool = True, copied: bool = False
) -> None:
    """Run the cases on this rank. Without ``ll`` small calls take the way of large ones;
    ``copied``: copy engines gather for `fused`."""
    with pretending() as patch, fresh_group() as group:
        if copied:
            copy_engines(patch)
        if not ll:
            patch.setattr("tpkernels.cuda.layouts.LL_BYTES", -1)
            patch.setattr("tpkernels.cuda.calls.all_reduce_variant", lambda *_: "two_shot")
        chaos = {"seed": group.rank(), "max_delay_us": max_delay_us}
        faults.workspace_of(group).set_chaos(**chaos)
        require_none(check_cases(cases, group))


@pytest.mark.parametrize("world", sweep([2, 1, 3]))
@on_ranks(driver=False)
def test_unfused() -> None:
    cases = [case for case in one_of_each(dist.get_world_size()) if case.algorithm == "unfused"]
    products = [case for case in cases if "matmul" in case.op]
    check_all([*cases, *(replace(case, weight_layout="caller's") for case in products)])


@pytest.mark.parametrize("world", sweep([3, 1, 2, 4]))
@on_ranks()
def test_products() -> None:
    """Uneven and empty shards, every epilogue; later ones need more memory than there is."""
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
            *each(*cases, dtypes=(BF16,), algorithms=VARIANTS, integers=(False,)),
            *each(
                Case(op="all_gather_matmul", **shapes, n=(4, 9), biases=(F32,),
                     return_gathered=True),
                Case(op="matmul_reduce_scatter", **shapes, k=(20,), **epilogue),
                Case(op="matmul_all_reduce", shape=(24, 3, 66), k=(20,), **epilogue),
                Case(op="matmul_all_reduce", shape=(24, 66), k=(20,), wire_dtype=F32),
                algorithms=VARIANTS,
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
    check_all(each(*cases, algorithms=("direct",)), ll=ll)


@pytest.mark.parametrize("world", sweep([3, 1, 2, 4], later=3))
@on_ranks()
def test_routed_rows() -> None:
    """Fewer experts than ranks, empty ones, all tokens to one, ranks without tokens, rows of any
    alignment; with gradients, and under delays. Later ones need more memory than there is."""
    cases, widths = [], itertools.cycle([1, 37, 64, 200])
    for case in itertools.islice(test_moe.shapes(dist.get_world_size()), 0, None, 3):
        few = case.experts < 64
        dtype = emulated.DTYPES[len(cases) % 3] if few else F32
        odd = len(cases) % 2 > 0
        more = {"width": next(widths), "dtype": dtype, "integers": odd or not few}
        more["ids"] = torch.int32 if odd else torch.int64
        variant = "direct" if dist.get_world_size() > 1 or len(cases) % 3 else "unfused"
        cases.append(replace(case, algorithm=variant, **more))
    with pretending(), fresh_group() as group:
        faults.workspace_of(group).set_chaos(seed=group.rank(), max_delay_us=100)
        require_none([test_moe.failure(case, group) for case in cases])


@pytest.mark.parametrize("broken", [{}, thorough({"single_buffer": True}), {"skip_waits": True}])
@on_ranks(3)
def test_delays_of_routed_rows_and_negative_controls(broken: dict[str, bool]) -> None:
    """What a broken protocol spoils depends on who runs when: it is tried again."""
    with pretending():
        tries = range(10 if broken else 1)
        wrong = (test_moe.delayed_job(algorithm="direct", **broken) for _ in tries)
        assert any(map(emulated.anywhere, wrong)) == bool(broken)


@on_ranks(3)
def test_routed_sums_have_the_bits_of_other_algorithms() -> None:
    """Vectors, and single elements."""
    with pretending():
        for width in (96, 100):
            test_moe.bits_job(3, width)


@on_ranks(2)
def test_routes_without_a_row_make_their_token_nan() -> None:
    """Beyond max_rows, and to experts that there are not: no host looks."""
    x, weights = torch.arange(1.0, 9.0).repeat(3, 1), torch.ones(6, 2)[:3]
    routes = torch.tensor([[0, 2], [3, -1], [1, 1], [0, 3], [4, 2], [2, 0]])
    with pretending(), fresh_group() as group:
        ops, given = torch.ops.tpkernels, (routes, 4, group.group_name)
        rows, counts = ops.moe_dispatch(x, *given, max_rows=4)
        first = 2 * group.rank()
        here = [int((routes == expert).sum()) for expert in (first, first + 1)]
        assert counts.tolist() == here == [3, 2]
        y = ops.moe_combine(rows, weights, *given, max_rows=4)
        # Each rank's fifth row has no room: of the token with the last route to its last expert.
        bad = [[1, 2], [0, 1]][group.rank()]
        assert y.isnan().all(1).nonzero().flatten().tolist() == bad, y
        good = [i for i in range(3) if i not in bad]
        assert torch.equal(rows, x[0].expand(4, 8)) and torch.equal(y[good], 2 * x[good])
        with pytest.raises(tpkernels.RoutingError, match=r"rank 0 contains expert -1 at \[1, 1\]"):
            ops.moe_dispatch(x, *given, algorithm="direct")
        with pytest.raises(ValueError, match="x has 3 rows, but max_rows is 4"):
            ops.moe_combine(x, weights, *given, max_rows=4)


@pytest.mark.parametrize("algorithm", ["direct", "unfused"])
@on_ranks(1)
def test_one_rank_sums_what_has_no_expert_to_nan(algorithm: str) -> None:
    x, weights = torch.arange(12.0).view(3, 4), torch.ones(3, 2)
    routes = torch.tensor([[0, 2], [-1, 4], [1, 1]])
    with pretending(), fresh_group() as group:
        ops, given = torch.ops.tpkernels, (routes, 4, group.group_name)
        options = {"max_rows": 8, "algorithm": algorithm}
        rows, counts = ops.moe_dispatch(x, *given, **options)
        assert torch.equal(rows[:4], x[[0, 2, 2, 0]]) and counts.tolist() == [1, 2, 1, 0]
        y = ops.moe_combine(rows, weights, *given, **options)
        assert torch.equal(y[::2], 2 * x[::2]) and y[1].isnan().all()
        if algorithm == "unfused":  # knows how many there are
            with pytest.raises(
                tpkernels.RoutingError, match=r"6 \(token, expert\) assignments go to"
            ):
                ops.moe_dispatch(x, *given, max_rows=5)


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
    cases = each(*cases, dtypes=(BF16,), algorithms=("fused",), integers=(False,))
    check_all(cases, max_delay_us, copied=True)


def batches_of(world: int) -> list[Case]:
    """Shards of an inner dim, even and uneven, empty ones too."""
    cases = []
    for total in (2 * world, 5):
        for sizes in uneven_splits(total, world):
            for lead, tail in (((3,), ()), ((2, 3), ()), ((2,), (3,))):
                split: dict[str, Any] = {"sizes": sizes, "dim": len(lead)}
                gathered, summed = (*lead, total, *tail, 12), (*lead, total, *tail, 10)
                more = {"biases": (F32,), "n": (4, 9), "return_gathered": True}
                cases += [
                    Case(op="all_gather_matmul", shape=gathered, **split, n=(7,)),
                    Case(op="all_gather_matmul", shape=gathered, **split, **more),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,)),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,), residual=F32,
                         out_dtype=F32, biases=(F32,), layout="transposed"),
                ]  # fmt: skip
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 1, 2])
@on_ranks()
def test_shards_of_an_inner_dim() -> None:
    check_all(each(*batches_of(dist.get_world_size()), algorithms=VARIANTS, integers=(True,)))


@pytest.mark.parametrize("variant", sweep(VARIANTS))
@on_ranks(3)
def test_call_after_call_under_delays(variant: str) -> None:
    cases = each(
        Case(op="all_gather_matmul", shape=(12, 8), sizes=(3, 0, 9), n=(5,)),
        Case(op="matmul_reduce_scatter", shape=(12, 6), sizes=(3, 0, 9), k=(5,)),
        Case(op="matmul_all_reduce", shape=(12, 6), k=(5,)),
        algorithms=(variant,),
    )
    check_all(cases * 4, 500)


@pytest.mark.thorough
@pytest.mark.parametrize("ll", [True, False])
@interpreted(2)
def test_all_algorithms_share_a_workspace(ll: bool) -> None:
    reductions = [
        Case(op=op, shape=(12, 6), sizes=sizes, k=(5,), algorithm=variant)
        for op, sizes in (("matmul_reduce_scatter", (5, 7)), ("matmul_all_reduce", None))
        for variant in ("fused", *VARIANTS, "unfused")
    ]
    gathers = [
        Case(op="all_gather_matmul", shape=(12, 6), sizes=(5, 7), n=(4,), algorithm=variant)
        for variant in ("fused", *VARIANTS)
    ]
    check_all([*reductions, *gathers, *reductions], 200, ll)


@pytest.mark.parametrize("dtype", dtypes.CODES)
def test_sums_have_the_bits_of_the_extension(dtype: torch.dtype) -> None:
    wide = dtypes.accumulator(dtype)
    for begin, columns in ((0, 33), (7, 33), (100, 50)):
        torch.manual_seed(begin)
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


# What is chosen, and refused.


@on_ranks(2, driver=False)
def test_all_ranks_know_of_a_callers_product() -> None:
    """It has no measured times, by which `auto` could take `fused`."""
    with pretending(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        product = tpkernels.CustomMatmul(lambda x: x @ w, (8, 6), F32)
        for op in FUSED_OPS:
            getattr(tpkernels, op)(x, product, group)
        tpkernels.all_gather_matmul(x, w, group)
        calls = groups.get(group.group_name).planned_calls()
    assert sorted(c.problem.options.local_product for c in calls) == [False, True, True, True]


@on_ranks(2, driver=False)
def test_auto_does_what_is_known_not_to_be_slower() -> None:
    with pretending(), fresh_group() as group:
        tpkernels.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 6), group)
        plan = groups.get(group.group_name).planned_calls()[0].plan
    assert plan.algorithm == "unfused", plan
    assert "no algorithm is known to be faster on this GPU" in plan.reason, plan


@on_ranks(2)
def test_which_products_hold_the_devices_turn() -> None:
    """Those whose sum may start early: calls of other groups wait as long."""
    held, seen = [0], []
    enter, leave = CudaWorkspace.__enter__, CudaWorkspace.__exit__

    def counted_enter(self: CudaWorkspace) -> CudaWorkspace:
        held[0] += 1
        return enter(self)

    def counted_leave(self: CudaWorkspace, *error: Any) -> None:
        held[0] -= 1
        leave(self, *error)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        seen.append(held[0])
        return x @ torch.ones(8, 6)

    with pretending() as patch, fresh_group() as group:
        patch.setattr(CudaWorkspace, "__enter__", counted_enter)
        patch.setattr(CudaWorkspace, "__exit__", counted_leave)
        x, product = torch.ones(4, 8), tpkernels.CustomMatmul(multiply, (8, 6), F32)
        want = torch.full((4, 6), 16.0)
        scattered = tpkernels.matmul_reduce_scatter(x, product, group, algorithm="direct")
        reduced = tpkernels.matmul_all_reduce(x, product, group, algorithm="direct")
        # Rows of 6 are normalised behind the sum.
        _, total = tpkernels.matmul_all_reduce_rms_norm(
            x, product, torch.ones(6), group, algorithm="direct"
        )
    assert seen == [0, 1, 0], seen
    for got in (scattered, reduced, total):
        assert torch.equal(got, want[: len(got)])


@on_ranks(2)
def test_refusals() -> None:
    with pretending(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        gather = functools.partial(tpkernels.all_gather_matmul, group=group)
        columns = functools.partial(gather, x, torch.ones(16, 6), gather_dim=1)
        for call, text in (
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
            ending = faults.ending_of(call)
            assert ending.text.endswith(text), ending


class NoMemory(SharedMemory):
    @staticmethod
    def empty(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("virtual memory management is not supported")


class NoPeers(SharedMemory):
    @staticmethod
    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        SharedMemory.rendezvous(memory, name)  # the other ranks succeed
        raise RuntimeError("no peer access")


def lacking(variant: str, text: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The algorithm ``variant`` cannot run on this rank."""
    place, why = "tpkernels.ops.planned_calls.unsupported", {variant: text}
    return lambda patch: patch.setattr(place, lambda name, *_: why.get(name))


def on_gpus(*gpus: Gpu) -> Callable[[pytest.MonkeyPatch], None]:
    """The ranks' GPUs, as a rank finds its own."""
    return lambda patch: patch.setattr(Gpu, "of", lambda _: gpus[dist.get_rank()])


def without_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu_memory, "DeviceWorkspace", NoMemory.empty)


def with_memory(memory: type[SharedMemory]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: use_memory(patch, memory)


OTHER = "H100 (sm_90, 114 processors)"
# The algorithm, what rank 1 lacks (under MPS: both), and what both are told.
LACKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], object], str]] = {
    "kernels": ("direct", lacking("direct", "needs the CUDA kernels"), "1 needs the CUDA kernels"),
    "sm_80": ("fused", lacking("fused", "needs capability 8.0"), "rank 1 needs capability 8.0"),
    "memory": ("fused", with_memory(NoMemory), "rank 1 cannot allocate"),
    "peers": (
        "fused",
        with_memory(NoPeers),
        "rank 1 cannot map the memory of its peers: no peer access. The GPUs need peer access",
    ),
    "pointers": (
        "fused",
        with_memory(with_handle(lambda handle: replace(handle, buffer_ptrs=[0, 0]))),
        "rank 1 cannot address the memory of its peers: with this backend, torch",
    ),
    "state": ("fused", without_state, "rank 1 cannot allocate the state of a workspace"),
    "alignment": (
        "fused",
        with_memory(with_handle(lambda handle: replace(handle, offset=handle.offset + 128))),
        "these must be multiples of 256",
    ),
    "same GPU": ("fused", on_gpus(Gpu(OTHER), Gpu(OTHER)), f"rank 0 has cpu, rank 1 has {OTHER}"),
}
SHARED = [Gpu("H100", "GPU-5f1c", 0)] * 2
# The ranks' GPUs, of which rank 1 cannot map rank 0's memory (under MPS: it can), and what both
# are told.
SHARING: dict[str, tuple[list[Gpu], str]] = {
    "MPS": ([gpu._replace(under_mps=True) for gpu in SHARED], "share GPU GPU-5f1c under MPS"),
    "one GPU": (SHARED, "Ranks 0 and 1 share GPU GPU-5f1c: give each rank a separate GPU"),
    "one visible GPU each": (
        [SHARED[0], SHARED[0]._replace(uuid="GPU-77aa")],
        "Ranks 0 and 1 use different GPUs, but each sees its GPU as cuda:0",
    ),
}


@pytest.mark.parametrize("what", LACKS)
@interpreted(2, driver=False)
def test_what_one_rank_lacks_is_refused_by_all(what: str) -> None:
    """Then all go on without kernels."""
    variant, lose, text = LACKS[what]
    with pretending() as patch:
        group = faults.new_group()
        if group.rank() == 1:
            lose(patch)
        call = functools.partial(faults.run_op, "all_gather_matmul", group)
        first, second = (faults.ending_of(lambda: call(variant)) for _ in range(2))
        assert first.error == "NotImplementedError" and text in first.text, first
        assert (second.error, second.text) == (first.error, first.text), second
        call()


@pytest.mark.parametrize("what", SHARING)
@interpreted(2, driver=False)
def test_gpus_that_torch_takes_for_one(what: str) -> None:
    gpus, text = SHARING[what]
    with pretending() as patch:
        group = faults.new_group()
        on_gpus(*gpus)(patch)
        if group.rank() == 1:
            with_memory(NoPeers)(patch)
        ending = faults.ending_of(
            lambda: faults.run_op("all_gather_matmul", group, algorithm="fused")
        )
        assert ending.error == "NotImplementedError" and text in ending.text, ending


def test_what_the_other_ranks_hear_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    properties = SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, uuid="5f1c"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    alone = Gpu("H100 (sm_90, 132 processors)", "GPU-5f1c", 3, under_mps=False)
    assert Gpu.of(torch.device("cuda", 3)) == alone
    (tmp_path / "control").touch()
    assert Gpu.of(torch.device("cuda", 3)) == alone._replace(under_mps=True)
    assert Gpu.of(torch.device("cpu")) == Gpu("cpu")


def test_allocation_waits_for_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's there may be a receive of what the peer sends when it has allocated."""
    waits, stream = list[str](), SimpleNamespace(synchronize=lambda: waits.append("stream"))
    threads = list[int]()

    def empty(*_: Any, **__: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        return torch.empty(8)

    monkeypatch.setattr(NoPeers, "empty", empty)
    use_memory(monkeypatch, NoPeers)
    monkeypatch.setattr(NoPeers, "rendezvous", NoMemory.empty)  # far enough
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waits.append("device"))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(Gpu, "of", lambda _: Gpu("H100"))
    two = SimpleNamespace(
        world=2, group="g", process_group="g", exchange=lambda _, mine: [mine] * 2
    )
    with pytest.raises(NotImplementedError, match="cannot map"):
        gpu_memory.make_symmetric(two, 8, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert waits == ["stream"] and threading.get_ident() not in threads


def test_what_outlives_a_call_is_allocated_on_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller's may allocate for a graph that is warmed up, or in inference mode."""
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
        space = DeviceWorkspace([region.data_ptr()], region, 0, 8, 8, 1.0)
        kept = [space.regions, space.state, space.control, space.scratch, space.starts((2, 3))]
    assert len(threads) == len(kept) and threading.get_ident() not in threads
    assert not any(tensor.is_inference() for tensor in kept)


# Failures: a call only queues its kernels, so its results are NaN and the next call says why.

CALLS = [
    *itertools.product(FUSED_OPS, VARIANTS),
    *itertools.product(["all_gather", "reduce_scatter", "all_reduce", "moe_dispatch"], ["direct"]),
]
FUSED_CALLS = [
    thorough("all_gather_matmul", "fused"),
    *(pytest.param(op, "fused", marks=pytest.mark.slow) for op in FUSED_OPS[1:]),
]


LATER = [("all_gather_matmul", "copied"), ("moe_combine", "direct")]


def call_of(op: str, variant: str, group: dist.ProcessGroup) -> Callable[[], list[torch.Tensor]]:
    """A call whose results are returned as a list; "copied" is `fused` by copy engines, with
    several weights."""
    x, w = torch.ones(70 if variant == "copied" else 12, 48), torch.ones(48, 40)
    factors: Any = (x, w) if "matmul" in op else (w,)
    options: dict[str, Any] = {"algorithm": variant}
    if variant == "copied":
        factors = x, [w[:, :n].contiguous() for n in (4, 33, 1)]
        options = {"algorithm": "fused", "return_gathered": True}

    function, name = getattr(tpkernels, op), group
    if OPS[op].routed:
        function, name = getattr(torch.ops.tpkernels, op), group.group_name
        weights = [torch.ones(48, 2)] if OPS[op].combines else []
        factors = w[:, :8], *weights, torch.arange(192).view(96, 2) % 2, 2
        if weights:
            factors = torch.ones(96, 8), *factors[1:]

    def call() -> list[torch.Tensor]:
        results = function(*factors, name, **options)
        if variant == "copied":
            return [results[0], *results[1]]
        return [results[0] if op == "moe_dispatch" else results]

    return call


@pytest.mark.parametrize(
    ("op", "variant"), [*sweep(CALLS), *FUSED_CALLS, *(thorough(*case) for case in LATER)]
)
@interpreted(2)
def test_a_call_that_gave_up_leaves_nan(op: str, variant: str) -> None:
    """Rank 1 does not come."""
    with pretending() as patch:
        if variant == "copied":
            copy_engines(patch)
        group = faults.new_group(timeout=1.0)
        call = call_of(op, variant, group)
        call()
        if group.rank() == 0:
            assert is_spoilt(call())
            after = faults.ending_of(call)
            assert after.error == "CollectiveTimeoutError" and after.peer == 1, after
            assert f"an earlier call of the group (detected by {op}" in after.text, after
        dist.barrier()


def killed_job(driver: str, op: str, variant: str) -> Ending | None:
    """Rank 1 is killed before its kernel starts; the thread that watches ends the others' waits.
    (Where a rank is so slow that it sees it before its kernel starts, that call raises already.)"""
    emulated.load(driver)
    with pretending():
        group = faults.new_group()
        call = call_of(op, variant, group)
        call()
        space_of(group).check("a test")
        if group.rank() == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        spoilt: list[bool] = []
        begin = time.monotonic()
        ending = faults.ending_of(lambda: spoilt.append(is_spoilt(call())))
        if not ending.error:
            ending = faults.ending_of(call)
        assert all(spoilt) and time.monotonic() - begin < faults.PATIENCE / 2, spoilt
        return ending


@pytest.mark.parametrize(
    ("op", "variant"),
    [*sweep([("matmul_reduce_scatter", variant) for variant in reversed(VARIANTS)]), *FUSED_CALLS],
)
def test_a_killed_rank_ends_the_wait(cuda_driver: str, op: str, variant: str) -> None:
    fused = variant == "fused"
    env = {"TRITON_INTERPRET": "1"} if fused else {}
    if fused:
        require_interpreter()
    with faults.watched_ranks(2 + fused, **env) as ranks:
        outcomes = faults.collect(ranks, killed_job, cuda_driver, op, variant)
        assert outcomes[1].exitcode == -signal.SIGKILL
        for ending in faults.values(outcomes, 1).values():
            assert ending.error == "PeerLostError" and ending.peer == 1, ending
            assert f"pid {ranks.pids[1]}" in ending.text, ending


@interpreted(2, driver=False)
def test_a_mismatch_is_found_by_the_kernels() -> None:
    with pretending():
        group = faults.new_group()
        faults.run_op("matmul_all_reduce", group, "fused", 40)
        x, w = torch.ones(40, 8), torch.ones(8, 32 + 8 * (group.rank() == 1))
        call = functools.partial(tpkernels.matmul_all_reduce, x, w, group, algorithm="fused")
        assert is_spoilt([call()])
        after = faults.ending_of(call)
    assert after.error == "CollectiveMismatchError" and after.peer == 1 - group.rank(), after


@pytest.mark.parametrize(("op", "variant"), FUSED_CALLS)
@interpreted(2)
def test_calls_behind_a_failed_one_touch_no_buffer(op: str, variant: str) -> None:
    """Rank 1 stays away; rank 0 goes on as if it had not looked. A call that is in order changes
    rank 1's buffers."""
    with pretending() as patch:
        group = faults.new_group(timeout=1.5)
        call = call_of(op, variant, group)
        call()
        space = space_of(group).current
        memory = (ctypes.c_uint8 * (2 * space.buffer_bytes)).from_address(
            space.buffers(group.rank())
        )
        buffers = torch.frombuffer(memory, dtype=torch.uint8)
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
            assert all(is_spoilt(call()) for _ in range(2))
        dist.barrier()
        assert bool((buffers == 0xA5).all()) and in_order > 0
