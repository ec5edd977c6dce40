"""What executors send: plain values as msgpack, tensors as raw bytes behind it.

A message has a frame (two lengths, then msgpack) and the bytes of its tensors in the order in which
the msgpack names them, so a tensor is copied into the transport and out of it, and nowhere else.
Decoding builds values of the types below and runs no code of the sender.

Allowed are None, bool, int, float, str, bytes, list, tuple, dict, and dense CPU tensors. Subclasses
are refused, because they would arrive as something else.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgpack
import torch

_LENGTHS = struct.Struct("<QQ")  # bytes of msgpack, bytes of tensors
_TENSOR = 2  # the code of an extension of msgpack: the dtype and shape of a tensor
_TUPLE = msgpack.ExtType(1, b"")  # the first item of a list that stands for a tuple
_PLAIN = (type(None), bool, int, float, str, bytes)
_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


Bytes = bytearray | memoryview  # a vector of bytes, which may be written


@dataclass(frozen=True)
class Message:
    """A message to be sent: its parts follow one another. The first holds the lengths and the
    msgpack, the others a tensor each. None is empty."""

    parts: list[Bytes]

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


class _Refused(Exception):
    pass


def encode(value: Any, what: str | Sequence[str] = "the message") -> Message:
    """The message of a value. Contiguous tensors are not copied: send it before they change.

    Args:
        what: the name of the value in errors, or the names of its items.

    Raises:
        TypeError: it holds something that cannot be sent; the error has the path to it.
        ValueError: an integer of more than 64 bits, or a value nested too deeply.
    """
    tensors: list[torch.Tensor] = []
    packed = b""
    with contextlib.suppress(_Refused, ValueError):
        packed = _pack(value, tensors)
    if not packed:
        named = [(value, what)] if isinstance(what, str) else zip(value, what, strict=True)
        for one, name in named:
            _explain(one, name)
        raise ValueError(f"{name} is nested too deeply to be sent, or contains itself")
    payloads = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
    frame = bytearray(_LENGTHS.pack(len(packed), sum(map(len, payloads))))
    frame += packed
    return Message([frame, *payloads])


def receive(fill: Callable[[Bytes], None]) -> Any:
    """The value of the next message.

    Args:
        fill: overwrites its argument with the next bytes of the transport.

    Raises:
        ValueError: this is not a message.
    """
    lengths = bytearray(_LENGTHS.size)
    fill(lengths)
    header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    try:
        header = bytearray(header_bytes)
    except (OverflowError, MemoryError) as error:
        raise ValueError(f"malformed message: no memory for {header_bytes} bytes") from error
    fill(header)
    tensors: list[torch.Tensor] = []
    value = _unpack(header, tensors, payload_bytes)
    for tensor in tensors:
        if tensor.numel():
            fill(_bytes_of(tensor))
            if tensor.dtype is torch.bool and tensor.view(torch.uint8).max() > 1:
                raise ValueError("malformed message: a bool tensor holds bytes other than 0 and 1")
    return value


def decode(data: bytes) -> Any:
    """The value of a message that is all here. Raises ValueError if it is malformed."""
    rest = memoryview(data)

    def fill(out: Bytes) -> None:
        nonlocal rest
        if len(out) > len(rest):
            raise ValueError(f"malformed message: it ends after {len(data)} bytes")
        out[:] = rest[: len(out)]
        rest = rest[len(out) :]

    value = receive(fill)
    if rest:
        raise ValueError(f"malformed message: {len(rest)} bytes too many")
    return value


def _pack(value: Any, tensors: list[torch.Tensor]) -> bytes:
    def replace(other: Any) -> Any:
        if type(other) is tuple:
            return [_TUPLE, *other]
        if isinstance(other, torch.Tensor) and _objection(other) is None:
            tensors.append(other)
            described = [_NAME_OF[other.dtype], list(other.shape)]
            return msgpack.ExtType(_TENSOR, msgpack.packb(described))
        raise _Refused

    packed: bytes = msgpack.packb(
        value, default=replace, strict_types=True, unicode_errors="surrogatepass"
    )
    return packed


def _unpack(packed: Any, tensors: list[torch.Tensor], payload_bytes: int) -> Any:
    left, marks = payload_bytes, 0

    def extended(code: int, data: bytes) -> Any:
        nonlocal left, marks
        if (code, data) == _TUPLE:
            marks += 1
            return _TUPLE
        dtype, shape = _described(code, msgpack.unpackb(data))
        left -= prod(shape) * dtype.itemsize
        if left < 0:
            raise ValueError(f"its tensors hold more than {payload_bytes} bytes")
        tensors.append(_empty(shape, dtype))
        return tensors[-1]

    def listed(items: list[Any]) -> Any:
        nonlocal marks
        if not items or items[0] is not _TUPLE:
            return items
        marks -= 1
        return tuple(items[1:])

    try:
        value = msgpack.unpackb(
            packed,
            ext_hook=extended,
            list_hook=listed,
            strict_map_key=False,
            timestamp=1,  # a float
            unicode_errors="surrogatepass",
        )
        if marks:
            raise ValueError("the mark of a tuple is not the first item of a list")
        if left:
            raise ValueError(f"its tensors hold {left} of {payload_bytes} bytes too few")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # TypeError: a list as a key.
        raise ValueError(f"malformed message: {error or type(error).__name__}") from error
    return value


def _described(code: int, inner: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of a tensor in a message."""
    if code != _TENSOR or not (isinstance(inner, list) and len(inner) == 2):
        raise ValueError(f"unknown extension {code}")
    name, shape = inner
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}"[:200])
    sizes = shape if isinstance(shape, list) else [-1]
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError(f"impossible shape {shape!r}"[:200])
    return DTYPES[name], tuple(sizes)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"malformed message, or no memory for shape {shape}: {error}") from error


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements as bytes: in place if the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _objection(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be sent, and what to do."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__qualname__}; send a plain tensor, such as its local shard"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}; send tensor.cpu()"
    if tensor.layout is not torch.strided:
        return f"a tensor with layout {tensor.layout}; send tensor.to_dense()"
    if tensor.dtype not in _NAME_OF:
        return f"a tensor of {tensor.dtype}; allowed: {', '.join(DTYPES)}"
    return None


def _explain(value: Any, path: str, depth: int = 0) -> None:
    """Raises the error of the first part of ``value`` that cannot be sent."""
    if depth > 200:
        return
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{path} is an integer of {value.bit_length()} bits; 64 can be sent")
    if type(value) in _PLAIN:
        return
    if isinstance(value, torch.Tensor):
        objection = _objection(value)
        if objection is not None:
            raise TypeError(f"{path} is {objection}")
    elif type(value) is dict:
        for key, one in value.items():
            _explain(key, f"the key {key!r:.60} of {path}", depth + 1)
            _explain(one, f"{path}[{key!r:.60}]", depth + 1)
    elif type(value) in (list, tuple):
        for index, one in enumerate(value):
            _explain(one, f"{path}[{index}]", depth + 1)
    else:
        raise TypeError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            "sent; allowed: None, bool, int, float, str, bytes, list, tuple, dict, CPU tensors"
        )
