"""The workspace of a group whose ranks are on one host: an arena in anonymous shared memory.

The arena holds, for each rank, signal words and two data buffers (csrc/host/channel.h has the
protocol and its proof). Symmetric tensors that users make are arenas of their own, called segments.
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
from tpkernels.symm.gpu_memory import agree_on_gpus
from tpkernels.symm.limits import short_of_memory
from tpkernels.symm.rendezvous import MappedArena, Parts, make_arena

PAGE = 4 << 10
_HUGE_PAGE = 2 << 20
_FIRST_BUFFER = 1 << 20  # bytes of a data buffer that are committed from the start
# Of a GPU's first workspace, which grows when a call needs more. The words are enough for the
# largest call by LL (cuda/layouts.py), and take 528 KiB for each source.
_FIRST_WORDS, _FIRST_BYTES = 33 << 10, 1 << 20
# How long a waiter polls at most before it sleeps (csrc/host/wait.h). If ranks outnumber cores,
# it yields its core between polls; else not, because whoever gets it keeps it for long: vLLM's
# workers share their cores with its engine, which is always busy. With the plugin it decodes a
# batch of 8 at 0.77 of its own speed where waiters yield after 5 us, and at 1.14 where they do not
# (benchmarks/results/cpu-2core-vllm.md).
_SPIN_US, _CROWDED_SPIN_US = 2000.0, 200.0


def is_crowded(pids: Sequence[int]) -> bool:
    """Return whether the ranks are more than the cores they may use together. An engine may have
    bound each to a core of its own."""
    cores = os.sched_getaffinity(0)
    for pid in pids:
        with suppress(OSError):  # it ended, or is in another pid namespace
            cores |= os.sched_getaffinity(pid)
    return len(pids) > len(cores)


def _make_channel(link: MappedArena, participant: Participant, capacity: int) -> _C.host.Channel:
    crowded = is_crowded(link.pids)
    return _C.host.Channel(
        link.arena,
        participant.rank,
        link.pidfds,
        link.pids,
        timeout=participant.timeout,
        spin_us=_CROWDED_SPIN_US if crowded else _SPIN_US,
        yield_us=0.0 if crowded else _SPIN_US,
        capacity=capacity,
        names=participant.names,
    )


class HostSegments(_C.host.Segments):
    """This rank's regions of the segments of a group, each for as long as its tensor lives."""

    def register(self, region: _C.host.Region) -> int:
        """Return the identity of a new segment, which is the same on all ranks."""
        identity = self.add(region.address, region.nbytes)
        weakref.finalize(region, self.forget, identity).atexit = False
        return identity

    def find(self, x: torch.Tensor) -> tuple[int, int]:
        """Return (identity, offset in bytes) of a contiguous tensor that lies in a segment;
        identity 0 where it does not."""
        if not len(self) or not x.is_contiguous():
            return 0, 0
        return self.locate(x.data_ptr(), x.numel() * x.element_size())


