"""Signals between the Triton kernels of a group, over symmetric memory.

Problem: kernels on several ranks, each a grid of programs, exchange tiles through symmetric memory.
Successive calls and replayed CUDA graphs must work without the host.

Algorithm: every rank owns a region that all ranks can address: a signal pad, then two data buffers.
A call is an epoch. Even and odd epochs use different signals and buffers. A signal is the 64-bit
value (signature << 32 | epoch); csrc/cuda/ll.cuh stores (data << 32 | epoch) instead. Producers
store signals in the region of the consumer, so every wait polls local memory.

Sync:
- A producer writes data, then stores a signal (`publish`: release, system scope).
- A consumer waits for the signal (`wait_for`: acquire, system scope), then reads the data.
- One thread of a program stores or polls the signal. A barrier of the program orders the memory
  accesses of all threads before the store, or after the poll.
- `publish_to_all` stores the signals with one thread per rank, because a release waits until the
  preceding stores have arrived. `wait_for_all` first loads all signals, with one thread per rank.
  It polls them one after another only if a signal is missing.
- The first program of a grid sends ENTERED to every peer when it starts. It waits for ENTERED from
  every peer before it ends.

Invariant 1 (no overwritten read): a rank may write the buffers of epoch e+2 when its call starts.
- When rank A starts epoch e+2, its kernel of epoch e+1 has ended. That kernel has seen ENTERED of
  e+1 from every peer B.
- B stored this signal after its kernel of epoch e ended. That kernel was the last reader on B of
  any buffer of epoch e.
- Epochs e and e+2 have the same parity. A may therefore write its buffer of that parity and its
  slots in the buffer of B.

Invariant 2 (no stale signal): no signal is two epochs ahead of a waiter, for the same reason.
Signals are therefore compared for equality.

Invariant 3 (no deadlock): programs may run one after another, if every rank starts them in
increasing order.
- A program waits only for programs with the same or a lower number. These are the first program of
  a peer, the program of a peer with the same number and, in an all-gather, the local copy programs.
- A program may wait before it publishes (the results of a two-shot). The awaited signal depends
  only on programs with the same or a lower number.

Invariant 4 (replay): the epoch lives in device memory, and the last program of a grid to end
advances it. A captured graph therefore replays correctly.

Failure: a wait ends at its deadline, when the ENTERED signal of the peer belongs to a different
call, when the host sets ABORT, or when another wait of the grid has failed. After a failed wait:
- The grid publishes no signals, so peers never read invalid data.
- The kernel runs to its end, and its last program fills the results with NaN.
- The host sees FAILED at its next check.
- Calls that are already queued store into no buffer (`usable`), because a peer may be more epochs
  behind than invariant 1 allows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.kernels.signals import (
    THREADS,
    any_missing,
    clock,
    load_in_one_thread,
    pause_for,
    poll,
    store_release,
    store_release_to_all,
)
from tpkernels.symm import device
from tpkernels.symm.device import DeviceWorkspace, to_int32

# Shared with the host; see symm/device.py.
STATE_EPOCH, STATE_ENDED = tl.constexpr(device.EPOCH), tl.constexpr(device.ENDED)
STATE_STATUS, STATE_PEER = tl.constexpr(device.STATUS), tl.constexpr(device.PEER)
STATE_EXPECTED, STATE_SEEN = tl.constexpr(device.EXPECTED), tl.constexpr(device.SEEN)
STATE_CLOCK, STATE_LOST = tl.constexpr(device.CLOCK), tl.constexpr(device.LOST)
STATE_LAST_CHECK = tl.constexpr(device.LAST_CHECK)
CHECK_INTERVAL_NS = tl.constexpr(device.CHECK_INTERVAL_NS)
LAST_EPOCH = tl.constexpr(device.LAST_EPOCH)
ABORT, FAILED = tl.constexpr(device.ABORT), tl.constexpr(device.FAILED)
FAILED_MISMATCH, FAILED_TIMEOUT = tl.constexpr(device.MISMATCH), tl.constexpr(device.TIMEOUT)
FAILED_ABORT = tl.constexpr(device.ABORTED)
# Indices of the signals of one source rank: ENTERED, then TILES + tile or chunk.
ENTERED, TILES = tl.constexpr(0), tl.constexpr(1)


class Workspace(NamedTuple):
    """A ``DeviceWorkspace`` as one launch argument. Kernels access its fields by name."""

    regions: torch.Tensor  # [world] int64: address of the region of each rank
    state: torch.Tensor
    control: torch.Tensor
    signals: int  # number of signals per source rank
    buffers_offset: int  # bytes from the start of a region
    buffer_stride: int  # bytes between the two buffers
    world: tl.constexpr
    chaos: tl.constexpr  # see `delay`


# Launch arguments that differ between ranks or calls. They are not fields of `Workspace`, because
# Triton 3.6 and 3.7 specialize the values of a tuple even if the argument is listed in
# do_not_specialize. They would compile separate kernels for rank 1 and for multiples of 16.
SCALARS = ["rank", "signature", "timeout_ns", "seed"]


def launch_arguments(workspace: DeviceWorkspace, signature: int) -> tuple[Any, ...]:
    """Return the launch arguments `workspace` and SCALARS that every communicating kernel needs."""
    if workspace.argument is None:
        workspace.argument = Workspace(
            workspace.regions,
            workspace.state,
            workspace.control,
            workspace.signals,
            workspace.buffers_offset,
            workspace.buffer_stride,
            tl.constexpr(workspace.world),
            tl.constexpr(workspace.chaos),
        )
    return (
        workspace.argument,
        workspace.rank,
        to_int32(signature),
        workspace.timeout_ns,
        workspace.seed,
    )


class Peers(NamedTuple):
    """The handle of one call inside a kernel, through which it signals its peers. Created by
    ``join``."""

    workspace: Workspace
    rank: tl.tensor
    signal_value: tl.tensor  # value of all signals of this call
    parity: tl.tensor
    timeout_ns: tl.tensor
    seed: tl.tensor  # random seed of the `chaos` delays
    usable: tl.tensor  # False after a failed wait: the kernel must not store into buffers


@triton.jit
def delay(peers, salt):
    """Pause, for tests. `chaos` is 2 * the maximum delay in ns, + 1 if waits return immediately."""
    if peers.workspace.chaos > 1:
        mixed = (peers.signal_value + peers.seed) * 0x9E3779B1 + tl.program_id(0) * 0x5EBCA6B
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D + salt * 0x297A2D3
        pause_for(((mixed >> 11) & 0x7FFFFFFF) % (peers.workspace.chaos >> 1))


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """Convert an address to a pointer with 16-byte alignment, for vector accesses."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def next_epoch(state):
    """Return the epoch of the next call: 1 to LAST_EPOCH, then 1 again, which flips the parity."""
    ended = tl.load(state + STATE_EPOCH)
    return tl.where(ended == LAST_EPOCH, 1, ended + 1)


