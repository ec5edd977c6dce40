"""The workspaces of a group that spans hosts: one per host.

Problem: only ranks on the same host share memory.

Algorithm:
1. The ranks know the hosts of all ranks (colocation.py). The ranks of each host create a workspace.
2. All ranks exchange the results.

Invariant 1 (agreement): all ranks have a node or none, because all ranks must make the same plans.
If one host fails, the remaining hosts close their workspaces.
Invariant 2 (bounded): no wait exceeds the group timeout.

Failure: a rank that cannot create the workspace notifies the ranks of its host at the addresses of
the first exchange. The group then works without nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tpkernels import _C
from tpkernels.common.text import describe_error
from tpkernels.symm.colocation import MAX_RANKS
from tpkernels.symm.exchange import ExchangeState, Participant
from tpkernels.symm.host import HostWorkspace


@dataclass
class Node:
    """The ranks of this host and their shared workspace."""

    participant: Participant  #: this rank in the full group
    workspace: HostWorkspace
    hosts: tuple[range, ...]  #: ranks of each host
    host: int  #: index of this host
    limit: int | None = None  #: bytes of a buffer, after a host could not grow

    @property
    def channel(self) -> _C.host.Channel:
        """Return the channel. Its rank numbers are indices into ``ranks``. Its errors contain group
        ranks."""
        return self.workspace.channel

    @property
    def ranks(self) -> range:
        """Return the group ranks of this host."""
        return self.hosts[self.host]

    @property
    def index(self) -> int:
        """Return the index of this rank in ``ranks``."""
        return self.participant.rank - self.ranks.start

    @property
    def usable_bytes(self) -> int:
        """Return the maximum size of a data buffer in bytes, valid on every host."""
        return self.workspace.workspace_bytes if self.limit is None else self.limit

    def set_timeout(self, seconds: float) -> None:
        """Set the limit of waits for other hosts."""
        self.participant = replace(self.participant, timeout=seconds)

    def needs_growth(self, nbytes: int) -> bool:
        """Return whether a call that would use ``nbytes`` of each data buffer should grow them."""
        return min(nbytes, self.usable_bytes) > self.channel.capacity

    def grow(self, nbytes: int, description: str) -> str | None:
        """Grow the data buffers on all hosts; see `HostWorkspace.grow`. Collective. If a host lacks
        the memory, all ranks limit their steps to the buffers of that host."""
        if not self.needs_growth(nbytes):  # a different thread has grown them
            return None
        try:
            warning = self.workspace.grow(nbytes, description)
        except BaseException as failure:
            # The ranks of other hosts wait in the exchange below.
            self.participant.notify_left(failure)
            raise
        reports = self.participant.exchange("workspace growth", (warning, self.channel.capacity))
        warnings = [warning for warning, _ in reports if warning is not None]
        if warnings:
            self.limit = min(capacity for _, capacity in reports)
        return warnings[0] if warnings else None


def make_node(
    participant: Participant, workspace_bytes: int, first_ranks: Sequence[int]
) -> tuple[Node | None, str | None]:
    """Create the nodes of a group. Collective.

    Args:
        participant: this rank in the full group.
        workspace_bytes: maximum size of a data buffer.
        first_ranks: first rank on the host of each rank, see `Colocation`.

    Returns:
        (node, None), or (None, reason) on all ranks if the group cannot have nodes.

    Raises:
        CollectiveTimeoutError: a rank did not arrive in time.
        PeerLostError: a rank left.
    """
    hosts = find_hosts(first_ranks)
    if isinstance(hosts, str):
        return None, hosts
    host = next(i for i, ranks in enumerate(hosts) if participant.rank in ranks)
    ranks, exchange_state = hosts[host], participant.exchange_state
    local = replace(
        participant,
        group=f"{participant.group}, host of rank {ranks.start}",
        rank=participant.rank - ranks.start,
        world=len(ranks),
        exchange_state=ExchangeState(
            exchange_state.address, [exchange_state.addresses[rank] for rank in ranks]
        ),
        group_ranks=tuple(ranks),
    )
    workspace = error = None
    try:
        workspace = HostWorkspace(local, workspace_bytes)
    except BaseException as failure:
        local.notify_left(failure)
        if not isinstance(failure, Exception):
            raise
        error = describe_error(failure)
    reports = participant.exchange("nodes", error)
    errors = [(rank, message) for rank, message in enumerate(reports) if message]
    if workspace is None or errors:
        if workspace is not None:
            workspace.close()
        rank, message = errors[0]
        return (
            None,
            f"needs shared memory on each host, but rank {rank} cannot create it: {message}",
        )
    return Node(participant, workspace, hosts, host), None


def find_hierarchical_obstacle(sizes: Sequence[int]) -> str | None:
    """Return the reason why `hierarchical` does not support hosts with these numbers of ranks, or
    None if it does."""
    hosts = find_hosts([sum(sizes[:host]) for host, size in enumerate(sizes) for _ in range(size)])
    return hosts if isinstance(hosts, str) else None


def find_hosts(first_ranks: Sequence[int]) -> tuple[range, ...] | str:
    """Return the ranks of each host, or the reason why `hierarchical` does not support the group.

    Args:
        first_ranks: first rank on the host of each rank.
    """
    firsts = sorted(set(first_ranks))
    hosts = tuple(range(first, end) for first, end in pairwise([*firsts, len(first_ranks)]))
    for ranks in hosts:
        for rank in ranks:
            if first_ranks[rank] != ranks.start:
                return (
                    "needs consecutive ranks on each host; "
                    f"rank {rank} shares a host with rank {first_ranks[rank]}, but rank "
                    f"{ranks.start}, which is between them, does not"
                )
    if len(hosts) == 1:
        return "is for groups that span hosts, but all ranks of this group are on one host"
    largest = max(map(len, hosts))
    if largest == 1:
        return "needs a host with two or more ranks that share memory, but each host has one rank"
    if largest > MAX_RANKS:
        return f"supports at most {MAX_RANKS} ranks per host, not {largest}"
    return hosts
