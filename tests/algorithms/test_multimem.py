"""``multimem`` between processes, with stand-ins for torch's ops and for CUDA tensors: results,
torch's calls and what follows them, and refusals. No GPU has confirmed it."""

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
    factors,
    fake,
    queue_of,
)
from tests.planning.test_choose import problem
from tests.support import faults
from tests.support.cases import Case, one_of_each, uneven_splits
from tests.support.cuda_rehearsal import ALL_QUALIFIED, SharedMemory, use_memory, with_handle
from tests.support.emulated import BF16, F32, anywhere, on_ranks, require_none
from tests.support.multimem_rehearsal import Multimem
from tests.support.nccl_rehearsal import over_nccl
from tests.support.ranked import check_cases, fresh_group
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.algorithms import multimem
from tpkernels.errors import CaptureError, WorkspaceMemoryError
from tpkernels.planning.choose import Means, candidates, choose
from tpkernels.planning.problem import VENDOR
from tpkernels.symm import streams

REDUCED, SCATTERED = "multimem_all_reduce_", "multimem_one_shot_all_reduce_out"
GATHERED = "multimem_all_gather_out"
SMALL = (15, *[1] * 7)  # sizes of shards, of which rank 1 has a small one


def cases_of(world: int, dtype: torch.dtype) -> list[Case]:
    """Every op; rows of a whole number of packs and of less, which the slots of ranks pad; empty
    shards; other dims; epilogues. Later ones need more memory than there is."""
    cases = [case for case in one_of_each(world) if case.algorithm == "direct"]
    for total, width in ((5, 3), (50, 8), (30 * world, 64)):
        for sizes in uneven_splits(total, world):
            shape = (total, width)
            cases += [Case(op=op, shape=shape, sizes=sizes) for op in (AG, RS)]
            cases += [
                Case(op=AGM, shape=shape, sizes=sizes, n=(6, 9), return_gathered=width == 8),
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
    """Of integers, whose sums are exact in any order."""
    cases = [case for dtype in (F32, BF16) for case in cases_of(dist.get_world_size(), dtype)]
    with over_nccl(), fresh_group() as group:
        require_none(check_cases(cases, group))
        found = groups.get(group.group_name).workspace.on_gpus[torch.device("cpu")]
        assert len(found._multicast) > 1
        assert {REDUCED, SCATTERED, GATHERED} == set(multimem._ops.calls)


@pytest.mark.parametrize("meets", [True, False])
@on_ranks(3)
def test_a_buffer_is_used_again_when_all_have_read_it(meets: bool) -> None:
    """Negative control: torch's ops end without a barrier."""
    wrong = 0
    with over_nccl() as patch, fresh_group() as group:
        patch.setattr(multimem, "_ops", Multimem(meets))
        rank, world = group.rank(), group.size()
        ranks = sum(range(world))
        for turn in range(60):
            x = torch.full((4 * world, 24), float(turn + rank))
            total = tpkernels.reduce_scatter(x, group, algorithm="multimem")
            wrong += not bool((total == world * turn + ranks).all())
            whole = tpkernels.all_gather(x[:4], group, algorithm="multimem")
            wrong += not torch.equal(whole[::4, 0], torch.arange(world).add(turn).to(F32))
    assert (anywhere(wrong) > 0) == (not meets), wrong


@on_ranks(2)
def test_a_symmetric_tensor_is_copied() -> None:
    """Torch's kernels would wait for ever for a rank that passed another one."""
    with over_nccl(), fresh_group() as group:
        own = groups.get(group.group_name).ready("cuda")
        x = own.make_symmetric((4, 8), F32, torch.device("cpu")).fill_(1)
        if group.rank() == 1:
            x = torch.ones(4, 8)
        assert bool((tpkernels.all_reduce(x, group, algorithm="multimem") == 2).all())
        assert bool((x == 1).all())
        tpkernels.all_reduce_(x, group, algorithm="multimem")
        assert bool((x == 2).all())


# Refusals.


WITHOUT_MULTICAST = with_handle(lambda handle: replace(handle, multicast_ptr=0))


@on_ranks(2)
def test_what_it_needs() -> None:
    with over_nccl() as patch, fresh_group() as group:
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
            use_memory(patch, WITHOUT_MULTICAST)
        other = faults.new_group()
        with pytest.raises(NotImplementedError, match="the GPUs has no multicast address"):
            tpkernels.all_gather(x, other, algorithm="multimem")
        tpkernels.all_gather(x, other, algorithm="direct")


@on_ranks(2)
def test_memory_that_cannot_grow() -> None:
    """In a capture, and where a rank has no multicast for more. The group goes on."""
    with over_nccl() as patch, fresh_group() as group:
        small, large = torch.ones(4, 8), torch.ones(100, 100)

        def reduce(x: torch.Tensor) -> bool:
            return bool((tpkernels.all_reduce(x, group, algorithm="multimem") == 2).all())

        assert reduce(small)
        with pytest.MonkeyPatch.context() as capture:
            capture.setattr(streams, "is_captured", lambda _: True)
            with pytest.raises(CaptureError, match="call it once before the graph capture"):
                reduce(large)
        use_memory(patch, WITHOUT_MULTICAST)
        with pytest.raises(WorkspaceMemoryError, match="no multicast address"):
            reduce(large)
        assert reduce(small)
        use_memory(patch, SharedMemory)
        assert reduce(large)


@pytest.mark.parametrize("op", [AR, RS, AG])
def test_auto_never_takes_it(op: str) -> None:
    """Though it is qualified: a lost peer would hang the GPU."""
    means = Means(shared_memory=True, qualification=ALL_QUALIFIED)
    on_gpus = problem(op, device="cuda", numerics=VENDOR)
    assert means.qualification.why_not(op, "multimem") is None
    assert candidates(on_gpus, means) == ["unfused", "ring", "direct"]
    assert choose(on_gpus, means, requested="multimem").algorithm == "multimem"


# What a rank queues, on fake CUDA tensors.


def queued(
    monkeypatch: pytest.MonkeyPatch, op: str, make: Callable[[], dict[str, Any]]
) -> list[str]:
    names: list[list[str]] = []

    @contextlib.contextmanager
    def workspace(call: Any, device: torch.device, nbytes: int) -> Any:
        assert nbytes % 16 == 0
        names.append(call.group.pg.queue.launches)
        yield SimpleNamespace(multicast=fake(nbytes, dtype=torch.uint8))

    def torchs(name: str) -> Callable[..., None]:
        return lambda *_: names[-1].append(name)

    monkeypatch.setattr(multimem, "_workspace", workspace)
    monkeypatch.setattr(multimem, "_is_aligned", lambda _: True)  # fake tensors have no address
    named = {name: torchs(name) for name in (REDUCED, SCATTERED, GATHERED)}
    monkeypatch.setattr(multimem, "_ops", SimpleNamespace(**named))
    monkeypatch.setattr("tests.support.launches.Collectives.group_name", "a group", raising=False)
    return queue_of(op, VENDOR, make, "multimem").launches


@pytest.mark.parametrize(
    ("op", "make", "launches"),
    [
        (AG, arguments(x=(8, 16)), [GATHERED, "cat"]),
        (AG, arguments(x=(1, 16), shard_sizes=SMALL), ["copy_", GATHERED, "cat"]),
        (AGM, arguments(**GATHER), [GATHERED, "cat", "mm"]),
        (RS, arguments(x=(64, 32)), ["copy_", SCATTERED]),
        (MRS, factors(), ["mm", SCATTERED]),
        (MRS, factors(bias=(32,), residual=(8, 32)), ["mm", SCATTERED, SUM]),
        (MRS, factors(wire_dtype=F32), ["mm", SCATTERED, SUM]),
        (MRS, factors(x=(22, 16), shard_sizes=SMALL), ["mm", SCATTERED, "copy_"]),
        (
            MRS,
            factors(x=(60, 16), w=(16, 3), shard_sizes=UNEVEN),
            ["mm", *["copy_"] * 8, SCATTERED],
        ),
        (AR, arguments(x=(64, 32)), ["copy_", REDUCED, "copy_"]),
        (IN_PLACE, arguments(x=(64, 32)), ["copy_", REDUCED, "copy_"]),
        (MAR, factors(), ["mm", REDUCED, "copy_"]),
        (MAR, factors(bias=(32,), residual=(64, 32)), ["mm", REDUCED, SUM]),
    ],
)
def test_launches(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    make: Callable[[], dict[str, Any]],
    launches: Sequence[str],
) -> None:
    """A matmul writes into symmetric memory. Behind the sum there is one launch, and in a
    reduce-scatter of whole packs without bias none."""
    assert queued(monkeypatch, op, make) == launches


def test_torch_normalises_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    make = factors(norm_weight=(32,), residual=(64, 32))
    found = queued(monkeypatch, f"{MAR}_rms_norm", make)
    assert found[:3] == ["mm", REDUCED, SUM] and by_torch(found[3:])


def test_torch_has_the_ops() -> None:
    """With the arguments that they are called with."""
    ops = torch.ops.symm_mem
    for name, wanted in {
        REDUCED: ["input", "reduce_op", "group_name"],
        SCATTERED: ["input", "reduce_op", "group_name", "out"],
        GATHERED: ["input", "group_name", "out"],
    }.items():
        schema = getattr(ops, name).default._schema
        assert [argument.name for argument in schema.arguments] == wanted, schema
