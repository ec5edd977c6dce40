"""The transport between the parent and a rank: messages through a socket pair.

A message consists of a head, a small plain value with the message kind, and content, a list of
buffers from `dumps`. Both are pickles. That is safe: both processes run the program of one user,
and only they hold the sockets. The content is unpickled separately from the head, so an unpickling
error does not desynchronize the messages. The data of tensors and arrays is sent out of band, next
to the pickle. It is copied into the socket and out of it, without further copies.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

_LENGTH = struct.Struct("<Q")  # size of the frame, a pickle of the head and the buffer sizes
_SMALL = 1 << 16  # bytes; smaller messages are joined: one system call, one wake-up
Bytes: TypeAlias = bytes | bytearray | memoryview  # one-dimensional
Message: TypeAlias = list[Bytes]


class _Pickler(pickle.Pickler):
    """Pickles only the elements of plain tensors. The torch pickler copies full storages, and does
    not support all dtypes."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        dims = sorted(range(value.dim()), key=value.stride, reverse=True)  # in memory order
        plain = value.permute(dims).resolve_conj().resolve_neg().contiguous()
        # Not a memoryview: before 3.11.9, Python crashes when it collects garbage that holds a
        # memoryview in use.
        array: Any = plain.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(array), value.dtype, plain.shape, dims)


def _tensor(
    elements: memoryview, dtype: torch.dtype, shape: torch.Size, dims: list[int]
) -> torch.Tensor:
    if not len(elements):  # torch.frombuffer rejects an empty buffer
        plain = torch.empty(shape, dtype=dtype)
    else:
        plain = torch.frombuffer(elements, dtype=torch.uint8).view(dtype).view(shape)
    return plain.permute([dims.index(dim) for dim in range(len(dims))])


def dumps(value: object, name: str) -> Message:
    """Return the content of a message for a value. Dense tensors are not copied, so send the
    message before they change.

    Args:
        name: name of the value in error messages.

    Raises:
        TypeError: the value cannot be pickled.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:  # pickling may raise any class
        raise TypeError(f"{name} cannot be sent: {error}") from error
    return [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def loads(content: Message) -> Any:
    """Return the value that `dumps` has serialized. The caller owns its tensors."""
    pickled, *buffers = content
    return pickle.loads(pickled, buffers=buffers)


def encode(head: object, content: Sequence[Bytes] = ()) -> Message:
    """Return the buffers of a message."""
    frame = pickle.dumps((head, [len(buffer) for buffer in content]))
    message = [_LENGTH.pack(len(frame)), frame, *content]
    return [b"".join(message)] if sum(map(len, message)) <= _SMALL else message


def _wait_on() -> None:
    pass


def send(pipe: socket.socket, message: Message, check: Callable[[], None] = _wait_on) -> None:
    """Send a message.

    Args:
        check: called at each timeout of the socket; raises to end the wait.

    Raises:
        OSError: the peer process ended.
    """
    for buffer in message:
        _move(pipe.send, buffer, check)


def receive(pipe: socket.socket, check: Callable[[], None] = _wait_on) -> tuple[Any, Message]:
    """Receive a message. Returns its head and its content.

    Args:
        check: called at each timeout of the socket; raises to end the wait.

    Raises:
        EOFError, OSError: the peer process ended.
    """

    def fill(data: memoryview) -> memoryview:
        _move(pipe.recv_into, data, check)
        return data

    (length,) = _LENGTH.unpack(fill(memoryview(bytearray(_LENGTH.size))))
    head, lengths = pickle.loads(fill(memoryview(bytearray(length))))
    # Memory from torch is aligned for tensors and not zero-filled.
    buffers: list[Any] = [torch.empty(length, dtype=torch.uint8).numpy() for length in lengths]
    return head, [fill(memoryview(buffer)) for buffer in buffers]


def _move(move: Callable[[memoryview], int], data: Bytes, check: Callable[[], None]) -> None:
    rest = memoryview(data)
    while rest:
        try:
            moved = move(rest)
        except TimeoutError:
            check()
            continue
        if not moved:
            raise EOFError("the peer process closed the connection")
        rest = rest[moved:]
