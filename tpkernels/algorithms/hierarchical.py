"""``hierarchical``: collectives in two levels, within a host and between hosts.

all_gather             Each rank sends its shard to one rank of every remote host. Meanwhile the
                       ranks of a host share their shards, then the shards that have arrived.
all_gather_matmul      An all_gather that multiplies each shard as soon as it is visible, on CPUs in
                       place.
reduce_scatter         A running sum per rank moves from host to host, and each host adds its
                       partial sums. If partial sums need fewer bytes, they are sent instead.
matmul_reduce_scatter  A reduce_scatter that first computes the partial sums that are sent.
all_reduce, matmul_all_reduce   A reduce-scatter of the elements or rows, then an all-gather.

A shard crosses the link of a host once, not once for each rank of the host. A running sum crosses
it instead of one partial sum per rank. `HostRoute` defines the messages of a reduction.
`plan_routes` explains why results are bitwise identical to all other algorithms.

Within a host: ranks share memory, and a rank copies its shard to its buffer in the node workspace.
For a reduction it writes its partial sums there, one slot for each rank of the host. For each owner
that a rank leads, it adds the slots of its host to the running sum of the previous host. Running
sums are in fp32, and their owner rounds them once.

Sync: every call starts with a handshake (point_to_point.py), as without shared memory. A call
consists of one or more epochs of the node channel. In each epoch every rank waits for a signal from
every peer on its host, with or without data. So the invariants of csrc/host/channel.h hold.
Messages read and write local memory, never the node workspace, so the invariants do not depend on
remote hosts.

Invariant 1 (no deadlock): an epoch waits only for epochs of earlier routes, and for epochs of the
current route on earlier hosts.
- All hosts process the routes in the same order.
- Along a route the running sum moves to hosts with higher numbers.
- Partial sums that are sent as they are leave before the first epoch.
- A sum that returns to its owner is awaited after the last epoch.

Invariant 2 (no mismatched messages): messages between two ranks arrive in the order of the sends.
- Sender and receiver process partial sums first, then running sums.
- Both process them by route, owner and chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tpkernels._C.host import Phase
from tpkernels.algorithms import transfers
from tpkernels.algorithms.chunks import Partials
from tpkernels.algorithms.point_to_point import PendingWork, enter
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.waits import signal_done
from tpkernels.common import dtypes
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.ranges import COPY, TRANSFER, record_range
from tpkernels.planning.algorithms import chunk_bytes
from tpkernels.symm.node import Node

# Message plan: pure functions with identical results on all ranks. A rank leads a remote rank if it
# transfers the data of the remote rank for its host. On a host with m ranks, the rank with index i
# leads the ranks with index i, i + m, i + 2m, ... of every remote host. So each host receives a
# shard once, and all of its ranks transfer data.


def leader(hosts: Sequence[range], rank: int, host: int) -> int:
    """Return the rank on a host that leads ``rank``. On its host, ``rank`` leads itself."""
    index = next(rank - ranks.start for ranks in hosts if rank in ranks)
    return hosts[host][index % len(hosts[host])]


def rounds(remote: range, local: range) -> Iterator[list[int | None]]:
    """Yield, for each rank of ``local``, the rank of ``remote`` that it leads, round by round.

    None: the rank does not lead a rank in this round.
    """
    for first in range(remote.start, remote.stop, len(local)):
        yield [rank if rank in remote else None for rank in range(first, first + len(local))]


@dataclass(frozen=True)
class HostRoute:
    """Path of the partial sums of an owner, in rank order.

    Hosts before ``start`` send their partial sums to host ``start``, and the running sum begins
    there. It visits the hosts from ``start`` to ``last``, and each adds its partial sums. If
    ``last`` is after ``home``, the host of the owner, the running sum returns to the owner.
    Hosts after ``last`` send their partial sums to the owner, and the owner adds them last.
    """

    start: int
    home: int
    last: int

    @property
    def hops(self) -> int:
        """Return the number of links that the running sum crosses."""
        return self.last - self.start + (self.last > self.home)

    def visits(self, host: int) -> bool:
        """Return True if the host adds to the running sum, False if it sends its partial sums."""
        return self.start <= host <= self.last


@functools.cache
def plan_routes(
    sizes: tuple[int, ...], partial_bytes: int, sum_bytes: int
) -> tuple[HostRoute, ...]:
    """Return, for each home host, the route that sends the fewest bytes between hosts.

    Among equal routes, the route with the fewest hops is selected. All hosts process the routes in
    the returned order, longest first.

    All routes give bitwise identical results. A host that adds to the running sum, and a
    receiver of partial sums, both add them one by one, in fp32 and in rank order.

    Args:
        sizes: number of ranks of each host.
        partial_bytes: bytes per element of a partial sum.
        sum_bytes: bytes per element of a running sum.
    """
    prefix_bytes = [partial_bytes * count for count in accumulate(sizes, initial=0)]
    last_host = len(sizes) - 1
    routes = []
    for home in range(len(sizes)):
        start = min(
            range(home, -1, -1), key=lambda host: prefix_bytes[host] + (home - host) * sum_bytes
        )
        last = min(
            range(home, last_host + 1),
            key=lambda host: (
                (host > home) * (host - home + 1) * sum_bytes
                + prefix_bytes[-1]
                - prefix_bytes[host + 1]
            ),
        )
        routes.append(HostRoute(start, home, last))
    return tuple(sorted(routes, key=lambda route: (-route.hops, -route.home)))


class Hierarchical(transfers.Transfers):
    """One call of a rank: epochs within the host and messages between hosts."""

    def __init__(self, call: Call) -> None:
        assert call.node is not None  # ensured by `choose`
        self.call = call
        self.node: Node = call.node
        self.buffer_bytes = self.node.usable_bytes
        self.chunk_bytes = chunk_bytes(call.problem, self.buffer_bytes)
        self.links = enter(call)
        other_hosts = [host for host in range(len(self.node.hosts)) if host != self.node.host]
        self.recv_ranks = [rank for host in other_hosts for rank in self.led_ranks(host)]
        index, count = self.node.index, len(self.node.ranks)
        self.peers = [(index + i) % count for i in range(1, count)]  # peers on this host
        self._sends: list[PendingWork] = []
        self._send_buffers: list[torch.Tensor] = []  # keeps the sent tensors alive
        self._first = True

    def begin_epoch(self) -> None:
        """Begin an epoch of the node channel. `enter` has begun the first."""
        if not self._first:
            self.node.channel.begin(self.call.plan.signature, self.call.plan.description)
        self._first = False

    def wait_entered(self) -> None:
        """Wait until all ranks have entered the call.

        This precedes all waits for data: a rank in a different call may never send that signal
        or message.
        """
        self.links.wait()

    def led_ranks(self, host: int) -> range:
        """Return the ranks of ``host`` that this rank leads."""
        return self.node.hosts[host][self.node.index :: len(self.node.ranks)]

    def send(self, data: torch.Tensor, dst: int) -> None:
        """Start to send a flat tensor; `end` waits for it."""
        self._send_buffers.append(data)
        self._sends += self.links.start([(data, dst)], [])

    def wait(self, started: Sequence[PendingWork]) -> None:
        """Wait for transfers."""
        if started:
            with record_range(TRANSFER):
                self.links.wait(started)

    def end(self) -> None:
        self.wait_entered()
        if self._first:  # no epoch ran
            self.node.channel.barrier()
        self.wait(self._sends)
        signal_done(self.call)

    def gather(
        self,
        shards: dict[int, torch.Tensor],
        counts: Sequence[int],
        chunk_numel: int,
        consume: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        node, rank, hosts = self.node, self.call.group.rank, len(self.node.hosts)
        dtype, receives = shards[rank].dtype, {rank: list[list[PendingWork]]()}

        def exchange_chunk(owners: list[int | None], begin: int) -> None:
            """Run one epoch: share one chunk per rank of this host.

            Each rank shares a chunk of its owner in this round, if it has an owner.
            """
            local_owner, chunk = owners[node.index], None
            self.begin_epoch()
            if local_owner is not None and begin < counts[local_owner]:
                if receives[local_owner]:
                    self.wait(receives[local_owner][begin // chunk_numel])
                chunk = shards[local_owner][begin : begin + chunk_numel]
                with record_range(COPY):
                    node.workspace.view(node.index, dtype, (chunk.numel(),)).copy_(chunk)
            node.channel.publish(Phase.DATA)
            if local_owner is not None and chunk is not None:
                consume(local_owner, begin, chunk)
            self.wait_entered()
            remaining = list(self.peers)
            while remaining:
                peer = node.channel.wait_any(remaining, Phase.DATA)
                remaining.remove(peer)
                owner = owners[peer]
                if owner is not None and begin < counts[owner]:
                    count = min(chunk_numel, counts[owner] - begin)
                    with record_range(TRANSFER):
                        consume(owner, begin, node.workspace.view(peer, dtype, (count,)))

        for i in range(1, hosts):
            for source in self.led_ranks((node.host + i) % hosts):
                chunks = shards[source].split(chunk_numel)
                receives[source] = [self.links.start([], [(chunk, source)]) for chunk in chunks]
        for i in range(1, hosts):
            for chunk in shards[rank].split(chunk_numel):
                self.send(chunk, leader(node.hosts, rank, (node.host - i) % hosts))
        for i in range(hosts):
            for owners in rounds(node.hosts[(node.host + i) % hosts], node.ranks):
                for begin in range(0, max(counts[o] for o in owners if o is not None), chunk_numel):
                    exchange_chunk(owners, begin)

    def reduce(self, partials: Partials, out: torch.Tensor, reduction: Reduction) -> None:
        HostReduction(self, partials, out, reduction).run()


_RETURNED = -1  # key of the sum that returns to this rank


class HostReduction:
    """The reduction of one call on one rank."""

    def __init__(
        self, comm: Hierarchical, partials: Partials, out: torch.Tensor, reduction: Reduction
    ) -> None:
        problem, node = comm.call.problem, comm.node
        self.comm, self.node, self.rank = comm, node, comm.call.group.rank
        self.local_partials, self.chunk_plan = partials, partials.chunk_plan
        self.out, self.reduction = out, reduction
        self.wire, self.acc_dtype = problem.dtype, dtypes.accumulator(problem.dtype)
        sizes = tuple(map(len, node.hosts))
        self.routes = plan_routes(sizes, self.wire.itemsize, self.acc_dtype.itemsize)
        self.later_ranks = range(node.ranks.stop, node.hosts[-1].stop)  # ranks of later hosts
        self.running_sums: dict[int, torch.Tensor] = {}  # by owner
        self.sum_receives: dict[tuple[int, int], list[PendingWork]] = {}  # by owner and chunk
        # (rank, partial sums) by owner
        self.remote_partials: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.partial_receives: dict[int, list[PendingWork]] = {}

    def run(self) -> None:
        local_host, comm = self.node.host, self.comm
        visited = [route for route in self.routes if route.visits(local_host)]
        self._start_receives(visited)
        for route in self.routes:
            if not route.visits(local_host):
                for owner in self.node.hosts[route.home]:
                    dst = (
                        leader(self.node.hosts, owner, route.start)
                        if local_host < route.start
                        else owner
                    )
                    comm.send(self.local_partials.full(owner, self.wire, self.out.device), dst)
        for route in visited:
            for owners in rounds(self.node.hosts[route.home], self.node.ranks):
                for index in range(self.chunk_plan.num_chunks):
                    self._reduce_chunk(route, owners, index)
        self._finish()

    def _start_receives(self, visited: Sequence[HostRoute]) -> None:
        """Start all receives of the call."""
        comm, local_host = self.comm, self.node.host
        for route in visited:
            sources = [
                rank
                for host, ranks in enumerate(self.node.hosts)
                if (host < route.start and local_host == route.start)
                or (host > route.last and local_host == route.home)
                for rank in ranks
            ]
            for owner in comm.led_ranks(route.home):
                partials = [(source, self._new_buffer(owner, self.wire)) for source in sources]
                self.remote_partials[owner] = partials
                self.partial_receives[owner] = [
                    started
                    for source, data in partials
                    for started in comm.links.start([], [(data, source)])
                ]
        for route in visited:
            for owner in comm.led_ranks(route.home):
                if local_host > route.start:
                    self._receive_sum(owner, owner, local_host - 1)
                elif route.hops:
                    self.running_sums[owner] = self._new_buffer(owner, self.acc_dtype)
                if local_host == route.home < route.last:
                    self._receive_sum(_RETURNED, owner, route.last)

    def _receive_sum(self, key: int, owner: int, host: int) -> None:
        """Start to receive the running sum of ``owner`` from a host, chunk by chunk."""
        self.running_sums[key] = total = self._new_buffer(owner, self.acc_dtype)
        source = leader(self.node.hosts, owner, host)
        for index, chunk in enumerate(
            total.split(self.chunk_plan.chunk_rows * self.chunk_plan.columns[owner])
        ):
            self.sum_receives[key, index] = self.comm.links.start([], [(chunk, source)])

    def _new_buffer(self, owner: int, dtype: torch.dtype) -> torch.Tensor:
        return empty([self.chunk_plan.counts[owner]], dtype, self.out.device)

    def _reduce_chunk(self, route: HostRoute, owners: list[int | None], index: int) -> None:
        """Add the partial sums of this host to one chunk of each owner of a round."""
        comm, node = self.comm, self.node
        comm.begin_epoch()
        for local_index in (*comm.peers, node.index):
            owner = owners[local_index]
            if owner is not None:
                begin, count = self.chunk_plan.chunk_range(owner, index)
                self.local_partials.fill(owner, begin, self._slot(node.index, local_index, count))
            node.channel.publish(Phase.DATA, local_index)
        comm.wait_entered()
        for peer in comm.peers:
            node.channel.wait(peer, Phase.DATA, node.index)
        owner = owners[node.index]
        if owner is None:
            return
        begin, count = self.chunk_plan.chunk_range(owner, index)
        span = slice(begin, begin + count)
        partials = [self._slot(peer, node.index, count) for peer in range(len(node.ranks))]
        total = None
        if node.host > route.start:
            comm.wait(self.sum_receives.get((owner, index), []))
            total = self.running_sums[owner][span]
        else:
            partials = [*self._wait_partials(owner, range(0, node.ranks.start), span), *partials]
        if node.host == route.home == route.last:
            self._write_result(
                total, [*partials, *self._wait_partials(owner, self.later_ranks, span)], span
            )
            return
        running_sum = self.running_sums[owner][span] if total is None else total
        add_partials(running_sum, total, partials)
        dst = owner if node.host == route.last else leader(self.node.hosts, owner, node.host + 1)
        comm.send(running_sum, dst)

    def _slot(self, writer: int, reader: int, count: int) -> torch.Tensor:
        offset = reader * self.chunk_plan.slot_bytes
        return self.node.workspace.view(writer, self.wire, (count,), offset)

    def _wait_partials(self, owner: int, ranks: range, span: slice) -> list[torch.Tensor]:
        """Wait for the partial sums that ``ranks`` sent, and return them."""
        self.comm.wait(self.partial_receives.pop(owner, []))
        return [
            partial[span] for rank, partial in self.remote_partials.get(owner, []) if rank in ranks
        ]

    def _write_result(
        self, total: torch.Tensor | None, partials: list[torch.Tensor], span: slice
    ) -> None:
        """Write elements ``span`` of the local result, rounded once."""
        begin = self.chunk_plan.offsets[self.rank] + span.start
        add_partials(self.out[span], total, partials, self.reduction, begin)

    def _finish(self) -> None:
        """Add the last partial sums to the sum that returns to this rank, if it returns."""
        route = next(route for route in self.routes if route.home == self.node.host)
        if route.last == route.home:
            return
        for index in range(self.chunk_plan.num_chunks):
            begin, count = self.chunk_plan.chunk_range(self.rank, index)
            if count:
                self.comm.wait(self.sum_receives[_RETURNED, index])
                span = slice(begin, begin + count)
                total = self.running_sums[_RETURNED][span]
                self._write_result(
                    total, self._wait_partials(self.rank, self.later_ranks, span), span
                )


def add_partials(
    dst: torch.Tensor,
    total: torch.Tensor | None,
    partials: list[torch.Tensor],
    reduction: Reduction | None = None,
    begin: int = 0,
) -> None:
    """Set ``dst = round(total + partials in order + bias + residual)``. May overwrite ``total``.

    `sum_partials` requires terms of one dtype. Partial sums with a dtype that differs from
    ``total`` are passed as residuals, one by one.
    """
    if total is not None and partials and partials[0].dtype != total.dtype:
        for partial in partials:
            reduce_into(total, [total], Reduction(total.dtype, residual=partial))
        partials = []
    terms = partials if total is None else [total, *partials]
    if terms[0] is not dst or len(terms) > 1 or reduction is not None:
        reduce_into(dst, terms, reduction or Reduction(dst.dtype), begin)


gather, reduce = transfers.make_functions(Hierarchical)
