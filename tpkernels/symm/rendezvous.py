"""Rendezvous: map one arena on all ranks of a group.

Problem: the ranks share only a key-value store, and must map the same memory.

Algorithm: all ranks can reach rank 0 (colocation.py).
1. Rank 0 creates the memory and listens on an abstract Unix socket. The name of the socket vanishes
   with the socket.
2. The peers connect. They prove that they belong to the group (a token from the exchange) and run
   as the same user, and send a pidfd of their process.
3. Rank 0 sends the memory descriptor and all pidfds to every peer.
4. Every rank checks that rank 0 runs as the same user and that the size of the memory is sealed. It
   maps the memory and commits the ranges of its region.
5. The ranks exchange their errors.

Invariant 1 (agreement): set-up succeeds on all ranks or on none, because of step 5.
Invariant 2 (bounded): a step lasts at most the group timeout plus `_GRACE` plus `_NOTICE`.
Invariant 3 (no leak): received descriptors are closed on every path.

Failure: a rank that gives up notifies its peers (exchange.py) and closes its connections.
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
from tpkernels.symm.limits import find_memory_shortage

MAX_DESCRIPTORS = 253  # kernel limit for one message
BACKLOG = 512  # limit of unaccepted connections, including connections of unrelated processes
_CONNECT_SLICE = 0.1  # s
# Rank 0 gives up at the deadline. Its peers wait this much longer (s), for its report of the
# missing rank.
_GRACE = 1.0
_NOTICE = 0.5  # s to wait for the notice of a rank that has closed its connections
_CHECK_INTERVAL = 0.05  # s between checks of the peers while no socket is readable

WORKSPACE = "workspace"  # purpose of an arena with the channel of a group

ByteRanges = Sequence[tuple[int, int]]  # (offset, bytes) within a region


class MappedArena(NamedTuple):
    """An arena that all ranks have mapped, with one pidfd and one pid per rank."""

    arena: _C.host.Arena
    pidfds: list[int]
    pids: list[int]


def make_arena(
    participant: Participant, purpose: str, region_bytes: int, ranges: ByteRanges
) -> MappedArena:
    """Map a new arena of ``participant.world`` regions on every rank. Collective.

    Args:
        purpose: name of the arena in exchanges and errors.
        region_bytes: size of the region of a rank.
        ranges: the (offset, bytes) ranges of its region that each rank commits.

    Raises:
        MemoryError: on every rank, if any rank cannot map the arena or commit its ranges.
        CollectiveTimeoutError: a rank did not arrive in time.
        PeerLostError: a rank left.
    """
    deadline = time.monotonic() + participant.timeout
    with contextlib.ExitStack() as files:
        setup = _ArenaSetup(participant, region_bytes, ranges, deadline, purpose)
        return setup.make(files)


@dataclass(frozen=True)
class _ArenaSetup:
    """The set-up of one arena by this rank."""

    participant: Participant
    region_bytes: int
    ranges: ByteRanges
    deadline: float
    purpose: str = "memory"

    def make(self, files: contextlib.ExitStack) -> MappedArena:
        """Set up the arena. ``files`` closes temporary sockets and descriptors."""
        purpose = self.purpose
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
        received: dict[int, list[int]] = {}  # pidfds, by sender rank
        try:
            if participant.rank == 0:
                received[0] = [_C.host.open_pidfd(os.getpid())]
                connections = {}
                if world > 1:
                    connections = self._accept_peers(listener, root["token"], files, received)
                pidfds = [pidfd for _, sent in sorted(received.items()) for pidfd in sent]
                error = self._find_shortage(pidfds, world)
                shared = [] if error is not None else [*pidfds, memory]
                for rank, connection in connections.items():
                    with self.peer_errors(rank):
                        send(connection, {"error": error}, shared)
            else:
                answer, descriptors = self._connect(root)
                pidfds = received[0] = descriptors[:world]
                for memory in descriptors[world:]:
                    files.callback(os.close, memory)
                error = answer["error"] or self._find_shortage(descriptors, world + 1)
            arena = None
            if error is None:
                arena, error = self._map(memory)
            errors = [error]
            if world > 1:
                watch = participant.watch
                if watch is None and len(pidfds) == world:
                    watch = partial(self._watch, pidfds)
                mapping = replace(participant, watch=watch)
                with self.peer_errors(0):  # the exchange has its own deadline
                    errors = mapping.exchange(f"{purpose}, mapped", error)
            _raise_first(errors)
        except BaseException as failure:
            if not isinstance(failure, MemoryError):  # all ranks raise a MemoryError
                participant.notify_left(failure)  # before the connections close
            close_all(pidfd for sent in received.values() for pidfd in sent)
            raise
        assert arena is not None  # no rank reported an error
        return MappedArena(arena, pidfds, pids)

    def _accept_peers(
        self,
        listener: socket.socket,
        token: str,
        files: contextlib.ExitStack,
        received: dict[int, list[int]],
    ) -> dict[int, socket.socket]:
        """Accept connections until all peers have sent their hello. Return the connections, and add
        the pidfds to ``received``. Unrelated processes that connect, even silent ones, do not delay
        the peers."""
        last_check, missing = 0.0, set(range(1, self.participant.world))
        connections: dict[int, socket.socket] = {}
        with selectors.PollSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing:
                with self.bounded(min(missing)) as remaining:
                    ready = selector.select(min(remaining, _CHECK_INTERVAL))
                    if time.monotonic() - last_check > _CHECK_INTERVAL:
                        self.participant.check_peers("setup")
                        last_check = time.monotonic()
                for connection in (key.fileobj for key, _ in ready):
                    assert isinstance(connection, socket.socket)  # for the type checker
                    if connection is listener:
                        accepted = files.enter_context(listener.accept()[0])
                        if get_peer_user(accepted) == os.geteuid():
                            selector.register(accepted, selectors.EVENT_READ)
                        else:
                            accepted.close()
                        continue
                    selector.unregister(connection)
                    rank, descriptors = _receive_hello(connection, token)
                    if rank not in missing:
                        close_all(descriptors)
                        connection.close()
                        continue
                    missing.remove(rank)
                    connection.settimeout(max(0.0, self.deadline - time.monotonic()))
                    connections[rank], received[rank] = connection, descriptors
        return connections

    def _connect(self, root: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Send a pidfd to rank 0. Return the answer of rank 0 and its descriptors: the pidfds of
        all ranks and the memory."""
        participant = self.participant
        with self.bounded(0) as remaining, connected(root["socket"], remaining) as connection:
            connection.settimeout(remaining + _GRACE)
            user = get_peer_user(connection)
            if user != os.geteuid():
                raise PeerLostError(
                    f"setup of group '{participant.group}': the process on the socket of rank 0 "
                    f"runs as user {user}, but rank {participant.group_rank(participant.rank)} "
                    f"runs as user {os.geteuid()}",
                    peer=participant.group_rank(0),
                )
            pidfd = _C.host.open_pidfd(os.getpid())
            try:
                send(connection, {"token": root["token"], "rank": participant.rank}, [pidfd])
            finally:
                os.close(pidfd)
            return receive(connection, participant.world + 1)

    def _watch(self, pidfds: list[int]) -> None:
        """Raise if the process of a rank has exited."""
        poll = select.poll()
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            with self.peer_errors(pidfds.index(pidfd)):
                raise EOFError("its process has ended")

    def _create(self) -> tuple[int, str | None]:
        world = self.participant.world
        error = find_memory_shortage(sum(size for _, size in self.ranges), world)
        if error is not None:
            return -1, error
        try:
            name = f"tpkernels-{self.purpose}"
            return _C.host.Arena.create(self.region_bytes, world, name), None
        except (OSError, RuntimeError, OverflowError) as failure:
            return -1, str(failure)

    def _map(self, memory: int) -> tuple[_C.host.Arena | None, str | None]:
        try:
            # An outside process reads the calls of a group in its workspace (`tpkernels stuck`).
            arena = _C.host.Arena(
                memory, self.region_bytes, self.participant.world, keep_fd=self.purpose == WORKSPACE
            )
            for offset, size in self.ranges:
                arena.commit(self.participant.rank, offset, size)
        except RuntimeError as error:
            return None, f"rank {self.participant.rank}: {error}"
        return arena, None

    def _find_shortage(self, descriptors: list[int], expected: int) -> str | None:
        """Return an error message if descriptors are missing. The kernel silently drops descriptors
        beyond the limit of the process."""
        if len(descriptors) == expected:
            return None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"rank {self.participant.rank} can open only {len(descriptors)} of the {expected} file "
            f"descriptors that it needs; its limit is {limit}: raise it (ulimit -n)"
        )

    @contextlib.contextmanager
    def bounded(self, peer: int) -> Iterator[float]:
        """Yield the seconds left to wait for ``peer``. Raise if the deadline has passed."""
        with self.peer_errors(peer):
            remaining = self.deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            yield remaining

    @contextlib.contextmanager
    def peer_errors(self, peer: int) -> Iterator[None]:
        """Convert socket errors to errors of this package that name ``peer``."""
        participant = self.participant
        rank, peer = participant.group_rank(participant.rank), participant.group_rank(peer)
        prefix = f"setup of group '{participant.group}': rank {rank} waited for rank {peer}"
        try:
            yield
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"{prefix}, which did not arrive within {participant.timeout:g} s, "
                "the timeout of the group",
                peer=peer,
            ) from error
        except (ConnectionError, EOFError, DistError) as error:
            # The notice with the cause arrives shortly after the connections close.
            notice_deadline = time.monotonic() + _NOTICE
            while time.monotonic() < notice_deadline:
                with contextlib.suppress(DistError):  # the peer also hosted the store
                    participant.check_peers("setup")
                time.sleep(0.005)
            raise PeerLostError(f"{prefix}, which disconnected ({error})", peer=peer) from error


