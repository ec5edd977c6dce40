"""``multimem`` between processes, with stand-ins for the torch ops and CUDA tensors: results,
launches and refusals. Not confirmed on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.algorithms.test_unfused_cuda import (
    AG,
    AGM,
    AR,
    GATHER,
    IN_PLACE,
    MAR,
    MRS,
    RS,
    SUM,
    UNEVEN,
    arguments,
    by_torch,
    fake,
    matmul_args,
    record_queue,
)
from tests.planning.test_choose import problem
from tests.support import faults
from tests.support.cases import Case, one_of_each, uneven_splits
from tests.support.cuda_rehearsal import (
    ALL_QUALIFIED,
    SharedMemory,
    memory_with_handle,
    use_symmetric_memory,
)
from tests.support.emulated import BF16, F32, on_ranks, require_no_failures, sum_over_ranks
from tests.support.multimem_rehearsal import Multimem
from tests.support.nccl_rehearsal import nccl_code_path
from tests.support.ranked import check_cases, fresh_group
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.algorithms import multimem
from tpkernels.errors import CaptureError, WorkspaceMemoryError
from tpkernels.planning.choose import Capabilities, candidates, choose
from tpkernels.planning.problem import VENDOR
from tpkernels.symm import streams

REDUCED, SCATTERED = "multimem_all_reduce_", "multimem_one_shot_all_reduce_out"
GATHERED = "multimem_all_gather_out"
SMALL = (15, *[1] * 7)  # shard sizes; rank 1 holds a small shard


def make_cases(world: int, dtype: torch.dtype) -> list[Case]:
    """Return cases of every op: rows of full and partial packs (the slots pad the latter), empty
    shards, different dims and epilogues. Later cases enlarge the workspace."""
    cases = [case for case in one_of_each(world) if case.algorithm == "direct"]
    for total, columns in ((5, 3), (50, 8), (30 * world, 64)):
        for sizes in uneven_splits(total, world):
            shape = (total, columns)
            cases += [Case(op=op, shape=shape, sizes=sizes) for op in (AG, RS)]
            cases += [
                Case(op=AGM, shape=shape, sizes=sizes, n=(6, 9), return_gathered=columns == 8),
                Case(op=MRS, shape=shape, sizes=sizes, k=(5, 7), biases=(F32,), residual=dtype),
            ]
    middle = {"shape": (2, 4 * world, 24), "dim": 1}
    cases += [
        Case(op=AGM, **middle, n=(8,)),
        Case(op=MRS, **middle, k=(7,), out_dtype=F32),
        Case(op=MAR, shape=(24, 66), k=(20,), biases=(F32,), residual=F32, out_dtype=F32),
        Case(op=AR, shape=(3, 0)),
        Case(op=AR, shape=(1, 3)),
    ]
    changed = {"algorithm": "multimem", "integers": True, "dtype": dtype}
    return [replace(case, **changed) for case in dict.fromkeys(cases)]


@pytest.mark.parametrize("world", sweep([3, 2, 4]))
@on_ranks()
def test_results() -> None:
    """The data are integers, whose sums are exact in any order."""
    cases = [case for dtype in (F32, BF16) for case in make_cases(dist.get_world_size(), dtype)]
    with nccl_code_path(), fresh_group() as group:
        require_no_failures(check_cases(cases, group))
        workspace = groups.get(group.group_name).workspace.cuda_workspaces[torch.device("cpu")]
        assert len(workspace._multicast) > 1
        assert {REDUCED, SCATTERED, GATHERED} == set(multimem._ops.calls)


@pytest.mark.parametrize("has_barrier", [True, False])
@on_ranks(3)
def test_a_buffer_is_reused_after_a_barrier(has_barrier: bool) -> None:
    """Many calls reuse the buffers. Negative control: without the final barrier of the torch ops,
    some results are wrong."""
    wrong = 0
    with nccl_code_path() as patch, fresh_group() as group:
        patch.setattr(multimem, "_ops", Multimem(has_barrier))
        rank, world = group.rank(), group.size()
        ranks = sum(range(world))
        for step in range(60):
            x = torch.full((4 * world, 24), float(step + rank))
            total = tpkernels.reduce_scatter(x, group, algorithm="multimem")
            wrong += not bool((total == world * step + ranks).all())
            gathered = tpkernels.all_gather(x[:4], group, algorithm="multimem")
            wrong += not torch.equal(gathered[::4, 0], torch.arange(world).add(step).to(F32))
    assert (sum_over_ranks(wrong) > 0) == (not has_barrier), wrong


@on_ranks(2)
def test_a_symmetric_tensor_is_copied() -> None:
    """Only rank 0 passes a symmetric tensor. In place, the torch kernels would wait forever for a
    rank that passed a different tensor."""
    with nccl_code_path(), fresh_group() as group:
        state = groups.get(group.group_name).ready("cuda")
        x = state.make_symmetric((4, 8), F32, torch.device("cpu")).fill_(1)
        if group.rank() == 1:
            x = torch.ones(4, 8)
        assert bool((tpkernels.all_reduce(x, group, algorithm="multimem") == 2).all())
        assert bool((x == 1).all())
        tpkernels.all_reduce_(x, group, algorithm="multimem")
        assert bool((x == 2).all())


# Refusals.


WITHOUT_MULTICAST = memory_with_handle(lambda handle: replace(handle, multicast_ptr=0))


@on_ranks(2)
def test_requirements() -> None:
    with nccl_code_path() as patch, fresh_group() as group:
        x = torch.ones(4, 8)
        ordered = dist.new_group()
        tpkernels.init(ordered, numerics="ordered")
        with pytest.raises(NotImplementedError, match="order of the switch"):
            tpkernels.all_reduce(x, ordered, algorithm="multimem")
        tpkernels.all_gather(x, ordered, algorithm="multimem")
        for op in (tpkernels.all_reduce, tpkernels.reduce_scatter):
            with pytest.raises(
                NotImplementedError, match=r"sums only float32 and bfloat16 .* float16"
            ):
                op(x.half(), group, algorithm="multimem")
        tpkernels.all_gather(x.half(), group, algorithm="multimem")
        tpkernels.matmul_all_reduce(
            x.half(), torch.ones(8, 8).half(), group, wire_dtype=F32, algorithm="multimem"
        )
        if group.rank() == 1:
            use_symmetric_memory(patch, WITHOUT_MULTICAST)
        second_group = faults.new_group()
        with pytest.raises(NotImplementedError, match="the GPUs has no multicast address"):
            tpkernels.all_gather(x, second_group, algorithm="multimem")
        tpkernels.all_gather(x, second_group, algorithm="direct")


@on_ranks(2)
def test_memory_that_cannot_grow() -> None:
    """A capture, and a rank without multicast memory, cannot enlarge the workspace. The group
    remains usable."""
    with nccl_code_path() as patch, fresh_group() as group:
        small, large = torch.ones(4, 8), torch.ones(100, 100)

        def reduce(x: torch.Tensor) -> bool:
            return bool((tpkernels.all_reduce(x, group, algorithm="multimem") == 2).all())

        assert reduce(small)
        with pytest.MonkeyPatch.context() as capture:
            capture.setattr(streams, "is_captured", lambda _: True)
            with pytest.raises(CaptureError, match="call it once before the graph capture"):
                reduce(large)
        use_symmetric_memory(patch, WITHOUT_MULTICAST)
        with pytest.raises(WorkspaceMemoryError, match="no multicast address"):
            reduce(large)
        assert reduce(small)
        use_symmetric_memory(patch, SharedMemory)
        assert reduce(large)


@pytest.mark.parametrize("op", [AR, RS, AG])
def test_auto_never_selects_multimem(op: str) -> None:
    """``multimem`` is qualified, but a lost peer would hang the GPU."""
    capabilities = Capabilities(shared_memory=True, qualification=ALL_QUALIFIED)
    cuda_problem = problem(op, device="cuda", numerics=VENDOR)
    assert capabilities.qualification.reason_against(op, "multimem") is None
    assert candidates(cuda_problem, capabilities) == ["unfused", "ring", "direct"]
    assert choose(cuda_problem, capabilities, requested="multimem").algorithm == "multimem"


# Launches of a rank, on fake CUDA tensors.


def queued(
    monkeypatch: pytest.MonkeyPatch, op: str, make: Callable[[], dict[str, Any]]
) -> list[str]:
    names: list[list[str]] = []

    @contextlib.contextmanager
    def workspace(call: Any, device: torch.device, nbytes: int) -> Any:
        assert nbytes % 16 == 0
        names.append(call.group.pg.queue.launches)
        yield SimpleNamespace(multicast=fake(nbytes, dtype=torch.uint8))

    def recorder(name: str) -> Callable[..., None]:
        return lambda *_: names[-1].append(name)

    monkeypatch.setattr(multimem, "_multicast_workspace", workspace)
    monkeypatch.setattr(multimem, "_is_aligned", lambda _: True)  # fake tensors have no address
    ops = {name: recorder(name) for name in (REDUCED, SCATTERED, GATHERED)}
    monkeypatch.setattr(multimem, "_ops", SimpleNamespace(**ops))
    monkeypatch.setattr("tests.support.launches.Collectives.group_name", "a group", raising=False)
    return record_queue(op, VENDOR, make, "multimem").launches


@pytest.mark.parametrize(
    ("op", "make", "launches"),
    [
        (AG, arguments(x=(8, 16)), [GATHERED, "cat"]),
        (AG, arguments(x=(1, 16), shard_sizes=SMALL), ["copy_", GATHERED, "cat"]),
        (AGM, arguments(**GATHER), [GATHERED, "cat", "mm"]),
        (RS, arguments(x=(64, 32)), ["copy_", SCATTERED]),
        (MRS, matmul_args(), ["mm", SCATTERED]),
        (MRS, matmul_args(bias=(32,), residual=(8, 32)), ["mm", SCATTERED, SUM]),
        (MRS, matmul_args(wire_dtype=F32), ["mm", SCATTERED, SUM]),
        (MRS, matmul_args(x=(22, 16), shard_sizes=SMALL), ["mm", SCATTERED, "copy_"]),
        (
            MRS,
            matmul_args(x=(60, 16), w=(16, 3), shard_sizes=UNEVEN),
            ["mm", *["copy_"] * 8, SCATTERED],
        ),
        (AR, arguments(x=(64, 32)), ["copy_", REDUCED, "copy_"]),
        (IN_PLACE, arguments(x=(64, 32)), ["copy_", REDUCED, "copy_"]),
        (MAR, matmul_args(), ["mm", REDUCED, "copy_"]),
        (MAR, matmul_args(bias=(32,), residual=(64, 32)), ["mm", REDUCED, SUM]),
    ],
)
def test_launches(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    make: Callable[[], dict[str, Any]],
    launches: Sequence[str],
) -> None:
    """The matmul writes to symmetric memory. One launch follows the reduction, except in a
    reduce-scatter of full packs without bias."""
    assert queued(monkeypatch, op, make) == launches


def test_torch_normalises_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    make = matmul_args(norm_weight=(32,), residual=(64, 32))
    launches = queued(monkeypatch, f"{MAR}_rms_norm", make)
    assert launches[:3] == ["mm", REDUCED, SUM] and by_torch(launches[3:])


def test_schemas_of_the_torch_ops() -> None:
    ops = torch.ops.symm_mem
    for name, expected in {
        REDUCED: ["input", "reduce_op", "group_name"],
        SCATTERED: ["input", "reduce_op", "group_name", "out"],
        GATHERED: ["input", "group_name", "out"],
    }.items():
        schema = getattr(ops, name).default._schema
        assert [argument.name for argument in schema.arguments] == expected, schema
