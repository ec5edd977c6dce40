"""Streams for copies that overlap with a matmul on the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None

# High. The kernels there have one block of one warp, and go before the blocks of a matmul that wait
# for a multiprocessor.
_PRIORITY = -1


class SideStream:
    """Two streams of ``device`` that are forked from the current stream and joined to it within a
    call. They take turns: while one copies, the other waits for the next word, or passes the word
    of the last copy on. Copies run one after another, whatever their stream, so that the first to
    be needed has the whole link.

    They use the caller's tensors without ``record_stream``: their memory is reused in the order of
    the current stream, which has waited in ``join`` when the call returns. Ordering is by events,
    so the streams can be captured into a graph. CPU tensors (a rehearsal) have no streams: all work
    runs at once, in order.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._streams = [torch.cuda.Stream(device, _PRIORITY) for _ in range(2) if on_gpu]
        self._at = 0
        self.copied: Mark = None  #: marks the last copy

    def fork(self) -> None:
        """Work queued here from now on runs after the work in the current stream."""
        self._at, self.copied = 0, None
        if self._streams:
            begun = torch.cuda.current_stream(self._device).record_event()
            for stream in self._streams:
                stream.wait_event(begun)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Work queued within the block goes to the stream whose turn it is."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[self._at]):
            yield

    @contextmanager
    def next(self) -> Iterator[None]:
        """The same for the other stream, whose turn it is then."""
        self._at = 1 - self._at
        with self.current():
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around a copy in one of the blocks above: it runs after the last one."""
        if not self._streams:
            yield
            return
        stream = self._streams[self._at]
        if self.copied is not None:
            stream.wait_event(self.copied)
        yield
        self.copied = stream.record_event()

    def wait(self, mark: Mark) -> None:
        """The current stream waits for ``mark``."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """The current stream waits for all work of these."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
