"""Connections over abstract Unix sockets between the ranks of a rendezvous, and the messages on
them: JSON with file descriptors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tpkernels.errors import CollectiveTimeoutError, PeerLostError

MOST_DESCRIPTORS = 253  # the kernel's limit for one message
_BACKLOG = 512  # connections that may wait to be accepted, including those of strangers
_CONNECT_SLICE = 0.1  # s


@contextlib.contextmanager
def listening(purpose: str) -> Iterator[tuple[socket.socket, str]]:
    """A listening Unix socket under a unique name, which disappears with the socket. Every user of
    the machine can see the name and connect."""
    name = f"tpkernels-{purpose}-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
        yield listener, name


@contextlib.contextmanager
def connected(name: str, seconds: float) -> Iterator[socket.socket]:
    """A connection to the socket called ``name``. If strangers have filled its queue, waits in the
    kernel for a place in it, for at most ``seconds``.

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
    whole = int(seconds)
    time_value = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time_value)


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    """Send one message with descriptors, which stay open here."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors)


def receive(connection: socket.socket, most_descriptors: int) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors, which the caller must close. Fewer arrive than were
    sent if this process may open no more.

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
    """The effective user on the other side of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
