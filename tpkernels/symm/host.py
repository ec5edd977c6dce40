"""The workspace of a group on one host: an arena in anonymous shared memory.

The arena holds a region per rank: a signal pad and two data buffers. csrc/host/channel.h defines
the protocol and proves its invariants. Each symmetric tensor of a user is a separate arena, a
segment.
"""

from __future__ import annotations

import itertools
import json
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from tpkernels import _C
from tpkernels._C.host import Phase
from tpkernels.common.integers import round_up
from tpkernels.errors import CaptureError, WorkspaceMemoryError
from tpkernels.symm import streams
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import DeviceWorkspace, region_bytes
from tpkernels.symm.exchange import Participant
from tpkernels.symm.gpu_memory import exchange_gpus
from tpkernels.symm.limits import find_memory_shortage
from tpkernels.symm.rendezvous import WORKSPACE, ByteRanges, MappedArena, make_arena

PAGE = 4 << 10
_HUGE_PAGE = 2 << 20
_FIRST_BUFFER = 1 << 20  # initial committed bytes of a data buffer
# Initial size of a GPU workspace, which grows on demand. The signals suffice for the largest LL
# call (cuda/layouts.py). They use 528 KiB per source.
_FIRST_SIGNALS, _FIRST_BYTES = 33 << 10, 1 << 20
# Maximum polling time of a waiter before it sleeps (csrc/host/wait.h). If ranks outnumber cores, a
# waiter yields its core between polls. Otherwise it does not yield, because a process that gets the
# core keeps it for long: vLLM workers share their cores with the engine, which is always busy. With
# the plugin, vLLM decodes a batch of 8 at 0.77x of its own speed if waiters yield after 5 us, and
# at 1.14x if they do not (benchmarks/results/cpu-2core-vllm.md).
SPIN_US, _CROWDED_SPIN_US = 2000.0, 200.0
# With the backend "tpkernels" a waiter sleeps sooner. Beside a third busy process on two cores, an
# all-reduce of 4 KiB takes 1.4 ms with 2000 us and 0.4 ms with 200 us, a broadcast of 16 MiB 39 ms
# and 8 ms (two cores of AMD EPYC Zen 3, 2026-11-28; benchmarks/results/cpu-2core-backend.md).
BACKEND_SPIN_US = 200.0


def is_crowded(pids: Sequence[int]) -> bool:
    """Return whether ranks outnumber the cores that they may use in total. An engine may have bound
    each rank to a different core."""
    cores = os.sched_getaffinity(0)
    for pid in pids:
        with suppress(OSError):  # it has exited, or is in a different pid namespace
            cores |= os.sched_getaffinity(pid)
    return len(pids) > len(cores)


def _make_channel(
    mapped_arena: MappedArena, participant: Participant, capacity: int, spin_us: float = SPIN_US
) -> _C.host.Channel:
    crowded = is_crowded(mapped_arena.pids)
    return _C.host.Channel(
        mapped_arena.arena,
        participant.rank,
        mapped_arena.pidfds,
        mapped_arena.pids,
        timeout=participant.timeout,
        spin_us=_CROWDED_SPIN_US if crowded else spin_us,
        yield_us=0.0 if crowded else spin_us,
        capacity=capacity,
        group_ranks=participant.group_ranks,
        group=participant.group,
    )


class HostSegments(_C.host.Segments):
    """The regions of this rank in the segments of a group. A region is registered while its tensor
    is alive."""

    def register(self, region: _C.host.Region) -> int:
        """Register a new segment. Return its identity, which is equal on all ranks."""
        identity = self.add(region.address, region.nbytes)
        weakref.finalize(region, self.forget, identity).atexit = False
        return identity

    def find(self, x: torch.Tensor) -> tuple[int, int]:
        """Return (segment identity, offset in bytes) of a contiguous tensor. The identity is 0 if
        the tensor is not in a segment."""
        if not len(self) or not x.is_contiguous():
            return 0, 0
        return self.locate(x.data_ptr(), x.numel() * x.element_size())


