"""``ring``: sends and receives between pairs of ranks, overlapped with the matmul of local data.

all_gather_matmul      Shards move around the ring in both directions. In step s each rank forwards
                       the shards that arrived in step s-1, and multiplies them meanwhile. On an
                       even ring both directions reach the opposite rank in the last step; each
                       direction carries half of that shard.
matmul_reduce_scatter  In step s each rank multiplies the rows of rank+s and sends the result to
                       their owner, local rows last. It adds the partial sums of all ranks at the
                       end.
matmul_all_reduce      A matmul_reduce_scatter of slices of the rows, then the sums move around the
                       ring.

Timeline of rank 0 of 4. A number is the owner of a shard or of rows:

    all_gather_matmul        step 1      step 2
      sends to rank 1        0           half of 3
      sends to rank 3        0           half of 1
      receives               3, 1        2, in halves
      multiplies             0           3, 1           2
    matmul_reduce_scatter    step 1      step 2         step 3
      multiplies             1           2              3             0
      sends                              1              2             3
      receives partials of               3              2             1, then sums

Partial sums are sent directly to their owner. If neighbours forwarded running sums, the sum of each
chunk would start at a different rank, and the summation order would not be the rank order. In both
schemes each rank sends (W-1)/W of the tensor. Networks without all-to-all links must route
transfers between ranks that are not neighbours.

Any process group with send and recv works. Shared memory and backend collectives are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tpkernels.algorithms import transfers
from tpkernels.algorithms.chunks import Partials, exchange_slices
from tpkernels.algorithms.point_to_point import enter
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.waits import signal_done
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.ranges import TRANSFER, record_range


@dataclass(frozen=True)
class Hop:
    """Transfers of one rank in one direction in one step of the ring.

    The rank sends a slice of the shard of ``sent_owner`` to rank ``dst``, and receives the slice
    with the same index of the shard of ``recv_owner`` from rank ``src``. A shard has ``num_slices``
    slices of equal size.
    """

    dst: int
    src: int
    sent_owner: int
    recv_owner: int
    slice_index: int = 0
    num_slices: int = 1

    def slice_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the slice of a flat shard that this hop transfers."""
        bounds = [
            shard.numel() * i // self.num_slices for i in (self.slice_index, self.slice_index + 1)
        ]
        return shard[bounds[0] : bounds[1]]


def ring_steps(rank: int, world: int) -> Iterator[list[Hop]]:
    """Yield the hops of each step of an all-gather."""
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(1, world // 2 + 1):
        up = Hop(right, left, (rank - step + 1) % world, (rank - step) % world)
        down = Hop(left, right, (rank + step - 1) % world, (rank + step) % world)
        if 2 * step < world:
            yield [up, down]
        elif world == 2:
            yield [up]
        else:  # last step of an even ring: each direction carries half of the opposite shard
            yield [
                replace(up, slice_index=0, num_slices=2),
                replace(down, slice_index=1, num_slices=2),
            ]


class Ring(transfers.Transfers):
    """One call of a rank."""

    def __init__(self, call: Call) -> None:
        self.call, self.recv_ranks = call, call.peers_in_ring_order
        self._rank, self._world = call.group.rank, call.group.world
        self._links = enter(call)

    def gather(
        self,
        shards: dict[int, torch.Tensor],
        counts: Sequence[int],
        chunk_numel: int,
        consume: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Transfer full shards. Available shards are consumed during the next transfer."""
        available = [self._rank]
        for hop_pair in ring_steps(self._rank, self._world):
            with record_range(TRANSFER):
                started = self._links.start(
                    [(hop.slice_shard(shards[hop.sent_owner]), hop.dst) for hop in hop_pair],
                    [(hop.slice_shard(shards[hop.recv_owner]), hop.src) for hop in hop_pair],
                )
                for owner in available:
                    consume(owner, 0, shards[owner])
                self._links.wait(started)
            available = sorted({hop.recv_owner for hop in hop_pair})
        for owner in available:
            consume(owner, 0, shards[owner])

    def reduce(self, partials: Partials, out: torch.Tensor, reduction: Reduction) -> None:
        wire, device = self.call.problem.dtype, out.device

        def get_partial(owner: int) -> torch.Tensor:
            return partials.full(owner, wire, device)

        terms = self.scatter(get_partial, [out.numel()] * self._world, device)
        reduce_into(out, terms, reduction, partials.chunk_plan.offsets[self._rank])

    def scatter(
        self, get_slice: Callable[[int], torch.Tensor], counts: Sequence[int], device: torch.device
    ) -> list[torch.Tensor]:
        """Send each rank its slice while the next slice is computed. The local slice is last.

        Args:
            get_slice: ``get_slice(owner)`` returns a flat, contiguous tensor.
            counts: number of elements that each rank sends to this rank.

        Returns:
            The slices for this rank, in rank order.
        """
        rank, world = self._rank, self._world
        remote_counts = [count for r, count in enumerate(counts) if r != rank]
        slices = list(
            empty([sum(remote_counts)], self.call.problem.dtype, device).split(remote_counts)
        )
        sent, started = [], []
        for step in range(1, world):
            dst, src = (rank + step) % world, (rank - step) % world
            sent.append(get_slice(dst))
            received = slices[src - (src > rank)]
            started += self._links.start([(sent[-1], dst)], [(received, src)])
        with record_range(TRANSFER):
            slices.insert(rank, get_slice(rank))
            self._links.wait(started)
        return slices

    def end(self) -> None:
        signal_done(self.call)


gather, reduce = transfers.make_functions(Ring)


def exchange(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    """Send each slice directly to its destination rank."""
    ring, (send_slices, recv_slices) = Ring(call), exchange_slices(call.problem, x, out)

    def get_slice(owner: int) -> torch.Tensor:
        return send_slices[owner].contiguous().view(-1)

    received = ring.scatter(get_slice, [recv_slice.numel() for recv_slice in recv_slices], x.device)
    for flat, recv_slice in zip(received, recv_slices, strict=True):
        recv_slice.copy_(flat.view(recv_slice.shape))
    ring.end()
