"""Input in symmetric memory (``tpkernels.empty``). Peers read it in place, and the user may
overwrite it when the op returns."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import (
    QUICK_WORLDS,
    Case,
    RanksFixture,
    exact_cases,
    expand_cases,
    uneven_splits,
)
from tests.support.ranked import SMALLEST_WORKSPACE, fresh_group, on_ranks, run_cases
from tests.support.tiers import sweep

F32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = ("symmetric", "symmetric_end", "mixed")


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize("layout", sweep(LAYOUTS))
def test_every_op(ranks: RanksFixture, world: int, layout: str) -> None:
    gather = Case(op="all_gather_matmul", shape=(24, 12), n=(7, 3), return_gathered=True)
    scatter = Case(op="matmul_reduce_scatter", shape=(24, 7), k=(12, 5))
    cases = [gather, replace(gather, shape=(2, 12, 3, 8), dim=1, n=(5,))]
    cases += [replace(gather, shape=(23, 12), sizes=sizes) for sizes in uneven_splits(23, world)]
    cases += [scatter, replace(scatter, op="matmul_all_reduce")]
    for op in ("all_gather", "reduce_scatter"):
        cases += [Case(op=op, shape=(24, 12)), Case(op=op, shape=(2, 12, 5), dim=1)]
        cases += [Case(op=op, shape=(23, 5), sizes=sizes) for sizes in uneven_splits(23, world)]
    for op in ("all_reduce", "all_reduce_"):
        cases += [Case(op=op, shape=shape) for shape in [(7,), (90, 77)]]
    expanded = exact_cases(*(replace(case, layout=layout) for case in cases), dtypes=(F32, BF16))
    last = replace(gather, shape=(5, 24), dim=1, layout=layout)
    expanded += expand_cases(last, algorithms=("direct", "unfused"), integers=(True,))
    run_cases(ranks, world, expanded)


@pytest.mark.parametrize("world", sweep([3, 1, 2]))
@pytest.mark.parametrize("layout", sweep(LAYOUTS))
def test_many_chunks(ranks: RanksFixture, world: int, layout: str) -> None:
    """In every chunk, peers read the right offset of the right tensor, even after a shard has
    ended."""
    shape = (900, 333)
    cases = [Case(op="all_reduce", shape=shape)]
    for sizes in uneven_splits(shape[0], world):
        cases += [Case(op=op, shape=shape, sizes=sizes) for op in ("all_gather", "reduce_scatter")]
        cases.append(Case(op="all_gather_matmul", shape=shape, sizes=sizes, n=(2,)))
    cases = [replace(case, layout=layout) for case in cases]
    expanded = expand_cases(*cases, dtypes=(F32,), algorithms=("direct",), integers=(True,))
    expanded += [replace(case, algorithm="pipelined") for case in expanded if case.n]
    run_cases(ranks, world, expanded, SMALLEST_WORKSPACE)


# Jobs of the ranks.

_Op = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def _ops(world: int) -> dict[str, tuple[tuple[int, ...], _Op]]:
    """Return the ops that read symmetric tensors of peers, as (shape of x, call)."""
    ones = torch.ones(5, 3)
    return {
        "all_gather": ((4, 5), tpkernels.all_gather),
        "all_gather_matmul, direct": (
            (4, 5),
            lambda x, g: tpkernels.all_gather_matmul(x, ones, g, algorithm="direct"),
        ),
        "all_gather_matmul, pipelined": (
            (4, 5),
            lambda x, g: tpkernels.all_gather_matmul(x, ones, g, algorithm="pipelined"),
        ),
        "reduce_scatter": ((4 * world, 5), tpkernels.reduce_scatter),
        "all_reduce, one-shot": ((4, 5), tpkernels.all_reduce),
        "all_reduce, two-shot": ((99, 99), tpkernels.all_reduce),
    }


@pytest.mark.parametrize("world", sweep([4, 2]))
@on_ranks(timeout=120)
def test_input_may_be_overwritten_after_the_call() -> list[str]:
    """Every op runs with random delays. Its input is filled with NaN as soon as the op returns."""
    failures = []
    with fresh_group() as group:
        world, rank = group.size(), group.rank()
        workspace = faults.get_workspace(group)
        workspace.set_chaos(seed=rank + 1, max_delay_us=3000)
        for name, (shape, op) in _ops(world).items():
            x = tpkernels.empty(*shape, group=group)
            for i in range(20):
                x.fill_(rank + i)
                result = op(x, group)
                x.fill_(math.nan)
                values = [float(r + i) for r in range(world)]
                expected = torch.full_like(result, sum(values))
                if "all_gather" in name:
                    rows = torch.tensor(values).repeat_interleave(shape[0])[:, None].expand(-1, 5)
                    expected = rows if name == "all_gather" else rows @ torch.ones(5, 3)
                if not torch.equal(result, expected):
                    failures.append(f"rank {rank}: {name}, round {i}: {result} for {expected}")
                    break
    return failures


@pytest.mark.parametrize("world", sweep([2, 3]))
@on_ranks()
def test_input_that_a_failed_rank_overwrites_is_an_error() -> None:
    """Rank 1 is late. Its peers time out, leave the call and overwrite the input that rank 1 was
    going to read."""
    for name, (shape, op) in _ops(dist.get_world_size()).items():
        with fresh_group() as group:
            x = tpkernels.empty(*shape, group=group).fill_(1)
            op(x, group)
            faults.get_workspace(group).channel.timeout = 0.1
            operand = x
            if group.rank() == 1:
                operand = x.clone()  # rank 1 would wait for the readers of a symmetric tensor
                dist.barrier()
            ending = faults.record_ending(functools.partial(op, operand, group))
            if group.rank() != 1:
                x.fill_(math.nan)
                dist.barrier()
            assert ending.error == "CollectiveTimeoutError", (group.rank(), name, ending)


@pytest.mark.parametrize("world", sweep([2, 1, 4]))
@on_ranks()
def test_results_are_not_overwritten() -> list[str]:
    """No result is a view of memory that later calls write."""
    failures = []
    with fresh_group() as group:
        world, rank = group.size(), group.rank()
        calls = _ops(world)
        results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for i in range(6):
            for name, (shape, op) in calls.items():
                result = op(torch.full(shape, float(rank + i)), group)
                results.append((name, result, result.clone()))
        failures = [name for name, result, copy in results if not torch.equal(result, copy)]
    return failures


@pytest.mark.parametrize("world", sweep([2, 1, 4], 1))
@on_ranks()
def test_allocation_and_release() -> None:
    """After a symmetric tensor is freed, peers still read views of a second tensor at the right
    addresses."""
    with fresh_group() as group:
        rank, world = group.rank(), group.size()
        expected = torch.arange(float(world)).repeat_interleave(2)
        for dtype in (F32, torch.float16, BF16, torch.float64):
            first = tpkernels.empty(2, dtype=dtype, group=group)
            second = tpkernels.empty(3, 2, dtype=dtype, group=group)
            assert (
                not first.count_nonzero() and not second.count_nonzero() and second.dtype == dtype
            ), f"not a tensor of {dtype} zeros: {first} {second}"
            del first
            gc.collect()
            for row in (second[0], second[2], second.view(-1)[3:5]):
                row.fill_(rank)
                result = tpkernels.all_gather(row, group)
                assert torch.equal(result, expected.to(dtype)), (
                    f"rank {rank}: {result}, expected {expected}"
                )
        assert tpkernels.empty(0, 4, group=group).shape == (0, 4)
        workspace = faults.get_workspace(group)
        del second, row
        gc.collect()
        assert not workspace.segments, f"{len(workspace.segments)} segments outlive their tensors"
