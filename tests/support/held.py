"""The object that the ranks hold in the executor tests."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class Held:
    limit = 3  # not a method

    def __init__(self, start: int = 0, fail_on: int | None = None) -> None:
        if dist.get_rank() == fail_on:
            raise ArithmeticError(f"rank {fail_on} was told to")
        self.start, self.steps, self.ended = start, 0, ""

    @property
    def costly(self) -> int:
        raise AssertionError("a property was read")

    def nothing(self) -> None:
        pass

    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Add the rank and ``start`` to x in place, then sum over the ranks. The rank owns x."""
        x += dist.get_rank() + self.start
        dist.all_reduce(x)
        return x

    def rank(self) -> int:
        return dist.get_rank()

    def mine(self, sizes: list[int]) -> torch.Tensor:
        return torch.full((sizes[dist.get_rank()],), float(dist.get_rank()))

    def unsendable(self, ranks: list[int]) -> Any:
        return [0, {"a": threading.Lock()}] if dist.get_rank() in ranks else 1

    def fail(self, ranks: list[int], how: str = "raise") -> int:
        if dist.get_rank() in ranks:
            if how == "exit":
                sys.exit(3)
            raise ArithmeticError(f"rank {dist.get_rank()} was told to")
        if how == "then wait":
            dist.barrier()
        return dist.get_rank()

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank while the other ranks wait."""
        if dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        time.sleep(100)

    def sleep(self, seconds: float, note: str = "") -> str:
        begin = time.monotonic()
        time.sleep(seconds)
        return f"{note}{begin} {time.monotonic()}"

    # Streams.

    def count(self, steps: int, pad: int = 0) -> Iterator[Any]:
        """Run a collective and yield per step. Ranks that stop after different steps hang."""
        self.steps, self.ended = 0, ""
        try:
            for step in range(steps):
                total = torch.tensor([float(step)])
                dist.all_reduce(total)
                self.steps += 1
                yield (total.item(), torch.zeros(pad)) if pad else total.item()
            self.ended = "exhausted"
        except GeneratorExit:
            self.ended = "closed"
            raise

    def progress(self) -> tuple[int, str]:
        return self.steps, self.ended

    def fail_in_step(self, step: int, ranks: list[int]) -> Iterator[int]:
        for i in range(100):
            if i == step and dist.get_rank() in ranks:
                raise ArithmeticError(f"rank {dist.get_rank()} was told to")
            yield i

    def uneven(self, steps: list[int]) -> Iterator[int]:
        yield from range(steps[dist.get_rank()])

    def late(self, rank: int) -> Iterator[int]:
        """Yield two items. The second is 0.2 s late on ``rank``."""
        yield 0
        if dist.get_rank() == rank:
            time.sleep(0.2)
        yield 1

    def die_in_step(self, step: int, rank: int) -> Iterator[int]:
        for i in self.count(100):
            if self.steps == step and dist.get_rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            yield i

    def unsendable_items(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()


def make(start: int) -> Held:
    return Held(start)
