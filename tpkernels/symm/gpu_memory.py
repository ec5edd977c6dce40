"""Memory that the GPUs of a group's ranks address, from torch's symmetric memory.

Users make symmetric tensors of it (`GpuSegments`), which copy engines of the peers read in place.

Sync: a copy engine's addresses are the host's, and the host asks no peer in a call. So all ranks
pass their parts of one symmetric tensor, whole, or none does; which one is a part of the call's
signature, and a rank that does otherwise is found at the first wait. The calls that read the tensor
end when all ranks have read it (`CopyCall`).

Memory: torch waits for the device when it frees such memory, which it cannot in a capture. What a
capture has read is never freed, as replays read it, too.

Allocations: `_allocate` avoids torch's pool of symmetric memory. `rendezvous` returns an earlier
result for an allocation that the group has mapped before, without asking the peers. A rank that
gets a recycled allocation, while a peer gets another one or a new one, would be paired with memory
that the peer has freed, or wait for it until a timeout.
"""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tpkernels.common import nvml
from tpkernels.symm import streams
from tpkernels.symm.device import DeviceWorkspace, lasting, region_bytes
from tpkernels.symm.exchange import Participant
from tpkernels.torch_private import SymmetricMemory, symmetric_memory

_ALIGNMENT = 256  # bytes, of symmetric memory: kernels read and write it in lines


class Symmetric(NamedTuple):
    """Memory of a rank that the others address, too."""

    memory: torch.Tensor  # bytes, filled with zeros
    addresses: tuple[int, ...]  # of all ranks' memory, as this rank addresses it
    multicast: int = 0  # the address of all ranks' memory at once; 0 without multicast
    handle: object = None  # torch's, which keeps it mapped; None: there is one rank


class Gpu(NamedTuple):
    """A rank's GPU, as the other ranks hear of it."""

    kind: str  # must be the same for all, because grids and configs depend on it
    uuid: str | None = None  # None: unknown, as in a rehearsal without GPUs
    ordinal: int | None = None  # as the rank's process numbers those that it sees
    under_mps: bool = False  # MPS runs the kernels of several processes on it side by side

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Describe a device."""
        if device.type != "cuda":
            return cls(device.type)
        found = torch.cuda.get_device_properties(device)
        kind = f"{found.name} (sm_{found.major}{found.minor}, {found.multi_processor_count} "
        pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
        under_mps = (pipes / "control").exists()
        return cls(f"{kind}processors)", nvml.uuid_of(device), device.index, under_mps)


def make_symmetric(
    participant: Participant, nbytes: int, device: torch.device, reason: str | None = None
) -> Symmetric:
    """Allocate memory that the GPUs of all ranks address. Collective; waits for the device's
    default stream alone: on others a receive may wait for what a peer sends later.
    ``reason``: why this rank cannot take part, if that is known already.

    Raises:
        NotImplementedError: on all ranks, if the GPUs cannot: no peer access, no virtual memory
            management, ranks that share a GPU without
            TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, GPUs that differ.
        CollectiveTimeoutError, PeerLostError: a rank did not arrive, or left.
    """
    memory = None
    if reason is None:
        try:
            memory = lasting(device, lambda: _allocate(participant, nbytes, device).zero_())
        except RuntimeError as error:
            reason = f"cannot allocate {nbytes} bytes of symmetric memory: {error}"
    # No peer writes before this returns, and by then all memory is zero.
    gpus = agree_on_gpus(participant, reason, Gpu.of(device))
    assert memory is not None  # otherwise all ranks would have raised
    if participant.world == 1:
        return Symmetric(memory, (memory.data_ptr(),))
    handle, reason = _map_peers(participant, memory, gpus)
    agree_on_gpus(participant, reason)
    assert handle is not None  # as above
    # The pointers are those of allocations. Each rank's memory begins at an offset of its own.
    found = participant.exchange("offsets", (handle.offset, handle.multicast_ptr != 0))
    offsets = [offset for offset, _ in found]
    addresses = tuple(map(operator.add, handle.buffer_ptrs, offsets))
    # A multicast address has one offset in all allocations.
    has_multicast = all(multicast for _, multicast in found) and len(set(offsets)) == 1
    multicast = handle.multicast_ptr + handle.offset if has_multicast else 0
    return Symmetric(memory, addresses, multicast, handle)


def _allocate(participant: Participant, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return bytes that `rendezvous` accepts, in a new allocation. In torch 2.11 to 2.14,
    `symmetric_memory.empty` makes the same call within the context of a pool, which does not
    affect it."""
    if participant.world == 1:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def _map_peers(
    participant: Participant, memory: torch.Tensor, gpus: Sequence[Gpu]
) -> tuple[Any, str | None]:
    """Return torch's handle of all ranks' allocations, or why there is none."""
    try:
        name = cast(Any, participant.process_group)  # a NewType of str
        handle: Any = symmetric_memory.rendezvous(memory, name)
    except RuntimeError as error:
        return None, f"cannot map the memory of its peers: {error}. {_how_to_map(gpus)}"
    if not all(handle.buffer_ptrs):
        return None, (
            "cannot address the memory of its peers: with this backend, torch symmetric memory "
            "provides no peer pointers; call "
            "torch.distributed._symmetric_memory.set_backend('CUDA') before its first use"
        )
    # All ranks check their offsets, so the sums are aligned as well.
    values = *handle.buffer_ptrs, handle.multicast_ptr, handle.offset
    if any(value % _ALIGNMENT for value in values):
        return None, (
            f"has symmetric memory at {', '.join(map(hex, handle.buffer_ptrs))} + {handle.offset}, "
            f"but these must be multiples of {_ALIGNMENT}; this version of torch needs a different "
            "version of tpkernels"
        )
    return handle, None


