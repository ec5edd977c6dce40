"""Memory that the GPUs of a group's ranks address, from torch's symmetric memory.

Users make symmetric tensors of it (`GpuSegments`), which copy engines of the peers read in place.

Sync: a copy engine's addresses are the host's, and the host asks no peer in a call. So all ranks
pass their parts of one symmetric tensor, whole, or none does; which one is a part of the call's
signature, and a rank that does otherwise is found at the first wait. The calls that read the tensor
end when all ranks have read it (`CopyCall`).

Memory: torch waits for the device when it frees such memory, which it cannot in a capture. What a
capture has read is never freed, as replays read it, too.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed._symmetric_memory as symmetric
from torch.multiprocessing.reductions import StorageWeakRef

from tpkernels.symm import streams
from tpkernels.symm.device import DeviceWorkspace, region_bytes
from tpkernels.symm.exchange import Participant


class Symmetric(NamedTuple):
    """Memory of a rank that the others address, too."""

    memory: torch.Tensor  # bytes, filled with zeros
    addresses: tuple[int, ...]  # of all ranks' memory, as this rank addresses it
    handle: Any  # torch's, which keeps it mapped; None: there is one rank


@torch.inference_mode(False)  # the memory outlives this call's mode
def make_symmetric(
    participant: Participant, nbytes: int, device: torch.device, reason: str | None = None
) -> Symmetric:
    """Allocate memory that the GPUs of all ranks address. Collective; waits for the device.
    ``reason``: why this rank cannot take part, if that is known already.

    Raises:
        NotImplementedError: on all ranks, if the GPUs cannot: no peer access, no virtual memory
            management, ranks that share a GPU without
            TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, GPUs that differ.
        CollectiveTimeoutError, PeerLostError: a rank did not arrive, or left.
    """
    memory = handle = None
    if reason is None:
        try:
            make = torch.empty if participant.world == 1 else symmetric.empty
            memory = make(nbytes, dtype=torch.uint8, device=device)
            memory.zero_()
            if memory.is_cuda:
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            reason = f"cannot allocate {nbytes} bytes of symmetric memory: {error}"
    # No peer writes before this returns, and by then all memory is zero.
    agree_on_gpus(participant, reason, _describe(device), _gpu_under_mps(device))
    assert memory is not None  # otherwise all ranks would have raised
    if participant.world == 1:
        return Symmetric(memory, (memory.data_ptr(),), None)
    try:
        name = cast(Any, participant.process_group)  # a NewType of str
        handle = symmetric.rendezvous(memory, name)
        if not all(handle.buffer_ptrs):
            reason = (
                "cannot address the other ranks' memory: torch's symmetric memory has no pointers "
                "to it with this backend; call "
                "torch.distributed._symmetric_memory.set_backend('CUDA') before its first use"
            )
    except RuntimeError as error:
        reason = (
            f"cannot map the other ranks' memory: {error}. Ranks that share a GPU need "
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
        )
    agree_on_gpus(participant, reason)
    assert handle is not None  # as above
    return Symmetric(memory, tuple(handle.buffer_ptrs), handle)


def make_workspace(
    participant: Participant,
    words: int,
    buffer_bytes: int,
    device: torch.device,
    reason: str | None = None,
) -> DeviceWorkspace:
    """Return a workspace of a group's kernels on GPUs, in memory from `make_symmetric`."""
    rank, nbytes = participant.rank, region_bytes(participant.world, words, buffer_bytes)
    memory, addresses, handle = make_symmetric(participant, nbytes, device, reason)
    region = memory if handle is None else handle.get_buffer(rank, (nbytes,), torch.uint8)
    multicast = 0 if handle is None else handle.multicast_ptr
    limits = words, buffer_bytes, participant.timeout
    return DeviceWorkspace(addresses, region, rank, *limits, multicast, (memory, handle))


def _describe(device: torch.device) -> str:
    """Return what must be the same for all ranks' GPUs, because grids and configs depend on it."""
    if device.type != "cuda":  # a rehearsal
        return device.type
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} processors)"


def _gpu_under_mps(device: torch.device) -> str | None:
    """Return the GPU's UUID where MPS runs the kernels of several processes side by side; None
    where processes that share a GPU have it in turns."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if device.type != "cuda" or not Path(folder, "control").exists():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def agree_on_gpus(
    participant: Participant, error: str | None, kind: str = "", under_mps: str | None = None
) -> None:
    """Raise ``NotImplementedError`` on all ranks if one has an ``error`` or another ``kind`` of
    GPU, or if two have one GPU, named by ``under_mps``. Collective."""
    reports = participant.exchange("kernels on GPUs", (error, kind, under_mps))
    first: dict[str, int] = {}  # rank on a GPU under MPS
    for rank, (error, kind, gpu) in enumerate(reports):
        why = None
        if error is not None:
            why = f"cannot run on GPUs: rank {rank} {error}"
        elif kind != reports[0][1]:
            why = f"need GPUs of one kind: rank 0 has {reports[0][1]}, rank {rank} {kind}"
        elif gpu is not None and first.setdefault(gpu, rank) != rank:
            why = (
                f"cannot run: ranks {first[gpu]} and {rank} share GPU {gpu} under MPS, where the "
                "kernel of one can fill the GPU while it waits for the other's. Give each rank a "
                "GPU of its own, or stop MPS"
            )
        if why is not None:
            raise NotImplementedError(f"the kernels of group '{participant.group}' {why}")


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
        """Make one, filled with zeros. Collective; raises what `make_symmetric` does."""
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
        captured = streams.is_captured(x.device)
        if not captured:
            self._forget()
        segment = self._at.get(x.data_ptr())
        if segment is None or segment.owner.expired() or segment.nbytes != x.nbytes:
            return None
        if not x.is_contiguous():
            return None
        if captured:
            self._recorded.add(segment.number)
        return segment

    def _forget(self) -> None:
        for address, segment in list(self._at.items()):
            if segment.owner.expired() and segment.number not in self._recorded:
                del self._at[address]
