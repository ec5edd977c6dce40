"""CUDA streams and events: capture detection, the order of calls on a device, and side streams.

Problem: a fused kernel occupies every SM and ends only after the kernels of its peers have
answered. If rank A runs the kernel of group 1 and rank B the kernel of group 2, each kernel waits
for a kernel that finds no free SM.

Algorithm: a process chains events per device. A call first waits for the event of the last call on
that device, whatever its group, and records an event at its end.

Invariant 1 (one call per device): at most one call runs on a device at a time.
Invariant 2 (progress): every call ends, if all ranks issue their calls in one order. The first
unfinished call in that order is then the next call on the device of each of its ranks. So its
kernels run together and end.

The caller ensures that all ranks issue the calls of groups that share devices in one order.

CUDA graphs: a capture cannot wait for an event recorded outside it, and a call outside cannot wait
for an event recorded in a capture. The streams of the capture order captured calls. The launching
stream orders replays.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None

# High priority: these kernels have one block of one warp, and run before matmul blocks that wait
# for a free SM.
_PRIORITY = -1


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is being captured into a graph."""
    if device.type != "cuda":
        return False
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class DeviceOrder:
    """The chain of events of one device.

    Attributes:
        groups: names of the groups that have made calls on the device.
    """

    def __init__(self) -> None:
        # Reentrant: two threads may use two groups, and a signal handler may make a call
        # during a call.
        self._lock = threading.RLock()
        self._last: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self.groups: set[str] = set()

    def begin(self, group: str, stream: torch.cuda.Stream) -> None:
        """Begin a call on ``stream``. The caller must call `end`, even if the call raises."""
        self._lock.acquire()
        try:
            self.groups.add(group)
            if self._last is not None and self._stream != stream:
                stream.wait_event(self._last)
        except BaseException:
            self._lock.release()
            raise

    def end(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """End the call: record ``event`` on ``stream``."""
        try:
            stream.record_event(event)
            self._last, self._stream = event, stream
        finally:
            self._lock.release()


@functools.cache
def get_device_order(device: torch.device) -> DeviceOrder:
    """Return the event chain of a device of this process."""
    return DeviceOrder()


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream of calls on ``device``, or None for a CPU: CPU calls run synchronously."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def new_event(device: torch.device) -> torch.cuda.Event | None:
    """Return a new event of ``device``, or None for a CPU."""
    return torch.cuda.Event() if device.type == "cuda" else None


class SideStreams:
    """Streams of ``device`` that a call forks from the current stream and joins to it.

    Two streams copy and alternate: while one stream copies, the other waits for the next signal.
    Copies run one at a time, even on different streams, so that the most urgent copy gets the full
    link bandwidth. A third stream runs every second chunk of a matmul, so that the last wave of a
    chunk and the first wave of the next chunk share the SMs.

    The streams use the tensors of the caller without ``record_stream``. The allocator reuses that
    memory in the order of the current stream, and the current stream waits for all side streams in
    ``join``. Tensors allocated on the third stream must only be used there. All ordering is by
    events, so a graph can capture the streams. CPU tensors (dry runs) use no streams: work runs
    synchronously, in order.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._streams = [torch.cuda.Stream(device, _PRIORITY) for _ in range(2) if on_gpu]
        self._matmul_stream = torch.cuda.Stream(device) if on_gpu else None
        self._active = self._chunks = 0
        self._forked: Mark = None
        self.copied: Mark = None  #: event after the last copy

    def fork(self) -> None:
        """Order later work on the side streams after the work queued on the current stream."""
        self._active, self._chunks, self.copied = 0, 0, None
        if self._streams:
            self._forked = torch.cuda.current_stream(self._device).record_event()
            for stream in self._streams:
                stream.wait_event(self._forked)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Queue the work of the block on the active copy stream."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[self._active]):
            yield

    @contextmanager
    def next(self) -> Iterator[None]:
        """Switch to the other copy stream, and queue the work of the block there."""
        self._active = 1 - self._active
        with self.current():
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run a copy after the previous copy. Used inside a `current` or `next` block."""
        if not self._streams:
            yield
            return
        stream = self._streams[self._active]
        if self.copied is not None:
            stream.wait_event(self.copied)
        yield
        self.copied = stream.record_event()

    @contextmanager
    def chunk(self, *, serial: bool = False) -> Iterator[None]:
        """Queue a chunk of a matmul and the work that only this chunk needs.

        Chunks alternate between the current stream and the third stream. Third-stream chunks start
        after the work before `fork` and overlap with the chunks of the current stream.

        Args:
            serial: queue the chunk on the current stream in any case.
        """
        self._chunks += not serial
        if self._matmul_stream is None or serial or self._chunks % 2 == 1:
            yield
            return
        if self._chunks == 2 and self._forked is not None:
            self._matmul_stream.wait_event(self._forked)
        with torch.cuda.stream(self._matmul_stream):
            yield

    def wait(self, mark: Mark) -> None:
        """Make the current stream wait for the event ``mark``."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """Make the current stream wait for all work on the side streams."""
        pending = self._streams
        if self._matmul_stream is not None and self._chunks > 1:
            pending = [*pending, self._matmul_stream]
        for stream in pending:
            torch.cuda.current_stream(self._device).wait_stream(stream)
