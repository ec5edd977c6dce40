"""Two levels for groups that span hosts: within a host, and between hosts.

all_gather             Each rank sends its shard to one rank of every other host. Meanwhile the
                       ranks of a host see each other's shards, then those that have arrived.
all_gather_matmul      The same; each shard is multiplied as soon as it is there, on CPUs where it
                       lies.
reduce_scatter         A running sum for each rank goes from host to host. Each host adds its
                       partials. Where that is fewer bytes, partials travel instead.
matmul_reduce_scatter  The same; partials that travel are multiplied first.
all_reduce, matmul_all_reduce   A reduce-scatter of the elements or rows, then an all-gather.

A shard crosses the link of a host once, not once for each rank of the host, and a sum crosses it
instead of a partial from each rank. `Route` says who sends what, and why that gives the same bits
as the other algorithms. The ranks of a host share memory, and messages go between hosts.

Within a host: a rank shows its shard in its buffer of the node's workspace. For a sum it writes its
partials there, one slot for each rank of the host. Those ranks add them to the running sums from
the host before, each for the owners that it deals with. Sums travel in fp32, and their owner rounds
them once.

Sync: every call begins with greetings (point_to_point.py), as without shared memory, and
is one or more calls of the node's channel, its steps. In each, every rank waits for a word of every
peer, with or without data, so the channel's proof holds (csrc/host/channel.h). Messages travel
between the ranks' own memory, never to or from the node's workspace. So the proof holds whatever
the other hosts do.

Why nobody waits in a circle: every host deals with the routes in the same order, and within a route
the sum goes from a host to one behind it. So a step waits only for steps of earlier routes, and for
those of the same route on earlier hosts. Partials that travel were sent before the first step. The
sum that returns to its owner is waited for after the last.

Why messages are not confused: those between two ranks arrive in the order in which they were sent.
Both sides go through partials first, then sums, each by route, owner and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tpkernels._C.host import Phase
from tpkernels.algorithms import transfers
from tpkernels.algorithms.parts import Partials
from tpkernels.algorithms.point_to_point import Started, enter
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.waits import announce_done
from tpkernels.common import dtypes
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.ranges import COPY, TRANSFER, recorded
from tpkernels.planning.algorithms import chunk_bytes
from tpkernels.symm.node import Node

# Who sends what to which host; pure, the same on all ranks. The ranks of another host are spread
# over those of this one: rank i of a host of m ranks deals with the ranks i, i + m, i + 2m, ... of
# every other host. So each host gets a shard once, and all of its ranks take part in the transfers.


def delegate(hosts: Sequence[range], of: int, host: int) -> int:
    """Return the rank that deals with rank ``of`` on a host: on its own host the rank itself."""
    index = next(of - ranks.start for ranks in hosts if of in ranks)
    return hosts[host][index % len(hosts[host])]


def rounds(theirs: range, ours: range) -> Iterator[list[int | None]]:
    """Yield, for each rank of a host, ``ours``, the rank among ``theirs`` that it deals with, one
    after the other; None: no more."""
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
    """Return, for each owner's host, the route by which the fewest bytes cross links between hosts;
    the one with the fewest hops, if there are several. They are in the order in which every host
    deals with them: the longest first.

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
    return tuple(sorted(best, key=lambda route: (-route.hops, -route.home)))


