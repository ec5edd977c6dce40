"""Messages between rank 0 and the others over connections of gloo that nothing else uses.

A transfer takes some 0.1 ms, however short it is. So the first has a fixed size, which holds most
messages whole; what it lacks of the msgpack is the second, and each tensor is one more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.launch import messages
from tpkernels.launch.messages import Bytes, Message

_FIRST_BYTES = 4096
_TAG = 0


class Wire:
    """One rank's end. Methods raise RuntimeError, as gloo does."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        pg = group or dist.group.WORLD
        if pg is None:
            raise ValueError("there is no process group: call torch.distributed.init_process_group")
        store, self.rank, self.world = pg.get_group_store(), pg.rank(), pg.size()
        # The store keeps what earlier wires have left there. All ranks count their wires alike.
        count = store.add(f"tpkernels-executor/{self.rank}", 1)
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(f"tpkernels-executor/{count}/", store),
            self.rank,
            self.world,
            timedelta(seconds=timeout),
        )
        self._sent: list[tuple[Any, torch.Tensor]] = []  # works, and the memory they read

    def broadcast(self, message: Message) -> None:
        """From rank 0. Returns when all have received it."""
        for part in _transfers(message):
            self._broadcast(part)

    def receive_broadcast(self) -> Any:
        return _received(self._broadcast)

    def send(self, message: Message) -> None:
        """To rank 0, which may receive it later."""
        for work, _ in self._sent:
            work.wait()
        vectors = [_vector(part) for part in _transfers(message)]
        self._sent = [(self._gloo.send([one], 0, _TAG), one) for one in vectors]

    def receive(self, rank: int, seconds: float) -> Any:
        until = time.monotonic() + seconds

        def take(out: Bytes) -> None:
            work = self._gloo.recv([_vector(out)], rank, _TAG)
            work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))

        return _received(take)

    def close(self) -> None:
        """Closes the connections. Ranks that wait for this one get an error."""
        self._gloo = None

    def _broadcast(self, data: Bytes) -> None:
        self._gloo.broadcast(_vector(data), 0).wait()


def _transfers(message: Message) -> Iterator[Bytes]:
    frame, *tensors = message.parts
    yield bytearray(frame[:_FIRST_BYTES]).ljust(_FIRST_BYTES, b"\0")
    if len(frame) > _FIRST_BYTES:
        yield frame[_FIRST_BYTES:]
    yield from tensors


def _received(take: Callable[[Bytes], None]) -> Any:
    first = bytearray(_FIRST_BYTES)
    take(first)
    rest, frame_parts = memoryview(first), messages.FRAME_PARTS

    def fill(out: Bytes) -> None:
        nonlocal rest, frame_parts
        here = min(len(out), len(rest)) if frame_parts else 0
        out[:here] = rest[:here]
        rest, frame_parts = rest[here:], max(0, frame_parts - 1)
        if here < len(out):
            take(memoryview(out)[here:])

    return messages.receive(fill)


def _vector(data: Bytes) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
