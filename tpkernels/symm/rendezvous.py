"""Problem: the ranks of a group, which so far share only a key-value store, must all map one arena.

Algorithm: the ranks are known to reach rank 0 (colocation.py). Rank 0 creates the memory and
listens on an abstract Unix socket, whose name disappears with the socket. The others connect, prove
that they belong to the group (a token from the exchange) and to the same user, and send a pidfd of
their own process. Rank 0 sends everybody the memory's descriptor and all pidfds. Every rank checks
that rank 0 runs as its own user, maps the memory, whose size must be sealed, and commits its parts
of it. Then the ranks exchange their errors, and either all succeed or all fail.

Every step is bounded by the group's timeout and `_GRACE` plus `_NOTICE`. Received descriptors are
closed on every path. A rank that gives up notifies the others (exchange.py) and closes its
connections.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import DistError

from tpkernels import _C
from tpkernels.errors import CollectiveTimeoutError, PeerLostError
from tpkernels.symm.exchange import Participant
from tpkernels.symm.limits import short_of_memory

MOST_DESCRIPTORS = 253  # the kernel's limit for one message
BACKLOG = 512  # connections that may wait to be accepted, including those of strangers
_CONNECT_SLICE = 0.1  # s
# Rank 0 gives up at the deadline; the others give it this long (s) to name the missing rank.
_GRACE = 1.0
_NOTICE = 0.5  # s for the notice of a rank that has closed its connections
_LOOK = 0.05  # s between checks of the peers while the sockets are silent

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
    with contextlib.ExitStack() as files:
        return _Arena(participant, region_bytes, parts, deadline).make(purpose, files)


@dataclass(frozen=True)
class _Arena:
    """An arena that one rank makes with the others."""

    participant: Participant
    region_bytes: int
    parts: Parts
    deadline: float

    def make(self, purpose: str, files: contextlib.ExitStack) -> MappedArena:
        """Make it; ``files`` closes what is not needed afterwards."""
        participant, world, memory = self.participant, self.participant.world, -1
        offer: dict[str, Any] = {"pid": os.getpid()}
        if participant.rank == 0:
            memory, offer["error"] = self._create()
            if memory >= 0:
                files.callback(os.close, memory)
            if world > 1:
                listener, offer["socket"] = files.enter_context(listening(purpose))
                offer["token"] = secrets.token_hex(16)
        offers = participant.exchange(purpose, offer) if world > 1 else [offer]
        root, pids = offers[0], [offer["pid"] for offer in offers]
        _raise_first([root["error"]])
        received: dict[int, list[int]] = {}  # pidfds, by the rank that sent them
        try:
            if participant.rank == 0:
                received[0] = [_C.host.open_pidfd(os.getpid())]
                connections = {}
                if world > 1:
                    connections = self._welcome(listener, root["token"], files, received)
                pidfds = [pidfd for _, sent in sorted(received.items()) for pidfd in sent]
                error = self._too_few(pidfds, world)
                shared = [] if error is not None else [*pidfds, memory]
                for rank, connection in connections.items():
                    with self.naming(rank):
                        send(connection, {"error": error}, shared)
            else:
                answer, descriptors = self._join(root)
                pidfds = received[0] = descriptors[:world]
                for memory in descriptors[world:]:
                    files.callback(os.close, memory)
                error = answer["error"] or self._too_few(descriptors, world + 1)
            arena = None
            if error is None:
                arena, error = self._map(memory)
            errors = [error]
            if world > 1:
                watch = participant.watch
                if watch is None and len(pidfds) == world:
                    watch = partial(self._watch, pidfds)
                mapping = replace(participant, watch=watch)
                with self.naming(0):  # the exchange has its own deadline
                    errors = mapping.exchange(f"{purpose}, mapped", error)
            _raise_first(errors)
        except BaseException as failure:
            if not isinstance(failure, MemoryError):  # which all ranks raise
                participant.tell_left(failure)  # while the connections are open
            close_all(pidfd for sent in received.values() for pidfd in sent)
            raise
        assert arena is not None  # or there was an error
        return MappedArena(arena, pidfds, pids)

    def _welcome(
        self,
        listener: socket.socket,
        token: str,
        files: contextlib.ExitStack,
        received: dict[int, list[int]],
    ) -> dict[int, socket.socket]:
        """Accept connections until all peers have said hello; return them, and add the pidfds to
        ``received``. Strangers hold nobody up, however many connect and silent they stay."""
        looked, missing = 0.0, set(range(1, self.participant.world))
        connections: dict[int, socket.socket] = {}
        with selectors.PollSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing:
                with self.bounded(min(missing)) as remaining:
                    ready = selector.select(min(remaining, _LOOK))
                    if time.monotonic() - looked > _LOOK:
                        self.participant.look("setup")
                        looked = time.monotonic()
                for connection in (key.fileobj for key, _ in ready):
                    assert isinstance(connection, socket.socket)  # for the type checker
                    if connection is listener:
                        guest = files.enter_context(listener.accept()[0])
                        if user_of(guest) == os.geteuid():
                            selector.register(guest, selectors.EVENT_READ)
                        else:
                            guest.close()
                        continue
                    selector.unregister(connection)
                    rank, descriptors = _hello(connection, token)
                    if rank not in missing:
                        close_all(descriptors)
                        connection.close()
                        continue
                    missing.remove(rank)
                    connection.settimeout(max(0.0, self.deadline - time.monotonic()))
                    connections[rank], received[rank] = connection, descriptors
        return connections

    def _join(self, root: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Give rank 0 a pidfd; return its answer, with the pidfds of all ranks and the memory."""
        participant = self.participant
        with self.bounded(0) as remaining, connected(root["socket"], remaining) as connection:
            connection.settimeout(remaining + _GRACE)
            user = user_of(connection)
            if user != os.geteuid():
                raise PeerLostError(
                    f"setup of group '{participant.group}': the process on the socket of rank 0 "
                    f"runs as user {user}, but rank {participant.name(participant.rank)} runs as "
                    f"user {os.geteuid()}",
                    peer=participant.name(0),
                )
            pidfd = _C.host.open_pidfd(os.getpid())
            try:
                send(connection, {"token": root["token"], "rank": participant.rank}, [pidfd])
            finally:
                os.close(pidfd)
            return receive(connection, participant.world + 1)

    def _watch(self, pidfds: list[int]) -> None:
        """Raise if a rank's process has ended."""
        poll = select.poll()
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            with self.naming(pidfds.index(pidfd)):
                raise EOFError("its process has ended")

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
            f"rank {self.participant.rank} can open only {len(descriptors)} of the {expected} file "
            f"descriptors that it needs; its limit is {limit}: raise it (ulimit -n)"
        )

    @contextlib.contextmanager
    def bounded(self, peer: int) -> Iterator[float]:
        """Yield the seconds left to wait for ``peer``; raise if there are none."""
        with self.naming(peer):
            remaining = self.deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            yield remaining

    @contextlib.contextmanager
    def naming(self, peer: int) -> Iterator[None]:
        """Turn a socket's errors into ours, which name ``peer``."""
        participant = self.participant
        rank, peer = participant.name(participant.rank), participant.name(peer)
        where = f"setup of group '{participant.group}': rank {rank} waited for rank {peer}"
        try:
            yield
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"{where}, which did not arrive within {participant.timeout:g} s", peer=peer
            ) from error
        except (ConnectionError, EOFError, DistError) as error:
            # Why it left, or whom it waited for, shows a little after its connections close.
            until = time.monotonic() + _NOTICE
            while time.monotonic() < until:
                with contextlib.suppress(DistError):  # it had the store, too
                    participant.look("setup")
                time.sleep(0.005)
            raise PeerLostError(f"{where}, which disconnected ({error})", peer=peer) from error


def _hello(connection: socket.socket, token: str) -> tuple[int, list[int]]:
    """Receive a peer's hello; return its rank, 0 if it is a stranger, and the descriptors sent."""
    hello: dict[str, Any] = {}
    descriptors: list[int] = []
    with contextlib.suppress(OSError, EOFError, ValueError):  # no valid message
        hello, descriptors = receive(connection, 1)
    return int(hello.get("rank", 0)) if hello.get("token") == token else 0, descriptors


def _raise_first(errors: Iterable[str | None]) -> None:
    for error in filter(None, errors):
        raise MemoryError(f"cannot create shared memory for the group: {error}")


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
                raise TimeoutError(f"the connection queue of {name} was full for {seconds:g} s")
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
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, most_descriptors)
    except ConnectionResetError:  # reported once, ahead of what the peer sent before closing
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, most_descriptors)
    if not data:
        close_all(descriptors)
        raise EOFError("the connection was closed")
    return json.loads(data), descriptors


def user_of(connection: socket.socket) -> int:
    """Return the effective user on the other side of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
