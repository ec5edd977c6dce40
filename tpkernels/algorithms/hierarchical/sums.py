"""The sum of all ranks' partials, for each rank its part of it.

Within a host each rank writes its partials into its buffer of the node's workspace, one slot for
each rank of the host. Those ranks add them to the running sums from the host before, each for the
owners that it deals with (routes.py). Sums travel in fp32, and their owner rounds them once.

Sync: a step is one call of the channel. In each, every rank waits for the word that every peer
publishes for it, with or without data, so the channel's proof holds (csrc/host/channel.h). What
travels between hosts lies in a rank's own memory, which no other rank reads.

Why nobody waits in a circle: every host deals with the routes in the same order, and within a route
the sum goes from a host to one behind it. So a step waits only for steps of earlier routes, and for
those of the same route on earlier hosts. Partials that travel were sent before the first step. The
sum that returns to its owner is waited for after the last.

Why messages are not confused: those between two ranks arrive in the order in which they were sent.
Both sides go through partials first, then sums, each by route, owner and step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tpkernels import dtypes
from tpkernels._C.host import Phase
from tpkernels.algorithms.hierarchical.routes import Route, in_order, routes
from tpkernels.algorithms.hierarchical.within import Levels
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.integers import round_up
from tpkernels.local.memory import empty
from tpkernels.planning.steps import LINE_BYTES
from tpkernels.transport.point_to_point import Started


@dataclass(frozen=True)
class Parts:
    """The parts of the whole sum, one for each rank, as flat tensors of this rank's partials.

    Attributes:
        counts: elements of each rank's part.
        steps: elements of each rank's part that are dealt with at a time.
        fill: ``fill(owner, begin, to)`` writes this rank's partial of a part, from element
            ``begin`` on, as much as ``to`` holds.
        there: ``there(owner)`` is this rank's whole partial; None: it has to be computed.
    """

    counts: Sequence[int]
    steps: Sequence[int]
    fill: Callable[[int, int, torch.Tensor], None]
    there: Callable[[int], torch.Tensor] | None = None

    def partial(self, owner: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return this rank's whole partial of a part."""
        if self.there is not None:
            return self.there(owner)
        partial = empty([self.counts[owner]], dtype, device)
        self.fill(owner, 0, partial)
        return partial

    @property
    def most_steps(self) -> int:
        """Steps of the largest part."""
        return max(-(-n // step) for n, step in zip(self.counts, self.steps, strict=True))


_RETURNED = -1  # in place of an owner: the sum that returns to this rank


class Sums:
    """What one rank does for the sums of one call."""

    def __init__(
        self, levels: Levels, parts: Parts, out: torch.Tensor, reduction: Reduction, begin: int
    ) -> None:
        problem, node = levels.call.problem, levels.node
        self.levels, self.parts, self.node = levels, parts, node
        self.rank = levels.call.group.rank
        self.out, self.reduction, self.begin = out, reduction, begin  # see `Shared.reduce`
        self.wire, self.wide = problem.dtype, dtypes.accumulator(problem.dtype)
        sizes = tuple(map(len, node.hosts))
        self.routes = in_order(routes(sizes, self.wire.itemsize, self.wide.itemsize))
        self.slot = round_up(max(parts.steps) * self.wire.itemsize, LINE_BYTES)
        self.sums: dict[int, torch.Tensor] = {}  # running ones, by owner
        self.arriving: dict[tuple[int, int], list[Started]] = {}  # of them, by owner and step
        self.partials: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by owner: (rank, partial)
        self.partials_arriving: dict[int, list[Started]] = {}

    def run(self) -> None:
        self._receive()
        for route in self.routes:
            if not route.visits(self.node.host):
                for owner in self.node.hosts[route.home]:
                    partial = self.parts.partial(owner, self.wire, self.out.device)
                    self.levels.send(partial, self._collector(route, owner))
        for route in self.routes:
            if route.visits(self.node.host):
                for owners in self.levels.rounds(route.home):
                    for index in range(self.parts.most_steps):
                        self._step(route, owners, index)
        self._finish()

    def _collector(self, route: Route, owner: int) -> int:
        """Who adds the partials of this host, which the sum does not visit."""
        if self.node.host < route.start:
            return self.levels.delegate(owner, route.start)
        return owner

    def _receive(self) -> None:
        """Start all receives of the call."""
        levels, here = self.levels, self.node.host
        for route in self.routes:
            if not route.visits(here):
                continue
            for owner in levels.dealt_with(route.home):
                sources = [
                    rank
                    for host, ranks in enumerate(self.node.hosts)
                    if (host < route.start and here == route.start)
                    or (host > route.turn and here == route.home)
                    for rank in ranks
                ]
                started = []
                for source in sources:
                    partial = self._memory(owner, self.wire)
                    self.partials.setdefault(owner, []).append((source, partial))
                    started += levels.receive(partial, source)
                self.partials_arriving[owner] = started
        for route in self.routes:
            if route.visits(here):
                for owner in levels.dealt_with(route.home):
                    if here > route.start:
                        self._receive_sum(owner, here - 1)
                    elif route.hops:
                        self.sums[owner] = self._memory(owner, self.wide)
                    if here == route.home < route.turn:
                        self._receive_sum(owner, route.turn, returned=True)

    def _receive_sum(self, owner: int, host: int, returned: bool = False) -> None:
        """The sum comes from a host, for the first time or ``returned``."""
        total = self._memory(owner, self.wide)
        key = _RETURNED if returned else owner
        self.sums[key] = total
        step, source = self.parts.steps[owner], self.levels.delegate(owner, host)
        for index, part in enumerate(total.split(step)):
            self.arriving[key, index] = self.levels.receive(part, source)

    def _memory(self, owner: int, dtype: torch.dtype) -> torch.Tensor:
        return empty([self.parts.counts[owner]], dtype, self.out.device)

    def _step(self, route: Route, owners: list[int | None], index: int) -> None:
        """Add the partials of this host to one step of the sums of a round's owners."""
        levels, node, parts = self.levels, self.node, self.parts
        levels.step()
        for place in (*levels.peers, node.index):
            owner = owners[place]
            if owner is not None:
                begin, count = self._range(owner, index)
                parts.fill(owner, begin, self._slot(node.index, place, count))
            node.channel.publish(Phase.DATA, place)
        levels.entered()
        for peer in levels.peers:
            node.channel.wait(peer, Phase.DATA, node.index)
        owner = owners[node.index]
        if owner is None:
            return
        begin, count = self._range(owner, index)
        span = slice(begin, begin + count)
        partials = [self._slot(peer, node.index, count) for peer in range(len(node.ranks))]
        total = None
        if node.host > route.start:
            levels.wait(self.arriving.get((owner, index), []))
            total = self.sums[owner][span]
        else:
            partials = [*self._received(owner, range(0, node.ranks.start), span), *partials]
        if node.host == route.home == route.turn:
            last = range(node.ranks.stop, node.hosts[-1].stop)
            self._result(total, [*partials, *self._received(owner, last, span)], begin)
            return
        running = self.sums[owner][span] if total is None else total
        add_to(running, total, partials)
        to = owner if node.host == route.turn else levels.delegate(owner, node.host + 1)
        levels.send(running, to)

    def _range(self, owner: int, index: int) -> tuple[int, int]:
        """First element and number of elements of a step of a part."""
        step, whole = self.parts.steps[owner], self.parts.counts[owner]
        begin = min(index * step, whole)
        return begin, min(step, whole - begin)

    def _slot(self, of: int, place: int, count: int) -> torch.Tensor:
        return self.node.workspace.view(of, self.wire, (count,), place * self.slot)

    def _received(self, owner: int, ranks: range, span: slice) -> list[torch.Tensor]:
        """Return the partials of ``ranks`` that came as they are, as far as they did."""
        self.levels.wait(self.partials_arriving.pop(owner, []))
        return [part[span] for rank, part in self.partials.get(owner, []) if rank in ranks]

    def _result(self, total: torch.Tensor | None, partials: list[torch.Tensor], begin: int) -> None:
        """The result of this rank from ``begin`` on."""
        count = (partials[0] if total is None else total).numel()
        to = self.out[begin : begin + count]
        add_to(to, total, partials, self.reduction, self.begin + begin)

    def _finish(self) -> None:
        """Wait for the sum that returns to this rank, if it does, and add the last partials."""
        own = next(route for route in self.routes if route.home == self.node.host)
        if own.turn == own.home:
            return
        last = range(self.node.ranks.stop, self.node.hosts[-1].stop)
        for index in range(self.parts.most_steps):
            begin, count = self._range(self.rank, index)
            if count:
                self.levels.wait(self.arriving[_RETURNED, index])
                span = slice(begin, begin + count)
                total = self.sums[_RETURNED][span]
                self._result(total, self._received(self.rank, last, span), begin)


class Shared(Levels):
    """Both levels of one call, with its sums."""

    def reduce(self, parts: Parts, out: torch.Tensor, reduction: Reduction, begin: int = 0) -> None:
        """Fill ``out``, flat, with the sum of this rank's part, which starts at element ``begin``
        of the whole output of the reduction."""
        Sums(self, parts, out, reduction, begin).run()


def add_to(
    to: torch.Tensor,
    total: torch.Tensor | None,
    partials: list[torch.Tensor],
    reduction: Reduction | None = None,
    begin: int = 0,
) -> None:
    """``to = round(total + partials in order + bias + residual)``; ``total`` may be overwritten.

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
