"""The transport between the parent and a rank: messages through a pair of sockets.

A message has a head, a small plain value that says what it is, and content: the parts that `dumps`
makes of any value. Both are pickles, as the two processes run one user's program and hold the only
ends of the sockets. The content is unpickled apart from the head, so its errors leave the messages
in step. The bytes of tensors and arrays lie beside the pickle: they are copied into the socket and
out of it, and nowhere else.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

_LENGTH = struct.Struct("<Q")  # bytes of the frame, which holds the head and the parts' lengths
_SMALL = 1 << 16  # bytes of a message that is copied together: one system call, one wake-up
Bytes: TypeAlias = bytes | bytearray | memoryview  # one-dimensional
Message: TypeAlias = list[Bytes]


class _Pickler(pickle.Pickler):
    """Sends plain tensors as their elements: torch copies whole storages, and not of all dtypes."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        dims = sorted(range(value.dim()), key=value.stride, reverse=True)  # as they lie in memory
        plain = value.permute(dims).resolve_conj().resolve_neg().contiguous()
        # Not its memoryview: before 3.11.9, Python crashes on garbage with one that is in use.
        array: Any = plain.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(array), value.dtype, plain.shape, dims)


def _tensor(
    elements: memoryview, dtype: torch.dtype, shape: torch.Size, dims: list[int]
) -> torch.Tensor:
    if not len(elements):  # torch makes no tensor of an empty buffer
        plain = torch.empty(shape, dtype=dtype)
    else:
        plain = torch.frombuffer(elements, dtype=torch.uint8).view(dtype).view(shape)
    return plain.permute([dims.index(dim) for dim in range(len(dims))])


def dumps(value: object, what: str) -> Message:
    """Return the content for a value. Dense tensors are not copied: send it before they change.

    Args:
        what: the name of the value in errors.

    Raises:
        TypeError: it cannot be pickled.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:  # pickle, and what it calls, raise several kinds
        raise TypeError(f"{what} cannot be sent: {error}") from error
    return [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def loads(content: Message) -> Any:
    """Return the value for which `dumps` has made the content. Its tensors are the caller's."""
    pickled, *buffers = content
    return pickle.loads(pickled, buffers=buffers)


def encode(head: object, content: Sequence[Bytes] = ()) -> Message:
    """Return a message."""
    frame = pickle.dumps((head, [len(part) for part in content]))
    message = [_LENGTH.pack(len(frame)), frame, *content]
    return [b"".join(message)] if sum(map(len, message)) <= _SMALL else message


def _wait_on() -> None:
    pass


def send(pipe: socket.socket, message: Message, check: Callable[[], None] = _wait_on) -> None:
    """Send a message.

    Args:
        check: called whenever the socket's timeout is over; raises to end the wait.

    Raises:
        OSError: the other side is gone.
    """
    for part in message:
        _move(pipe.send, part, check)


def receive(pipe: socket.socket, check: Callable[[], None] = _wait_on) -> tuple[Any, Message]:
    """Return the head and the content of the next message.

    Args:
        check: called whenever the socket's timeout is over; raises to end the wait.

    Raises:
        EOFError, OSError: the other side is gone.
    """

    def filled(data: memoryview) -> memoryview:
        _move(pipe.recv_into, data, check)
        return data

    (length,) = _LENGTH.unpack(filled(memoryview(bytearray(_LENGTH.size))))
    head, lengths = pickle.loads(filled(memoryview(bytearray(length))))
    # Memory from torch is aligned for it, and not cleared before.
    parts: list[Any] = [torch.empty(length, dtype=torch.uint8).numpy() for length in lengths]
    return head, [filled(memoryview(part)) for part in parts]


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