class HostWorkspace:
    """The regions and the epoch of one group on one host.

    The algorithms run their calls on ``channel``, which the C++ extension implements.
    """

    def __init__(
        self, participant: Participant, workspace_bytes: int, spin_us: float = SPIN_US
    ) -> None:
        self.participant = participant
        self.workspace_bytes = workspace_bytes
        self._can_grow = True
        self.segments = HostSegments()
        self._chaos: dict[str, Any] | None = None
        self._device_workspace: DeviceWorkspace | None = None
        self.alarm = _C.calls.Alarm()
        self.cuda_workspaces: dict[torch.device, CudaWorkspace] = {}  #: set by `open_cuda`
        self._variants: frozenset[str] = frozenset()
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        region = _C.host.Channel.region_bytes(participant.world, workspace_bytes)
        self._region_bytes = -(-region // _HUGE_PAGE) * _HUGE_PAGE
        first = min(workspace_bytes, _FIRST_BUFFER)
        try:
            mapped_arena = make_arena(
                participant, WORKSPACE, self._region_bytes, self._ranges_to_commit(0, first)
            )
        except MemoryError as error:
            hint = f"pass tpkernels.init a workspace_bytes smaller than {workspace_bytes}"
            raise MemoryError(f"{error}; {hint}") from None
        self.channel = _make_channel(mapped_arena, participant, first, spin_us)
        self._arena = mapped_arena.arena
        self._gpu_timeout = participant.timeout

    def set_timeouts(self, timeout: float, gpu_timeout: float) -> None:
        """Set the limits of waits: ``timeout`` for calls on the host, ``gpu_timeout`` for calls on
        GPUs and their kernels."""
        self.participant = replace(self.participant, timeout=timeout)
        self.channel.timeout = timeout
        self._gpu_timeout = gpu_timeout
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.set_timeout(gpu_timeout)

    @property
    def epoch(self) -> int:
        """Return the number of the last call. It is equal on all ranks."""
        return self.channel.epoch

    @property
    def usable_bytes(self) -> int:
        """Return the maximum size of a data buffer in bytes."""
        return self.workspace_bytes if self._can_grow else self.channel.capacity

    def needs_growth(self, nbytes: int) -> bool:
        """Return whether a call that would use ``nbytes`` of each data buffer should grow them."""
        return self._can_grow and min(nbytes, self.workspace_bytes) > self.channel.capacity

    def grow(self, nbytes: int, description: str) -> str | None:
        """Grow the data buffers. Collective.

        Args:
            nbytes: requested size of each buffer. The result is at most ``workspace_bytes``.
            description: the call, for the message of a mismatch.

        Returns:
            None, or the message of a warning if a rank lacks the memory. Then no buffer grows.
        """
        if not self.needs_growth(nbytes):  # a different thread has grown them
            return None
        new_capacity = min(1 << (nbytes - 1).bit_length(), self.workspace_bytes)
        ranges, rank = (
            self._ranges_to_commit(self.channel.capacity, new_capacity),
            self.participant.rank,
        )
        # All ranks read the free memory before any rank commits memory.
        error = find_memory_shortage(sum(size for _, size in ranges), self.participant.world)
        self._check_same_call(f"workspace growth to {new_capacity} bytes for {description}")
        error = error or self._commit(ranges)
        report = None if error is None else f"rank {self.participant.group_rank(rank)}: {error}"
        errors = self.exchange("workspace growth", report)
        self._can_grow = not any(errors)
        if self._can_grow:
            self.channel.grow(new_capacity)
            return None
        for offset, size in ranges:
            self._arena.decommit(rank, offset, size)
        return (
            f"the workspace of group '{self.participant.group}' stays at {self.channel.capacity} "
            f"bytes per buffer, so large calls need more steps: {next(filter(None, errors))}"
        )

    def _commit(self, ranges: ByteRanges) -> str | None:
        """Commit ranges of the region of this rank. Return the error message, if any."""
        try:
            for offset, size in ranges:
                self._arena.commit(self.participant.rank, offset, size)
        except RuntimeError as failure:
            return str(failure)
        return None

    def _ranges_to_commit(self, begin: int, end: int) -> ByteRanges:
        """Return the ranges to commit before the buffers grow from ``begin`` to ``end`` bytes."""
        return _C.host.Channel.commit_ranges(self.participant.world, self._region_bytes, begin, end)

    def device_workspace(
        self, signals: int, buffer_bytes: int, description: str
    ) -> DeviceWorkspace:
        """Return the workspace of Triton kernels under the interpreter. Collective if it must grow.

        Args:
            signals: minimum number of signals per source.
            buffer_bytes: minimum size of each data buffer.
            description: the call, for the message of a mismatch.
        """
        if self._device_workspace is not None:
            if self._device_workspace.holds(signals, buffer_bytes):
                return self._device_workspace
            signals = max(signals, self._device_workspace.signals)
            buffer_bytes = max(buffer_bytes, self._device_workspace.buffer_bytes)
        self._check_same_call(
            f"a kernel workspace of {signals} signals and {buffer_bytes} bytes for {description}"
        )
        participant = self.participant
        arena = self._make_extra_arena(
            "kernels", region_bytes(participant.world, signals, buffer_bytes)
        )
        regions = [arena.region(rank) for rank in range(participant.world)]
        with torch.inference_mode(False):  # it outlives the mode of this call
            region = torch.frombuffer(regions[participant.rank], dtype=torch.uint8)
        addresses, limits = [region.address for region in regions], (signals, buffer_bytes)
        self._device_workspace = DeviceWorkspace(
            addresses, region, participant.rank, *limits, participant.timeout, memory=regions
        )
        if self._chaos is not None:
            self._device_workspace.set_chaos(**self._chaos)
        return self._device_workspace

    def open_cuda(self, device: torch.device, kernels: str, reason: str | None) -> None:
        """Set up GPU kernels. Collective.

        Args:
            device: the GPU of this rank.
            kernels: the kind of kernels. "multicast" also allocates multicast memory.
            reason: the reason why this rank cannot run them, if any.

        Raises:
            NotImplementedError: on all ranks, if any rank passes a ``reason`` or the GPUs cannot
                share memory.
        """
        with self.wait_limit(self._gpu_timeout):
            self._check_same_call(f"the setup of {kernels} kernels on GPUs")
            if device in self.cuda_workspaces:
                exchange_gpus(self._watched_participant(), reason)
            else:
                self.cuda_workspaces[device] = self._make_cuda(device, reason)
            if kernels == "multicast":
                self.cuda_workspaces[device].grow_multicast(_FIRST_BYTES)

    def use_variants(self, variants: frozenset[str]) -> None:
        """Use these variants on GPUs. They must be equal on all ranks; see
        `DeviceWorkspace.variants`."""
        self._variants = variants
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.use_variants(variants)

    def _make_cuda(self, device: torch.device, reason: str | None) -> CudaWorkspace:
        mapped_arena = self._make_mapped_arena(
            "watch", _C.host.Channel.region_bytes(self.participant.world, PAGE)
        )
        channel = _make_channel(mapped_arena, self.participant, PAGE)
        channel.begin(1, "the setup of kernels on GPUs")
        channel.barrier()
        cuda_workspace = CudaWorkspace(
            self._watched_participant(), channel, device, self.alarm, self._variants
        )
        try:
            cuda_workspace.grow(_FIRST_SIGNALS, _FIRST_BYTES, reason)
        except BaseException:
            cuda_workspace.close("a failed setup of kernels on GPUs")
            raise
        return cuda_workspace

    def cuda_workspace(
        self, device: torch.device, signals: int, buffer_bytes: int, description: str
    ) -> CudaWorkspace:
        """Return the GPU workspace. Collective if it must grow. Requires an earlier `open_cuda`.

        Args:
            device: the GPU of this rank.
            signals: minimum number of signals per source.
            buffer_bytes: minimum size of each data buffer.
            description: the call, for errors.

        Raises:
            CaptureError: the workspace must grow, but a graph is being captured.
            WorkspaceMemoryError: on all ranks, if any rank lacks the memory.
        """
        cuda_workspace = self.cuda_workspaces[device]
        if not cuda_workspace.current.holds(signals, buffer_bytes):
            resource = f"a GPU workspace of {signals} signals and {buffer_bytes} bytes"
            self._grow_on_gpu(
                device, resource, description, partial(cuda_workspace.grow, signals, buffer_bytes)
            )
        return cuda_workspace

    def multicast(self, device: torch.device, nbytes: int, description: str) -> CudaWorkspace:
        """Return the GPU workspace with at least ``nbytes`` for torch multimem ops. Errors as in
        `cuda_workspace`."""
        cuda_workspace = self.cuda_workspaces[device]
        if cuda_workspace.multicast.numel() < nbytes:
            resource = f"{nbytes} bytes of multicast memory"
            self._grow_on_gpu(
                device, resource, description, partial(cuda_workspace.grow_multicast, nbytes)
            )
        return cuda_workspace

    def _grow_on_gpu(
        self, device: torch.device, resource: str, description: str, grow: Callable[[], None]
    ) -> None:
        if streams.is_captured(device):
            raise CaptureError(
                f"{description} needs a larger workspace; call it once before the graph capture"
            )
        with self.wait_limit(self._gpu_timeout):
            self._check_same_call(f"{resource} for {description}")
            try:
                grow()
            except NotImplementedError as error:  # raised on all ranks
                raise WorkspaceMemoryError(f"{description}: {error}") from None

    def check_kernels(self, description: str) -> None:
        """Raise the error of a failed GPU kernel, if any. ``description`` names the call that
        detected it."""
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.check(description)

    def check(self) -> None:
        """Wait for queued GPU kernels, then raise the error of a failed kernel or a lost peer."""
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.wait()
        self.check_kernels("tpkernels.check")
        self.channel.check_peers()

    def view(
        self, rank: int, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0
    ) -> torch.Tensor:
        """Return a contiguous tensor at byte ``offset`` of the data buffer of ``rank``. It is valid
        until this epoch ends."""
        nbytes = prod(shape) * dtype.itemsize
        if offset < 0 or offset + nbytes > self.channel.capacity:
            raise IndexError(
                f"bytes [{offset}, +{nbytes}) are out of range; a workspace buffer has "
                f"{self.channel.capacity} bytes"
            )
        base = self._bases.get((rank, dtype))
        if base is None:
            with torch.inference_mode(False):  # it outlives the mode of this call
                base = torch.frombuffer(self._arena.region(rank), dtype=dtype)
            self._bases[rank, dtype] = base
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * max(shape[i], 1)
        begin = self.channel.buffer_offset(self.epoch & 1) + offset
        return torch.as_strided(base, shape, strides, begin // dtype.itemsize)

    def peer_data(self, peer: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the data that ``peer`` published in this epoch (data buffer or segment)."""
        if not self.channel.in_segment(peer):
            return self.view(peer, dtype, shape)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        region = self.channel.peer_segment(peer, nbytes)
        return torch.frombuffer(region, dtype=dtype).view(shape)

    def make_symmetric(
        self, shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device | None = None
    ) -> torch.Tensor:
        """Allocate a symmetric tensor, and return the tensor of this rank. Collective.

        Args:
            shape, dtype: of the tensor; equal on all ranks.
            gpu: a GPU set up with `open_cuda`, or None for host memory.
        """
        description = f"tpkernels.empty({list(shape)}, {dtype})"
        if gpu is not None:
            with self.wait_limit(self._gpu_timeout):
                self._check_same_call(f"{description} on GPUs")
                return self.cuda_workspaces[gpu].make_tensor(shape, dtype)
        self._check_same_call(description)
        nbytes = max(prod(shape) * dtype.itemsize, 1)
        arena = self._make_extra_arena("empty", nbytes)
        region = arena.region(self.participant.rank, 0, nbytes)
        self.channel.add_segment(self.segments.register(region), arena)
        if prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(region, dtype=dtype, count=prod(shape)).view(shape)

    @contextmanager
    def wait_limit(self, seconds: float) -> Iterator[None]:
        """Set the limit of waits on the host to ``seconds`` within the block."""
        previous = self.participant
        self.participant = replace(previous, timeout=seconds)
        self.channel.timeout = seconds
        try:
            yield
        finally:
            self.participant, self.channel.timeout = previous, previous.timeout

    def _make_extra_arena(self, purpose: str, nbytes: int) -> _C.host.Arena:
        """Create an arena in addition to the arena of the channel. Collective. Closes the pidfds,
        because the channel already watches the ranks."""
        mapped_arena = self._make_mapped_arena(purpose, nbytes)
        for pidfd in mapped_arena.pidfds:
            os.close(pidfd)
        return mapped_arena.arena

    def _make_mapped_arena(self, purpose: str, nbytes: int) -> MappedArena:
        """Create an arena within the current call. Collective."""
        region = round_up(nbytes, PAGE)
        return make_arena(self._watched_participant(), purpose, region, [(0, region)])

    def _watched_participant(self) -> Participant:
        """Return this rank for a rendezvous within the current call. It watches the peers and
        exchanges values through this workspace."""
        # No rank publishes RESULT in such a call.
        watch = partial(self.channel.watch, Phase.RESULT, 0.0)
        return replace(self.participant, watch=watch, memory_exchange=self.exchange)

    def _check_same_call(self, description: str) -> None:
        """Begin a call, and check that all ranks begin a call with the same description."""
        self.channel.begin(zlib.crc32(description.encode()) or 1, description)
        self.channel.barrier()

    def exchange(self, purpose: str, value: object) -> list[Any]:
        """Return the JSON values of all ranks in rank order. Collective. It runs one call, or
        several calls if a value exceeds a data buffer.

        Sync: a rank writes the size of its encoded value and one chunk of it, publishes, and reads
        the chunks of all ranks. As in any call, the data buffers of epoch e stay unchanged until
        all ranks have finished epoch e.
        """
        payload, received = json.dumps(value).encode(), [b""] * self.participant.world
        for begin in itertools.count(0, chunk := self.channel.capacity - 8):
            self.channel.begin(zlib.crc32(purpose.encode()) or 1, purpose)
            message = len(payload).to_bytes(8, "little") + payload[begin : begin + chunk]
            self._buffer_bytes(self.participant.rank, len(message))[:] = message
            self.channel.publish(Phase.DATA)
            largest = 0
            for peer in range(self.participant.world):
                self.channel.wait(peer, Phase.DATA)
                size = int.from_bytes(self._buffer_bytes(peer, 8), "little")
                received[peer] += self._buffer_bytes(peer, 8 + min(chunk, max(size - begin, 0)))[8:]
                largest = max(largest, size)
            if largest <= begin + chunk:
                self.channel.end_call()
                return [json.loads(encoded) for encoded in received]
        raise AssertionError("unreachable")

    def _buffer_bytes(self, rank: int, nbytes: int) -> memoryview:
        """Return the first bytes of the data buffer of ``rank``. Valid until this epoch ends."""
        offset = self.channel.buffer_offset(self.epoch & 1)
        return memoryview(self._arena.region(rank, offset, nbytes))

    def set_chaos(self, **switches: Any) -> None:
        """Inject random delays into every publish and wait, for tests. Some ``switches`` break the
        protocol (negative controls)."""
        self._chaos = switches
        self.channel.set_chaos(**switches)
        if self._device_workspace is not None:
            self._device_workspace.set_chaos(**switches)
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.set_chaos(**switches)

    def abandon(self, reason: str, late: bool = False, culprit: int = -1) -> None:
        """Abandon the calls of this rank after an error, and notify waiting peers."""
        self.channel.abandon(reason, late, culprit)
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.close(reason, late, culprit)
        self.cuda_workspaces.clear()

    def leave(self) -> None:
        """Abort the waits of queued kernels, because the process exits."""
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.leave()

    def close(self) -> None:
        """Release the memory. It is freed with its last view. First wait, within limits, for queued
        kernels: the kernels of peers depend on them."""
        for cuda_workspace in self.cuda_workspaces.values():
            cuda_workspace.drain()
        self.abandon("tpkernels.finalize")
        self._bases.clear()
        self.segments.clear()
        self._device_workspace = None
