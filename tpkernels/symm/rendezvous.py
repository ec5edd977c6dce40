"""Problem: the ranks of a group, which so far share only a key-value store, must all map one arena.

Algorithm: the ranks are known to reach rank 0 (colocation.py). Rank 0 creates the memory and
listens on an abstract Unix socket, whose name disappears with the socket. The others connect, prove
that they belong to the group (a token from the exchange) and to the same user, and send a pidfd of
their own process. Rank 0 sends everybody the memory's descriptor and all pidfds. Every rank checks
that rank 0 runs as its own user, maps the memory, whose size must be sealed, and commits its parts
of it. Rank 0 collects the outcomes, and either all ranks succeed or all fail.

Every step is bounded by one deadline. Received descriptors are closed on every path. Messages are
JSON with file descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tpkernels import _C
from tpkernels.errors import CollectiveTimeoutError, PeerLostError
from tpkernels.symm.exchange import Participant
from tpkernels.symm.limits import short_of_memory

MOST_DESCRIPTORS = 253  # the kernel's limit for one message
BACKLOG = 512  # connections that may wait to be accepted, including those of strangers
_CONNECT_SLICE = 0.1  # s
# Rank 0 gives up at the deadline; the others give it this long (s) to name the missing rank.
_GRACE = 1.0
_LOOK = 0.05  # s between checks of the peers while the sockets are silent

T = TypeVar("T")
Parts = Sequence[tuple[int, int]]  # (offset, bytes) within a region


class MappedArena(NamedTuple):
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
    deadline = time.monotonic() + participant.timeout
    arena = _Arena(participant, region_bytes, parts, deadline)
    if participant.world == 1:
        return arena.host(None, "")
    if participant.rank == 0:
        token = secrets.token_hex(16)
        with listening(purpose) as (listener, name):
            participant.exchange(purpose, {"socket": name, "token": token})
            return arena.host(listener, token)
    root = participant.exchange(purpose, {})[0]
    with arena.bounded(0) as remaining, connected(root["socket"], remaining) as connection:
        connection.settimeout(remaining + _GRACE)
        return arena.join(connection, root["token"])


class _Peer(NamedTuple):
    """A rank that has connected to rank 0."""

    connection: socket.socket
    pid: int
    pidfds: list[int]  #: one, or none if rank 0 could not open one more


@dataclass(frozen=True)
class _Arena:
    """An arena that one rank makes with the others."""

    participant: Participant
    region_bytes: int
    parts: Parts
    deadline: float
    peers: dict[int, _Peer] = field(default_factory=dict)  #: on rank 0

    def host(self, listener: socket.socket | None, token: str) -> MappedArena:
        """Make it as rank 0; without a ``listener`` as the only rank."""
        pids, pidfds, memory, arena = [os.getpid()], [_C.host.open_pidfd(os.getpid())], -1, None
        with contextlib.ExitStack() as open_files:
            try:
                if listener is not None:
                    self._welcome(listener, token, open_files)
                for _, peer in sorted(self.peers.items()):
                    pids.append(peer.pid)
                    pidfds += peer.pidfds
                error = self._too_few(pidfds, self.participant.world)
                if error is None:
                    memory, error = self._create()
                shared = [] if error is not None else [*pidfds, memory]
                offer = {"pids": pids, "error": error}
                self._for_each(lambda connection: send(connection, offer, shared))
                if error is None:
                    arena, error = self._map(memory)
                # Even after an error: closing with unread data would reset the connections.
                for report, _ in self._for_each(receive):
                    error = report["error"] or error
                verdict = {"error": error}
                self._for_each(lambda connection: send(connection, verdict))
            except BaseException as failure:
                received = [fd for peer in self.peers.values() for fd in peer.pidfds]
                close_all({*pidfds, *received})
                late = isinstance(failure, CollectiveTimeoutError)
                note = {"failed": str(failure), "late": late}
                note["peer"] = getattr(failure, "peer", None)
                for peer in self.peers.values():
                    with contextlib.suppress(OSError):
                        send(peer.connection, note)
                raise
            finally:
                close_all([memory] if memory >= 0 else [])
        return _verdict(arena, error, pidfds, pids)

    def _for_each(self, action: Callable[[socket.socket], T]) -> list[T]:
        """Return what ``action`` returns for the connection of each peer in turn."""
        results = []
        for rank in range(1, self.participant.world):
            with self.bounded(rank):
                results.append(action(self.peers[rank].connection))
        return results

    def _welcome(
        self, listener: socket.socket, token: str, open_files: contextlib.ExitStack
    ) -> None:
        """Accept connections until all ``peers`` have said hello. Strangers hold nobody up, however
        many connect and however silent they stay."""
        looked, others = 0.0, set(range(1, self.participant.world))
        with selectors.PollSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing := others - set(self.peers):
                with self.bounded(min(missing)) as remaining:
                    ready = selector.select(min(remaining, _LOOK))
                    if time.monotonic() - looked > _LOOK:
                        self.participant.look("set-up")
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
                    hello: dict[str, Any] = {}
                    descriptors: list[int] = []
                    with contextlib.suppress(OSError, EOFError, ValueError):  # no valid message
                        hello, descriptors = receive(connection, 1)
                    rank = int(hello.get("rank", 0))
                    if hello.get("token") != token or rank not in others:
                        close_all(descriptors)
                        connection.close()
                        continue
                    connection.settimeout(max(0.0, self.deadline - time.monotonic()))
                    self.peers[rank] = _Peer(connection, hello["pid"], descriptors)

    def join(self, connection: socket.socket, token: str) -> MappedArena:
        """Make it as any other rank."""
        participant = self.participant
        if user_of(connection) != os.geteuid():
            raise PeerLostError(
                f"set-up of group '{participant.group}': user {user_of(connection)} listens in "
                f"rank {participant.name(0)}'s place; rank {participant.name(participant.rank)} is "
                f"user {os.geteuid()}",
                peer=participant.name(0),
            )
        hello = {"token": token, "rank": participant.rank, "pid": os.getpid()}
        own = _C.host.open_pidfd(os.getpid())
        try:
            send(connection, hello, [own])
        finally:
            os.close(own)
        offer, descriptors = receive(connection, participant.world + 1)
        pidfds, memory = descriptors[: participant.world], descriptors[participant.world :]
        try:
            arena, error = None, offer["error"]
            if error is None:
                error = self._too_few(descriptors, participant.world + 1)
            if error is None:
                arena, error = self._map(memory[0])
            with contextlib.suppress(BrokenPipeError):  # rank 0 has closed it, and said why
                send(connection, {"error": error})
            verdict = receive(connection)[0]["error"]
        except BaseException:
            close_all(pidfds)
            raise
        finally:
            close_all(memory)
        return _verdict(arena, verdict, pidfds, offer["pids"])

    def _create(self) -> tuple[int, str | None]:
        world = self.participant.world
        error = short_of_memory(sum(size for _, size in self.parts), world)
        if error is not None:
            return -1, error
        try:
            return _C.host.Arena.create(self.region_bytes, world), None
        except (OSError, RuntimeError, OverflowError) as failure:
            return -1, str(failure)

    def _map(self, memory: int) -> tuple[_C.host.Arena | None, str | None]:
        try:
            arena = _C.host.Arena(memory, self.region_bytes, self.participant.world)
            for offset, size in self.parts:
                arena.commit(self.participant.rank, offset, size)
        except RuntimeError as error:
            return None, f"rank {self.participant.rank}: {error}"
        return arena, None

    def _too_few(self, descriptors: list[int], expected: int) -> str | None:
        """Return the error if some descriptors are missing: the kernel silently drops those that
        would exceed the process's limit."""
        if len(descriptors) == expected:
            return None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"rank {self.participant.rank} can open only {len(descriptors)} of {expected} more "
            f"descriptors; its limit is {limit}: raise it (ulimit -n)"
        )

    @contextlib.contextmanager
    def bounded(self, peer: int) -> Iterator[float]:
        """Yield the seconds left, and turn a socket's errors into ours, which name ``peer``."""
        participant = self.participant
        own, peer = participant.name(participant.rank), participant.name(peer)
        where = f"set-up of group '{participant.group}': rank {own} waited for rank {peer}"
        remaining = self.deadline - time.monotonic()
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


