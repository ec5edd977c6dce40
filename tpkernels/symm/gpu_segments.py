"""Symmetric tensors that users have made on a GPU, which copy engines of the peers read in place.

Sync: a copy engine's addresses are the host's, and the host asks no peer in a call. So all ranks
pass their parts of one symmetric tensor, whole, or none does; which one is a part of the call's
signature, and a rank that does otherwise is found at the first wait. The calls that read the tensor
end when all ranks have read it (`CopyCall`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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
        """The signature of a call that reads it."""
        return zlib.crc32(f"{of_call} in symmetric tensor {self.number}".encode()) or 1


class GpuSegments:
    """This rank's symmetric tensors on one device. What nobody uses any more goes at the next
    look."""

    def __init__(self) -> None:
        self._made = 0
        self._at: dict[int, GpuSegment] = {}  # by this rank's address

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
        """The one that x is the whole of."""
        if not self._at:
            return None
        self._forget()
        found = self._at.get(x.data_ptr())
        whole = found is not None and found.nbytes == x.numel() * x.element_size()
        return found if whole and x.is_contiguous() else None

    def _forget(self) -> None:
        for address in [at for at, segment in self._at.items() if segment.owner.expired()]:
            del self._at[address]
