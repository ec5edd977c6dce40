"""Routes of ``hierarchical`` between hosts, and the bytes that each op sends between hosts."""

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
from tpkernels.algorithms.hierarchical import HostRoute, leader, plan_routes, rounds
from tpkernels.symm.node import find_hosts

F32, BF16 = torch.float32, torch.bfloat16


SIZES = [(2, 2), (2, 1), (1, 3), (3, 2, 1), (1, 2, 4), (8, 8), (5, 2, 3, 1)]
WIRES = [(2, 4), (4, 4), (8, 8)]


def hosts(sizes: Sequence[int]) -> tuple[range, ...]:
    starts = [sum(sizes[:host]) for host in range(len(sizes))]
    host_ranks = find_hosts(
        [start for start, size in zip(starts, sizes, strict=True) for _ in range(size)]
    )
    assert not isinstance(host_ranks, str)
    return host_ranks


def _bytes(sizes: tuple[int, ...], route: HostRoute, partial: int, total: int) -> int:
    """Return the bytes per element that a route sends between hosts."""
    raw = sum(size for host, size in enumerate(sizes) if not route.visits(host))
    return raw * partial + route.hops * total


@pytest.mark.parametrize(("partial", "total"), WIRES)
def test_a_route_moves_the_fewest_bytes(partial: int, total: int) -> None:
    for count in (1, 2, 3, 4):
        for sizes in itertools.product((1, 2, 3, 5, 9), repeat=count):
            for route in plan_routes(sizes, partial, total):
                alternatives = [
                    _bytes(sizes, HostRoute(start, route.home, last), partial, total)
                    for start in range(route.home + 1)
                    for last in range(route.home, count)
                ]
                assert _bytes(sizes, route, partial, total) == min(alternatives), (sizes, route)


def test_routes_for_fixed_host_sizes() -> None:
    """Routes are in order of length, longest first."""
    # Longer routes would send equally many bytes.
    assert plan_routes((2, 2), 2, 4) == (HostRoute(1, 1, 1), HostRoute(0, 0, 0))
    assert plan_routes((2, 2), 4, 4) == (HostRoute(0, 1, 1), HostRoute(0, 0, 0))
    assert plan_routes((8, 8), 2, 4) == (HostRoute(0, 0, 1), HostRoute(0, 1, 1))
    assert HostRoute(1, 2, 2) in plan_routes((1, 8, 8), 2, 4)  # one partial is smaller than a sum


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_of_a_host_share_the_transfers(sizes: tuple[int, ...]) -> None:
    """Every host assigns each remote rank to one local rank, its leader, and spreads them
    evenly."""
    all_hosts = hosts(sizes)
    for host, local in enumerate(all_hosts):
        for remote in all_hosts:
            assigned = [
                (rank, local[index])
                for each_round in rounds(remote, local)
                for index, rank in enumerate(each_round)
                if rank is not None
            ]
            assert sorted(rank for rank, _ in assigned) == list(remote)
            assert all(leader(all_hosts, rank, host) == assignee for rank, assignee in assigned)
            shares = [sum(1 for _, assignee in assigned if assignee == rank) for rank in local]
            assert max(shares) - min(shares) <= 1


def traffic_job(layout: str, cases: list[Case]) -> list[int]:
    """Return the bytes that this rank sends to other hosts in each call, without handshakes."""
    result, host = [], layout[dist.get_rank()]
    with on_hosts(layout), fresh_group() as group:
        for case in cases:
            with bytes_sent() as sent:
                call(case, group)
            result.append(sum(nbytes for dst, nbytes in sent.items() if layout[dst] != host))
    return result


@pytest.mark.parametrize("layout", sweep(["0011", "000111"]))
def test_bytes_between_hosts(ranks: RanksFixture, layout: str) -> None:
    """Count the bytes between two hosts.

    ``hierarchical`` sends each shard once per remote host. It sends a running sum instead of the
    partials of a host if the sum is smaller. With ``ring``, shards cross every boundary between
    hosts, and each partial crosses separately.
    """
    world, ranks_per_host = len(layout), len(layout) // 2
    cases = [
        Case(op="all_gather", shape=(12 * world, 10), dtype=BF16),
        Case(op="all_gather_matmul", shape=(12 * world, 10), n=(8,), dtype=BF16),
        Case(op="reduce_scatter", shape=(12 * world, 10), dtype=BF16),
        Case(op="reduce_scatter", shape=(12 * world, 10), dtype=F32),
        Case(op="matmul_reduce_scatter", shape=(12 * world, 10), k=(8,), dtype=F32),
        Case(op="all_reduce", shape=(12 * world, 10), dtype=F32),
        Case(op="matmul_all_reduce", shape=(12 * world, 10), k=(8,), dtype=F32),
    ]
    both = [
        replace(case, algorithm=algorithm)
        for case in cases
        for algorithm in ("hierarchical", "ring")
    ]
    sent_by_rank = ranks(world).run(traffic_job, layout, both)
    sent = dict(zip(both, map(sum, zip(*sent_by_rank, strict=True)), strict=True))
    for case in cases:
        size = case.dtype.itemsize
        elements = prod(case.shape) // world  # per shard
        gather_bytes, ring_gather_bytes = world * size, 2 * (world - 1) * size
        sum_bytes = ranks_per_host * (min(ranks_per_host * size, 8) + min(ranks_per_host * size, 4))
        partial_bytes = 2 * ranks_per_host**2 * size
        expected = {
            "hierarchical": ("gather" in case.op or "all_reduce" in case.op) * gather_bytes
            + ("reduce" in case.op) * sum_bytes,
            "ring": ("gather" in case.op or "all_reduce" in case.op) * ring_gather_bytes
            + ("reduce" in case.op) * partial_bytes,
        }
        for algorithm, count in expected.items():
            assert sent[replace(case, algorithm=algorithm)] == count * elements, (case, algorithm)
        assert expected["hierarchical"] <= expected["ring"]
