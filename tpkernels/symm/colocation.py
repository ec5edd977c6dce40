"""Detect the ranks of a group that can share memory: ranks that reach the same Unix socket.

Ranks probe by connecting, because boot IDs are unreliable. Machines cloned from one image may have
equal boot IDs. Containers on one machine have equal boot IDs, but may share no other resource. The
memory descriptors are sent over such a socket, so a rank that reaches it can receive them. All
ranks get the same result.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpkernels import _C
from tpkernels.symm.exchange import Participant
from tpkernels.symm.rendezvous import BACKLOG, MAX_DESCRIPTORS, connected, get_peer_user, listening

MAX_RANKS = MAX_DESCRIPTORS - 1  # one descriptor is the memory, the rest are pidfds


@dataclass(frozen=True)
class Colocation:
    """Results of the probe. Identical on all ranks of the group."""

    unshared_reason: str | None  #: reason why not all ranks can share memory, if any
    first_ranks: list[int]  #: per rank: the lowest rank it shares memory with, or itself
    rank_infos: list[dict[str, Any]]  #: per rank: its information, with "boot_id" added


def probe_colocation(participant: Participant, rank_info: dict[str, Any]) -> Colocation:
    """Connect to the sockets of lower ranks until a connection succeeds. Collective."""
    rank, world, refusal = participant.rank, participant.world, unsupported()
    rank_info = {**rank_info, "boot_id": None, "socket": None}
    with contextlib.suppress(OSError):
        rank_info["boot_id"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if world == 1:
        return Colocation(refusal, [0], [rank_info])
    listener = obstacle = None
    with contextlib.ExitStack() as stack:
        if refusal is None:
            try:
                listener, name = stack.enter_context(listening(f"host-{rank}"))
                listener.setblocking(False)
                rank_info["socket"] = name
            except OSError as error:
                obstacle = f"cannot open a socket: {error.strerror}"
        rank_infos = participant.exchange("init", rank_info)
        deadline = time.monotonic() + participant.timeout

        def find_obstacle(lower: int) -> str | None:
            remaining = max(0.0, deadline - time.monotonic())
            return _find_connect_obstacle(rank_infos[lower]["socket"], remaining)

        def empty_queue() -> None:
            """Close queued connections, because unrelated processes may have filled the queue."""
            if listener is not None:
                with contextlib.suppress(OSError):  # empty queue, or no free descriptors
                    for _ in range(BACKLOG):
                        listener.accept()[0].close()

        first_rank = rank
        if rank > 0:
            obstacle = find_obstacle(0)
            lower = range(1, rank) if listener is not None else ()
            reachable = (peer for peer in lower if find_obstacle(peer) is None)
            first_rank = 0 if obstacle is None else next(reachable, rank)
        if refusal is not None:
            obstacle, first_rank = refusal, rank
        draining = replace(participant, watch=empty_queue)
        reports = draining.exchange("reach", {"leader": first_rank, "obstacle": obstacle})
    obstacles = [report["obstacle"] for report in reports]
    unshared_reason = next(
        (f"rank {rank} {reason}" for rank, reason in enumerate(obstacles) if reason), None
    )
    if world > MAX_RANKS:
        unshared_reason = f"the group has {world} ranks; at most {MAX_RANKS} ranks can share memory"
    return Colocation(unshared_reason, [report["leader"] for report in reports], rank_infos)


def unsupported() -> str | None:
    """Return the reason why this process cannot share memory, or None if it can."""
    for name, probe in (
        ("memfd_create", lambda: _C.host.open_memfd("tpkernels-probe")),
        ("pidfd_open", lambda: _C.host.open_pidfd(os.getpid())),
    ):
        try:
            os.close(probe())
        except OSError as error:
            return (
                f"cannot share memory: {name}: {error.strerror}; this call needs Linux 5.3 or "
                "newer and a seccomp profile that allows it"
            )
    return None


def _find_connect_obstacle(name: str | None, seconds: float) -> str | None:
    """Return the reason why the socket ``name`` cannot be reached, or None if a process of this
    user listens there."""
    if name is None:
        return "did not receive a socket name from rank 0"
    try:
        with connected(name, seconds) as connection:
            user = get_peer_user(connection)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"cannot open a socket: {error.strerror}"
        return (
            f"cannot reach rank 0's Unix socket ({error.strerror or error}): the ranks are on "
            "different hosts, or in containers with different network namespaces. Ranks can share "
            "memory only within one host, even if NVLink connects the GPUs of several hosts (NVL72)"
        )
    return (
        None
        if user == os.geteuid()
        else f"runs as user {os.geteuid()}, but rank 0 runs as user {user}"
    )
