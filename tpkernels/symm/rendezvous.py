"""Problem: the ranks of a group, which so far share only a key-value store, must all map one arena.

Algorithm: the ranks are known to reach rank 0 (colocation.py). Rank 0 creates the memory and
listens on an abstract Unix socket, whose name disappears with the socket. The others connect, prove
that they belong to the group (a token from the store) and to the same user, and send a pidfd of
their own process. Rank 0 sends everybody the memory's descriptor and all pidfds. Every rank checks
that rank 0 runs as its own user, maps the memory, whose size must be sealed, and commits its parts
of it. Rank 0 collects the outcomes, and either all ranks succeed or all fail.

Every step is bounded by one deadline. Received descriptors are closed on every path.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpkernels import _C
from tpkernels.errors import CollectiveTimeoutError, PeerLostError
from tpkernels.symm.exchange import Participant, exchange
from tpkernels.symm.limits import short_of_memory
from tpkernels.symm.messages import close_all, connected, listening, receive, send, user_of

# Rank 0 gives up at the deadline; the others give it this long (s) to name the missing rank.
_GRACE = 1.0
_LOOK = 0.05  # s between checks of the peers while the sockets are silent

Parts = Sequence[tuple[int, int]]  # (offset, bytes) within a region


@dataclass(frozen=True)
class MappedArena:
    """An arena that all ranks have mapped, and a pidfd and pid of each rank."""

    arena: _C.host.Arena
    pidfds: list[int]
    pids: list[int]


def make_arena(
    participant: Participant, purpose: str, region_bytes: int, parts: Parts
) -> MappedArena:
    """Map a new arena of ``participant.world`` regions on every rank; each rank commits ``parts``
    of its own. Collective.

    Raises:
        MemoryError: on every rank, when one of them cannot map it or commit its parts.
        CollectiveTimeoutError, PeerLostError: a rank did not arrive, or left.
    """
    if participant.world == 1:
        return _lone_arena(region_bytes, parts)
    deadline = time.monotonic() + participant.timeout
    if participant.rank == 0:
        token = secrets.token_hex(16)
        with listening(purpose) as (listener, name):
            exchange(participant, purpose, {"socket": name, "token": token})
            return _host(participant, listener, token, region_bytes, parts, deadline)
    root = exchange(participant, purpose, {})[0]
    with (
        _bounded(participant, 0, deadline) as remaining,
        connected(root["socket"], remaining) as connection,
    ):
        connection.settimeout(remaining + _GRACE)
        return _join(participant, connection, root["token"], region_bytes, parts)


@dataclass(frozen=True)
class _Peer:
    """A rank that has connected to rank 0."""

    connection: socket.socket
    pid: int
    pidfds: list[int]  #: one, or none if rank 0 could not open one more


def _host(
    participant: Participant,
    listener: socket.socket,
    token: str,
    region_bytes: int,
    parts: Parts,
    deadline: float,
) -> MappedArena:
    others = range(1, participant.world)
    peers: dict[int, _Peer] = {}
    own, memory, arena = _C.host.open_pidfd(os.getpid()), -1, None
    with contextlib.ExitStack() as open_files:
        try:
            _welcome(participant, listener, token, deadline, peers, open_files)
            pids = [os.getpid(), *(peers[rank].pid for rank in others)]
            pidfds = [own, *(fd for rank in others for fd in peers[rank].pidfds)]
            error = _too_few(pidfds, participant.world, 0)
            if error is None:
                memory, error = _create(region_bytes, participant.world, parts)
            shared = [] if error is not None else [*pidfds, memory]
            for rank in others:
                with _bounded(participant, rank, deadline):
                    send(peers[rank].connection, {"pids": pids, "error": error}, shared)
            if error is None:
                arena, error = _map(memory, region_bytes, participant.world, 0, parts)
            for rank in others:
                with _bounded(participant, rank, deadline):
                    # Even after an error: closing with unread data would reset the connection.
                    error = receive(peers[rank].connection, 0)[0]["error"] or error
            for rank in others:
                with _bounded(participant, rank, deadline):
                    send(peers[rank].connection, {"error": error}, [])
        except BaseException as failure:
            close_all([own, *(fd for peer in peers.values() for fd in peer.pidfds)])
            late = isinstance(failure, CollectiveTimeoutError)
            note = {"failed": str(failure), "late": late, "peer": getattr(failure, "peer", None)}
            for peer in peers.values():
                with contextlib.suppress(OSError):
                    send(peer.connection, note, [])
            raise
        finally:
            close_all([memory] if memory >= 0 else [])
    return _verdict(arena, error, pidfds, pids)


def _welcome(
    participant: Participant,
    listener: socket.socket,
    token: str,
    deadline: float,
    peers: dict[int, _Peer],
    open_files: contextlib.ExitStack,
) -> None:
    """Accepts connections until all ``peers`` have said hello. Strangers hold nobody up, however
    many connect and however silent they stay."""
    looked = 0.0
    with selectors.PollSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(peers) < participant.world - 1:
            missing = min(set(range(1, participant.world)) - set(peers))
            with _bounded(participant, missing, deadline) as remaining:
                ready = selector.select(min(remaining, _LOOK))
                if time.monotonic() - looked > _LOOK:
                    participant.look("set-up")
                    looked = time.monotonic()
            for connection in (key.fileobj for key, _ in ready):
                assert isinstance(connection, socket.socket)  # for the type checker
                if connection is listener:
                    guest = open_files.enter_context(listener.accept()[0])
                    if user_of(guest) == os.geteuid():
                        selector.register(guest, selectors.EVENT_READ)
                    else:
                        guest.close()
                    continue
                selector.unregister(connection)
                hello, descriptors = _hello(connection)
                rank = int(hello.get("rank", 0))
                if hello.get("token") != token or rank not in range(1, participant.world):
                    close_all(descriptors)
                    connection.close()
                    continue
                connection.settimeout(max(0.0, deadline - time.monotonic()))
                peers[rank] = _Peer(connection, hello["pid"], descriptors)


def _hello(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The first message on a connection that is ready to read; empty without a valid one."""
    try:
        return receive(connection, 1)
    except (OSError, EOFError, ValueError):
        return {}, []