class Shared(transfers.Transfers):
    """One call of a rank: its steps within the host, and its messages between hosts."""

    def __init__(self, call: Call) -> None:
        assert call.node is not None  # else `choose` refuses
        self.call = call
        self.node: Node = call.node
        self.room = self.node.usable_bytes
        self.chunk = chunk_bytes(call.problem, self.room)
        self.link = enter(call)
        others = [host for host in range(len(self.node.hosts)) if host != self.node.host]
        self.received = [rank for host in others for rank in self.dealt_with(host)]
        place, count = self.node.index, len(self.node.ranks)
        self.peers = [(place + i) % count for i in range(1, count)]  # on this host, by place
        self._sent: list[Started] = []
        self._kept: list[torch.Tensor] = []  # what `_sent` sends
        self._first = True

    def step(self) -> None:
        """Begin a step within the host: the next call of the node's channel. `enter` has begun the
        first."""
        if not self._first:
            self.node.channel.begin(self.call.plan.signature, self.call.plan.text)
        self._first = False

    def entered(self) -> None:
        """Wait until all ranks have entered the call. Before anything else is waited for: a rank
        in another call may never publish the word, or send the message."""
        self.link.wait()

    def dealt_with(self, host: int) -> range:
        """Return those of ``host`` that this rank deals with."""
        return self.node.hosts[host][self.node.index :: len(self.node.ranks)]

    def send(self, data: torch.Tensor, to: int) -> None:
        """Start to send a flat tensor; `end` waits for it."""
        self._kept.append(data)
        self._sent += self.link.start([(data, to)], [])

    def wait(self, started: Sequence[Started]) -> None:
        """Wait for transfers that were started."""
        if started:
            with recorded(TRANSFER):
                self.link.wait(started)

    def end(self) -> None:
        self.entered()
        if self._first:  # there was nothing to share
            self.node.channel.barrier()
        self.wait(self._sent)
        announce_done(self.call)

    def gather(
        self,
        shards: dict[int, torch.Tensor],
        counts: Sequence[int],
        step: int,
        use: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        node, rank, hosts = self.node, self.call.group.rank, len(self.node.hosts)
        dtype, arriving = shards[rank].dtype, {rank: list[list[Started]]()}

        def show(owners: list[int | None], begin: int) -> None:
            """Make one step: each rank of this host shows the others a part of the shard of its
            owner of the round, if it has one."""
            mine, part = owners[node.index], None
            self.step()
            if mine is not None and begin < counts[mine]:
                if arriving[mine]:
                    self.wait(arriving[mine][begin // step])
                part = shards[mine][begin : begin + step]
                with recorded(COPY):
                    node.workspace.view(node.index, dtype, (part.numel(),)).copy_(part)
            node.channel.publish(Phase.DATA)
            if mine is not None and part is not None:
                use(mine, begin, part)
            self.entered()
            waiting = list(self.peers)
            while waiting:
                peer = node.channel.wait_any(waiting, Phase.DATA)
                waiting.remove(peer)
                owner = owners[peer]
                if owner is not None and begin < counts[owner]:
                    count = min(step, counts[owner] - begin)
                    with recorded(TRANSFER):
                        use(owner, begin, node.workspace.view(peer, dtype, (count,)))

        for i in range(1, hosts):
            for source in self.dealt_with((node.host + i) % hosts):
                parts = shards[source].split(step)
                arriving[source] = [self.link.start([], [(part, source)]) for part in parts]
        for i in range(1, hosts):
            for part in shards[rank].split(step):
                self.send(part, delegate(node.hosts, rank, (node.host - i) % hosts))
        for i in range(hosts):
            for owners in rounds(node.hosts[(node.host + i) % hosts], node.ranks):
                for begin in range(0, max(counts[o] for o in owners if o is not None), step):
                    show(owners, begin)

    def reduce(self, partials: Partials, out: torch.Tensor, reduction: Reduction) -> None:
        Sums(self, partials, out, reduction).run()


_RETURNED = -1  # in place of an owner: the sum that returns to this rank


class Sums:
    """What one rank does for the sums of one call."""

    def __init__(
        self, levels: Shared, partials: Partials, out: torch.Tensor, reduction: Reduction
    ) -> None:
        problem, node = levels.call.problem, levels.node
        self.levels, self.node, self.rank = levels, node, levels.call.group.rank
        self.mine, self.split = partials, partials.split
        self.out, self.reduction = out, reduction
        self.wire, self.wide = problem.dtype, dtypes.accumulator(problem.dtype)
        sizes = tuple(map(len, node.hosts))
        self.routes = routes(sizes, self.wire.itemsize, self.wide.itemsize)
        self.last = range(node.ranks.stop, node.hosts[-1].stop)  # ranks behind this host
        self.sums: dict[int, torch.Tensor] = {}  # running ones, by owner
        self.arriving: dict[tuple[int, int], list[Started]] = {}  # of them, by owner and step
        self.partials: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by owner: (rank, partial)
        self.partials_arriving: dict[int, list[Started]] = {}

    def run(self) -> None:
        here, levels = self.node.host, self.levels
        visiting = [route for route in self.routes if route.visits(here)]
        self._receive(visiting)
        for route in self.routes:
            if not route.visits(here):
                for owner in self.node.hosts[route.home]:
                    to = (
                        delegate(self.node.hosts, owner, route.start)
                        if here < route.start
                        else owner
                    )
                    levels.send(self.mine.whole(owner, self.wire, self.out.device), to)
        for route in visiting:
            for owners in rounds(self.node.hosts[route.home], self.node.ranks):
                for index in range(self.split.steps):
                    self._step(route, owners, index)
        self._finish()

    def _receive(self, visiting: Sequence[Route]) -> None:
        """Start all receives of the call."""
        levels, here = self.levels, self.node.host
        for route in visiting:
            sources = [
                rank
                for host, ranks in enumerate(self.node.hosts)
                if (host < route.start and here == route.start)
                or (host > route.turn and here == route.home)
                for rank in ranks
            ]
            for owner in levels.dealt_with(route.home):
                partials = [(source, self._memory(owner, self.wire)) for source in sources]
                self.partials[owner] = partials
                self.partials_arriving[owner] = [
                    started
                    for source, data in partials
                    for started in levels.link.start([], [(data, source)])
                ]
        for route in visiting:
            for owner in levels.dealt_with(route.home):
                if here > route.start:
                    self._receive_sum(owner, owner, here - 1)
                elif route.hops:
                    self.sums[owner] = self._memory(owner, self.wide)
                if here == route.home < route.turn:
                    self._receive_sum(_RETURNED, owner, route.turn)

    def _receive_sum(self, key: int, owner: int, host: int) -> None:
        """Receive the sum for ``owner`` from a host, step by step."""
        self.sums[key] = total = self._memory(owner, self.wide)
        source = delegate(self.node.hosts, owner, host)
        for index, part in enumerate(total.split(self.split.step * self.split.columns[owner])):
            self.arriving[key, index] = self.levels.link.start([], [(part, source)])

    def _memory(self, owner: int, dtype: torch.dtype) -> torch.Tensor:
        return empty([self.split.counts[owner]], dtype, self.out.device)

    def _step(self, route: Route, owners: list[int | None], index: int) -> None:
        """Add the partials of this host to one step of the sums of a round's owners."""
        levels, node = self.levels, self.node
        levels.step()
        for place in (*levels.peers, node.index):
            owner = owners[place]
            if owner is not None:
                begin, count = self.split.piece(owner, index)
                self.mine.fill(owner, begin, self._slot(node.index, place, count))
            node.channel.publish(Phase.DATA, place)
        levels.entered()
        for peer in levels.peers:
            node.channel.wait(peer, Phase.DATA, node.index)
        owner = owners[node.index]
        if owner is None:
            return
        begin, count = self.split.piece(owner, index)
        span = slice(begin, begin + count)
        partials = [self._slot(peer, node.index, count) for peer in range(len(node.ranks))]
        total = None
        if node.host > route.start:
            levels.wait(self.arriving.get((owner, index), []))
            total = self.sums[owner][span]
        else:
            partials = [*self._received(owner, range(0, node.ranks.start), span), *partials]
        if node.host == route.home == route.turn:
            self._result(total, [*partials, *self._received(owner, self.last, span)], span)
            return
        running = self.sums[owner][span] if total is None else total
        add_to(running, total, partials)
        to = owner if node.host == route.turn else delegate(self.node.hosts, owner, node.host + 1)
        levels.send(running, to)

    def _slot(self, of: int, place: int, count: int) -> torch.Tensor:
        offset = place * self.split.slot_bytes
        return self.node.workspace.view(of, self.wire, (count,), offset)

    def _received(self, owner: int, ranks: range, span: slice) -> list[torch.Tensor]:
        """Return the partials of ``ranks`` that came as they are, as far as they did."""
        self.levels.wait(self.partials_arriving.pop(owner, []))
        return [part[span] for rank, part in self.partials.get(owner, []) if rank in ranks]

    def _result(
        self, total: torch.Tensor | None, partials: list[torch.Tensor], span: slice
    ) -> None:
        """Round the result of this rank, elements ``span`` of its part."""
        begin = self.split.begins[self.rank] + span.start
        add_to(self.out[span], total, partials, self.reduction, begin)

    def _finish(self) -> None:
        """Wait for the sum that returns to this rank, if it does, and add the last partials."""
        own = next(route for route in self.routes if route.home == self.node.host)
        if own.turn == own.home:
            return
        for index in range(self.split.steps):
            begin, count = self.split.piece(self.rank, index)
            if count:
                self.levels.wait(self.arriving[_RETURNED, index])
                span = slice(begin, begin + count)
                total = self.sums[_RETURNED][span]
                self._result(total, self._received(self.rank, self.last, span), span)


def add_to(
    to: torch.Tensor,
    total: torch.Tensor | None,
    partials: list[torch.Tensor],
    reduction: Reduction | None = None,
    begin: int = 0,
) -> None:
    """Set ``to = round(total + partials in order + bias + residual)``. May overwrite ``total``.

    `sum_partials` takes terms of one dtype, so partials of another dtype than the running sum go in
    as its residual, one by one.
    """
    if total is not None and partials and partials[0].dtype != total.dtype:
        for partial in partials:
            reduce_into(total, [total], Reduction(total.dtype, residual=partial))
        partials = []
    terms = partials if total is None else [total, *partials]
    if terms[0] is not to or len(terms) > 1 or reduction is not None:
        reduce_into(to, terms, reduction or Reduction(to.dtype), begin)


gather, reduce = transfers.operations(Shared)
