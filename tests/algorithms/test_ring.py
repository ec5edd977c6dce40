"""``ring``, and ``unfused`` beside it, where ranks share no memory: against float64, to the bit,
and what travels. ops/test_<op>.py run it where they do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from tests.support.cases import DTYPES, Case, RanksFixture, each, one_of_each, uneven_splits
from tests.support.emulated import anywhere
from tests.support.ranked import apart, bytes_sent, call, fresh_group, on_ranks, run_cases
from tests.support.tiers import sweep
from tpkernels.algorithms import ring

F32, BF16 = torch.float32, torch.bfloat16
# The ops, and the factors of those that multiply.
OPS: dict[str, dict[str, Any]] = {"all_gather": {}, "reduce_scatter": {}, "all_reduce": {}}
OPS |= {"all_gather_matmul": {"n": (8,)}}
OPS |= {op: {"k": (8,)} for op in ("matmul_reduce_scatter", "matmul_all_reduce")}


def run(ranks: RanksFixture, world: int, cases: list[Case]) -> None:
    run_cases(ranks, world, cases, hosts="01234"[:world])


def ways(*cases: Case, **options: Any) -> list[Case]:
    return each(*cases, algorithms=("unfused", "ring", "auto"), **options)


@pytest.mark.parametrize("world", sweep((3, 2, 4, 5)))
def test_every_op_and_dtype(ranks: RanksFixture, world: int) -> None:
    plain = [replace(case, algorithm="ring") for case in dict.fromkeys(one_of_each(world))]
    run(ranks, world, ways(*{replace(c, integers=False, algorithm="auto") for c in plain}))


def uneven_cases(world: int, algorithm: str) -> list[Case]:
    """Shards of several dims, uneven and empty ones, exact."""
    cases = []
    for sizes in [*uneven_splits(23, world), (0,) * world]:
        rows = sum(sizes)
        for shape, dim in [((rows, 9), 0), ((2, rows, 9), 1), ((2, rows, 3, 5), 1)]:
            split: dict[str, Any] = {"sizes": sizes, "shape": shape, "dim": dim}
            cases += [
                Case(op="all_gather", **split),
                Case(op="reduce_scatter", **split),
                Case(op="all_gather_matmul", n=(8, 3), return_gathered=dim > 0, **split),
                Case(op="matmul_reduce_scatter", k=(7, 9), **split),
            ]
        if rows:
            last: dict[str, Any] = {"sizes": sizes, "shape": (6, rows), "dim": 1}
            cases += [
                Case(op="all_gather", **last),
                Case(op="reduce_scatter", **last),
                Case(op="matmul_reduce_scatter", k=(7,), biases=(F32,), **last),
            ]
    cases += [
        Case(op=op, shape=shape, k=(5,) * ("matmul" in op))
        for op in ("all_reduce", "all_reduce_", "matmul_all_reduce")
        for shape in [(1, 3), (world - 1, 2), (world + 1, 7)]
    ]
    return [replace(case, algorithm=algorithm, integers=True) for case in cases]


BITS = [
    Case(op="all_gather_matmul", shape=(60, 133), n=(40, 300), biases=(F32, None)),
    Case(op="matmul_reduce_scatter", shape=(60, 65), k=(133, 90), biases=(F32,)),
    Case(op="matmul_reduce_scatter", shape=(9, 60), dim=1, k=(133,), out_dtype=F32),
    Case(op="matmul_all_reduce", shape=(60, 300), k=(133, 90), biases=(F32,)),
    Case(op="reduce_scatter", shape=(60, 65)),
    Case(op="all_reduce", shape=(90, 133)),
    Case(op="all_reduce_", shape=(90, 133)),
]


@pytest.mark.parametrize("world", sweep((3, 2, 4, 5)))
@on_ranks()
def test_the_bits_are_those_of_unfused() -> None:
    """With memory in common and without."""
    cases = [replace(case, dtype=dtype) for case in BITS for dtype in DTYPES]
    found: dict[Case, list[torch.Tensor]] = {}
    with fresh_group() as near, apart(), fresh_group() as far:
        for case, group in itertools.product(cases, (near, far)):
            for way in ("unfused", "ring"):
                got = call(replace(case, algorithm=way), group)
                first = found.setdefault(case, got)
                assert all(map(torch.equal, got, first)), f"{case} {way}"


# What travels.


@pytest.mark.parametrize("world", range(1, 10))
def test_the_steps_of_the_ring(world: int) -> None:
    """Each rank gets every shard once, from a neighbour that has it, in half as many steps as there
    are peers; what one sends in a step the other receives."""
    steps = [list(ring.hops(rank, world)) for rank in range(world)]
    have = [{(rank, part) for part in (0, 1)} for rank in range(world)]
    for step in zip(*steps, strict=True):
        every = [
            (rank, hop, half)
            for rank, hops in enumerate(step)
            for hop in hops
            for half in (range(2) if hop.parts == 1 else [hop.part])
        ]
        halves = {(rank, hop.to, hop.sent, half) for rank, hop, half in every}
        expected = {(hop.source, rank, hop.received, half) for rank, hop, half in every}
        assert halves == expected
        for sender, receiver, owner, half in halves:
            assert (owner, half) in have[sender]
            assert (receiver - sender) % world in (1, world - 1)
        for _, receiver, owner, half in halves:
            assert (owner, half) not in have[receiver]
            have[receiver].add((owner, half))
    assert all(len(parts) == 2 * world for parts in have)
    assert all(len(rank) == world // 2 for rank in steps)


@pytest.mark.parametrize("world", sweep((3, 2, 4, 5)))
@on_ranks()
def test_no_more_travels_than_must() -> None:
    """(W-1)/W of the tensor from each rank, twice for an all-reduce: as in an all-to-all and an
    all-gather."""
    with apart(), fresh_group() as group:
        world = group.size()
        for op, factors in OPS.items():
            shape = (12 * world, 10)
            case = Case(op=op, shape=shape, dtype=BF16, algorithm="ring", **factors)
            call(case, group)
            with bytes_sent() as sent:
                call(case, group)
            shard, twice = prod(shape) * 2 // world, 2 if "all_reduce" in op else 1
            total = anywhere(sent.total())
            assert total == world * (world - 1) * shard * twice, (op, total)
