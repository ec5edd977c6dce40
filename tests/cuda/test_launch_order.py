"""The order in which the host queues the work of calls with two streams. Where all streams share
one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), a copy that waits for a peer holds up what is
queued behind it, on whatever stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tpkernels.algorithms.pipelined import cuda as pipelined
from tpkernels.symm import streams
from tpkernels.symm.streams import SideStream


class Queue:
    """Copies, a side stream and products that only note their turn."""

    def __init__(self, rank: int) -> None:
        self.rank, self.order, self.in_place = rank, list[str](), None

    def put(self, src: torch.Tensor, offset: int) -> None:
        self.order.append("put")

    def publish(self, index: int, to: int | None = None) -> None:
        self.order.append("publish" if to is None else f"publish to {to}")

    def await_word(self, source: int, index: int) -> None:
        pass

    def copy_from(self, source: int, dst: torch.Tensor, offset: int) -> None:
        self.order.append(f"fetch {source}")

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def fork(self) -> None:
        self.copied: str | None = None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        yield

    next = current

    @contextlib.contextmanager
    def part(self, alone: bool) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        yield
        self.copied = self.order[-1]

    def wait(self, mark: str | None) -> None:
        self.order.append(f"wait for {mark}")

    def join(self) -> None:
        self.order.append("join")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Queue(0)
    monkeypatch.setattr(pipelined, "local_matmul", lambda *_: made.order.append("product"))
    return made


def test_no_product_of_a_gather_is_queued_behind_a_later_fetch(queue: Any) -> None:
    rows, whole, w, out = (torch.empty(size, 2) for size in (1, 3, 2, 3))
    pipelined.gather_and_multiply(
        queue, queue, (1, 2), [1, 1, 1], rows, whole, [(w, None, out), (w, None, out)]
    )
    assert queue.order == [
        *("put", "publish", "wait for None", "product", "product"),
        *("fetch 1", "wait for fetch 1", "product", "product"),
        *("fetch 2", "wait for fetch 2", "product", "product", "join"),
    ]


def test_a_scatter_fetches_one_product_late(queue: Any) -> None:
    x, w = torch.empty(4, 2), torch.empty(2, 2)
    pipelined.multiply_and_scatter(queue, queue, (1, 2, 3), [1] * 4, x, w, torch.float32)
    assert queue.order == [
        *("product", "publish to 1"),
        *("product", "publish to 2", "fetch 3"),
        *("product", "publish to 3", "fetch 2"),
        *("product", "fetch 1", "join"),
    ]


def test_the_side_stream_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels of one warp do not wait behind the blocks of a product."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given: made.append(given))
    SideStream(torch.device("cuda", 0))
    device = torch.device("cuda", 0)
    assert made == [(device, streams._PRIORITY)] * 2 + [(device,)]  # products take the last
    assert streams._PRIORITY < 0  # lower numbers go first
