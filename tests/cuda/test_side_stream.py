"""Dependencies of the copies on the side streams of a call, and the order in which the host queues
them.

Streams and events only record the order. If all streams share one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1), a copy that waits for a peer delays all later work on any stream.
"""

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
from tpkernels.symm.streams import SideStreams


class Stream:
    """``before``: all work that runs before the next queued work."""

    def __init__(self, *_: object) -> None:
        self.before = frozenset[str]()

    def record_event(self) -> frozenset[str]:
        return self.before

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Device:
    """The streams of a GPU, and copies that record the work before them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank, self.last_signal, self.segment = 0, 7, None
        self.stream = self.main = Stream()
        self.before: dict[str, frozenset[str]] = {}
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", self.use)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.stream)
        patch.setattr(pipelined, "local_matmul", lambda *_: self.queue("product"))
        self.side_streams = SideStreams(torch.device("cuda", 0))

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        previous, self.stream = self.stream, stream
        yield
        self.stream = previous

    def queue(self, name: str) -> None:
        while name in self.before:
            name += "'"
        self.before[name] = self.stream.before
        self.stream.before |= {name}

    def put(self, src: torch.Tensor, offset: int) -> None:
        self.queue("put")

    def publish(self, index: int, peer: int | None = None) -> None:
        self.queue("publish" if peer is None else f"publish to {peer}")

    def set_flag(self, index: int) -> None:
        self.queue(f"flag {index}")

    def await_signal(self, source: int, index: int) -> None:
        self.queue(f"wait for {source}")

    def copy_from(self, source: int, dst: torch.Tensor, offset: int) -> None:
        self.queue(f"copy of {source}")

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    return Device(monkeypatch)


def test_chunks_of_fused(device: Any) -> None:
    """Queue two peers with two chunks each.

    Each peer has one wait, and the copies form a chain. A copy does not wait for the flag of the
    previous copy.
    """
    rows, gathered = torch.empty(2, 4), torch.empty(6, 4)
    device.queue("before")
    fused.copy_peer_rows(device, device.side_streams, (1, 2), rows, gathered, (2, 2, 2), 1, 2)
    before = device.before
    copies = ["copy of 1", "copy of 1'", "copy of 2", "copy of 2'"]
    flags = ["flag 2", "flag 3", "flag 4", "flag 5"]
    assert set(before) == {"before", "put", "publish", "wait for 1", "wait for 2", *copies, *flags}
    for index, copy in enumerate(copies):
        assert {"before", "wait for 1", *copies[:index]} <= before[copy]
        assert copy in before[flags[index]]
        assert index == 0 or flags[index - 1] not in before[copy]
    assert "wait for 2" in before["copy of 2"] and "wait for 2" in before["copy of 2'"]
    assert "copy of 1'" not in before["wait for 2"]  # they overlap
    assert not device.main.before & set(copies)
    device.side_streams.join()
    assert set(before) <= device.main.before


@pytest.mark.parametrize("custom", [False, True])
def test_shards_of_a_gather(device: Any, custom: bool) -> None:
    """Queue a gather with torch matmuls or a ``custom`` matmul.

    Custom matmuls run in sequence, torch matmuls concurrently.
    """
    rows, gathered, w, out = (torch.empty(size, 2) for size in (1, 3, 2, 3))
    if custom:
        w = tpkernels.CustomMatmul(lambda x: x, (2, 2), torch.float32)  # type: ignore[assignment]
    matmul_args = [(w, None, out)]
    pipelined.gather_and_multiply(
        device, device.side_streams, (1, 2), [1, 1, 1], rows, gathered, matmul_args
    )
    before = device.before
    assert before["product"] == set()
    assert ("product" in before["product'"]) is custom and (
        "product'" in before["product''"]
    ) is custom
    assert "product" in before["product''"]
    assert "copy of 1" in before["product'"] and "copy of 2" not in before["product'"]
    assert {"copy of 1", "copy of 2"} <= before["product''"]
    assert "copy of 1" in before["copy of 2"] and "copy of 1" not in before["wait for 2"]
    assert set(before) == device.main.before


def test_partials_of_a_scatter(device: Any) -> None:
    x, w = torch.empty(3, 2), torch.empty(2, 2)
    peers, sizes = (1, 2), [1, 1, 1]
    pipelined.multiply_and_scatter(device, device.side_streams, peers, sizes, x, w, torch.float32)
    before = device.before
    assert "wait for 2" in before["copy of 2"] <= before["copy of 1"]
    assert "copy of 2" not in before["wait for 1"]
    assert not before["product''"] & {"copy of 1", "copy of 2"}
    assert "product" not in before["product'"] and "product'" not in before["product''"]
    for product, published in (("product", "publish to 1"), ("product'", "publish to 2")):
        assert before[published] == {product}
    assert set(before) == device.main.before


def test_second_stream_follows_prior_work(device: Any) -> None:
    side_streams = device.side_streams
    for _ in range(2):
        device.queue("allocated")
        side_streams.fork()
        for serial in (True, False, True, False, False):
            with side_streams.chunk(serial=serial):
                device.queue("product")
        side_streams.join()
    names = ["product" + "'" * i for i in range(10)]
    before = [device.before[name] for name in names]
    assert names[1] in before[2] and names[1] not in before[3] and names[3] not in before[4]
    assert all({"allocated'", *names[:5]} <= prior_ops for prior_ops in before[5:])
    assert set(names) <= device.main.before


def queued_names(device: Any) -> list[str]:
    """Return the queued work in order, without waits."""
    return [name.rstrip("'") for name in device.before if not name.startswith("wait")]


def test_host_queue_order(device: Any) -> None:
    """Queue a gather and a scatter.

    A gather queues each matmul before the fetches of later shards. A scatter fetches one matmul
    late.
    """
    rows, gathered, w, out = (torch.empty(size, 2) for size in (1, 3, 2, 3))
    matmul_args = [(w, None, out), (w, None, out)]
    pipelined.gather_and_multiply(
        device, device.side_streams, (1, 2), [1, 1, 1], rows, gathered, matmul_args
    )
    assert queued_names(device) == [
        *("put", "publish", "product", "product"),
        *("copy of 1", "product", "product"),
        *("copy of 2", "product", "product"),
    ]
    device.before.clear()
    x, w = torch.empty(4, 2), torch.empty(2, 2)
    pipelined.multiply_and_scatter(
        device, device.side_streams, (1, 2, 3), [1] * 4, x, w, torch.float32
    )
    assert queued_names(device) == [
        *("product", "publish to 1"),
        *("product", "publish to 2", "copy of 3"),
        *("product", "publish to 3", "copy of 2"),
        *("product", "copy of 1"),
    ]


def test_side_stream_has_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create side streams. Two of them have priority, the stream for matmuls has not.

    So kernels of one warp do not wait for the blocks of a matmul.
    """
    streams_created: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args: streams_created.append(args))
    SideStreams(torch.device("cuda", 0))
    device = torch.device("cuda", 0)
    # The last stream is for matmuls.
    assert streams_created == [(device, streams._PRIORITY)] * 2 + [(device,)]
    assert streams._PRIORITY < 0  # lower values have priority
