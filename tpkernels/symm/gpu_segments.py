"""Symmetric tensors that users have made on a GPU, which copy engines of the peers read in place.

Sync: a copy engine's addresses are the host's, and the host asks no peer in a call. So all ranks
pass their parts of one symmetric tensor, whole, or none does; which one is a part of the call's
signature, and a rank that does otherwise is found at the first wait. The calls that read the tensor
end when all ranks have read it (`CopyCall`).

Memory: torch waits for the device when it frees such memory, which it cannot in a capture. What a
capture has read is never freed, as replays read it, too.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tpkernels.symm import capture
from tpkernels.symm.exchange import Participant
from tpkernels.symm.gpu_memory import make_symmetric


@dataclass(frozen=True)
class GpuSegment:
    """A symmetric tensor: its number, the same on all ranks, and where the ranks have it."""

    number: int
    nbytes: int
    addresses: tuple[int, ...]
    memory: object  # keeps the peers' parts mapped, and perhaps this rank's
    owner: StorageWeakRef

    def signature(self, of_call: int) -> int:
        """Return the signature of a call that reads it."""
        return zlib.crc32(f"{of_call} in symmetric tensor {self.number}".encode()) or 1


class GpuSegments:
    """This rank's symmetric tensors on one device. What nobody uses any more goes at the next
    look outside a capture."""

    def __init__(self) -> None:
        self._made = 0
        self._at: dict[int, GpuSegment] = {}  # by this rank's address
        self._recorded: set[int] = set()  # the numbers of those that a graph has

    def make(
        self,
        participant: Participant,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """A new one, filled with zeros. Collective; raises what `make_symmetric` does."""
        self._forget()
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        made = make_symmetric(participant, max(nbytes, 1), device)
        self._made += 1
        if nbytes:
            owner = StorageWeakRef(made.memory.untyped_storage())
            segment = GpuSegment(self._made, nbytes, made.addresses, made.handle, owner)
            self._at[made.addresses[participant.rank]] = segment
        return made.memory[:nbytes].view(dtype).view(shape)

    def find(self, x: torch.Tensor) -> GpuSegment | None:
        """Return the one that x is the whole of."""
        if not self._at:
            return None
        captured = capture.is_captured(x.device)
        if not captured:
            self._forget()
        found = self._at.get(x.data_ptr())
        if found is None or found.owner.expired():
            return None
        if found.nbytes != x.numel() * x.element_size() or not x.is_contiguous():
            return None
        if captured:
            self._recorded.add(found.number)
        return found

    def _forget(self) -> None:
        for address, segment in list(self._at.items()):
            if segment.owner.expired() and segment.number not in self._recorded:
                del self._at[address]
