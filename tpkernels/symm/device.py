"""The workspace of the kernels on devices: the contents of each rank's region, and prepared calls.

A region holds `words` signal words for each parity and source rank, and then two buffers. The
protocol and its proof are in kernels/sync.py.
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

_Made = TypeVar("_Made")

_ALIGNMENT = 256  # bytes, of the buffers
_WORD = 8
_LINE = 16  # words of 128 bytes: the words of each source begin at a cache line

# `state`: int64 words in device memory, private to a rank. ENDED: how many programs of the running
# grid have ended. STATUS to SEEN: the first failed wait. LOST: ABORT, as the device saw it. LOOKED:
# when it looked last, in ns.
STATE = EPOCH, ENDED, STATUS, PEER, EXPECTED, SEEN, CLOCK, LOST, LOOKED = range(9)
# From the next cache line on, flags: what copy engines have brought within a call
# (csrc/cuda/sync.cuh).
FLAGS_AT, FLAGS = _LINE, 1024
# The kernels of a rank read ABORT at most once in so many ns, however many programs wait. On an
# H200, reads by 115 waiting programs slowed the copies of other multiprocessors down to a tenth.
LOOK_NS = 1_000_000
# Epochs are 1 to LAST_EPOCH, then 1 again. A word that was never written has epoch 0.
LAST_EPOCH = 0xFFFF_FFFE
# `control`: int64 words in host memory. ABORT: 1 + the lost rank; the host writes it. FAILED: 1
# once STATUS is set; a kernel writes it.
CONTROL = ABORT, FAILED = range(2)
# `scratch`: where up to 512 programs of a kernel make descriptors of 128 bytes each, one for each
# of the pipeline's stages (at most 6) and one more. The calls of a group come one after the other.
SCRATCH_BYTES = 512 * 7 * 128
# Values of STATUS.
MISMATCH, TIMEOUT, ABORTED = 1, 2, 3
_ERRORS = {
    TIMEOUT: CollectiveTimeoutError,
    MISMATCH: CollectiveMismatchError,
    ABORTED: PeerLostError,
}


def signed(signature: int) -> int:
    """Return a signature as kernels take it: a signed 32-bit number."""
    return signature - (signature >> 31 << 32)


def region_bytes(world: int, words: int, buffer_bytes: int) -> int:
    """Return the bytes of a region with that many words of each source and buffers of that size."""
    words = round_up(words, _LINE)
    return round_up(2 * world * words * _WORD, _ALIGNMENT) + 2 * round_up(buffer_bytes, _ALIGNMENT)


def lasting(device: torch.device, allocate: Callable[[], _Made]) -> _Made:
    """Return what ``allocate`` makes on a device for longer than a call, once it is filled.

    It runs on a thread of its own, and so on the default stream, without inference mode or a
    default device. In the warm-up of ``torch.compile(mode="reduce-overhead")`` what the calling
    thread allocates lies in a graph's pool, and torch raises where some of that is kept.
    """

    def run() -> _Made:
        if device.type != "cuda":
            return allocate()
        with torch.cuda.device(device):
            made = allocate()
            torch.cuda.current_stream(device).synchronize()
        return made

    with ThreadPoolExecutor(1, "tpkernels-memory") as thread:
        return thread.submit(run).result()


class DeviceWorkspace:
    """The regions of a group's ranks, and the epoch of their kernels.

    Args:
        addresses: of the ranks' regions for this rank; they are filled with zeros.
        own: the bytes of this rank's region.
        words: signal words of each source.
        buffer_bytes: of each of the two buffers.
        timeout: seconds that a wait may take.
        memory: keeps the regions mapped.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        region: torch.Tensor,
        rank: int,
        words: int,
        buffer_bytes: int,
        timeout: float,
        memory: object = None,
    ) -> None:
        self._addresses, self._region, self._memory = addresses, region, memory
        device = region.device
        #: Variants that are qualified on this machine (planning/qualification.py). Identical on all
        #: ranks; empty without a report.
        self.variants: frozenset[str] = frozenset()

        def allocate() -> tuple[torch.Tensor, ...]:
            state = torch.zeros(FLAGS_AT + FLAGS, dtype=torch.int64, device=device)
            pinned = state.is_cuda  # host and kernels write it while the other reads
            control = torch.zeros(len(CONTROL), dtype=torch.int64, pin_memory=pinned)
            scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
            return (
                torch.tensor(addresses, dtype=torch.int64, device=device),
                state,
                control,
                scratch,
            )

        self.regions, self.state, self.control, self.scratch = lasting(device, allocate)
        # Reading an element of a tensor takes 2 us, and every call looks.
        self._failed = ctypes.c_int64.from_address(self.control.data_ptr() + FAILED * _WORD)
        self.rank, self.world = rank, len(addresses)
        words = round_up(words, _LINE)
        self.words, self.buffer_bytes = words, round_up(buffer_bytes, _ALIGNMENT)
        self.buffers_at = round_up(2 * self.world * words * _WORD, _ALIGNMENT)
        self.timeout_ns = int(timeout * 1e9)
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}
        self.seed = self.chaos = 0  # see `set_chaos`
        self.buffer_stride = self.buffer_bytes
        self.argument: tuple[object, ...] | None = None  #: as kernels take it (kernels/sync.py)
        self.state_of_arguments = object()  #: another one when launch arguments change

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's region."""
        return region_bytes(self.world, self.words, self.buffer_bytes)

    def holds(self, words: int, buffer_bytes: int) -> bool:
        """Return whether a call that needs that much fits."""
        return words <= self.words and buffer_bytes <= self.buffer_bytes

    def enlarged(self, words: int, buffer_bytes: int) -> tuple[int, int]:
        """Return words, and bytes of a buffer, that hold as much as asked for and take at least
        twice this one's memory. Only what is too small here grows."""
        short_of_words, short_of_bytes = words > self.words, buffer_bytes > self.buffer_bytes
        words = max(words, self.words * (2 if short_of_words else 1))
        buffer_bytes = max(buffer_bytes, self.buffer_bytes * (2 if short_of_bytes else 1))
        missing = max(0, 2 * self.nbytes - region_bytes(self.world, words, buffer_bytes))
        if short_of_bytes:
            return words, buffer_bytes + ceil_div(missing, 2)
        return words + ceil_div(missing, 2 * self.world * _WORD), buffer_bytes

    def buffers(self, rank: int) -> int:
        """Return the address of the first of ``rank``'s two buffers; the other follows it."""
        return self._addresses[rank] + self.buffers_at

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """Return the contiguous tensor at byte ``offset`` of this rank's two buffers."""
        nbytes = prod(shape) * dtype.itemsize
        if offset < 0 or offset + nbytes > 2 * self.buffer_bytes:
            raise IndexError(
                f"bytes [{offset}, +{nbytes}) are out of range; the two buffers have "
                f"{2 * self.buffer_bytes} bytes"
            )
        return self._region.narrow(0, self.buffers_at + offset, nbytes).view(dtype).view(shape)

    def starts(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the row at which each rank's segment begins, and the end of the last."""
        starts = self._starts.get(sizes)
        if starts is None:
            if streams.is_captured(self.regions.device):
                raise CaptureError(
                    f"the shard sizes {list(sizes)} are new to this group; call the op with them "
                    "once before the graph capture"
                )
            edges, device = [sum(sizes[:r]) for r in range(len(sizes) + 1)], self.regions.device
            starts = lasting(device, lambda: torch.tensor(edges, dtype=torch.int32, device=device))
            self._starts[sizes] = starts
        return starts

    def use_variants(self, variants: frozenset[str]) -> None:
        """Take these variants from the next call on."""
        self.variants, self.state_of_arguments = variants, object()

    def abort(self, rank: int) -> None:
        """End all waits of a running kernel, because ``rank`` is lost."""
        self.control[ABORT] = 1 + rank

    def set_timeout(self, seconds: float) -> None:
        """Bound waits from the next call on."""
        self.timeout_ns = int(seconds * 1e9)
        self.state_of_arguments = object()

    @property
    def failed_word(self) -> int:
        """Return the address of the word that a kernel sets when a wait has failed."""
        return ctypes.addressof(self._failed)

    @property
    def has_failed(self) -> bool:
        """Return whether a wait has failed so far."""
        return self._failed.value != 0

    def failure(self) -> tuple[int, int, int, int] | None:
        """Return (kind, peer, word expected, word seen) of the first failed wait; None, at no cost,
        if there is none. Not in a capture: it reads the device's memory."""
        if not self.has_failed:
            return None
        kind, peer, expected, seen = self.state[STATUS : SEEN + 1].tolist()
        return kind, peer, expected & (1 << 64) - 1, seen & (1 << 64) - 1

    def set_chaos(
        self, seed: int, max_delay_us: int, single_buffer: bool = False, skip_waits: bool = False
    ) -> None:
        """Add random delays to every publish and wait, for tests. ``single_buffer`` and
        ``skip_waits`` break the protocol (negative controls)."""
        self.seed = seed
        self.chaos = max_delay_us * 2000 + skip_waits  # twice the nanoseconds, and one bit
        self.buffer_stride = 0 if single_buffer else self.buffer_bytes
        self.argument, self.state_of_arguments = None, object()


def kernel_error(
    failure: tuple[int, int, int, int],
    *,
    where: str,
    rank: int,
    timeout: float,
    groups: Collection[str] = (),
) -> TpkernelsError:
    """Return the exception for a ``DeviceWorkspace.failure`` of ``rank``. ``where``: the call that
    it was in, or that has found it. ``groups``: those whose calls have run on the device."""
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


class Prepared(NamedTuple):
    """A call prepared for all tensors with the same shapes, strides, dtypes and alignments."""

    words: int  #: that it needs of each source in a workspace
    buffer_bytes: int
    sizes: tuple[int, ...]  #: whose `DeviceWorkspace.starts` the kernels read; empty for none
    #: Takes the workspace and the call's signature; returns what launches the kernels for tensors.
    #: That checks nothing: they are like those that the call was prepared for.
    bind: Callable[[DeviceWorkspace, int], Callable[..., None]]
