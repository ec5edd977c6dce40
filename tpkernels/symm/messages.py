"""Messages between the ranks of a rendezvous: JSON, with descriptors, over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

from tpkernels.errors import CollectiveTimeoutError, PeerLostError


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    """One message, with descriptors, which stay open here."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors)


def receive(connection: socket.socket, most_descriptors: int) -> tuple[dict[str, Any], list[int]]:
    """The next message and the descriptors that came with it, which are the caller's.

    Raises:
        EOFError, OSError: there is none, and why.
        CollectiveTimeoutError, PeerLostError: rank 0 sent word that it gave up.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, most_descriptors)
    except ConnectionResetError:  # told once, ahead of what the peer had sent before it closed
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
    """The user on the other side of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