def _receive_hello(connection: socket.socket, token: str) -> tuple[int, list[int]]:
    """Receive the hello of a peer. Return the sender rank (0 for an unrelated process) and the
    descriptors."""
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
    """Listen on an abstract Unix socket with a unique name. The name vanishes with the socket.
    Every user of the machine can see the name and connect."""
    name = f"tpkernels-{purpose}-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        yield listener, name


@contextlib.contextmanager
def connected(name: str, seconds: float) -> Iterator[socket.socket]:
    """Connect to the socket ``name``. If its queue is full, wait in the kernel for a free slot, for
    at most ``seconds``.

    Raises:
        ConnectionRefusedError: no process listens on the socket.
        TimeoutError: the queue stayed full.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        # With settimeout, Python would not wait for a free slot in the queue of a Unix socket.
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
    """Send one message with copies of ``descriptors``. They stay open in this process."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors)


def receive(
    connection: socket.socket, max_descriptors: int = 0
) -> tuple[dict[str, Any], list[int]]:
    """Receive the next message.

    Returns:
        The message, and its descriptors, which the caller must close. Descriptors beyond the limit
        of this process are missing.

    Raises:
        EOFError: the peer closed the connection.
        OSError: the connection failed.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, max_descriptors)
    except ConnectionResetError:  # reported once, ahead of data sent before the close
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, max_descriptors)
    if not data:
        close_all(descriptors)
        raise EOFError("the connection was closed")
    return json.loads(data), descriptors


def get_peer_user(connection: socket.socket) -> int:
    """Return the effective user id of the peer of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
