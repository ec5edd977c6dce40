"""Streams for copies that overlap with matmuls, and for matmuls that overlap with each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None

# High. The kernels there have one block of one warp, and go before the blocks of a matmul that wait
# for a multiprocessor.
_PRIORITY = -1


class SideStream:
    """Streams of ``device`` that are forked from the current stream and joined to it within a call.

    Two are for copies and take turns: while one copies, the other waits for the next word. Copies
    run one after another, whatever their stream, so that the first to be needed has the whole link.
    A third runs every second part of a matmul, so that the last wave of one part and the first of
    the next share the multiprocessors.

    They use the caller's tensors without ``record_stream``: their memory is reused in the order of
    the current stream, which has waited in ``join`` when the call returns. What is allocated on the
    third stream must be used there alone. Ordering is by events, so the streams can be captured
    into a graph. CPU tensors (a rehearsal) have no streams: all work runs at once, in order.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._streams = [torch.cuda.Stream(device, _PRIORITY) for _ in range(2) if on_gpu]
        self._second = torch.cuda.Stream(device) if on_gpu else None
        self._at = self._parts = 0
        self._begun: Mark = None
        self.copied: Mark = None  #: marks the last copy

    def fork(self) -> None:
        """Work queued here from now on runs after the work in the current stream."""
        self._at, self._parts, self.copied = 0, 0, None
        if self._streams:
            self._begun = torch.cuda.current_stream(self._device).record_event()
            for stream in self._streams:
                stream.wait_event(self._begun)

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

    @contextmanager
    def part(self, *, alone: bool = False) -> Iterator[None]:
        """Around a part of a matmul, and what belongs to it alone. The current stream has the first
        part, the third, ..., or all that must be ``alone``; the others run after what came before
        `fork`, and next to these."""
        self._parts += not alone
        if self._second is None or alone or self._parts % 2 == 1:
            yield
            return
        if self._parts == 2 and self._begun is not None:
            self._second.wait_event(self._begun)
        with torch.cuda.stream(self._second):
            yield

    def wait(self, mark: Mark) -> None:
        """The current stream waits for ``mark``."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """The current stream waits for all work of these."""
        used = self._streams
        if self._second is not None and self._parts > 1:
            used = [*used, self._second]
        for stream in used:
            torch.cuda.current_stream(self._device).wait_stream(stream)
