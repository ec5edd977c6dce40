"""Messages: every value arrives as it was sent, and nothing else is sent or accepted."""

from __future__ import annotations

import io
import pickle
import random
import struct
import warnings
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tpkernels.launch.messages import DTYPES, Bytes, encode, receive

SENT = (type(None), bool, int, float, str, bytes, list, tuple, dict, torch.Tensor)


def decode(data: bytes) -> Any:
    """The value of a message, all of which is there."""
    rest = io.BytesIO(data)

    def fill(out: Bytes) -> None:
        if rest.readinto(out) < len(out):
            raise ValueError("malformed message: it ends early")

    return receive(fill)


def sent(value: Any) -> Any:
    return decode(b"".join(encode(value)))


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def equal(a: Any, b: Any) -> bool:
    """Types, order and bits too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        return equal(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return repr(a) == repr(b)  # nan, -0.0


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(st.characters(), max_size=9),
    st.binary(max_size=9),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(PLAIN, st.tuples(PLAIN, PLAIN)), inner, max_size=4),
        st.just(torch.arange(6, dtype=torch.int16).view(2, 3)),
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(VALUES)
def test_values_arrive_as_they_were_sent(value: Any) -> None:
    assert equal(sent(value), value)


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    most = 2 if dtype is torch.bool else 256
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        raw = torch.randint(0, most, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
        whole = raw.view(dtype).view(3, 5)
        tensors = [whole, whole[0, 0], whole[:0], whole[:, 0]]
        if dtype is not torch.float4_e2m1fn_x2:  # torch cannot copy its elements
            tensors += [whole.t(), whole[::2, 1:4]]
        got = sent(tensors)
        assert equal(got, tensors)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in got)


def test_every_plain_dtype_of_torch_is_known() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    odd = {dtype for dtype in every if str(dtype)[6:].startswith(("q", "bits"))}
    narrow = {
        torch.int1,
        torch.uint1,
        *(getattr(torch, f"{u}int{b}") for u in ("", "u") for b in range(2, 8)),
    }
    assert every - odd - narrow == set(DTYPES.values())


def test_tensors_are_copies_without_gradients() -> None:
    x = torch.ones(4, requires_grad=True)
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    got = sent(
        {"x": x * 2, "p": nn.Parameter(torch.zeros(2)), "z": z, "neg": z.imag, (1, "k"): (x, [x])}
    )
    assert type(got["p"]) is torch.Tensor and not got["x"].requires_grad
    assert torch.equal(got["z"], z) and torch.equal(got["neg"], z.imag)
    assert torch.equal(got[1, "k"][0], x) and torch.equal(got[1, "k"][1][0], x)
    got["x"].fill_(7)
    assert x.sum() == 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), r"^args is a builtins\.object, which cannot be sent; allowed: None, bool"),
        ([1, {"a": (2, {3})}], r"^args\[1\]\['a'\]\[1\] is a builtins\.set,"),
        ({frozenset(): 1}, r"^the key frozenset\(\) of args is a builtins\.frozenset"),
        ((torch.Size([2]),), r"^args\[0\] is a torch\.Size,"),
        (np.float32(1), r"^args is a numpy\.float32,"),
        (torch.empty(1, device="meta"), r"^args is a tensor on meta; send tensor\.cpu\(\)"),
        (torch.eye(2).to_sparse(), r"layout torch\.sparse_coo; send tensor\.to_dense\(\)"),
        (torch.ones(1).as_subclass(nn.UninitializedBuffer), "a UninitializedBuffer; send a plain"),
        (torch.empty(2, dtype=torch.bits8), r"a tensor of torch\.bits8; allowed: bool, uint8"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_named(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        encode(value, "args")


def test_integers_and_depth_have_limits() -> None:
    for good in (-(1 << 63), (1 << 64) - 1):
        assert sent([good]) == [good]
    for bad in (-(1 << 63) - 1, 1 << 64):
        with pytest.raises(ValueError, match=r"^args\['n'\] is an integer of 6[45] bits; 64 can"):
            encode({"n": bad}, "args")
    for make in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}):
        value: Any = 0
        for _ in range(2000):
            value = make(value)
        with pytest.raises(ValueError, match="nested too deeply"):
            encode(value)
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="contains itself"):
        encode(circle)


# What comes in.


def framed(packed: bytes, tensors: bytes = b"") -> bytes:
    return struct.pack("<QQ", len(packed), len(tensors)) + packed + tensors


def tensor_of(dtype: Any, shape: Any) -> bytes:
    return msgpack.packb(msgpack.ExtType(2, msgpack.packb([dtype, shape])))


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 16,
        framed(b"\xc0\xc0"),
        framed(b"\xc1"),
        framed(b"\x81\x90\x00"),  # a list as a key
        framed(b"\xa1\xff"),  # no UTF-8
        framed(b"\xdd\xff\xff\xff\xff"),  # a list of 2^32 items
        struct.pack("<QQ", 1 << 62, 0),
        struct.pack("<QQ", 1, 1 << 62) + b"\xc0",
        framed(msgpack.packb(msgpack.ExtType(3, b""))),
        framed(msgpack.packb(msgpack.ExtType(1, b"x"))),
        framed(msgpack.packb(msgpack.ExtType(2, b"\xc1"))),
        framed(tensor_of("float32", [2]), b"1234"),
        framed(tensor_of("float32", [1]), b"12345"),
        framed(tensor_of("float32", [-1]), b"1234"),
        framed(tensor_of("float32", [1 << 62, 1 << 62, 0])),
        framed(tensor_of("__class__", [1]), b"1234"),
        framed(tensor_of(["float32"], [1]), b"1234"),
        framed(tensor_of("bool", [2]), b"\1\2"),
        pickle.dumps([1]),
    ],
)
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="malformed message"):
        decode(data)


def check(value: Any) -> None:
    assert type(value) in SENT, type(value)
    if isinstance(value, dict):
        check([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for one in value:
            check(one)


def test_damaged_messages_are_refused_or_hold_plain_values() -> None:
    value = [("call", {"x": torch.arange(5), 2: (True, None)}), 2.5, b"bytes", "text", -7]
    whole = b"".join(encode(value))
    source, refused = random.Random(1), 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(source.choice((1, 1, 2, 4))):
            damaged[source.randrange(16, len(damaged))] = source.randrange(256)
        try:
            check(decode(bytes(damaged)))
        except ValueError as error:
            assert "malformed" in str(error)
            refused += 1
    assert 375 < refused < 1500  # others hit the numbers and texts
