"""Where a manager of transformers puts its outputs. Its own router keeps, on every rank, all that
nobody asks for: each token of each request, with all tokens before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter


class ToLoop(OutputRouter):
    """Has ``receive`` called with outputs in the event loop that runs now."""

    def __init__(self, receive: Callable[[list[Any]], object]) -> None:
        super().__init__()
        self._receive, self._loop = receive, asyncio.get_running_loop()

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all requests
            self._loop.call_soon_threadsafe(self._receive, outputs)


class Nowhere(OutputRouter):
    """Drops outputs: those of rank 0 are the ones that clients get."""

    def deliver(self, output: Any) -> None:
        pass

    def deliver_batch(self, outputs: list[Any]) -> None:
        pass
