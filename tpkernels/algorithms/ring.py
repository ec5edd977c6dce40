"""Sends and receives between pairs of ranks, overlapped with the matmul of local data.

all_gather_matmul      shards travel round the ring from neighbour to neighbour, in both directions.
                       In step s each rank passes on the shards that arrived in step s-1, and
                       multiplies them meanwhile. On an even ring both directions reach the opposite
                       rank in the same step; each brings half of that rank's shard.
matmul_reduce_scatter  in step s each rank multiplies the rows of rank+s and sends them there, its
                       own rows last. When it has the partials of all ranks it sums them.
matmul_all_reduce      the same on parts of the rows, then the sums travel round the ring.

What rank 0 of 4 does; a number is the owner of a shard or of rows:

    all_gather_matmul        step 1      step 2
      sends to rank 1        0           half of 3
      sends to rank 3        0           half of 1
      receives               3, 1        2, in halves
      multiplies             0           3, 1           2
    matmul_reduce_scatter    step 1      step 2         step 3
      multiplies             1           2              3             0
      sends                              1              2             3
      receives partials of               3              2             1, then sums

Partials go straight to their owner. If neighbours passed on running sums, each chunk's sum would
start at a different rank, which breaks the contract of fixed rank order. Either way each rank sends
(W-1)/W of the tensor. Links without all-to-all have to route transfers between ranks that are not
neighbours.

No shared memory and no collective of the backend is needed: any process group with send and recv
will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tpkernels.algorithms import transfers
from tpkernels.algorithms.parts import Partials, pieces_of
from tpkernels.algorithms.point_to_point import enter
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.waits import announce_done
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.ranges import TRANSFER, recorded


@dataclass(frozen=True)
class Hop:
    """What one rank does in one direction in one step of the ring: it sends part of rank ``sent``'s
    shard to rank ``to``, and receives the same part of rank ``received``'s shard from rank
    ``source``. The part is number ``part`` of ``parts`` equal ones."""

    to: int
    source: int
    sent: int
    received: int
    part: int = 0
    parts: int = 1

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the part of a flat shard that travels."""
        edges = [shard.numel() * i // self.parts for i in (self.part, self.part + 1)]
        return shard[edges[0] : edges[1]]


def hops(rank: int, world: int) -> Iterator[list[Hop]]:
    """Yield the steps of an all-gather round the ring."""
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(1, world // 2 + 1):
        up = Hop(right, left, (rank - step + 1) % world, (rank - step) % world)
        down = Hop(left, right, (rank + step - 1) % world, (rank + step) % world)
        if 2 * step < world:
            yield [up, down]
        elif world == 2:
            yield [up]
        else:  # the last step of an even ring: both directions bring the opposite rank's shard
            yield [replace(up, part=0, parts=2), replace(down, part=1, parts=2)]


class Ring(transfers.Transfers):
    """One call of a rank."""

    def __init__(self, call: Call) -> None:
        self.call, self.received = call, call.peers_in_ring_order
        self._rank, self._world = call.group.rank, call.group.world
        self._link = enter(call)

    def gather(
        self,
        shards: dict[int, torch.Tensor],
        counts: Sequence[int],
        step: int,
        use: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Move whole shards. Those that are here are used while others travel."""
        here = [self._rank]
        for hop_pair in hops(self._rank, self._world):
            with recorded(TRANSFER):
                started = self._link.start(
                    [(hop.of(shards[hop.sent]), hop.to) for hop in hop_pair],
                    [(hop.of(shards[hop.received]), hop.source) for hop in hop_pair],
                )
                for owner in here:
                    use(owner, 0, shards[owner])
                self._link.wait(started)
            here = sorted({hop.received for hop in hop_pair})
        for owner in here:
            use(owner, 0, shards[owner])

    def reduce(self, partials: Partials, out: torch.Tensor, reduction: Reduction) -> None:
        wire, device = self.call.problem.dtype, out.device

        def part_of(owner: int) -> torch.Tensor:
            return partials.whole(owner, wire, device)

        terms = self.scatter(part_of, [out.numel()] * self._world, device)
        reduce_into(out, terms, reduction, partials.split.begins[self._rank])

    def scatter(
        self, part_of: Callable[[int], torch.Tensor], counts: Sequence[int], device: torch.device
    ) -> list[torch.Tensor]:
        """Send ``part_of(owner)``, flat and contiguous, to each owner while the next one is
        computed; this rank's own comes last. Return the ranks' parts for this rank, in rank order,
        of ``counts`` elements."""
        rank, world = self._rank, self._world
        theirs = [count for r, count in enumerate(counts) if r != rank]
        parts = list(empty([sum(theirs)], self.call.problem.dtype, device).split(theirs))
        sent, started = [], []
        for step in range(1, world):
            to, source = (rank + step) % world, (rank - step) % world
            sent.append(part_of(to))
            received = parts[source - (source > rank)]
            started += self._link.start([(sent[-1], to)], [(received, source)])
        with recorded(TRANSFER):
            parts.insert(rank, part_of(rank))
            self._link.wait(started)
        return parts

    def end(self) -> None:
        announce_done(self.call)


gather, reduce = transfers.operations(Ring)


def exchange(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    """Send each piece straight to its owner."""
    ring, (pieces, places) = Ring(call), pieces_of(call.problem, x, out)

    def part_of(owner: int) -> torch.Tensor:
        return pieces[owner].contiguous().view(-1)

    received = ring.scatter(part_of, [place.numel() for place in places], x.device)
    for piece, place in zip(received, places, strict=True):
        place.copy_(piece.view(place.shape))
    ring.end()
