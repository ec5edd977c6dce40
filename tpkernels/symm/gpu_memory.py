"""GPU memory that all ranks of a group can address, allocated with torch symmetric memory.

Users allocate symmetric tensors in it (`GpuSegments`). The copy engines of peers read them in
place.

Sync: the host supplies the addresses of a copy engine, and does not communicate during a call. So
either all ranks pass the full symmetric tensor with the same number, or no rank passes one. The
number is an input of the call signature, so the first wait detects a rank that differs. A call that
reads the tensor ends after all ranks have read it (`CopyCall`).

Lifetime: torch synchronizes with the device when it frees such memory, and cannot do that during a
capture. Memory that a captured call reads is never freed, because replays read it again.

Allocation: `_allocate` bypasses the torch pool of symmetric memory. For an allocation that the
group has mapped before, `rendezvous` returns the earlier result without communication. If one rank
got a recycled allocation and a peer a different one, the rank would use memory that the peer has
freed, or wait for the peer until the timeout.
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
from tpkernels.symm.device import DeviceWorkspace, allocate_persistent, region_bytes
from tpkernels.symm.exchange import Participant
from tpkernels.torch_private import SymmetricMemory, symmetric_memory

_ALIGNMENT = 256  # bytes; alignment of symmetric memory, because kernels access full lines


class SymmetricBuffer(NamedTuple):
    """A buffer of this rank, and the addresses of the buffers of all ranks."""

    memory: torch.Tensor  # [nbytes] uint8, zero-filled
    addresses: tuple[int, ...]  # address of each rank's buffer, as mapped on this rank
    multicast: int = 0  # multicast address of all buffers; 0 without multicast
    handle: object = None  # torch handle that owns the mapping; None with one rank


class Gpu(NamedTuple):
    """Description of the GPU of a rank, exchanged among the ranks."""

    kind: str  # must be equal on all ranks: grids and configs depend on it
    uuid: str | None = None  # None if unknown, as in a CPU dry run
    ordinal: int | None = None  # device index in the process of the rank
    under_mps: bool = False  # MPS runs kernels of several processes concurrently

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Describe a device."""
        if device.type != "cuda":
            return cls(device.type)
        properties = torch.cuda.get_device_properties(device)
        kind = (
            f"{properties.name} (sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} "
        )
        pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
        under_mps = (pipes / "control").exists()
        return cls(f"{kind}processors)", nvml.get_uuid(device), device.index, under_mps)


def make_symmetric(
    participant: Participant, nbytes: int, device: torch.device, reason: str | None = None
) -> SymmetricBuffer:
    """Allocate a symmetric buffer. Collective.

    Waits only for the default stream of the device. Other streams may contain a receive that waits
    for data that a peer sends later.

    Args:
        participant: this rank.
        nbytes: size of the buffer of each rank.
        device: the GPU of this rank.
        reason: the reason why this rank cannot participate, if known.

    Raises:
        NotImplementedError: on all ranks, if the GPUs do not support it. They lack peer access or
            virtual memory management, differ in kind, or ranks share a GPU without
            TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
        CollectiveTimeoutError: a rank did not arrive in time.
        PeerLostError: a rank left.
    """
    memory = None
    if reason is None:
        try:
            memory = allocate_persistent(
                device, lambda: _allocate(participant, nbytes, device).zero_()
            )
        except RuntimeError as error:
            reason = f"cannot allocate {nbytes} bytes of symmetric memory: {error}"
    # Peers write only after this exchange, so all memory is zero by then.
    gpus = exchange_gpus(participant, reason, Gpu.of(device))
    assert memory is not None  # otherwise all ranks would have raised
    if participant.world == 1:
        return SymmetricBuffer(memory, (memory.data_ptr(),))
    handle, reason = _map_peers(participant, memory, gpus)
    exchange_gpus(participant, reason)
    assert handle is not None  # as above
    # The pointers address allocations. The offset of the buffer may differ by rank.
    reports = participant.exchange("offsets", (handle.offset, handle.multicast_ptr != 0))
    offsets = [offset for offset, _ in reports]
    addresses = tuple(map(operator.add, handle.buffer_ptrs, offsets))
    # A multicast address requires the same offset in all allocations.
    has_multicast = all(multicast for _, multicast in reports) and len(set(offsets)) == 1
    multicast = handle.multicast_ptr + handle.offset if has_multicast else 0
    return SymmetricBuffer(memory, addresses, multicast, handle)


