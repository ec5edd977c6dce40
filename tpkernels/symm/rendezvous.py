"""Problem: the ranks of a group, who so far share only a key-value store, are to map one arena.

Algorithm: that they can is known (reach.py). Rank 0 makes the memory and listens on an abstract
Unix socket, whose name goes with the socket; the others connect, prove that they are of the group
(a token from the store) and of the same user, and hand over a pidfd of themselves. Rank 0 sends
everybody the memory's descriptor and all pidfds. Every rank maps the memory and commits its own
region; rank 0 collects how that went, and all succeed or all fail alike.

Every step is bounded by one deadline. Descriptors received are closed on every path.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from tpkernels import _C
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError
from tpkernels.symm.limits import available_bytes
from tpkernels.symm.messages import close_all, receive, send, user_of

# Rank 0 gives up at the deadline; the others leave it this long (s) to tell them on whom.
_GRACE = 1.0


@dataclass(frozen=True)
class Member:
    """This rank's place in a group, and the means to reach the others before there is memory."""

    store: Store
    group: str
    rank: int
    world: int
    timeout: float
    watch: Callable[[], None] | None = None  #: raises if a peer is lost, once that can be told


@dataclass(frozen=True)
class Link:
    """An arena that all ranks have mapped, and a pidfd and pid of each rank."""

    arena: _C.Arena
    pidfds: list[int]
    pids: list[int]


