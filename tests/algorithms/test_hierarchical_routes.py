"""What ``hierarchical`` sends between hosts: the routes and the bytes of each op."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, RanksFixture
from tests.support.ranked import bytes_sent, call, fresh_group, on_hosts
from tests.support.tiers import sweep
from tpkernels.algorithms.hierarchical import Route, delegate, rounds, routes
from tpkernels.symm.node import hosts_of

F32, BF16 = torch.float32, torch.bfloat16


SIZES = [(2, 2), (2, 1), (1, 3), (3, 2, 1), (1, 2, 4), (8, 8), (5, 2, 3, 1)]
WIRES = [(2, 4), (4, 4), (8, 8)]


def hosts(sizes: Sequence[int]) -> tuple[range, ...]:
    starts = [sum(sizes[:host]) for host in range(len(sizes))]
    found = hosts_of(
        [start for start, size in zip(starts, sizes, strict=True) for _ in range(size)]
    )
    assert not isinstance(found, str)
    return found


def _bytes(sizes: tuple[int, ...], route: Route, partial: int, total: int) -> int:
    """Bytes of an element that cross links, counted along the route."""
    raw = sum(size for host, size in enumerate(sizes) if not route.visits(host))
    return raw * partial + route.hops * total


@pytest.mark.parametrize(("partial", "total"), WIRES)
def test_a_route_moves_the_fewest_bytes(partial: int, total: int) -> None:
    for count in (1, 2, 3, 4):
        for sizes in itertools.product((1, 2, 3, 5, 9), repeat=count):
            for route in routes(sizes, partial, total):
                every = [
                    _bytes(sizes, Route(start, route.home, turn), partial, total)
                    for start in range(route.home + 1)
                    for turn in range(route.home, count)
                ]
                assert _bytes(sizes, route, partial, total) == min(every), (sizes, route)


def test_routes_of_known_hosts() -> None:
    """The longest first."""
    assert routes((2, 2), 2, 4) == (Route(1, 1, 1), Route(0, 0, 0))  # as many bytes, fewer hops
    assert routes((2, 2), 4, 4) == (Route(0, 1, 1), Route(0, 0, 0))
    assert routes((8, 8), 2, 4) == (Route(0, 0, 1), Route(0, 1, 1))
    assert Route(1, 2, 2) in routes((1, 8, 8), 2, 4)  # one partial is less than a sum


@pytest.mark.parametrize("sizes", SIZES)
def test_each_rank_of_a_host_has_its_share(sizes: tuple[int, ...]) -> None:
    """On every host, each rank is dealt with once, by its delegate."""
    on = hosts(sizes)
    for here, ours in enumerate(on):
        for theirs in on:
            dealt = [
                (rank, ours[place])
                for each_round in rounds(theirs, ours)
                for place, rank in enumerate(each_round)
                if rank is not None
            ]
            assert sorted(rank for rank, _ in dealt) == list(theirs)
            assert all(delegate(on, rank, here) == by for rank, by in dealt)
            shares = [sum(1 for _, by in dealt if by == rank) for rank in ours]
            assert max(shares) - min(shares) <= 1


def traffic_job(layout: str, cases: list[Case]) -> list[int]:
    """Bytes that this rank sends to other hosts in each call, greetings aside."""
    result, here = [], layout[dist.get_rank()]
    with on_hosts(layout), fresh_group() as group:
        for case in cases:
            with bytes_sent() as sent:
                call(case, group)
            result.append(sum(nbytes for to, nbytes in sent.items() if layout[to] != here))
    return result


@pytest.mark.parametrize("layout", sweep(["0011", "000111"]))
def test_what_crosses_the_link(ranks: RanksFixture, layout: str) -> None:
    """A shard crosses once for each other host. A sum crosses instead of the partials of a host,
    where it is smaller. By `ring` shards pass each boundary between hosts, and partials cross one
    by one."""
    world, each_host = len(layout), len(layout) // 2
    cases = [
        Case(op="all_gather", shape=(12 * world, 10), dtype=BF16),
        Case(op="all_gather_matmul", shape=(12 * world, 10), n=(8,), dtype=BF16),
        Case(op="reduce_scatter", shape=(12 * world, 10), dtype=BF16),
        Case(op="reduce_scatter", shape=(12 * world, 10), dtype=F32),
        Case(op="matmul_reduce_scatter", shape=(12 * world, 10), k=(8,), dtype=F32),
        Case(op="all_reduce", shape=(12 * world, 10), dtype=F32),
        Case(op="matmul_all_reduce", shape=(12 * world, 10), k=(8,), dtype=F32),
    ]
    both = [replace(case, algorithm=way) for case in cases for way in ("hierarchical", "ring")]
    told = ranks(world).run(traffic_job, layout, both)
    sent = dict(zip(both, map(sum, zip(*told, strict=True)), strict=True))
    for case in cases:
        size = case.dtype.itemsize
        elements = prod(case.shape) // world  # of a shard
        gathered, alone = world * size, 2 * (world - 1) * size
        summed = each_host * (min(each_host * size, 8) + min(each_host * size, 4))
        partials = 2 * each_host**2 * size
        expected = {
            "hierarchical": ("gather" in case.op or "all_reduce" in case.op) * gathered
            + ("reduce" in case.op) * summed,
            "ring": ("gather" in case.op or "all_reduce" in case.op) * alone
            + ("reduce" in case.op) * partials,
        }
        for way, count in expected.items():
            assert sent[replace(case, algorithm=way)] == count * elements, (case, way)
        assert expected["hierarchical"] <= expected["ring"]
