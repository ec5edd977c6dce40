"""`hierarchical` on CUDA tensors: sends and receives of the process group, in batches.

Problem: NCCL runs the transfers of a process group in the order in which they were queued. A
receive that is queued long before its send holds up all that come behind it, and two ranks that
queue theirs in different orders wait for each other.

Algorithm: all ranks cut the transfers of a call into the same numbered batches. A rank queues its
part of each as one group of NCCL calls; one without transfers in a batch goes on to the next.
Transfers within a host and between hosts are in one batch, and so run at once. cpu.py says who
deals with whom.

all-gathers     batch 0 shows the shards of a host to all of its ranks. Batch d, from 1 on, brings
                shards from the host d places on, each to one rank, and batch d + 1 shows them to
                the others. Whatever is multiplied is multiplied on the current stream, the batches
                are on a second one.
reductions      batch i brings the partials for the owners of route i to where they are added. Each
                stop of that route adds and passes the sum on, one batch after the other. Meanwhile
                the partials of the next route are computed.

Sync: a rank sends in a batch only what it has had before the batch. A transfer has the same number
at both ends, so by induction over the numbers no batch waits for a later one. Those of a batch
between the same two ranks are queued in the order of the list, which all ranks have.

No GPU has run this. Untuned: shards and partials travel whole, not in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from tpkernels import dtypes
from tpkernels.algorithms import transfers
from tpkernels.algorithms.hierarchical.cpu import Route, add_to, delegate, routes
from tpkernels.algorithms.parts import Partials
from tpkernels.algorithms.reduction import Reduction
from tpkernels.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.ranges import TRANSFER, recorded
from tpkernels.symm.streams import SideStream
from tpkernels.transport.point_to_point import enter

Hosts: TypeAlias = tuple[range, ...]


class Transfer(NamedTuple):
    """What travels for ``owner``: its shard, the partial of ``source``, or the running sum."""

    owner: int
    source: int
    to: int
    is_sum: bool = False


def gathering(hosts: Hosts) -> list[list[Transfer]]:
    """Return the batches of an all-gather, of all ranks."""
    batches: list[list[Transfer]] = [[] for _ in range(len(hosts) + 1)]
    for here, ranks in enumerate(hosts):
        for distance in range(len(hosts)):
            for owner in hosts[(here + distance) % len(hosts)]:
                by = delegate(hosts, owner, here)
                if distance:
                    batches[distance].append(Transfer(owner, owner, by))
                batches[distance + (distance > 0)] += [
                    Transfer(owner, by, to) for to in ranks if to != by
                ]
    return batches


def summing(hosts: Hosts, ordered: Sequence[Route]) -> list[list[Transfer]]:
    """Return the batches of a reduction, of all ranks; batch i has the partials of route i."""
    count = max(number + 1 + route.hops for number, route in enumerate(ordered))
    batches: list[list[Transfer]] = [[] for _ in range(count)]
    for number, route in enumerate(ordered):
        for owner in hosts[route.home]:
            for host, ranks in enumerate(hosts):
                to = _adds(hosts, route, owner, host)
                batches[number] += [Transfer(owner, rank, to) for rank in ranks if rank != to]
            stops = [delegate(hosts, owner, h) for h in range(route.start, route.turn + 1)]
            if route.turn > route.home:
                stops.append(owner)
            for hop, (source, to) in enumerate(pairwise(stops), number + 1):
                batches[hop].append(Transfer(owner, source, to, is_sum=True))
    return batches


def _adds(hosts: Hosts, route: Route, owner: int, host: int) -> int:
    """Return who adds the partials of a host to the sum for ``owner``."""
    if route.visits(host):
        return delegate(hosts, owner, host)
    return delegate(hosts, owner, route.start) if host < route.start else owner


@functools.cache
def _batches_of(
    rank: int, batches_of_all: Callable[..., list[list[Transfer]]], *arguments: Any
) -> list[list[Transfer]]:
    """Return a rank's part of the batches."""
    batches = batches_of_all(*arguments)
    return [[t for t in batch if rank in (t.source, t.to)] for batch in batches]


class Batches(transfers.Transfers):
    """One call of a rank. Shards and partials move whole, into memory of its own."""

    def __init__(self, call: Call) -> None:
        assert call.node is not None  # else `choose` refuses
        self.call, self.node, self._rank = call, call.node, call.group.rank
        self.received = call.peers_in_ring_order
        self._link = enter(call)

    def gather(
        self,
        shards: dict[int, torch.Tensor],
        counts: Sequence[int],
        step: int,
        use: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Bring whole shards, host by host."""
        device = shards[self._rank].device
        kept, here = self.call.kept, [self._rank]
        side = kept.get("side") or kept.setdefault("side", SideStream(device))
        side.fork()
        try:
            for batch in _batches_of(self._rank, gathering, self.node.hosts):
                with side.current(), side.copying(), recorded(TRANSFER):
                    sends = [(shards[t.owner], t.to) for t in batch if t.source == self._rank]
                    receives = [(shards[t.owner], t.source) for t in batch if t.to == self._rank]
                    self._link.wait(self._link.start(sends, receives))
                arrived = side.copied
                for owner in here:
                    use(owner, 0, shards[owner])
                side.wait(arrived)
                here = [t.owner for t in batch if t.to == self._rank]
            for owner in here:
                use(owner, 0, shards[owner])
        finally:
            side.join()

    def reduce(self, mine: Partials, out: torch.Tensor, reduction: Reduction) -> None:
        problem, hosts = self.call.problem, self.node.hosts
        wire, wide = problem.dtype, dtypes.accumulator(problem.dtype)
        ordered = routes(tuple(map(len, hosts)), wire.itemsize, wide.itemsize)
        partials: dict[int, dict[int, torch.Tensor]] = {}  # by owner and source
        sums: dict[int, torch.Tensor] = {}  # that have arrived, by owner

        def compute(number: int) -> None:
            for owner in hosts[ordered[number].home] if number < len(ordered) else ():
                partials[owner] = {self._rank: mine.whole(owner, wire, out.device)}

        def terms(owner: int, end: int) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
            """Return the sum and the partials of ranks before ``end`` that are not yet added."""
            waiting = partials[owner]
            taken = sorted(source for source in waiting if source < end)
            return sums.pop(owner, None), [waiting.pop(source) for source in taken]

        def message(t: Transfer) -> torch.Tensor:
            if t.to == self._rank:
                to = empty([mine.split.counts[t.owner]], wide if t.is_sum else wire, out.device)
                if t.is_sum:
                    sums[t.owner] = to
                else:
                    partials[t.owner][t.source] = to
                return to
            if not t.is_sum:
                return partials[t.owner].pop(self._rank)
            total, others = terms(t.owner, self.node.ranks.stop)
            running = others[0].new_empty(others[0].shape, dtype=wide) if total is None else total
            add_to(running, total, others)
            return running

        compute(0)
        for number, batch in enumerate(_batches_of(self._rank, summing, hosts, ordered)):
            sends = [(message(t), t.to) for t in batch if t.source == self._rank]
            receives = [(message(t), t.source) for t in batch if t.to == self._rank]
            with recorded(TRANSFER):
                started = self._link.start(sends, receives)
                compute(number + 1)
                self._link.wait(started)
        if out.numel():
            add_to(out, *terms(self._rank, problem.world), reduction, mine.split.begins[self._rank])

    def end(self) -> None:
        """The current stream has waited for everything."""


gather, reduce = transfers.operations(Batches)