def exchange(member: Member, purpose: str, say: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, in rank order. Waits for all, ``member.timeout`` at the most."""
    store = member.store
    prefix = f"tpkernels/{member.group}/{purpose}"
    arrival = store.add(f"{prefix}/arrivals", 1) - 1
    prefix += f"/{arrival // member.world}"
    store.set(f"{prefix}/{member.rank}", json.dumps(say))
    deadline = time.monotonic() + member.timeout
    said = []
    for rank in range(member.world):
        key = f"{prefix}/{rank}"
        try:
            _await(member, key, deadline)
        except TpkernelsError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise CollectiveTimeoutError(
                f"{purpose} of group '{member.group}': rank {member.rank} waited "
                f"{member.timeout:g} s for rank {rank}, which did not come. All ranks of the group "
                "must make their first call, call tpkernels.init or make a communicator together.",
                peer=rank,
            ) from error
        said.append(json.loads(store.get(key)))
    return said


def _await(member: Member, key: str, deadline: float) -> None:
    """Polls. ``Store.wait`` would hold the client's lock, and what is waited for may hang on what
    another thread of this process has to say, of another group."""
    pause = 1e-4
    while not member.store.check([key]):
        if member.watch is not None:
            member.watch()
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


@contextlib.contextmanager
def listening(purpose: str, backlog: int) -> Iterator[tuple[socket.socket, str]]:
    """A Unix socket under a name that no other has, which goes with it."""
    name = f"tpkernels-{purpose}-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
        yield listener, name


def make_arena(member: Member, purpose: str, region_bytes: int) -> Link:
    """Maps a new arena of ``member.world`` regions on every rank. Collective.

    Raises:
        MemoryError: on every rank, when one of them cannot commit its region.
        CollectiveTimeoutError, PeerLostError: a rank did not come, or left.
    """
    if member.world == 1:
        return _lone_arena(region_bytes)
    deadline = time.monotonic() + member.timeout
    if member.rank == 0:
        token = secrets.token_hex(16)
        with listening(purpose, member.world) as (listener, name):
            exchange(member, purpose, {"socket": name, "token": token})
            return _host(member, listener, token, region_bytes, deadline)
    root = exchange(member, purpose, {})[0]
    with (
        _bounded(member, 0, deadline) as remaining,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        connection.settimeout(remaining + _GRACE)
        connection.connect(f"\0{root['socket']}")
        return _join(member, connection, root["token"], region_bytes)


def _host(
    member: Member, listener: socket.socket, token: str, region_bytes: int, deadline: float
) -> Link:
    ranks = range(member.world)
    peers: dict[int, socket.socket] = {}
    pidfds, pids, memory = {0: _own_pidfd()}, {0: os.getpid()}, -1
    with contextlib.ExitStack() as open_files:
        try:
            while len(peers) < member.world - 1:
                missing = min(set(ranks[1:]) - set(peers))
                with _bounded(member, missing, deadline) as remaining:
                    listener.settimeout(remaining)
                    connection = open_files.enter_context(listener.accept()[0])
                    if user_of(connection) != os.getuid():  # a stranger; our members still come
                        connection.close()
                        continue
                    connection.settimeout(remaining)
                    hello, descriptors = receive(connection, 1)
                if hello.get("token") != token:
                    close_all(descriptors)
                    connection.close()
                    continue
                peers[hello["rank"]] = connection
                pidfds[hello["rank"]], pids[hello["rank"]] = descriptors[0], hello["pid"]
            memory, error = _create(region_bytes, member.world)
            shared = [pidfds[r] for r in ranks] + ([memory] if memory >= 0 else [])
            offer = {"pids": [pids[r] for r in ranks], "error": error}
            for rank, connection in peers.items():
                with _bounded(member, rank, deadline):
                    send(connection, offer, shared)
            arena = None
            if error is None:
                arena, error = _map(memory, region_bytes, member.world, 0)
            for rank, connection in peers.items():
                with _bounded(member, rank, deadline):  # all are heard, or a close would reset them
                    error = receive(connection, 0)[0]["error"] or error
            for rank, connection in peers.items():
                with _bounded(member, rank, deadline):
                    send(connection, {"error": error}, [])
        except BaseException as failure:
            close_all(pidfds.values())
            late = isinstance(failure, CollectiveTimeoutError)
            told = {"failed": str(failure), "late": late, "peer": getattr(failure, "peer", None)}
            for connection in peers.values():
                with contextlib.suppress(OSError):
                    send(connection, told, [])
            raise
        finally:
            close_all([memory] if memory >= 0 else [])
    return _verdict(arena, error, [pidfds[r] for r in ranks], [pids[r] for r in ranks])


def _join(member: Member, connection: socket.socket, token: str, region_bytes: int) -> Link:
    own = _own_pidfd()
    try:
        hello = {"token": token, "rank": member.rank, "pid": os.getpid()}
        send(connection, hello, [own])
    finally:
        os.close(own)
    offer, descriptors = receive(connection, member.world + 1)
    pidfds, memory = descriptors[: member.world], descriptors[member.world :]
    try:
        arena, error = None, offer["error"]
        if error is None:
            arena, error = _map(memory[0], region_bytes, member.world, member.rank)
        with contextlib.suppress(BrokenPipeError):  # then rank 0 has said why
            send(connection, {"error": error}, [])
        verdict = receive(connection, 0)[0]["error"]
    except BaseException:
        close_all(pidfds)
        raise
    finally:
        close_all(memory)
    return _verdict(arena, verdict, pidfds, offer["pids"])


def _lone_arena(region_bytes: int) -> Link:
    memory, error = _create(region_bytes, 1)
    arena = None
    if error is None:
        arena, error = _map(memory, region_bytes, 1, 0)
        os.close(memory)
    return _verdict(arena, error, [_own_pidfd()], [os.getpid()])


def _create(region_bytes: int, world: int) -> tuple[int, str | None]:
    total, free = region_bytes * world, available_bytes()
    if total > free:
        return -1, (
            f"the ranks' shared memory takes {world} x {region_bytes >> 20} MiB, and only "
            f"{free >> 20} MiB are free; give tpkernels.init a smaller workspace_bytes"
        )
    try:
        return _C.Arena.create(region_bytes, world), None
    except RuntimeError as error:
        return -1, str(error)


def _map(
    memory: int, region_bytes: int, world: int, rank: int
) -> tuple[_C.Arena | None, str | None]:
    try:
        arena = _C.Arena(memory, region_bytes, world)
        arena.reserve(memory, rank)
    except RuntimeError as error:
        return None, f"rank {rank}: {error}"
    return arena, None


def _verdict(arena: _C.Arena | None, error: str | None, pidfds: list[int], pids: list[int]) -> Link:
    if error is not None or arena is None:
        close_all(pidfds)
        raise MemoryError(f"no shared memory for the group: {error}")
    return Link(arena, pidfds, pids)


def _own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise TpkernelsError(
            f"cannot watch processes (pidfd_open: {error.strerror}); needs Linux 5.3 or newer"
        ) from error


@contextlib.contextmanager
def _bounded(member: Member, peer: int, deadline: float) -> Iterator[float]:
    """Gives the seconds left and turns a socket's failure into ours, naming ``peer``."""
    where = f"set-up of group '{member.group}': rank {member.rank} waited for rank {peer}"
    remaining = deadline - time.monotonic()
    try:
        if remaining <= 0:
            raise TimeoutError
        yield remaining
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"{where}, which did not come within {member.timeout:g} s", peer=peer
        ) from error
    except (ConnectionError, EOFError) as error:
        until = time.monotonic() + 0.2  # a process's end shows a little after its sockets close
        while member.watch is not None and time.monotonic() < until:
            member.watch()
            time.sleep(0.005)
        raise PeerLostError(f"{where}, which left ({error})", peer=peer) from error