def _allocate(participant: Participant, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a new allocation of ``nbytes`` that `rendezvous` accepts. In torch 2.11 to 2.14,
    `symmetric_memory.empty` makes this call within the context of a pool. The context has no effect
    on it."""
    if participant.world == 1:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def _map_peers(
    participant: Participant, memory: torch.Tensor, gpus: Sequence[Gpu]
) -> tuple[Any, str | None]:
    """Return (torch handle of the allocations of all ranks, None), or (None, reason)."""
    try:
        name = cast(Any, participant.process_group)  # a NewType of str
        handle: Any = symmetric_memory.rendezvous(memory, name)
    except RuntimeError as error:
        return None, f"cannot map the memory of its peers: {error}. {_mapping_advice(gpus)}"
    if not all(handle.buffer_ptrs):
        return None, (
            "cannot address the memory of its peers: with this backend, torch symmetric memory "
            "provides no peer pointers; call "
            "torch.distributed._symmetric_memory.set_backend('CUDA') before its first use"
        )
    # Every rank checks its offset, so pointer plus offset is aligned as well.
    values = *handle.buffer_ptrs, handle.multicast_ptr, handle.offset
    if any(value % _ALIGNMENT for value in values):
        return None, (
            f"has symmetric memory at {', '.join(map(hex, handle.buffer_ptrs))} + {handle.offset}, "
            f"but these must be multiples of {_ALIGNMENT}; this version of torch needs a different "
            "version of tpkernels"
        )
    return handle, None


def _mapping_advice(gpus: Sequence[Gpu]) -> str:
    """Return advice for the user if torch cannot map the memory of these GPUs."""
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
    signals: int,
    buffer_bytes: int,
    device: torch.device,
    reason: str | None = None,
) -> DeviceWorkspace:
    """Create the GPU workspace of a group. Collective; errors as in `make_symmetric`.

    Args:
        participant: this rank.
        signals: number of signals per source.
        buffer_bytes: size of each of the two data buffers.
        device: the GPU of this rank.
        reason: the reason why this rank cannot participate, if known.
    """
    rank, nbytes = participant.rank, region_bytes(participant.world, signals, buffer_bytes)
    buffer = make_symmetric(participant, nbytes, device, reason)
    limits, workspace = (signals, buffer_bytes, participant.timeout), None
    try:
        workspace = DeviceWorkspace(buffer.addresses, buffer.memory, rank, *limits, memory=buffer)
    except RuntimeError as error:
        reason = f"cannot allocate the state of a workspace: {error}"
    exchange_gpus(participant, reason)
    assert workspace is not None  # otherwise all ranks would have raised
    return workspace


def exchange_gpus(
    participant: Participant, error: str | None, local_gpu: Gpu | None = None
) -> list[Gpu]:
    """Exchange errors and the GPUs of all ranks. Collective.

    Args:
        participant: this rank.
        error: the reason why this rank cannot use GPUs, if any.
        local_gpu: the GPU of this rank. Either all ranks pass a GPU, or no rank does.

    Raises:
        NotImplementedError: on all ranks, if a rank has an ``error``, the kinds of GPUs differ, or
            two ranks share a GPU under MPS.
    """
    reports = participant.exchange("kernels on GPUs", (error, *(local_gpu or Gpu(""))))
    gpus = [Gpu(*gpu) for _, *gpu in reports]
    first: dict[str, int] = {}  # rank on a GPU under MPS
    for rank, ((error, *_), gpu) in enumerate(zip(reports, gpus, strict=True)):
        obstacle = None
        if error is not None:
            obstacle = f"cannot run on GPUs: rank {rank} {error}"
        elif gpu.kind != gpus[0].kind:
            obstacle = (
                f"need the same kind of GPU on all ranks: rank 0 has {gpus[0].kind}, rank {rank} "
                f"has {gpu.kind}"
            )
        elif gpu.under_mps and gpu.uuid and first.setdefault(gpu.uuid, rank) != rank:
            obstacle = (
                f"cannot run: ranks {first[gpu.uuid]} and {rank} share GPU {gpu.uuid} under MPS, "
                "and a kernel of one rank can fill the GPU while it waits for a kernel of the "
                "other rank. Give each rank a separate GPU, or stop MPS"
            )
        if obstacle is not None:
            raise NotImplementedError(f"the kernels of group '{participant.group}' {obstacle}")
    return gpus


@dataclass(frozen=True)
class GpuSegment:
    """A symmetric tensor: its number (equal on all ranks) and its addresses."""

    number: int
    nbytes: int
    addresses: tuple[int, ...]
    memory: object  # owner of the peer mappings, and possibly of the local one
    owner: StorageWeakRef

    def signature(self, call_signature: int) -> int:
        """Return the signature of a call that reads the tensor.

        Args:
            call_signature: signature of the same call without a symmetric tensor.
        """
        return zlib.crc32(f"{call_signature} in symmetric tensor {self.number}".encode()) or 1


class GpuSegments:
    """The symmetric tensors of this rank on one device. Lookups outside a capture drop tensors that
    are no longer referenced."""

    def __init__(self) -> None:
        self._count = 0
        self._by_address: dict[int, GpuSegment] = {}  # by address on this rank
        self._recorded: set[int] = set()  # numbers of segments that a graph reads

    def make(
        self,
        participant: Participant,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Allocate a zero-filled symmetric tensor. Collective; errors as in `make_symmetric`."""
        self._forget()
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        buffer = make_symmetric(participant, max(nbytes, 1), device)
        self._count += 1
        if nbytes:
            owner = StorageWeakRef(buffer.memory.untyped_storage())
            fields = self._count, nbytes, buffer.addresses
            segment = GpuSegment(*fields, buffer.handle, owner)
            self._by_address[buffer.addresses[participant.rank]] = segment
        return buffer.memory[:nbytes].view(dtype).view(shape)

    def find(self, x: torch.Tensor) -> GpuSegment | None:
        """Return the segment if ``x`` is a full symmetric tensor, else None."""
        if not self._by_address:
            return None
        captured = streams.is_captured(x.device)
        if not captured:
            self._forget()
        segment = self._by_address.get(x.data_ptr())
        if segment is None or segment.owner.expired() or segment.nbytes != x.nbytes:
            return None
        if not x.is_contiguous():
            return None
        if captured:
            self._recorded.add(segment.number)
        return segment

    def _forget(self) -> None:
        for address, segment in list(self._by_address.items()):
            if segment.owner.expired() and segment.number not in self._recorded:
                del self._by_address[address]
