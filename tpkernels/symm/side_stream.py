"""A second stream beside the current one, for copies beside a product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None


class SideStream:
    """A stream of ``device`` that is forked from the current stream and joined to it within a call.

    It uses the caller's tensors without ``record_stream``: the current stream, in whose order their
    memory is given out again, is behind ``join`` when the call returns. Events order it, so it goes
    into a captured graph. CPU tensors (a rehearsal) have no streams: all runs at once, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fork(self) -> None:
        """What is queued here from now on runs behind what the current stream has so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """What is queued within goes to this stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """What this stream has so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        """The current stream goes on behind ``mark``."""
        if self._stream is not None and mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def join(self) -> None:
        """The current stream goes on behind all of this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
