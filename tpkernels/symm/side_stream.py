"""A second stream, for copies that overlap with a matmul on the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None

# High. The kernels there have one block of one warp, and go before the blocks of a matmul that wait
# for a multiprocessor.
_PRIORITY = -1


class SideStream:
    """A stream of ``device`` that is forked from the current stream and joined to it within a call.

    It uses the caller's tensors without ``record_stream``: their memory is reused in the order of
    the current stream, which has waited in ``join`` when the call returns. Ordering is by events,
    so the stream can be captured into a graph. CPU tensors (a rehearsal) have no streams: all work
    runs at once, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, _PRIORITY) if device.type == "cuda" else None

    def fork(self) -> None:
        """Work queued here from now on runs after the work in the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Work queued within the block goes to this stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Marks the work in this stream so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        """The current stream waits for ``mark``."""
        if self._stream is not None and mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def join(self) -> None:
        """The current stream waits for all work of this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