def _verdict(
    arena: _C.host.Arena | None, error: str | None, pidfds: list[int], pids: list[int]
) -> MappedArena:
    if error is not None or arena is None:
        close_all(pidfds)
        raise MemoryError(f"no shared memory for the group: {error}")
    return MappedArena(arena, pidfds, pids)


# Abstract Unix sockets.


@contextlib.contextmanager
def listening(purpose: str) -> Iterator[tuple[socket.socket, str]]:
    """Listen on a Unix socket under a unique name, which disappears with the socket. Every user of
    the machine can see the name and connect."""
    name = f"tpkernels-{purpose}-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        yield listener, name


@contextlib.contextmanager
def connected(name: str, seconds: float) -> Iterator[socket.socket]:
    """Connect to the socket called ``name``. If strangers have filled its queue, wait in the kernel
    for a place in it, for at most ``seconds``.

    Raises:
        ConnectionRefusedError: nobody listens there.
        TimeoutError: there was no place in time.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        # Not settimeout: with it Python never waits for room in a Unix socket's queue.
        _set_send_timeout(connection, _CONNECT_SLICE)
        while True:
            try:
                connection.connect(f"\0{name}")
                connection.getpeername()  # a signal may interrupt connect()
                break
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno != errno.ENOTCONN:
                    raise
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no room in the queue of {name} within {seconds:g} s")
        _set_send_timeout(connection, 0.0)
        yield connection


def _set_send_timeout(connection: socket.socket, seconds: float) -> None:
    time_value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time_value)


def send(
    connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send one message with descriptors, which stay open here."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors)


def receive(
    connection: socket.socket, most_descriptors: int = 0
) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which the caller must close. Fewer arrive than
    were sent if this process may open no more.

    Raises:
        EOFError, OSError: the connection was closed or failed.
        CollectiveTimeoutError, PeerLostError: rank 0 reported that it gave up.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, most_descriptors)
    except ConnectionResetError:  # reported once, ahead of what the peer sent before closing
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, most_descriptors)
    if not data:
        close_all(descriptors)
        raise EOFError("the connection was closed")
    message = json.loads(data)
    if "failed" in message:
        close_all(descriptors)
        kind = CollectiveTimeoutError if message["late"] else PeerLostError
        raise kind(f"rank 0 failed: {message['failed']}", peer=message["peer"])
    return message, descriptors


def user_of(connection: socket.socket) -> int:
    """Return the effective user on the other side of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
