"""What the parent and the ranks send: plain values as msgpack, tensors as raw bytes behind it.

A message has a frame (two lengths, then msgpack) and the bytes of its tensors in the order in which
the msgpack names them, so a tensor is copied into the transport and out of it, and nowhere else.
Decoding builds None, bool, int, float, str, bytes, list, tuple, dict and CPU tensors, and runs no
code of the sender. Subclasses are refused, because they would arrive as something else.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import msgpack
import torch

_LENGTHS = struct.Struct("<QQ")  # bytes of msgpack, bytes of tensors
# Extensions of msgpack: the items of a tuple, as a message; the dtype and shape of a tensor.
_TUPLE, _TENSOR = 1, 2
_PLAIN = (type(None), bool, int, float, str, bytes)
_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
# OverflowError, MemoryError: no memory for so many bytes.
_MALFORMED = (
    ValueError,
    TypeError,
    RecursionError,
    OverflowError,
    MemoryError,
    msgpack.UnpackException,
)
Bytes = bytearray | memoryview  # a vector of bytes, which may be written
Message = list[Bytes]  # the frame, and the bytes of each tensor that has any


class _Refused(Exception):
    pass


def encode(value: Any, what: str | Sequence[str] = "the message") -> Message:
    """Return the message of a value. Contiguous tensors are not copied: send it before they change.

    Args:
        what: the name of the value in errors, or the names of its items.

    Raises:
        TypeError: it holds something that cannot be sent; the error has the path to it.
        ValueError: an integer of more than 64 bits, or a value nested too deeply.
    """
    tensors: list[torch.Tensor] = []

    def replace(other: Any) -> Any:
        if type(other) is tuple:
            return msgpack.ExtType(_TUPLE, pack(list(other)))
        if isinstance(other, torch.Tensor) and _objection(other) is None:
            tensors.append(other)
            return msgpack.ExtType(
                _TENSOR, msgpack.packb([_NAME_OF[other.dtype], list(other.shape)])
            )
        raise _Refused

    pack = partial(
        msgpack.packb, default=replace, strict_types=True, unicode_errors="surrogatepass"
    )
    with contextlib.suppress(_Refused, ValueError, RecursionError):
        packed = pack(value)
        payloads = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        frame = bytearray(_LENGTHS.pack(len(packed), sum(map(len, payloads))) + packed)
        return [frame, *payloads]
    items = [(value, what)] if isinstance(what, str) else zip(value, what, strict=True)
    for item, name in items:
        _explain(item, name)
    names = what if isinstance(what, str) else " or ".join(filter(None, what))
    raise ValueError(f"{names} is nested too deeply to be sent, or contains itself")


def receive(fill: Callable[[Bytes], None]) -> Any:
    """Return the value of the next message.

    Args:
        fill: overwrites its argument with the next bytes of the transport.

    Raises:
        ValueError: this is not a message.
    """
    lengths = bytearray(_LENGTHS.size)
    fill(lengths)
    packed_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    tensors: list[torch.Tensor] = []
    try:
        packed = bytearray(packed_bytes)
        fill(packed)
        value = _unpack(packed, tensors, payload_bytes)
    except _MALFORMED as error:
        raise ValueError(f"malformed message: {error or type(error).__name__}"[:300]) from error
    for tensor in tensors:
        if tensor.numel():
            fill(_bytes_of(tensor))
            if tensor.dtype is torch.bool and tensor.view(torch.uint8).max() > 1:
                raise ValueError("malformed message: a bool tensor holds bytes other than 0 and 1")
    return value


def _unpack(packed: bytearray, tensors: list[torch.Tensor], payload_bytes: int) -> Any:
    left = payload_bytes

    def extended(code: int, data: bytes) -> Any:
        nonlocal left
        if code == _TUPLE:
            return tuple(unpack(data))
        if code != _TENSOR:
            raise ValueError(f"unknown extension {code}")
        name, shape = msgpack.unpackb(data)
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
            raise ValueError(f"impossible shape {shape!r}")
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}")
        left -= prod(shape) * DTYPES[name].itemsize
        if left < 0:
            raise ValueError(f"its tensors hold more than {payload_bytes} bytes")
        try:
            tensors.append(torch.empty(shape, dtype=DTYPES[name]))
        except RuntimeError as error:
            raise ValueError(f"no tensor of shape {shape}: {error}") from error
        return tensors[-1]

    unpack = partial(
        msgpack.unpackb,
        ext_hook=extended,
        strict_map_key=False,
        timestamp=1,  # a float
        unicode_errors="surrogatepass",
    )
    value = unpack(packed)
    if left:
        raise ValueError(f"{left} bytes of no tensor")
    return value


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements as bytes: in place if the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _objection(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be sent, and what to do."""
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
    """Raise the error of the first part of ``value`` that cannot be sent."""
    if depth > 200:
        return
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{path} is an integer of {value.bit_length()} bits; 64 can be sent")
    if isinstance(value, torch.Tensor):
        if (objection := _objection(value)) is not None:
            raise TypeError(f"{path} is {objection}")
    elif type(value) is dict:
        for key, item in value.items():
            _explain(key, f"the key {key!r:.60} of {path}", depth + 1)
            _explain(item, f"{path}[{key!r:.60}]", depth + 1)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _explain(item, f"{path}[{index}]", depth + 1)
    elif type(value) not in _PLAIN:
        raise TypeError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            "sent; allowed: None, bool, int, float, str, bytes, list, tuple, dict, CPU tensors"
        )
