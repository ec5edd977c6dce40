"""Problem: in a group that spans hosts, the ranks of each host share memory with each other only.

Algorithm: the ranks know who shares a host (colocation.py). Each host makes a workspace of its own,
and all ranks exchange whether every host succeeded. Nothing is left of the others if one did not:
all ranks make the same plans, so all have a node or none.

Failure: a rank that cannot make the workspace notifies the others of its host, which know its
address from the first exchange. No wait is longer than the group's timeout. The group works without
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tpkernels import _C
from tpkernels.common.text import of_error
from tpkernels.symm.colocation import MOST_RANKS
from tpkernels.symm.exchange import Participant, Presence
from tpkernels.symm.host import HostWorkspace


@dataclass
class Node:
    """The ranks of this host, and the workspace that they share."""

    participant: Participant  #: this rank's place in the whole group
    workspace: HostWorkspace
    hosts: tuple[range, ...]  #: the ranks of each host
    host: int  #: this rank's
    limit: int | None = None  #: bytes of a buffer, once a host could not grow

    @property
    def channel(self) -> _C.host.Channel:
        """Return the channel. It numbers ranks by their place in ``ranks``; its errors give their
        numbers in the group."""
        return self.workspace.channel

    @property
    def ranks(self) -> range:
        """Return those of this host."""
        return self.hosts[self.host]

    @property
    def index(self) -> int:
        """Return this rank's place in ``ranks``."""
        return self.participant.rank - self.ranks.start

    @property
    def usable_bytes(self) -> int:
        """Return what each data buffer may grow to, on every host."""
        return self.workspace.workspace_bytes if self.limit is None else self.limit

    def set_timeout(self, seconds: float) -> None:
        """Bound waits for the other hosts."""
        self.participant = replace(self.participant, timeout=seconds)

    def wants(self, nbytes: int) -> bool:
        """Return whether the data buffers should grow for a call that would use ``nbytes`` of
        each."""
        return min(nbytes, self.usable_bytes) > self.channel.capacity

    def grow(self, nbytes: int, text: str) -> str | None:
        """Grow the data buffers on all hosts; see `HostWorkspace.grow`. Collective. If one host
        lacks the memory, all take the steps that fit there."""
        if not self.wants(nbytes):  # another thread was first
            return None
        try:
            refused = self.workspace.grow(nbytes, text)
        except BaseException as failure:
            self.participant.tell_left(failure)  # the other hosts wait below
            raise
        reports = self.participant.exchange("workspace growth", (refused, self.channel.capacity))
        refusals = [refused for refused, _ in reports if refused is not None]
        if refusals:
            self.limit = min(capacity for _, capacity in reports)
        return refusals[0] if refusals else None


def make_node(
    participant: Participant, workspace_bytes: int, leaders: Sequence[int]
) -> tuple[Node | None, str | None]:
    """Return this rank's node, or what the group lacks for that; all ranks get one, or none.
    ``leaders``: see `Colocation`. Collective.

    Raises:
        CollectiveTimeoutError, PeerLostError: a rank did not arrive, or left.
    """
    hosts = hosts_of(leaders)
    if isinstance(hosts, str):
        return None, hosts
    host = next(i for i, ranks in enumerate(hosts) if participant.rank in ranks)
    ranks, presence = hosts[host], participant.presence
    local = replace(
        participant,
        group=f"{participant.group}, host of rank {ranks.start}",
        rank=participant.rank - ranks.start,
        world=len(ranks),
        presence=Presence(presence.address, [presence.addresses[rank] for rank in ranks]),
        names=tuple(ranks),
    )
    workspace = error = None
    try:
        workspace = HostWorkspace(local, workspace_bytes)
    except BaseException as failure:
        local.tell_left(failure)
        if not isinstance(failure, Exception):
            raise
        error = of_error(failure)
    reports = participant.exchange("nodes", error)
    errors = [(rank, text) for rank, text in enumerate(reports) if text]
    if workspace is None or errors:
        if workspace is not None:
            workspace.close()
        rank, text = errors[0]
        return None, f"needs shared memory on each host, but rank {rank} cannot create it: {text}"
    return Node(participant, workspace, hosts, host), None


def why_not_hierarchical(sizes: Sequence[int]) -> str | None:
    """Return what hosts with so many ranks each lack for `hierarchical`; None: nothing."""
    hosts = hosts_of([sum(sizes[:host]) for host, size in enumerate(sizes) for _ in range(size)])
    return hosts if isinstance(hosts, str) else None


def hosts_of(leaders: Sequence[int]) -> tuple[range, ...] | str:
    """Return the ranks of each host, given the first rank of each rank's host; or why they cannot
    take the two levels of `hierarchical`."""
    firsts = sorted(set(leaders))
    hosts = tuple(range(first, end) for first, end in pairwise([*firsts, len(leaders)]))
    for ranks in hosts:
        for rank in ranks:
            if leaders[rank] != ranks.start:
                return (
                    "needs consecutive ranks on each host; "
                    f"rank {rank} shares a host with rank {leaders[rank]}, but rank {ranks.start}, "
                    "which is between them, does not"
                )
    if len(hosts) == 1:
        return "is for groups that span hosts, but all ranks of this group are on one host"
    largest = max(map(len, hosts))
    if largest == 1:
        return "needs a host with two or more ranks that share memory, but each host has one rank"
    if largest > MOST_RANKS:
        return f"supports at most {MOST_RANKS} ranks per host, not {largest}"
    return hosts