def _join(
    participant: Participant, connection: socket.socket, token: str, region_bytes: int, parts: Parts
) -> MappedArena:
    if user_of(connection) != os.geteuid():
        raise PeerLostError(
            f"set-up of group '{participant.group}': user {user_of(connection)} listens in rank "
            f"{participant.name(0)}'s place; rank {participant.name(participant.rank)} is user "
            f"{os.geteuid()}",
            peer=participant.name(0),
        )
    own = _C.host.open_pidfd(os.getpid())
    try:
        hello = {"token": token, "rank": participant.rank, "pid": os.getpid()}
        send(connection, hello, [own])
    finally:
        os.close(own)
    offer, descriptors = receive(connection, participant.world + 1)
    pidfds, memory = descriptors[: participant.world], descriptors[participant.world :]
    try:
        arena, error = None, offer["error"]
        if error is None:
            error = _too_few(descriptors, participant.world + 1, participant.rank)
        if error is None:
            arena, error = _map(memory[0], region_bytes, participant.world, participant.rank, parts)
        with contextlib.suppress(BrokenPipeError):  # rank 0 has closed it, and said why
            send(connection, {"error": error}, [])
        verdict = receive(connection, 0)[0]["error"]
    except BaseException:
        close_all(pidfds)
        raise
    finally:
        close_all(memory)
    return _verdict(arena, verdict, pidfds, offer["pids"])


def _lone_arena(region_bytes: int, parts: Parts) -> MappedArena:
    memory, error = _create(region_bytes, 1, parts)
    arena = None
    if error is None:
        arena, error = _map(memory, region_bytes, 1, 0, parts)
        os.close(memory)
    return _verdict(arena, error, [_C.host.open_pidfd(os.getpid())], [os.getpid()])


def _create(region_bytes: int, world: int, parts: Parts) -> tuple[int, str | None]:
    error = short_of_memory(sum(size for _, size in parts), world)
    if error is not None:
        return -1, error
    try:
        return _C.host.Arena.create(region_bytes, world), None
    except (OSError, RuntimeError, OverflowError) as failure:
        return -1, str(failure)


def _map(
    memory: int, region_bytes: int, world: int, rank: int, parts: Parts
) -> tuple[_C.host.Arena | None, str | None]:
    try:
        arena = _C.host.Arena(memory, region_bytes, world)
        for offset, size in parts:
            arena.commit(rank, offset, size)
    except RuntimeError as error:
        return None, f"rank {rank}: {error}"
    return arena, None


def _too_few(descriptors: list[int], expected: int, rank: int) -> str | None:
    """The error if some descriptors are missing: the kernel silently drops those that would exceed
    the process's limit."""
    if len(descriptors) == expected:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"rank {rank} can open only {len(descriptors)} of {expected} more descriptors; its limit "
        f"is {limit}: raise it (ulimit -n)"
    )


def _verdict(
    arena: _C.host.Arena | None, error: str | None, pidfds: list[int], pids: list[int]
) -> MappedArena:
    if error is not None or arena is None:
        close_all(pidfds)
        raise MemoryError(f"no shared memory for the group: {error}")
    return MappedArena(arena, pidfds, pids)


@contextlib.contextmanager
def _bounded(participant: Participant, peer: int, deadline: float) -> Iterator[float]:
    """Yield the seconds left, and turn a socket's errors into ours, which name ``peer``."""
    own, peer = participant.name(participant.rank), participant.name(peer)
    where = f"set-up of group '{participant.group}': rank {own} waited for rank {peer}"
    remaining = deadline - time.monotonic()
    try:
        if remaining <= 0:
            raise TimeoutError
        yield remaining
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"{where}, which did not arrive within {participant.timeout:g} s", peer=peer
        ) from error
    except (ConnectionError, EOFError) as error:
        until = time.monotonic() + 0.2  # its end shows a little after its sockets close
        while participant.watch is not None and time.monotonic() < until:
            participant.watch()
            time.sleep(0.005)
        raise PeerLostError(f"{where}, which left ({error})", peer=peer) from error
