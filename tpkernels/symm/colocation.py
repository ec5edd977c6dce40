"""Which ranks of a group can share memory: those that reach a Unix socket of the same rank.

Probed by connecting, because boot IDs are unreliable: machines cloned from one image may have the
same boot ID, and containers on one machine have the same one but may share nothing else. Memory
descriptors are sent over such a socket, so a rank that reaches it can receive them. All ranks reach
the same answer.
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
from tpkernels.symm.rendezvous import BACKLOG, MOST_DESCRIPTORS, connected, listening, user_of

MOST_RANKS = MOST_DESCRIPTORS - 1  # a pidfd of each, and the memory


@dataclass(frozen=True)
class Colocation:
    """What the ranks of a group have found out about each other, the same on all of them."""

    why_not: str | None  #: why not all can share memory; None: they can
    leaders: list[int]  #: for each rank, the first that it can share memory with, if only itself
    statements: list[dict[str, Any]]  #: of all ranks, with each rank's "boot_id" added


def probe_colocation(participant: Participant, statement: dict[str, Any]) -> Colocation:
    """Connect to the sockets of lower ranks until one is reached. Collective."""
    rank, world, refusal = participant.rank, participant.world, unsupported()
    statement = {**statement, "boot_id": None, "socket": None}
    with contextlib.suppress(OSError):
        statement["boot_id"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if world == 1:
        return Colocation(refusal, [0], [statement])
    listener = obstacle = None
    with contextlib.ExitStack() as stack:
        if refusal is None:
            try:
                listener, name = stack.enter_context(listening(f"host-{rank}"))
                listener.setblocking(False)
                statement["socket"] = name
            except OSError as error:
                obstacle = f"cannot open a socket: {error.strerror}"
        statements = participant.exchange("init", statement)
        deadline = time.monotonic() + participant.timeout

        def why_not_reached(lower: int) -> str | None:
            remaining = max(0.0, deadline - time.monotonic())
            return _why_not_reached(statements[lower]["socket"], remaining)

        def empty_queue() -> None:
            """Make room for members where strangers have filled the queue."""
            if listener is not None:
                with contextlib.suppress(OSError):  # it is empty, or there are no descriptors
                    for _ in range(BACKLOG):
                        listener.accept()[0].close()

        leader = rank
        if rank > 0:
            obstacle = why_not_reached(0)
            lower = range(1, rank) if listener is not None else ()
            others = (other for other in lower if why_not_reached(other) is None)
            leader = 0 if obstacle is None else next(others, rank)
        if refusal is not None:
            obstacle, leader = refusal, rank
        waiting = replace(participant, watch=empty_queue)
        reports = waiting.exchange("reach", {"leader": leader, "obstacle": obstacle})
    obstacles = [report["obstacle"] for report in reports]
    why_not = next((f"rank {rank} {why}" for rank, why in enumerate(obstacles) if why), None)
    if world > MOST_RANKS:
        why_not = f"the group has {world} ranks; at most {MOST_RANKS} ranks can share memory"
    return Colocation(why_not, [report["leader"] for report in reports], statements)


def unsupported() -> str | None:
    """Return why this process cannot share memory; None: it can."""
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


def _why_not_reached(name: str | None, seconds: float) -> str | None:
    """Return why a rank's socket cannot be reached; None: a process of this user listens there."""
    if name is None:
        return "did not receive a socket name from rank 0"
    try:
        with connected(name, seconds) as connection:
            user = user_of(connection)
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
