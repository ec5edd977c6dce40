"""The workspace of device kernels: the layout of a region, and prepared calls.

A region holds ``signals`` signals per parity and source rank, then two data buffers.
kernels/sync.py defines the protocol and proves its invariants.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import NamedTuple, TypeVar

import torch

from tpkernels.common.integers import ceil_div, round_up
from tpkernels.errors import (
    CaptureError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
)
from tpkernels.symm import streams

_T = TypeVar("_T")

_ALIGNMENT = 256  # bytes; alignment of the buffers
_SIGNAL_BYTES = 8
_LINE_SIGNALS = 16  # signals per 128 bytes; the signals of a source start on a cache line

# `state`: int64 values in device memory, private to a rank. ENDED: number of programs of the
# running grid that have ended. STATUS to SEEN: the first failed wait. LOST: the last value of ABORT
# that the device has read. LAST_CHECK: the time of that read, in ns.
STATE = EPOCH, ENDED, STATUS, PEER, EXPECTED, SEEN, CLOCK, LOST, LAST_CHECK = range(9)
# Flags follow on the next cache line: each is set when a copy engine has completed a copy of the
# running call (csrc/cuda/sync.cuh).
FLAGS_OFFSET, MAX_FLAGS = _LINE_SIGNALS, 1024
# Minimum time in ns between two reads of ABORT by the kernels of a rank, for any number of waiting
# programs. On an H200, frequent reads by 115 waiting programs slowed the copies of other SMs to a
# tenth of their speed.
CHECK_INTERVAL_NS = 1_000_000
# Epochs run from 1 to LAST_EPOCH, then restart at 1. A signal that was never written has epoch 0.
LAST_EPOCH = 0xFFFF_FFFE
# `control`: int64 values in host memory. ABORT: 1 + the lost rank, written by the host. FAILED: 1
# after STATUS is set, written by a kernel.
CONTROL = ABORT, FAILED = range(2)
# `scratch`: 128-byte descriptors for up to 512 programs of a kernel, one per pipeline stage (at
# most 6) plus one. Shared by all calls, because the calls of a group run one at a time.
SCRATCH_BYTES = 512 * 7 * 128
# Values of STATUS.
MISMATCH, TIMEOUT, ABORTED = 1, 2, 3
_ERRORS = {
    TIMEOUT: CollectiveTimeoutError,
    MISMATCH: CollectiveMismatchError,
    ABORTED: PeerLostError,
}


def to_int32(signature: int) -> int:
    """Convert an unsigned 32-bit signature to the signed number that kernels expect."""
    return signature - (signature >> 31 << 32)


def region_bytes(world: int, signals: int, buffer_bytes: int) -> int:
    """Return the size of a region with ``signals`` signals per source and two data buffers."""
    signals = round_up(signals, _LINE_SIGNALS)
    return round_up(2 * world * signals * _SIGNAL_BYTES, _ALIGNMENT) + 2 * round_up(
        buffer_bytes, _ALIGNMENT
    )


def allocate_persistent(device: torch.device, allocate: Callable[[], _T]) -> _T:
    """Run ``allocate`` for memory on a device that outlives a call, and wait until it is filled.

    ``allocate`` runs on a new thread, and therefore on the default stream, without inference mode
    or a default device. During the warm-up of ``torch.compile(mode="reduce-overhead")``,
    allocations of the calling thread belong to a graph pool, and torch raises if a tensor of that
    pool stays alive.
    """

    def run() -> _T:
        if device.type != "cuda":
            return allocate()
        with torch.cuda.device(device):
            filled = allocate()
            torch.cuda.current_stream(device).synchronize()
        return filled

    with ThreadPoolExecutor(1, "tpkernels-memory") as thread:
        return thread.submit(run).result()


class DeviceWorkspace:
    """The regions of all ranks of a group, and the epoch of their kernels.

    Args:
        addresses: addresses of the zero-filled regions, as mapped on this rank, by rank.
        region: [bytes] uint8, the region of this rank.
        rank: this rank.
        signals: number of signals per source.
        buffer_bytes: size of each of the two data buffers.
        timeout: limit of a wait in seconds.
        memory: owner of the mapping.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        region: torch.Tensor,
        rank: int,
        signals: int,
        buffer_bytes: int,
        timeout: float,
        memory: object = None,
    ) -> None:
        self._addresses, self._region, self._memory = addresses, region, memory
        device = region.device
        #: Qualified variants of this machine (planning/qualification.py). Identical on all ranks;
        #: empty without a report.
        self.variants: frozenset[str] = frozenset()

        def allocate() -> tuple[torch.Tensor, ...]:
            state = torch.zeros(FLAGS_OFFSET + MAX_FLAGS, dtype=torch.int64, device=device)
            pinned = state.is_cuda  # accessed by the host and by running kernels
            control = torch.zeros(len(CONTROL), dtype=torch.int64, pin_memory=pinned)
            scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
            return (
                torch.tensor(addresses, dtype=torch.int64, device=device),
                state,
                control,
                scratch,
            )

        self.regions, self.state, self.control, self.scratch = allocate_persistent(device, allocate)
        # Every call reads the flag. Reading a tensor element would cost 2 us.
        self._failed = ctypes.c_int64.from_address(self.control.data_ptr() + FAILED * _SIGNAL_BYTES)
        self.rank, self.world = rank, len(addresses)
        signals = round_up(signals, _LINE_SIGNALS)
        self.signals, self.buffer_bytes = signals, round_up(buffer_bytes, _ALIGNMENT)
        self.buffers_offset = round_up(2 * self.world * signals * _SIGNAL_BYTES, _ALIGNMENT)
        self.timeout_ns = int(timeout * 1e9)
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}
        self.seed = self.chaos = 0  # see `set_chaos`
        self.buffer_stride = self.buffer_bytes
        self.argument: tuple[object, ...] | None = None  #: launch argument (kernels/sync.py)
        self.arguments_version = object()  #: replaced when launch arguments change

    @property
    def nbytes(self) -> int:
        """Return the size of a region in bytes."""
        return region_bytes(self.world, self.signals, self.buffer_bytes)

    def holds(self, signals: int, buffer_bytes: int) -> bool:
        """Return whether the workspace is large enough for a call with these requirements."""
        return signals <= self.signals and buffer_bytes <= self.buffer_bytes

    def enlarged_size(self, signals: int, buffer_bytes: int) -> tuple[int, int]:
        """Return the (signals, buffer_bytes) of a replacement: at least the requested size and
        twice the memory of this workspace. Only the dimension that is too small grows."""
        grow_signals, grow_buffers = signals > self.signals, buffer_bytes > self.buffer_bytes
        signals = max(signals, self.signals * (2 if grow_signals else 1))
        buffer_bytes = max(buffer_bytes, self.buffer_bytes * (2 if grow_buffers else 1))
        missing = max(0, 2 * self.nbytes - region_bytes(self.world, signals, buffer_bytes))
        if grow_buffers:
            return signals, buffer_bytes + ceil_div(missing, 2)
        return signals + ceil_div(missing, 2 * self.world * _SIGNAL_BYTES), buffer_bytes

    def buffers(self, rank: int) -> int:
        """Return the address of the first data buffer of ``rank``. The second buffer follows it."""
        return self._addresses[rank] + self.buffers_offset

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """Return a contiguous tensor at byte ``offset`` of the two data buffers of this rank."""
        nbytes = prod(shape) * dtype.itemsize
        if offset < 0 or offset + nbytes > 2 * self.buffer_bytes:
            raise IndexError(
                f"bytes [{offset}, +{nbytes}) are out of range; the two buffers have "
                f"{2 * self.buffer_bytes} bytes"
            )
        return self._region.narrow(0, self.buffers_offset + offset, nbytes).view(dtype).view(shape)

    def starts(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return [world + 1] int32: the first row of each rank, and the total number of rows.

        Raises:
            CaptureError: ``sizes`` is new and a graph is being captured.
        """
        starts = self._starts.get(sizes)
        if starts is None:
            if streams.is_captured(self.regions.device):
                raise CaptureError(
                    f"the shard sizes {list(sizes)} are new to this group; call the op with them "
                    "once before the graph capture"
                )
            offsets, device = [sum(sizes[:r]) for r in range(len(sizes) + 1)], self.regions.device
            starts = allocate_persistent(
                device, lambda: torch.tensor(offsets, dtype=torch.int32, device=device)
            )
            self._starts[sizes] = starts
        return starts

    def use_variants(self, variants: frozenset[str]) -> None:
        """Use these variants from the next call on."""
        self.variants, self.arguments_version = variants, object()

    def abort(self, rank: int) -> None:
        """Make the waits of running kernels fail, because ``rank`` is lost."""
        self.control[ABORT] = 1 + rank

    def set_timeout(self, seconds: float) -> None:
        """Set the limit of a wait, from the next call on."""
        self.timeout_ns = int(seconds * 1e9)
        self.arguments_version = object()

    @property
    def failure_flag_address(self) -> int:
        """Return the address of the flag that a kernel sets after a failed wait."""
        return ctypes.addressof(self._failed)

    @property
    def has_failed(self) -> bool:
        """Return whether a wait has failed."""
        return self._failed.value != 0

    def failure(self) -> tuple[int, int, int, int] | None:
        """Return (kind, peer, expected signal, seen signal) of the first failed wait, or None.

        Without a failure it is cheap. After a failure it reads device memory, so it must not run in
        a capture.
        """
        if not self.has_failed:
            return None
        kind, peer, expected, seen = self.state[STATUS : SEEN + 1].tolist()
        return kind, peer, expected & (1 << 64) - 1, seen & (1 << 64) - 1

    def set_chaos(
        self, seed: int, max_delay_us: int, single_buffer: bool = False, skip_waits: bool = False
    ) -> None:
        """Inject random delays into every publish and wait, for tests. ``single_buffer`` and
        ``skip_waits`` break the protocol (negative controls)."""
        self.seed = seed
        self.chaos = max_delay_us * 2000 + skip_waits  # twice the nanoseconds, and one bit
        self.buffer_stride = 0 if single_buffer else self.buffer_bytes
        self.argument, self.arguments_version = None, object()


def kernel_error(
    failure: tuple[int, int, int, int],
    *,
    where: str,
    rank: int,
    timeout: float,
    groups: Collection[str] = (),
) -> TpkernelsError:
    """Return the exception for a failed wait.

    Args:
        failure: result of ``DeviceWorkspace.failure``.
        where: the call that failed or that detected the failure.
        rank: the rank whose kernel waited.
        timeout: limit of the wait in seconds.
        groups: names of the groups that have made calls on the device.
    """
    kind, peer, expected, seen = failure
    hint = ""
    if kind == TIMEOUT and len(groups) > 1:
        names = ", ".join(f"'{name}'" for name in sorted(groups))
        hint = (
            f" Groups {names} use this GPU: all ranks must issue the calls of groups that share "
            "GPUs in the same order."
        )
    return _ERRORS[kind](
        f"{where}: rank {rank} waited in its kernel for rank {peer}: expected signal "
        f"{expected:#018x}, seen {seen:#018x}, timeout {timeout:g} s. The results are NaN and the "
        f"group is broken; create a new group.{hint}",
        peer=peer,
    )


class PreparedCall(NamedTuple):
    """A call prepared for tensors with given shapes, strides, dtypes and alignments."""

    signals: int  #: signals per source that the workspace must have
    buffer_bytes: int  #: data buffer bytes that the workspace must have
    sizes: tuple[int, ...]  #: argument of `DeviceWorkspace.starts`; empty if the kernels read none
    #: Maps (workspace, signature of the call) to a function that launches the kernels on tensors.
    #: The function does not check the tensors: they must match the prepared ones.
    bind: Callable[[DeviceWorkspace, int], Callable[..., None]]
