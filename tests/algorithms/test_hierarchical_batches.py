"""The batches of transfers of ``hierarchical`` on CUDA tensors, carried out by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tpkernels.algorithms.hierarchical.cpu import in_order, routes
from tpkernels.algorithms.hierarchical.cuda import Transfer, gathering, summing
from tpkernels.symm.node import hosts_of

SIZES = [(2, 2), (2, 1), (1, 3), (3, 2, 1), (1, 2, 4), (8, 8), (5, 2, 3, 1)]
WIRES = [(2, 4), (4, 4), (8, 8)]


def hosts(sizes: Sequence[int]) -> tuple[range, ...]:
    starts = [sum(sizes[:host]) for host in range(len(sizes))]
    found = hosts_of(
        [start for start, size in zip(starts, sizes, strict=True) for _ in range(size)]
    )
    assert not isinstance(found, str)
    return found


def crosses(on: tuple[range, ...], transfer: Transfer) -> bool:
    return not any(transfer.source in ranks and transfer.to in ranks for ranks in on)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_rank_gets_every_shard(sizes: tuple[int, ...]) -> None:
    """A rank sends on only what it has had before; a shard goes to each other host once."""
    on, world, sent = hosts(sizes), sum(sizes), 0
    has = [{rank} for rank in range(world)]
    for batch in gathering(on):
        before = [set(each) for each in has]
        for transfer in batch:
            assert transfer.owner in before[transfer.source], transfer
            assert transfer.owner not in has[transfer.to], transfer
            has[transfer.to].add(transfer.owner)
            sent += crosses(on, transfer)
    assert has == [set(range(world))] * world
    assert sent == world * (len(sizes) - 1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("partial", "total"), WIRES)
def test_every_sum_is_in_the_order_of_the_ranks(
    sizes: tuple[int, ...], partial: int, total: int
) -> None:
    """Adds names in place of numbers, as `Batches.reduce` does, and counts what crosses links."""
    on, world = hosts(sizes), sum(sizes)
    ordered = in_order(routes(sizes, partial, total))
    partials = {(rank, owner): {rank} for rank in range(world) for owner in range(world)}
    sums: dict[tuple[int, int], list[int]] = {}

    def added(rank: int, owner: int, end: int) -> list[int]:
        mine = {source for source in partials[rank, owner] if source < end}
        partials[rank, owner] -= mine
        return sums.pop((rank, owner), []) + sorted(mine)

    crossed = 0
    for batch in summing(on, ordered):
        moved = []
        for transfer in batch:
            owner, rank, to, is_sum = transfer
            crossed += crosses(on, transfer) * (total if is_sum else partial)
            if is_sum:
                end = next(ranks.stop for ranks in on if rank in ranks)
                moved.append((to, owner, added(rank, owner, end)))
            else:
                partials[rank, owner].remove(rank)
                moved.append((to, owner, {rank}))
        for to, owner, what in moved:
            if isinstance(what, set):
                partials[to, owner] |= what
            else:
                sums[to, owner] = what
    for rank in range(world):
        assert added(rank, rank, world) == list(range(world))
    raw = sum(
        size * partial * sizes[route.home]
        for route in ordered
        for host, size in enumerate(sizes)
        if not route.visits(host)
    )
    assert crossed == raw + sum(r.hops * total * sizes[r.home] for r in ordered)
