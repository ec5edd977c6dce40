"""Which groups can share memory: those whose ranks all reach a Unix socket of rank 0.

Probed by connecting, because boot IDs are unreliable: machines cloned from one image may have the
same boot ID, and containers on one machine have the same one but may share nothing else. Memory
descriptors are sent over such a socket, so a rank that reaches it can receive them. All ranks reach
the same answer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpkernels import _C
from tpkernels.symm.exchange import Participant
from tpkernels.symm.rendezvous import MOST_DESCRIPTORS, connected, listening, user_of

MOST_RANKS = MOST_DESCRIPTORS - 1  # a pidfd of each, and the memory
_ACCEPT_SLICE = 0.05  # s


def probe_colocation(
    participant: Participant, statement: dict[str, Any]
) -> tuple[str | None, list[dict[str, Any]]]:
    """Return why the ranks cannot share memory; None: they can. Also returns the statements of all
    ranks, as `Participant.exchange` does, with each rank's "boot_id" added."""
    statement = {
        **statement,
        "unsupported": unsupported(participant.world),
        "boot_id": _boot_id(),
    }
    if participant.world == 1:
        return statement["unsupported"], [statement]
    with contextlib.ExitStack() as stack:
        why_not = None
        if participant.rank == 0:
            try:
                name = _listen(stack, "reach")
            except OSError as error:
                name, why_not = None, f"cannot open a socket: {error.strerror}"
            except RuntimeError as error:
                name, why_not = None, f"cannot start a thread: {error}"
            statement["socket"] = name
        statements = participant.exchange("init", statement)
        if participant.rank != 0:
            why_not = _why_not_reached(statements[0]["socket"], participant.timeout)
        obstacles = participant.exchange("reach", statement["unsupported"] or why_not)
    reasons = [f"rank {rank} {why}" for rank, why in enumerate(obstacles) if why is not None]
    return (reasons[0] if reasons else None), statements


def find_leaders(
    participant: Participant, statement: dict[str, Any]
) -> tuple[list[int], list[dict[str, Any]]]:
    """For each rank, the first rank that it can share memory with, if only itself. Also returns
    the statements of all ranks. Collective."""
    with contextlib.ExitStack() as stack:
        name = None
        with contextlib.suppress(OSError, RuntimeError):  # no descriptor, or no thread
            own_name = _listen(stack, f"host-{participant.rank}")
            name = own_name if unsupported() is None else None
        statements = participant.exchange("hosts", {"socket": name, **statement})
        leader = participant.rank
        if name is not None:
            reached = (
                rank
                for rank in range(participant.rank)
                if _why_not_reached(statements[rank]["socket"], participant.timeout) is None
            )
            leader = next(reached, leader)
        leaders = participant.exchange("leaders", leader)
    return leaders, statements


def unsupported(world: int = 1) -> str | None:
    """Return why this process cannot share memory with ``world`` ranks; None: it can."""
    if world > MOST_RANKS:
        return f"is one of {world} ranks; at most {MOST_RANKS} can share memory"
    for name, probe in (
        ("memfd_create", lambda: _C.host.open_memfd("tpkernels-probe")),
        ("pidfd_open", lambda: _C.host.open_pidfd(os.getpid())),
    ):
        try:
            os.close(probe())
        except OSError as error:
            return (
                f"cannot share memory: {name}: {error.strerror}; this needs Linux 5.3 or newer "
                "and no seccomp filter that forbids the call"
            )
    return None


def _why_not_reached(name: str | None, seconds: float) -> str | None:
    """Return why rank 0's socket cannot be reached; None: a process of this user listens there."""
    if name is None:
        return "got no socket name from rank 0"
    try:
        with connected(name, seconds) as connection:
            user = user_of(connection)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"cannot open a socket: {error.strerror}"
        return (
            f"cannot reach rank 0's Unix socket ({error.strerror or error}): another host, or "
            "containers that share no network namespace. Ranks share memory within one host "
            "only, also where NVLink connects GPUs of several, as in an NVL72"
        )
    return None if user == os.geteuid() else f"is user {os.geteuid()}, rank 0 is user {user}"


def _listen(stack: contextlib.ExitStack, purpose: str) -> str:
    """Return the name of a socket on which a thread accepts connections until ``stack`` ends."""
    listener, name = stack.enter_context(listening(purpose))
    stack.enter_context(_accepting(listener))
    return name


@contextlib.contextmanager
def _accepting(listener: socket.socket) -> Iterator[None]:
    """Empties the queue of connections, from members and strangers, during the block."""
    over = threading.Event()
    listener.settimeout(_ACCEPT_SLICE)

    def accept() -> None:
        while not over.is_set():
            try:
                listener.accept()[0].close()
            except TimeoutError:
                pass
            except OSError:  # out of descriptors, or the other side has left
                time.sleep(1e-3)

    thread = threading.Thread(target=accept, name="tpkernels-reach", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
