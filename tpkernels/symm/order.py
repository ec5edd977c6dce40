"""One order for the calls of all groups on a device.

Problem: a fused kernel fills every multiprocessor and ends when its peers' kernels have answered.
If rank A runs the kernel of group 1 and rank B that of group 2, each waits for a kernel of the
other that finds no multiprocessor free.

Algorithm: a chain of events for each device of a process. A call on a stream first waits for the
event of the last call of any group on that device, and records its own event at its end.

Invariant: at most one call per device is under way. If all ranks issue their calls in one order,
the first call in that order that has not ended is the next one on the devices of all its ranks, so
its kernels run together and end. tests/support/residency_model.py searches all schedules.

Callers see to what cannot be seen here: the ranks issue the calls of groups that share devices in
one order. Neither can a capture wait for an event from outside it, nor a call outside for an event
that was recorded in a capture. Captured calls are therefore ordered only by the streams of the
capture, and replays only by the stream that they are launched on.
"""

from __future__ import annotations

import functools
import threading

import torch


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
    """An event of ``device``; None for a CPU."""
    return torch.cuda.Event() if device.type == "cuda" else None
