"""Streams and events of GPUs: whether they are captured, one order for the calls of all groups on a
device, and streams beside the current one.

Problem: a fused kernel fills every multiprocessor and ends when its peers' kernels have answered.
If rank A runs the kernel of group 1 and rank B that of group 2, each waits for a kernel of the
other that finds no multiprocessor free.

Algorithm: a chain of events for each device of a process. A call on a stream first waits for the
event of the last call of any group on that device, and records its own event at its end.

Invariant: at most one call per device is under way. If all ranks issue their calls in one order,
the first call in that order that has not ended is the next one on the devices of all its ranks, so
its kernels run together and end.

Callers see to what cannot be seen here: the ranks issue the calls of groups that share devices in
one order. Neither can a capture wait for an event from outside it, nor a call outside for an event
that was recorded in a capture. Captured calls are therefore ordered only by the streams of the
capture, and replays only by the stream that they are launched on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None

# High. The kernels there have one block of one warp, and go before the blocks of a matmul that wait
# for a multiprocessor.
_PRIORITY = -1


def is_captured(device: torch.device) -> bool:
    """Return whether what this thread queues on ``device`` now goes into a graph."""
    if device.type != "cuda":
        return False
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class DeviceOrder:
    """The chain of one device. ``groups``: the names of those whose calls have been in it."""

    def __init__(self) -> None:
        # Calls of two groups may come from two threads, and one from a signal handler within
        # another.
        self._lock = threading.RLock()
        self._last: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self.groups: set[str] = set()

    def begin(self, group: str, stream: torch.cuda.Stream) -> None:
        """Begin a call on ``stream``, which `end` must end, whether it raises or not."""
        self._lock.acquire()
        try:
            self.groups.add(group)
            if self._last is not None and self._stream != stream:
                stream.wait_event(self._last)
        except BaseException:
            self._lock.release()
            raise

    def end(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """End a call on ``stream``, and record ``event`` there."""
        try:
            stream.record_event(event)
            self._last, self._stream = event, stream
        finally:
            self._lock.release()


@functools.cache
def order_of(device: torch.device) -> DeviceOrder:
    """Return the chain of a device of this process."""
    return DeviceOrder()


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that calls on ``device`` are queued on; None for a CPU, where they run at
    once."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def new_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event of ``device``; None for a CPU."""
    return torch.cuda.Event() if device.type == "cuda" else None


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
        """Run what is queued here from now on after the work in the current stream."""
        self._at, self._parts, self.copied = 0, 0, None
        if self._streams:
            self._begun = torch.cuda.current_stream(self._device).record_event()
            for stream in self._streams:
                stream.wait_event(self._begun)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Queue the block's work on the stream whose turn it is."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[self._at]):
            yield

    @contextmanager
    def next(self) -> Iterator[None]:
        """Give the other stream its turn, and queue the block's work there."""
        self._at = 1 - self._at
        with self.current():
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run a copy, in one of the blocks above, after the last one."""
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
        """Queue a part of a matmul, and what belongs to it alone. The current stream has the first
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
        """Have the current stream wait for ``mark``."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """Have the current stream wait for all work of these."""
        used = self._streams
        if self._second is not None and self._parts > 1:
            used = [*used, self._second]
        for stream in used:
            torch.cuda.current_stream(self._device).wait_stream(stream)
