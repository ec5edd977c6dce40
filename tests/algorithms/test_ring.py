"""``ring``, compared with ``unfused``, on ranks without shared memory: results against float64,
bitwise identity, and bytes sent. tests/ops covers ranks with shared memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from tests.support.cases import DTYPES, Case, RanksFixture, expand_cases, one_of_each, uneven_splits
from tests.support.emulated import sum_over_ranks
from tests.support.ranked import bytes_sent, call, fresh_group, on_ranks, run_cases, separate_hosts
from tests.support.tiers import sweep
from tpkernels.algorithms import ring

F32, BF16 = torch.float32, torch.bfloat16
# Ops, and the weight shapes of the ops with a matmul.
OPS: dict[str, dict[str, Any]] = {"all_gather": {}, "reduce_scatter": {}, "all_reduce": {}}
OPS |= {"all_gather_matmul": {"n": (8,)}}
OPS |= {op: {"k": (8,)} for op in ("matmul_reduce_scatter", "matmul_all_reduce")}


def run(ranks: RanksFixture, world: int, cases: list[Case]) -> None:
    run_cases(ranks, world, cases, hosts="01234"[:world])


def with_algorithms(*cases: Case, **options: Any) -> list[Case]:
    return expand_cases(*cases, algorithms=("unfused", "ring", "auto"), **options)


@pytest.mark.parametrize("world", sweep((3, 2, 4, 5)))
def test_every_op_and_dtype(ranks: RanksFixture, world: int) -> None:
    plain = [replace(case, algorithm="ring") for case in dict.fromkeys(one_of_each(world))]
    run(
        ranks,
        world,
        with_algorithms(*{replace(c, integers=False, algorithm="auto") for c in plain}),
    )


def uneven_cases(world: int, algorithm: str) -> list[Case]:
    """Return exact cases with even, uneven and empty shards along several dims."""
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
def test_bitwise_identical_to_unfused() -> None:
    """All results agree, on a group with shared memory and on a group without."""
    cases = [replace(case, dtype=dtype) for case in BITS for dtype in DTYPES]
    references: dict[Case, list[torch.Tensor]] = {}
    with fresh_group() as sharing, separate_hosts(), fresh_group() as separate:
        for case, group in itertools.product(cases, (sharing, separate)):
            for algorithm in ("unfused", "ring"):
                result = call(replace(case, algorithm=algorithm), group)
                reference = references.setdefault(case, result)
                assert all(map(torch.equal, result, reference)), f"{case} {algorithm}"


# Bytes sent.


@pytest.mark.parametrize("world", range(1, 10))
def test_the_steps_of_the_ring(world: int) -> None:
    """Each rank receives every shard once, from a neighbour that already holds it, in W // 2 steps.
    The sends and receives of a step match."""
    steps = [list(ring.ring_steps(rank, world)) for rank in range(world)]
    owned = [{(rank, half) for half in (0, 1)} for rank in range(world)]
    for step in zip(*steps, strict=True):
        all_hops = [
            (rank, hop, half)
            for rank, hops in enumerate(step)
            for hop in hops
            for half in (range(2) if hop.num_slices == 1 else [hop.slice_index])
        ]
        sends = {(rank, hop.dst, hop.sent_owner, half) for rank, hop, half in all_hops}
        receives = {(hop.src, rank, hop.recv_owner, half) for rank, hop, half in all_hops}
        assert sends == receives
        for sender, receiver, owner, half in sends:
            assert (owner, half) in owned[sender]
            assert (receiver - sender) % world in (1, world - 1)
        for _, receiver, owner, half in sends:
            assert (owner, half) not in owned[receiver]
            owned[receiver].add((owner, half))
    assert all(len(shards) == 2 * world for shards in owned)
    assert all(len(rank) == world // 2 for rank in steps)


@pytest.mark.parametrize("world", sweep((3, 2, 4, 5)))
@on_ranks()
def test_bytes_sent_are_minimal() -> None:
    """Each rank sends (W-1)/W of the tensor, and twice that for an all-reduce: as much as an
    all-to-all plus an all-gather."""
    with separate_hosts(), fresh_group() as group:
        world = group.size()
        for op, weight_dims in OPS.items():
            shape = (12 * world, 10)
            case = Case(op=op, shape=shape, dtype=BF16, algorithm="ring", **weight_dims)
            call(case, group)
            with bytes_sent() as sent:
                call(case, group)
            shard_bytes, passes = prod(shape) * 2 // world, 2 if "all_reduce" in op else 1
            total = sum_over_ranks(sent.total())
            assert total == world * (world - 1) * shard_bytes * passes, (op, total)
