"""Messages between the executor and its ranks: values arrive unchanged at any size, and an error in
one message does not disturb the next."""

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
    local, remote = socket.socketpair()
    with local, remote:
        yield local, remote


def transfer(content: Message) -> Message:
    """Copy the content into new buffers, as a receiver would."""
    return [memoryview(bytearray(buffer)) for buffer in content]


def round_trip(value: Any) -> Any:
    return messages.loads(transfer(messages.dumps(value, "the value")))


def byte_values(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def equal(a: Any, b: Any) -> bool:
    """Compare recursively: types, order of dict items and bits of tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and byte_values(a) == byte_values(b)
    if isinstance(a, dict):
        return equal(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return repr(a) == repr(b)  # distinguishes -0.0 from 0.0, and equates NaNs


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
    assert equal(round_trip(value), value)


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
    end = 2 if dtype is torch.bool else 256
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        raw = torch.randint(0, end, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
        x = raw.view(dtype).view(3, 5)
        tensors = [x, x[0, 0], x[:0], x[:, 0]]
        if dtype is not torch.float4_e2m1fn_x2:  # torch cannot copy its elements
            tensors += [x.t(), x[::2, 1:4], x[:, ::2].t()]
        got = round_trip(tensors)
        assert equal(got, tensors)
    strides = [tensor.clone().stride() for tensor in tensors]
    assert [tensor.stride() for tensor in got] == strides


def test_tensors_are_copied_without_their_storage() -> None:
    x = torch.ones(1 << 16)
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    value = {"x": x, "part": x[:4], "z": z, "neg": z.imag, (1, "k"): (x, [x]), "array": np.ones(4)}
    content = messages.dumps(value, "the value")
    # In bytes: `part` sends its 4 elements, not its full base.
    assert sum(map(len, content)) < 5 * x.numel()
    # The pickle does not contain the data of x.
    assert content[1].obj is not None and len(content[0]) < 5000
    got = messages.loads(transfer(content))
    assert torch.equal(got["z"], z) and torch.equal(got["neg"], z.imag)
    assert got[1, "k"][0] is got[1, "k"][1][0] is got["x"]
    got["x"].fill_(7)
    got["array"][:] = 7
    assert x.sum() == x.numel() and got["part"].sum() == 4 and value["array"].sum() == 4


def test_content_in_a_cycle_is_collected() -> None:
    """Regression test: the garbage collector of Python crashed on some of these cycles."""
    for _ in range(100):
        content: list[Any] = list(messages.dumps([torch.ones(10), np.ones(10)], "the value"))
        received = transfer(content)
        content += [content, received, received, messages.loads(received)]
        received.append(content)  # type: ignore[arg-type]
    del content, received
    gc.collect()


def test_parameters_and_sparse_tensors_use_the_torch_pickle() -> None:
    x = torch.ones(4, requires_grad=True)
    sparse = torch.eye(2).to_sparse()
    leaf, parameter, got = round_trip((x, nn.Parameter(torch.zeros(2)), sparse))
    assert torch.equal(leaf, x) and leaf.requires_grad
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert torch.equal(got.to_dense(), torch.eye(2))


def test_unpicklable_values_are_named() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    for value, message in (
        (threading.Lock(), r"^args cannot be sent: cannot pickle '_thread\.lock' object"),
        (lambda: None, "^args cannot be sent: .*lambda"),
        (deep, "^args cannot be sent: maximum recursion depth"),
    ):
        with pytest.raises(TypeError, match=message):
            messages.dumps(value, "args")


def test_messages_of_any_size_follow_each_other(pipe: Pipe) -> None:
    """Send a message larger than the pipe, an empty message, and content that is not a pickle."""
    local, remote = pipe
    big = torch.arange(1 << 20)
    contents: list[Message] = [messages.dumps(big, "big"), [], [b"no pickle", b"beside it"]]

    def send() -> None:
        for number, content in enumerate(contents):
            messages.send(local, messages.encode(("head", number), content))

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        got = [messages.receive(remote) for _ in contents]
        sending.result(10)
    assert [head for head, _ in got] == [("head", number) for number in range(3)]
    assert torch.equal(messages.loads(got[0][1]), big) and not got[1][1]
    assert [bytes(part) for part in got[2][1]] == contents[2]


def test_waits_end_if_the_check_raises_or_the_peer_is_gone(pipe: Pipe) -> None:
    local, remote = pipe
    local.settimeout(0.01)
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks % 3 == 0:
            raise InterruptedError("enough")

    big = messages.encode("head", [bytes(1 << 24)])
    for run in (lambda: messages.receive(local, check), lambda: messages.send(local, big, check)):
        with pytest.raises(InterruptedError, match="enough"):
            run()
    assert checks == 6
    remote.close()
    with pytest.raises(OSError, match="Broken pipe"):
        messages.send(local, big, check)
    local.settimeout(None)
    with pytest.raises((EOFError, ConnectionError)):
        messages.receive(local)
