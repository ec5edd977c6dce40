"""What the copies of a call wait for on its side streams, and the order in which the host queues
them: streams and events that only note what comes before what. Where all streams share one hardware
queue (CUDA_DEVICE_MAX_CONNECTIONS=1), a copy that waits for a peer holds up what is queued behind
it, on whatever stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tpkernels
from tpkernels.algorithms import fused
from tpkernels.algorithms.pipelined import cuda as pipelined
from tpkernels.symm import streams
from tpkernels.symm.streams import SideStream


class Stream:
    """``before``: all that runs before what is queued next."""

    def __init__(self, *_: object) -> None:
        self.before = frozenset[str]()

    def record_event(self) -> frozenset[str]:
        return self.before

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Device:
    """A GPU's streams, and copies that note what has run before them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank, self.last_word, self.in_place = 0, 7, None
        self.stream = self.main = Stream()
        self.before: dict[str, frozenset[str]] = {}
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", self.use)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.stream)
        patch.setattr(pipelined, "local_matmul", lambda *_: self.queue("product"))
        self.side = SideStream(torch.device("cuda", 0))

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def queue(self, name: str) -> None:
        while name in self.before:
            name += "'"
        self.before[name] = self.stream.before
        self.stream.before |= {name}

    def put(self, src: torch.Tensor, offset: int) -> None:
        self.queue("put")

    def publish(self, index: int, to: int | None = None) -> None:
        self.queue("publish" if to is None else f"publish to {to}")

    def raise_flag(self, index: int) -> None:
        self.queue(f"flag {index}")

    def await_word(self, source: int, index: int) -> None:
        self.queue(f"wait for {source}")

    def copy_from(self, source: int, dst: torch.Tensor, offset: int) -> None:
        self.queue(f"copy of {source}")

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    return Device(monkeypatch)


def test_chunks_of_fused(device: Any) -> None:
    """Two peers with two chunks each: one wait for a peer, copies in a chain, and flags that no
    copy but the one after the next waits for."""
    rows, whole = torch.empty(2, 4), torch.empty(6, 4)
    device.queue("before")
    fused.bring_rows(device, device.side, (1, 2), rows, whole, (2, 2, 2), 1, 2)
    before = device.before
    copies = ["copy of 1", "copy of 1'", "copy of 2", "copy of 2'"]
    flags = ["flag 2", "flag 3", "flag 4", "flag 5"]
    assert set(before) == {"before", "put", "publish", "wait for 1", "wait for 2", *copies, *flags}
    for at, copy in enumerate(copies):
        assert {"before", "wait for 1", *copies[:at]} <= before[copy]
        assert copy in before[flags[at]]
        assert at == 0 or flags[at - 1] not in before[copy]
    assert "wait for 2" in before["copy of 2"] and "wait for 2" in before["copy of 2'"]
    assert "copy of 1'" not in before["wait for 2"]  # which runs meanwhile
    assert not device.main.before & set(copies)
    device.side.join()
    assert set(before) <= device.main.before


@pytest.mark.parametrize("own", [False, True])
def test_shards_of_a_gather(device: Any, own: bool) -> None:
    """A caller's ``own`` products run one after the other, torch's next to each other."""
    rows, whole, w, out = (torch.empty(size, 2) for size in (1, 3, 2, 3))
    if own:
        w = tpkernels.CustomMatmul(lambda x: x, (2, 2), torch.float32)  # type: ignore[assignment]
    factors = [(w, None, out)]
    pipelined.gather_and_multiply(device, device.side, (1, 2), [1, 1, 1], rows, whole, factors)
    before = device.before
    assert before["product"] == set()
    assert ("product" in before["product'"]) is own and ("product'" in before["product''"]) is own
    assert "product" in before["product''"]
    assert "copy of 1" in before["product'"] and "copy of 2" not in before["product'"]
    assert {"copy of 1", "copy of 2"} <= before["product''"]
    assert "copy of 1" in before["copy of 2"] and "copy of 1" not in before["wait for 2"]
    assert set(before) == device.main.before


def test_partials_of_a_scatter(device: Any) -> None:
    x, w = torch.empty(3, 2), torch.empty(2, 2)
    peers, sizes = (1, 2), [1, 1, 1]
    pipelined.multiply_and_scatter(device, device.side, peers, sizes, x, w, torch.float32)
    before = device.before
    assert "wait for 2" in before["copy of 2"] <= before["copy of 1"]
    assert "copy of 2" not in before["wait for 1"]
    assert not before["product''"] & {"copy of 1", "copy of 2"}
    assert "product" not in before["product'"] and "product'" not in before["product''"]
    for product, published in (("product", "publish to 1"), ("product'", "publish to 2")):
        assert before[published] == {product}
    assert set(before) == device.main.before


def test_what_came_before_a_call_comes_before_its_second_stream(device: Any) -> None:
    side = device.side
    for _ in range(2):
        device.queue("allocated")
        side.fork()
        for alone in (True, False, True, False, False):
            with side.part(alone=alone):
                device.queue("product")
        side.join()
    names = ["product" + "'" * i for i in range(10)]
    before = [device.before[name] for name in names]
    assert names[1] in before[2] and names[1] not in before[3] and names[3] not in before[4]
    assert all({"allocated'", *names[:5]} <= each for each in before[5:])
    assert set(names) <= device.main.before


def names_in(device: Any) -> list[str]:
    """What has been queued, in order, without the waits."""
    return [name.rstrip("'") for name in device.before if not name.startswith("wait")]


def test_the_order_in_which_the_host_queues(device: Any) -> None:
    """No product of a gather is behind a later fetch; a scatter fetches one product late."""
    rows, whole, w, out = (torch.empty(size, 2) for size in (1, 3, 2, 3))
    factors = [(w, None, out), (w, None, out)]
    pipelined.gather_and_multiply(device, device.side, (1, 2), [1, 1, 1], rows, whole, factors)
    assert names_in(device) == [
        *("put", "publish", "product", "product"),
        *("copy of 1", "product", "product"),
        *("copy of 2", "product", "product"),
    ]
    device.before.clear()
    x, w = torch.empty(4, 2), torch.empty(2, 2)
    pipelined.multiply_and_scatter(device, device.side, (1, 2, 3), [1] * 4, x, w, torch.float32)
    assert names_in(device) == [
        *("product", "publish to 1"),
        *("product", "publish to 2", "copy of 3"),
        *("product", "publish to 3", "copy of 2"),
        *("product", "copy of 1"),
    ]


def test_the_side_stream_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels of one warp do not wait behind the blocks of a product."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given: made.append(given))
    SideStream(torch.device("cuda", 0))
    device = torch.device("cuda", 0)
    assert made == [(device, streams._PRIORITY)] * 2 + [(device,)]  # products take the last
    assert streams._PRIORITY < 0  # lower numbers go first
