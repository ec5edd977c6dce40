"""Which tensors lie in symmetric memory that users have made: segments, arenas of their own."""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass

import torch

from tpkernels import _C


@dataclass(frozen=True)
class _Segment:
    identity: int
    address: int
    nbytes: int


class Segments:
    """This rank's regions of the segments of a group, each for as long as its tensor lives."""

    def __init__(self) -> None:
        self._made = 0
        self._living: dict[int, _Segment] = {}
        self._state = object()  # another one after each change
        self._by_address: tuple[object, list[int], list[_Segment]] = (None, [], [])

    def __len__(self) -> int:
        return len(self._living)

    def add(self, region: _C.host.Region) -> int:
        """The identity of a new segment, which is the same on all ranks."""
        self._made += 1
        self._living[self._made] = _Segment(self._made, region.address, region.nbytes)
        self._state = object()
        weakref.finalize(region, self._forget, self._made).atexit = False
        return self._made

    def locate(self, x: torch.Tensor) -> tuple[int, int]:
        """(identity, offset in bytes) of a contiguous tensor that lies in a segment; identity 0
        where it does not."""
        if not self._living or not x.is_contiguous():
            return 0, 0
        state, starts, segments = self._by_address
        if state is not self._state:
            state = self._state  # before the look at them: a later change makes it stale
            segments = sorted(self._living.copy().values(), key=lambda each: each.address)
            starts = [each.address for each in segments]
            self._by_address = state, starts, segments
        address, nbytes = x.data_ptr(), x.numel() * x.element_size()
        at = bisect.bisect_right(starts, address) - 1
        if at < 0 or address + nbytes > starts[at] + segments[at].nbytes:
            return 0, 0
        return segments[at].identity, address - starts[at]

    def clear(self) -> None:
        """Forgets all."""
        self._living.clear()
        self._state = object()

    def _forget(self, identity: int) -> None:
        """At the end of its tensor: at any time, on any thread."""
        self._living.pop(identity, None)
        self._state = object()
