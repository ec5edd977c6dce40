"""One call of a rank: its steps within the host, and its transfers between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from tpkernels._C.host import Phase
from tpkernels.algorithms.hierarchical.routes import delegate, rounds
from tpkernels.call import Call
from tpkernels.local.ranges import COPY, TRANSFER, recorded
from tpkernels.symm.node import Node
from tpkernels.transport.point_to_point import Started, enter
from tpkernels.transport.waits import announce_done


class Levels:
    """Both levels of one call."""

    def __init__(self, call: Call) -> None:
        assert call.node is not None  # else `choose` refuses
        self.call = call
        self.node: Node = call.node
        self.link = enter(call)
        self._sent: list[Started] = []
        self._kept: list[torch.Tensor] = []  # what `_sent` sends
        self._first = True

    @property
    def peers(self) -> list[int]:
        """Return the other ranks of this host, by their place in it, from the next one on."""
        own, count = self.node.index, len(self.node.ranks)
        return [(own + i) % count for i in range(1, count)]

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

    def delegate(self, of: int, host: int) -> int:
        """Return the rank that deals with ``of`` on a host."""
        return delegate(self.node.hosts, of, host)

    def rounds(self, host: int) -> Iterator[list[int | None]]:
        """Which ranks of ``host`` those of this host deal with, round by round."""
        return rounds(self.node.hosts[host], self.node.ranks)

    @property
    def received(self) -> list[int]:
        """Whose shards this rank receives into memory of its own."""
        others = [host for host in range(len(self.node.hosts)) if host != self.node.host]
        return [rank for host in others for rank in self.dealt_with(host)]

    def dealt_with(self, host: int) -> list[int]:
        """Those of ``host`` that this rank deals with."""
        return [rank for each in self.rounds(host) if (rank := each[self.node.index]) is not None]

    def send(self, data: torch.Tensor, to: int) -> None:
        """Start to send a flat tensor; `end` waits for it."""
        self._kept.append(data)
        self._sent += self.link.start([(data, to)], [])

    def receive(self, data: torch.Tensor, source: int) -> list[Started]:
        """Start to receive a flat tensor."""
        return self.link.start([], [(data, source)])

    def wait(self, started: Sequence[Started]) -> None:
        """Wait for what `receive` returned."""
        if started:
            with recorded(TRANSFER):
                self.link.wait(started)

    def end(self) -> None:
        """End the call."""
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
        """Has every rank see the shards of all, ``step`` elements at a time.

        Args:
            shards: the flat shard of this rank, and memory for the flat shards of those in
                ``received``.
            counts: elements of each rank's shard.
            use: ``use(owner, begin, part)`` is called for each part of each shard: the elements
                from ``begin`` on. It must not keep ``part``, which may lie in shared memory.
        """
        node, rank = self.node, self.call.group.rank
        hosts = len(node.hosts)
        to_hosts = [(node.host - i) % hosts for i in range(1, hosts)]
        from_hosts = [(node.host + i) % hosts for i in range(1, hosts)]
        arriving: dict[int, list[list[Started]]] = {rank: []}
        for host in from_hosts:
            for source in self.dealt_with(host):
                parts = shards[source].split(step)
                arriving[source] = [self.receive(part, source) for part in parts]
        for host in to_hosts:
            for part in shards[rank].split(step):
                self.send(part, self.delegate(rank, host))
        for host in (node.host, *from_hosts):
            for owners in self.rounds(host):
                self._share(shards, arriving, owners, counts, step, use)

    def _share(
        self,
        shards: dict[int, torch.Tensor],
        arriving: dict[int, list[list[Started]]],
        owners: list[int | None],
        counts: Sequence[int],
        step: int,
        use: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Each rank of this host shows the others the shard of its owner of the round, if it has
        one.

        Sync: a step is one call of the channel, and in each every rank waits for a word of every
        peer, with or without data, so the channel's proof holds (csrc/host/channel.h).
        """
        node = self.node
        mine = owners[node.index]
        most = max(counts[owner] for owner in owners if owner is not None)
        dtype = next(iter(shards.values())).dtype
        for begin in range(0, most, step):
            self.step()
            part = None
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
            waiting = self.peers
            while waiting:
                peer = node.channel.wait_any(waiting, Phase.DATA)
                waiting.remove(peer)
                owner = owners[peer]
                if owner is not None and begin < counts[owner]:
                    count = min(step, counts[owner] - begin)
                    with recorded(TRANSFER):
                        use(owner, begin, node.workspace.view(peer, dtype, (count,)))
