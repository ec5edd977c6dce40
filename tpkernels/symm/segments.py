"""Which tensors lie in symmetric memory that users have made: segments, arenas of their own."""

from __future__ import annotations

import weakref

import torch

from tpkernels import _C


class Segments(_C.host.Segments):
    """This rank's regions of the segments of a group, each for as long as its tensor lives."""

    def register(self, region: _C.host.Region) -> int:
        """Return the identity of a new segment, which is the same on all ranks."""
        identity = self.add(region.address, region.nbytes)
        weakref.finalize(region, self.forget, identity).atexit = False
        return identity

    def find(self, x: torch.Tensor) -> tuple[int, int]:
        """(identity, offset in bytes) of a contiguous tensor that lies in a segment; identity 0
        where it does not."""
        if not len(self) or not x.is_contiguous():
            return 0, 0
        return self.locate(x.data_ptr(), x.numel() * x.element_size())