class HostWorkspace:
    """Peers' buffers, signals and the epoch of one group on one host.

    ``channel`` is the extension's side of it, which the algorithms drive.
    """

    def __init__(self, participant: Participant, workspace_bytes: int) -> None:
        self.participant = participant
        self.workspace_bytes = workspace_bytes
        self._may_grow = True
        self.segments = HostSegments()
        self._chaos: dict[str, Any] | None = None
        self._device: DeviceWorkspace | None = None
        self.alarm = _C.calls.Alarm()
        self.on_gpus: dict[torch.device, CudaWorkspace] = {}  #: those that `open_cuda` has made
        self._variants: frozenset[str] = frozenset()
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        region = _C.host.Channel.region_bytes(participant.world, workspace_bytes)
        self._region_bytes = -(-region // _HUGE_PAGE) * _HUGE_PAGE
        first = min(workspace_bytes, _FIRST_BUFFER)
        try:
            link = make_arena(participant, "workspace", self._region_bytes, self._parts(0, first))
        except MemoryError as error:
            hint = f"pass tpkernels.init a workspace_bytes smaller than {workspace_bytes}"
            raise MemoryError(f"{error}; {hint}") from None
        self.channel = _make_channel(link, participant, first)
        self._arena = link.arena
        self._gpu_timeout = participant.timeout

    def set_timeouts(self, timeout: float, gpu_timeout: float) -> None:
        """Bound waits in calls on the host, and in those on GPUs with their kernels."""
        self.participant = replace(self.participant, timeout=timeout)
        self.channel.timeout = timeout
        self._gpu_timeout = gpu_timeout
        for space in self.on_gpus.values():
            space.set_timeout(gpu_timeout)

    @property
    def epoch(self) -> int:
        """Return the number of the last call, the same on all ranks."""
        return self.channel.epoch

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that each data buffer may grow to."""
        return self.workspace_bytes if self._may_grow else self.channel.capacity

    def wants(self, nbytes: int) -> bool:
        """Return whether the data buffers should grow for a call that would use ``nbytes`` of
        each."""
        return self._may_grow and min(nbytes, self.workspace_bytes) > self.channel.capacity

    def grow(self, nbytes: int, text: str) -> str | None:
        """Grow the data buffers to ``nbytes`` each, at most to ``workspace_bytes``. If a rank lacks
        the memory, all stay as they are, and the text of a warning is returned. Collective."""
        if not self.wants(nbytes):  # another thread was first
            return None
        wanted = min(1 << (nbytes - 1).bit_length(), self.workspace_bytes)
        parts, rank = self._parts(self.channel.capacity, wanted), self.participant.rank
        # All ranks check how much is free before any of them takes some of it.
        error = short_of_memory(sum(size for _, size in parts), self.participant.world)
        self._agree(f"workspace growth to {wanted} bytes for {text}")
        error = error or self._commit(parts)
        report = None if error is None else f"rank {self.participant.name(rank)}: {error}"
        errors = self.exchange("workspace growth", report)
        self._may_grow = not any(errors)
        if self._may_grow:
            self.channel.grow(wanted)
            return None
        for offset, size in parts:
            self._arena.give_back(rank, offset, size)
        return (
            f"the workspace of group '{self.participant.group}' stays at {self.channel.capacity} "
            f"bytes per buffer, so large calls need more steps: {next(filter(None, errors))}"
        )

    def _commit(self, parts: Parts) -> str | None:
        """Commit parts of this rank's region; return the error, if any."""
        try:
            for offset, size in parts:
                self._arena.commit(self.participant.rank, offset, size)
        except RuntimeError as failure:
            return str(failure)
        return None

    def _parts(self, begin: int, end: int) -> Parts:
        """Return the parts of a region to commit for buffers to grow from ``begin`` to ``end``
        bytes."""
        return _C.host.Channel.parts(self.participant.world, self._region_bytes, begin, end)

    def device(self, words: int, buffer_bytes: int, text: str) -> DeviceWorkspace:
        """Return the workspace of the Triton kernels under their interpreter, with at least that
        many words of each source and bytes of each buffer. Collective when it has to grow."""
        if self._device is not None:
            if self._device.holds(words, buffer_bytes):
                return self._device
            words = max(words, self._device.words)
            buffer_bytes = max(buffer_bytes, self._device.buffer_bytes)
        self._agree(f"a kernel workspace of {words} signals and {buffer_bytes} bytes for {text}")
        participant = self.participant
        arena = self._further_arena("kernels", region_bytes(participant.world, words, buffer_bytes))
        regions = [arena.region(rank) for rank in range(participant.world)]
        with torch.inference_mode(False):  # it outlives the mode of this call
            region = torch.frombuffer(regions[participant.rank], dtype=torch.uint8)
        addresses, limits = [region.address for region in regions], (words, buffer_bytes)
        self._device = DeviceWorkspace(
            addresses, region, participant.rank, *limits, participant.timeout, memory=regions
        )
        if self._chaos is not None:
            self._device.set_chaos(**self._chaos)
        return self._device

    def open_cuda(self, device: torch.device, kernels: str, reason: str | None) -> None:
        """Set up one kind of kernels on GPUs; ``device`` is this rank's. Collective.

        Raises:
            NotImplementedError: on all ranks, if one of them has a ``reason`` not to, or if the
                GPUs share no memory.
        """
        with self.waiting(self._gpu_timeout):
            self._agree(f"the setup of {kernels} kernels on GPUs")
            if device in self.on_gpus:
                agree_on_gpus(self._watched(), reason)
            else:
                self.on_gpus[device] = self._make_cuda(device, reason)
            if kernels == "multicast":
                self.on_gpus[device].grow_multicast(_FIRST_BYTES)

    def use_variants(self, variants: frozenset[str]) -> None:
        """Take these variants on GPUs, the same on all ranks; see `DeviceWorkspace.variants`."""
        self._variants = variants
        for space in self.on_gpus.values():
            space.use_variants(variants)

    def _make_cuda(self, device: torch.device, reason: str | None) -> CudaWorkspace:
        link = self._link("watch", _C.host.Channel.region_bytes(self.participant.world, PAGE))
        channel = _make_channel(link, self.participant, PAGE)
        channel.begin(1, "the setup of kernels on GPUs")
        channel.barrier()
        space = CudaWorkspace(self._watched(), channel, device, self.alarm, self._variants)
        try:
            space.grow(_FIRST_WORDS, _FIRST_BYTES, reason)
        except BaseException:
            space.close("a failed setup of kernels on GPUs")
            raise
        return space

    def cuda(self, device: torch.device, words: int, buffer_bytes: int, text: str) -> CudaWorkspace:
        """Return the workspace of kernels on GPUs, as `device` is for those under the interpreter.

        Raises:
            CaptureError: it would have to grow while a graph is captured.
            WorkspaceMemoryError: on all ranks, if one has no memory for it.
        """
        space = self.on_gpus[device]
        if not space.current.holds(words, buffer_bytes):
            what = f"a GPU workspace of {words} signals and {buffer_bytes} bytes"
            self._grow_on_gpu(device, what, text, partial(space.grow, words, buffer_bytes))
        return space

    def multicast(self, device: torch.device, nbytes: int, text: str) -> CudaWorkspace:
        """Return the workspace on GPUs with so many bytes for torch's multimem ops. Raises what
        `cuda` does."""
        space = self.on_gpus[device]
        if space.multicast.numel() < nbytes:
            what = f"{nbytes} bytes of multicast memory"
            self._grow_on_gpu(device, what, text, partial(space.grow_multicast, nbytes))
        return space

    def _grow_on_gpu(
        self, device: torch.device, what: str, text: str, grow: Callable[[], None]
    ) -> None:
        if streams.is_captured(device):
            raise CaptureError(
                f"{text} needs a larger workspace; call it once before the graph capture"
            )
        with self.waiting(self._gpu_timeout):
            self._agree(f"{what} for {text}")
            try:
                grow()
            except NotImplementedError as error:  # as for the first workspace, on all ranks
                raise WorkspaceMemoryError(f"{text}: {error}") from None

    def check_kernels(self, text: str) -> None:
        """Raise the error if a GPU kernel has failed so far; ``text`` names, in its message, the
        call that noticed."""
        for space in self.on_gpus.values():
            space.check(text)

    def check(self) -> None:
        """Raise what has failed in kernels on GPUs, once the queued ones have run, or that a peer
        is lost."""
        for space in self.on_gpus.values():
            space.wait()
        self.check_kernels("tpkernels.check")
        self.channel.check_peers()

    def view(
        self, rank: int, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0
    ) -> torch.Tensor:
        """Return the contiguous tensor at ``offset`` bytes of ``rank``'s buffer, until this epoch
        ends."""
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
        """Return what ``peer`` published in this epoch, in its buffer or a segment."""
        if not self.channel.in_segment(peer):
            return self.view(peer, dtype, shape)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        region = self.channel.segment_of(peer, nbytes)
        return torch.frombuffer(region, dtype=dtype).view(shape)

    def make_symmetric(
        self, shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device | None = None
    ) -> torch.Tensor:
        """Make a segment; return this rank's part of it as a tensor: on the host, or on a ``gpu``
        for which `open_cuda` has set kernels up. Collective."""
        text = f"tpkernels.empty({list(shape)}, {dtype})"
        if gpu is not None:
            with self.waiting(self._gpu_timeout):
                self._agree(f"{text} on GPUs")
                return self.on_gpus[gpu].make_tensor(shape, dtype)
        self._agree(text)
        nbytes = max(prod(shape) * dtype.itemsize, 1)
        arena = self._further_arena("empty", nbytes)
        region = arena.region(self.participant.rank, 0, nbytes)
        self.channel.add_segment(self.segments.register(region), arena)
        if prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(region, dtype=dtype, count=prod(shape)).view(shape)

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Let waits on the host take that long, within the block."""
        usual = self.participant
        self.participant = replace(usual, timeout=seconds)
        self.channel.timeout = seconds
        try:
            yield
        finally:
            self.participant, self.channel.timeout = usual, usual.timeout

    def _further_arena(self, purpose: str, nbytes: int) -> _C.host.Arena:
        """Make an arena beside the channel's, which watches the ranks already. Collective."""
        link = self._link(purpose, nbytes)
        for pidfd in link.pidfds:
            os.close(pidfd)
        return link.arena

    def _link(self, purpose: str, nbytes: int) -> MappedArena:
        """Make a new arena, in the call that has just begun. Collective."""
        region = round_up(nbytes, PAGE)
        return make_arena(self._watched(), purpose, region, [(0, region)])

    def _watched(self) -> Participant:
        """Return this rank, for a rendezvous in the call that has just begun: its peers are
        watched, and exchanges go through this workspace."""
        # Nobody publishes RESULT in such a call.
        watch = partial(self.channel.watch, Phase.RESULT, 0.0)
        return replace(self.participant, watch=watch, by_memory=self.exchange)

    def _agree(self, text: str) -> None:
        """Check that all ranks are about to do the same."""
        self.channel.begin(zlib.crc32(text.encode()) or 1, text)
        self.channel.barrier()

    def exchange(self, purpose: str, value: object) -> list[Any]:
        """Return the values of all ranks, which JSON can hold, in rank order. A call of its own, or
        several where a value is larger than a buffer. Collective.

        Sync: a rank writes the size of its text and a part of it, publishes, and reads those of all
        ranks. As in any call, the buffers of this epoch stay until all ranks are in the one after
        the next.
        """
        text, texts = json.dumps(value).encode(), [b""] * self.participant.world
        for begin in itertools.count(0, part := self.channel.capacity - 8):
            self.channel.begin(zlib.crc32(purpose.encode()) or 1, purpose)
            message = len(text).to_bytes(8, "little") + text[begin : begin + part]
            self._bytes(self.participant.rank, len(message))[:] = message
            self.channel.publish(Phase.DATA)
            longest = 0
            for peer in range(self.participant.world):
                self.channel.wait(peer, Phase.DATA)
                size = int.from_bytes(self._bytes(peer, 8), "little")
                texts[peer] += self._bytes(peer, 8 + min(part, max(size - begin, 0)))[8:]
                longest = max(longest, size)
            if longest <= begin + part:
                return [json.loads(encoded) for encoded in texts]
        raise AssertionError("unreachable")

    def _bytes(self, rank: int, nbytes: int) -> memoryview:
        """Return the first bytes of a rank's buffer, until this epoch ends."""
        offset = self.channel.buffer_offset(self.epoch & 1)
        return memoryview(self._arena.region(rank, offset, nbytes))

    def set_chaos(self, **switches: Any) -> None:
        """Switch on, for tests, random delays at every publish and wait, and negative controls."""
        self._chaos = switches
        self.channel.set_chaos(**switches)
        if self._device is not None:
            self._device.set_chaos(**switches)
        for space in self.on_gpus.values():
            space.set_chaos(**switches)

    def abandon(self, why: str, late: bool = False, culprit: int = -1) -> None:
        """End this rank's calls after an error, and notify the peers that wait."""
        self.channel.abandon(why, late, culprit)
        for space in self.on_gpus.values():
            space.close(why, late, culprit)
        self.on_gpus.clear()

    def leave(self) -> None:
        """Make kernels that are still queued stop waiting for peers, as the process ends."""
        for space in self.on_gpus.values():
            space.leave()

    def close(self) -> None:
        """Drop the memory, which is freed when its last view is. Queued kernels may end first,
        within limits: their peers count on them."""
        for space in self.on_gpus.values():
            space.let_end()
        self.abandon("tpkernels.finalize")
        self._bases.clear()
        self.segments.clear()
        self._device = None