@triton.jit
def next_buffer(workspace, rank):
    """Return the buffer address of ``rank`` for the call that the next kernel begins."""
    parity = next_epoch(workspace.state) & 1
    region = tl.load(workspace.regions + rank)
    return region + workspace.buffers_offset + parity * workspace.buffer_stride


@triton.jit
def failed(state):
    """Return whether a wait has failed in this grid or in an earlier grid."""
    return tl.atomic_add(state + STATE_STATUS, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def join(workspace, rank, signature, timeout_ns, seed):
    """Return the next call. `enter` and `finish`, or separate launches, begin and end the call."""
    epoch = next_epoch(workspace.state)
    value = (signature.to(tl.int64) << 32) | epoch
    return Peers(workspace, rank, value, epoch & 1, timeout_ns, seed, not failed(workspace.state))


@triton.jit
def enter(peers):
    """Begin a call: the first program sends ENTERED to all peers."""
    if tl.program_id(0) == 0:
        publish_to_all(peers, ENTERED)


@triton.jit
def finish(peers):
    """End a call: the first program waits for ENTERED from every peer, and the last program to end
    advances the epoch. Returns true in that last program if a wait has failed. The caller must then
    `poison` the results."""
    if tl.program_id(0) == 0:
        wait_for_all(peers, ENTERED)
    tl.debug_barrier()  # all threads have stored results before one thread counts
    ended = tl.atomic_add(peers.workspace.state + STATE_ENDED, 1, sem="acq_rel", scope="gpu")
    broken = failed(peers.workspace.state)
    last = ended == tl.num_programs(0) - 1
    if last:
        tl.store(peers.workspace.state + STATE_ENDED, 0)
        tl.store(peers.workspace.state + STATE_EPOCH, peers.signal_value & 0xFFFFFFFF)
        if (peers.signal_value & 0xFFFFFFFF) >= LAST_EPOCH - 1:
            _clear_signals(peers)
    return last & broken


@triton.jit
def _clear_signals(peers):
    """Clear the signals before epochs repeat, as `advance` in csrc/cuda/sync.cuh does."""
    _fill(
        signal_pointer(peers, peers.rank, 0, 0), peers.workspace.signals * peers.workspace.world, 0
    )


@triton.jit
def poison(out, count):
    """Fill ``out`` with NaN to mark it as invalid."""
    _fill(out, count, float("nan"))


@triton.jit
def _fill(out, count, value):
    BLOCK: tl.constexpr = 1024
    values = tl.full((BLOCK,), value, out.dtype.element_ty)
    for begin in range(0, count, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        tl.store(out + offsets, values, mask=offsets < count)


@triton.jit
def signal_offset(peers, source, index):
    """Return the offset, in signals, of signal ``index`` from ``source`` within a region."""
    return (peers.parity * peers.workspace.world + source) * peers.workspace.signals + index


@triton.jit
def signal_pointer(peers, rank, source, index):
    """Return a pointer to signal ``index`` from ``source`` in the region of ``rank``."""
    region = tl.load(peers.workspace.regions + rank).to(tl.pointer_type(tl.int64))
    return region + signal_offset(peers, source, index)


@triton.jit
def buffer_address(peers, rank):
    """Return the buffer address of ``rank`` in this call."""
    region = tl.load(peers.workspace.regions + rank)
    return region + peers.workspace.buffers_offset + peers.parity * peers.workspace.buffer_stride


@triton.jit
def publish(peers, dst, index):
    """Signal rank ``dst`` that the writes of this program are complete: release, system scope."""
    publish_from(peers, dst, peers.rank, index)


@triton.jit
def publish_to_all(peers, index):
    """Signal all ranks, including this rank: one barrier, then concurrent releases."""
    delay(peers, index)
    healthy = not failed(peers.workspace.state)
    offset = tl.cast(signal_offset(peers, peers.rank, index), tl.int64) * 8
    store_release_to_all(
        peers.workspace.regions, peers.workspace.world, offset, peers.signal_value, healthy
    )


@triton.jit
def publish_from(peers, dst, source, index):
    """Signal rank ``dst`` that data from ``source`` is complete. After a failed wait no signal is
    stored, because the data is invalid."""
    delay(peers, index)
    signal = signal_pointer(peers, dst, source, index)
    store_release(signal, peers.signal_value, not failed(peers.workspace.state))


@triton.jit
def wait_for(peers, source, index):
    """Wait until signal ``index`` from ``source`` has arrived or a wait has failed. Acquire."""
    await_value(
        peers, source, signal_pointer(peers, peers.rank, source, index), peers.signal_value, index
    )


@triton.jit
def await_value(peers, source, signal, value, salt):
    """Wait until the word at pointer ``signal`` equals ``value``, or a wait has failed. ``source``
    is the rank to report. Acquire."""
    delay(peers, salt)
    if peers.workspace.chaos & 1 == 0:
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
        if seen != value:
            _poll(peers, source, signal, value)


@triton.jit
def wait_for_all(peers, index):
    """Wait for signal ``index`` from all ranks, including this rank. Returns after one parallel
    load if all signals have arrived. Acquire."""
    world = peers.workspace.world
    source = tl.arange(0, THREADS)
    signals = signal_pointer(peers, peers.rank, source, index)
    if any_missing(signals, source < world, peers.signal_value) | (peers.workspace.chaos != 0):
        for rank in range(world):
            wait_for(peers, rank, index)


@triton.jit
def wait_for_range(peers, source, first, last):
    """Wait for signals [first, last) from one rank. Loads THREADS signals at a time, and polls them
    one after another only if a signal is missing. Acquire."""
    for begin in range(first, last, THREADS):
        index, end = begin + tl.arange(0, THREADS), tl.minimum(begin + THREADS, last)
        awaited = signal_pointer(peers, peers.rank, source, index)
        if any_missing(awaited, index < end, peers.signal_value) | (peers.workspace.chaos != 0):
            for i in range(begin, end):
                wait_for(peers, source, i)


# Threads read clocks and memory at different times, but a program must branch uniformly. Reads use
# atomics here: one thread performs the atomic and broadcasts the result.


@triton.jit
def _now(state):
    """Return the latest time recorded by any program."""
    tl.atomic_max(state + STATE_CLOCK, tl.cast(clock(), tl.int64), sem="relaxed", scope="gpu")
    return tl.atomic_add(state + STATE_CLOCK, 0, sem="relaxed", scope="gpu")


@triton.jit
def _read_abort(peers, now):
    """Return the cached value of ABORT: 1 + the lost rank, or 0. The first program that calls this
    after CHECK_INTERVAL_NS reads host memory and updates the cache."""
    state = peers.workspace.state
    last_check = tl.atomic_add(state + STATE_LAST_CHECK, 0, sem="relaxed", scope="gpu")
    if now - last_check > CHECK_INTERVAL_NS:  # noqa: SIM102 - an atomic that is to be rare
        if (
            tl.atomic_cas(state + STATE_LAST_CHECK, last_check, now, sem="relaxed", scope="gpu")
            == last_check
        ):
            abort = load_in_one_thread(peers.workspace.control + ABORT)
            tl.atomic_max(state + STATE_LOST, abort, sem="relaxed", scope="gpu")
    return tl.atomic_add(state + STATE_LOST, 0, sem="relaxed", scope="gpu")


@triton.jit
def _poll(peers, source, awaited, value):
    state, signal_value = peers.workspace.state, peers.signal_value
    entered = signal_pointer(peers, peers.rank, source, ENTERED)
    begin = _now(state)
    status = tl.atomic_add(state + STATE_STATUS, 0, sem="relaxed", scope="gpu")
    seen = tl.atomic_add(awaited, 0, sem="acquire", scope="sys")
    while (seen != value) & (status == 0):
        poll(awaited, value)
        arrived = tl.atomic_add(entered, 0, sem="relaxed", scope="sys")
        now = _now(state)
        abort_value = _read_abort(peers, now)
        if (arrived != signal_value) & ((arrived & 0xFFFFFFFF) == (signal_value & 0xFFFFFFFF)):
            _fail(peers, FAILED_MISMATCH, source, arrived)
        elif abort_value != 0:
            _fail(peers, FAILED_ABORT, abort_value - 1, arrived)
        elif now - begin > peers.timeout_ns:
            _fail(peers, FAILED_TIMEOUT, source, seen)
        status = tl.atomic_add(state + STATE_STATUS, 0, sem="relaxed", scope="gpu")
        seen = tl.atomic_add(awaited, 0, sem="acquire", scope="sys")


@triton.jit
def _fail(peers, kind: tl.constexpr, source, seen):
    """Record the failure, if it is the first of the grid."""
    state = peers.workspace.state
    zero, status = tl.full((), 0, tl.int64), tl.full((), kind, tl.int64)
    if tl.atomic_cas(state + STATE_STATUS, zero, status, sem="acq_rel", scope="gpu") == 0:
        tl.store(state + STATE_PEER, tl.cast(source, tl.int64))
        tl.store(state + STATE_EXPECTED, peers.signal_value)
        tl.store(state + STATE_SEEN, seen)
        store_release(peers.workspace.control + FAILED, zero + 1, tl.full((), True, tl.int1))
