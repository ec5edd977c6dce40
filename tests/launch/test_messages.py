"""Messages: every value arrives as it was sent, whatever its size, and an error in one leaves the
next in step."""

from __future__ import annotations

import gc
import socket
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tpkernels.launch import messages
from tpkernels.launch.messages import Message

Pipe = tuple[socket.socket, socket.socket]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def arrived(content: Message) -> Message:
    """The content on the other side, in memory of its own."""
    return [memoryview(bytearray(part)) for part in content]


def sent(value: Any) -> Any:
    return messages.loads(arrived(messages.dumps(value, "the value")))


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
    st.integers(),
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


NARROW = {f"{u}int{bits}" for u in ("", "u") for bits in range(1, 8)}
DTYPES = {
    str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
DTYPES -= NARROW | {name for name in DTYPES if name.startswith(("q", "bits"))}


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_of_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    most = 2 if dtype is torch.bool else 256
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        raw = torch.randint(0, most, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
        whole = raw.view(dtype).view(3, 5)
        tensors = [whole, whole[0, 0], whole[:0], whole[:, 0]]
        if dtype is not torch.float4_e2m1fn_x2:  # torch cannot copy its elements
            tensors += [whole.t(), whole[::2, 1:4], whole[:, ::2].t()]
        got = sent(tensors)
        assert equal(got, tensors)
    strides = [tensor.clone().stride() for tensor in tensors]
    assert [tensor.stride() for tensor in got] == strides


def test_tensors_are_copies_of_what_they_show() -> None:
    x = torch.ones(1 << 16)
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    value = {"x": x, "part": x[:4], "z": z, "neg": z.imag, (1, "k"): (x, [x]), "array": np.ones(4)}
    content = messages.dumps(value, "the value")
    assert sum(map(len, content)) < 5 * x.numel()  # bytes: of `part`, not all that it is a view of
    assert content[1].obj is not None and len(content[0]) < 5000  # x is not in the pickle
    got = messages.loads(arrived(content))
    assert torch.equal(got["z"], z) and torch.equal(got["neg"], z.imag)
    assert got[1, "k"][0] is got[1, "k"][1][0] is got["x"]
    got["x"].fill_(7)
    got["array"][:] = 7
    assert x.sum() == x.numel() and got["part"].sum() == 4 and value["array"].sum() == 4


def test_content_in_a_cycle_is_collected() -> None:
    """Python crashed on some of it."""
    for _ in range(100):
        content: list[Any] = list(messages.dumps([torch.ones(10), np.ones(10)], "the value"))
        received = arrived(content)
        content += [content, received, received, messages.loads(received)]
        received.append(content)  # type: ignore[arg-type]
    del content, received
    gc.collect()


def test_other_tensors_arrive_as_torch_pickles_them() -> None:
    x = torch.ones(4, requires_grad=True)
    sparse = torch.eye(2).to_sparse()
    leaf, parameter, got = sent((x, nn.Parameter(torch.zeros(2)), sparse))
    assert torch.equal(leaf, x) and leaf.requires_grad
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert torch.equal(got.to_dense(), torch.eye(2))


def test_what_cannot_be_sent_is_named() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    for value, text in (
        (threading.Lock(), r"^args cannot be sent: cannot pickle '_thread\.lock' object"),
        (lambda: None, "^args cannot be sent: .*lambda"),
        (deep, "^args cannot be sent: maximum recursion depth"),
    ):
        with pytest.raises(TypeError, match=text):
            messages.dumps(value, "args")


def test_messages_of_any_size_follow_each_other(pipe: Pipe) -> None:
    """Much more than the pipe holds, nothing, and content that cannot be unpickled."""
    ours, theirs = pipe
    big = torch.arange(1 << 20)
    contents: list[Message] = [messages.dumps(big, "big"), [], [b"no pickle", b"beside it"]]

    def send() -> None:
        for number, content in enumerate(contents):
            messages.send(ours, messages.encode(("head", number), content))

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        got = [messages.receive(theirs) for _ in contents]
        sending.result(10)
    assert [head for head, _ in got] == [("head", number) for number in range(3)]
    assert torch.equal(messages.loads(got[0][1]), big) and not got[1][1]
    assert [bytes(part) for part in got[2][1]] == contents[2]


def test_waits_end_when_the_check_raises_and_when_the_other_side_is_gone(pipe: Pipe) -> None:
    ours, theirs = pipe
    ours.settimeout(0.01)
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks % 3 == 0:
            raise InterruptedError("enough")

    big = messages.encode("head", [bytes(1 << 24)])
    for act in (lambda: messages.receive(ours, check), lambda: messages.send(ours, big, check)):
        with pytest.raises(InterruptedError, match="enough"):
            act()
    assert looks == 6
    theirs.close()
    with pytest.raises(OSError, match="Broken pipe"):
        messages.send(ours, big, check)
    ours.settimeout(None)
    with pytest.raises((EOFError, ConnectionError)):
        messages.receive(ours)
