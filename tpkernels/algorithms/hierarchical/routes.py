"""Which rank sends what to which host. Pure; all ranks compute the same.

The ranks of another host are spread over those of this one: rank i of a host of m ranks deals with
the ranks i, i + m, i + 2m, ... of every other host. So each host gets a shard once, and all of its
ranks take part in the transfers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


def delegate(hosts: Sequence[range], of: int, host: int) -> int:
    """Return the rank that deals with rank ``of`` on a host: on its own host the rank itself."""
    index = next(of - ranks.start for ranks in hosts if of in ranks)
    return hosts[host][index % len(hosts[host])]


def rounds(theirs: range, ours: range) -> Iterator[list[int | None]]:
    """For each rank of a host, ``ours``, the rank among ``theirs`` that it deals with, one after
    the other; None: no more."""
    for first in range(theirs.start, theirs.stop, len(ours)):
        yield [rank if rank in theirs else None for rank in range(first, first + len(ours))]


@dataclass(frozen=True)
class Route:
    """How the partials of a rank's part come together, in the order of the ranks.

    Hosts before ``start`` send theirs as they are to the host where the sum starts. From there the
    sum visits one host after the other up to ``turn``, each of which adds its partials. If ``turn``
    is behind the owner's host, ``home``, the sum returns to the owner. Hosts behind ``turn`` send
    their partials as they are to the owner, which adds them last.
    """

    start: int
    home: int
    turn: int

    @property
    def hops(self) -> int:
        """Return how often the sum crosses a link."""
        return self.turn - self.start + (self.turn > self.home)

    def visits(self, host: int) -> bool:
        """Return whether the host adds its partials to the sum; otherwise it sends them."""
        return self.start <= host <= self.turn


@functools.cache
def routes(sizes: tuple[int, ...], partial_bytes: int, sum_bytes: int) -> tuple[Route, ...]:
    """For each owner's host, the route by which the fewest bytes cross links between hosts; the
    one with the fewest hops, if there are several.

    Every route gives the same bits: adding the partials of a host to the sum, and sending them to
    where the sum is, both add them one by one, in fp32, in the order of the ranks.

    Args:
        sizes: ranks of each host.
        partial_bytes, sum_bytes: bytes of an element of a partial, and of the sum.
    """
    before = [partial_bytes * count for count in accumulate(sizes, initial=0)]
    last = len(sizes) - 1
    best = []
    for home in range(len(sizes)):
        start = min(range(home, -1, -1), key=lambda host: before[host] + (home - host) * sum_bytes)
        turn = min(
            range(home, last + 1),
            key=lambda host: (
                (host > home) * (host - home + 1) * sum_bytes + before[-1] - before[host + 1]
            ),
        )
        best.append(Route(start, home, turn))
    return tuple(best)


def in_order(routes: Sequence[Route]) -> list[Route]:
    """Return the routes in the order in which every host deals with them: the longest first."""
    return sorted(routes, key=lambda route: (-route.hops, -route.home))