def _how_to_map(gpus: Sequence[Gpu]) -> str:
    """Return what to do where torch cannot map the memory of ranks on these GPUs."""
    ranks: dict[Any, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu.uuid is not None and ranks.setdefault(gpu.uuid, rank) != rank:
            return (
                f"Ranks {ranks[gpu.uuid]} and {rank} share GPU {gpu.uuid}: give each rank a "
                "separate GPU. For tests only, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 permits "
                "ranks to share a GPU"
            )
    for rank, gpu in enumerate(gpus):
        if gpu.ordinal is not None and ranks.setdefault(gpu.ordinal, rank) != rank:
            return (
                f"Ranks {ranks[gpu.ordinal]} and {rank} use different GPUs, but each sees its GPU "
                f"as cuda:{gpu.ordinal}, and torch treats these as the same GPU: let each process "
                "see all GPUs of the host (the same CUDA_VISIBLE_DEVICES on all ranks, no "
                "--gpus-per-task), and use cuda:LOCAL_RANK"
            )
    return "The GPUs need peer access; `nvidia-smi topo -p2p r` shows which GPUs support it"


def make_workspace(
    participant: Participant,
    words: int,
    buffer_bytes: int,
    device: torch.device,
    reason: str | None = None,
) -> DeviceWorkspace:
    """Return a workspace of a group's kernels on GPUs, in memory from `make_symmetric`; raise what
    that does."""
    rank, nbytes = participant.rank, region_bytes(participant.world, words, buffer_bytes)
    made = make_symmetric(participant, nbytes, device, reason)
    limits, space = (words, buffer_bytes, participant.timeout), None
    try:
        space = DeviceWorkspace(made.addresses, made.memory, rank, *limits, memory=made)
    except RuntimeError as error:
        reason = f"cannot allocate the state of a workspace: {error}"
    agree_on_gpus(participant, reason)
    assert space is not None  # otherwise all ranks would have raised
    return space


def agree_on_gpus(participant: Participant, error: str | None, own: Gpu | None = None) -> list[Gpu]:
    """Return all ranks' GPUs. Raise ``NotImplementedError`` on all ranks if one has an ``error`` or
    another kind of GPU, or if two share one under MPS. Collective; all ranks give a GPU or none."""
    reports = participant.exchange("kernels on GPUs", (error, *(own or Gpu(""))))
    gpus = [Gpu(*gpu) for _, *gpu in reports]
    first: dict[str, int] = {}  # rank on a GPU under MPS
    for rank, ((error, *_), gpu) in enumerate(zip(reports, gpus, strict=True)):
        why = None
        if error is not None:
            why = f"cannot run on GPUs: rank {rank} {error}"
        elif gpu.kind != gpus[0].kind:
            why = (
                f"need the same kind of GPU on all ranks: rank 0 has {gpus[0].kind}, rank {rank} "
                f"has {gpu.kind}"
            )
        elif gpu.under_mps and gpu.uuid and first.setdefault(gpu.uuid, rank) != rank:
            why = (
                f"cannot run: ranks {first[gpu.uuid]} and {rank} share GPU {gpu.uuid} under MPS, "
                "and a kernel of one rank can fill the GPU while it waits for a kernel of the "
                "other rank. Give each rank a separate GPU, or stop MPS"
            )
        if why is not None:
            raise NotImplementedError(f"the kernels of group '{participant.group}' {why}")
    return gpus


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
            known = self._made, nbytes, made.addresses
            segment = GpuSegment(*known, made.handle, owner)
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
