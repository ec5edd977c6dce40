"""Input in symmetric memory (``tpkernels.empty``): peers read it in place, and it is the user's
again when the op returns."""

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
from tests.support.cases import QUICK_WORLDS, Case, RanksFixture, each, exact, uneven_splits
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
    every = exact(*(replace(case, layout=layout) for case in cases), dtypes=(F32, BF16))
    last = replace(gather, shape=(5, 24), dim=1, layout=layout)
    every += each(last, algorithms=("direct", "unfused"), integers=(True,))
    run_cases(ranks, world, every)


@pytest.mark.parametrize("world", sweep([3, 1, 2]))
@pytest.mark.parametrize("layout", sweep(LAYOUTS))
def test_many_chunks(ranks: RanksFixture, world: int, layout: str) -> None:
    """In every chunk, peers find the right place in the right tensor, also where a rank's shard has
    ended before."""
    shape = (900, 333)
    cases = [Case(op="all_reduce", shape=shape)]
    for sizes in uneven_splits(shape[0], world):
        cases += [Case(op=op, shape=shape, sizes=sizes) for op in ("all_gather", "reduce_scatter")]
        cases.append(Case(op="all_gather_matmul", shape=shape, sizes=sizes, n=(2,)))
    cases = [replace(case, layout=layout) for case in cases]
    every = each(*cases, dtypes=(F32,), algorithms=("direct",), integers=(True,))
    every += [replace(case, algorithm="pipelined") for case in every if case.n]
    run_cases(ranks, world, every, SMALLEST_WORKSPACE)


# Jobs, run in the ranks.

_Op = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def _ops(world: int) -> dict[str, tuple[tuple[int, ...], _Op]]:
    """The ops that peers serve from a symmetric tensor: (shape of x, call)."""
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
def test_input_may_be_overwritten_at_once() -> list[str]:
    """Every op, with random delays, on input that is spoilt as soon as the op returns."""
    failures = []
    with fresh_group() as group:
        world, rank = group.size(), group.rank()
        workspace = faults.workspace_of(group)
        workspace.set_chaos(seed=rank + 1, max_delay_us=3000)
        for name, (shape, op) in _ops(world).items():
            x = tpkernels.empty(*shape, group=group)
            for i in range(20):
                x.fill_(rank + i)
                got = op(x, group)
                x.fill_(math.nan)
                mine = [float(r + i) for r in range(world)]
                want = torch.full_like(got, sum(mine))
                if "all_gather" in name:
                    rows = torch.tensor(mine).repeat_interleave(shape[0])[:, None].expand(-1, 5)
                    want = rows if name == "all_gather" else rows @ torch.ones(5, 3)
                if not torch.equal(got, want):
                    failures.append(f"rank {rank}: {name}, round {i}: {got} for {want}")
                    break
    return failures


@pytest.mark.parametrize("world", sweep([2, 3]))
@on_ranks()
def test_input_that_a_failed_rank_overwrites_is_no_result() -> None:
    """Rank 1 is late for a call that rank 0 has left, whose input the others were to read."""
    for name, (shape, op) in _ops(dist.get_world_size()).items():
        with fresh_group() as group:
            x = tpkernels.empty(*shape, group=group).fill_(1)
            op(x, group)
            faults.workspace_of(group).channel.timeout = 0.1
            given = x
            if group.rank() == 1:
                given = x.clone()  # with a symmetric tensor it would wait for its readers
                dist.barrier()
            ending = faults.ending_of(functools.partial(op, given, group))
            if group.rank() != 1:
                x.fill_(math.nan)
                dist.barrier()
            assert ending.error == "CollectiveTimeoutError", (group.rank(), name, ending)


@pytest.mark.parametrize("world", sweep([2, 1, 4]))
@on_ranks()
def test_results_are_kept() -> list[str]:
    """No result is a view of memory that later calls write to."""
    failures = []
    with fresh_group() as group:
        world, rank = group.size(), group.rank()
        calls = _ops(world)
        kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for i in range(6):
            for name, (shape, op) in calls.items():
                got = op(torch.full(shape, float(rank + i)), group)
                kept.append((name, got, got.clone()))
        failures = [name for name, got, copy in kept if not torch.equal(got, copy)]
    return failures


@pytest.mark.parametrize("world", sweep([2, 1, 4], 1))
@on_ranks()
def test_made_and_dropped() -> None:
    """Symmetric tensors come and go; one that others still use is read by its own address."""
    with fresh_group() as group:
        rank, world = group.rank(), group.size()
        want = torch.arange(float(world)).repeat_interleave(2)
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
                got = tpkernels.all_gather(row, group)
                assert torch.equal(got, want.to(dtype)), f"rank {rank}: {got}, expected {want}"
        assert tpkernels.empty(0, 4, group=group).shape == (0, 4)
        workspace = faults.workspace_of(group)
        del second, row
        gc.collect()
        assert not workspace.segments, f"{len(workspace.segments)} segments outlive their tensors"
