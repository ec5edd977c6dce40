"""Signals between the kernels of a group's ranks, over symmetric memory.

Problem: kernels on several ranks, each a grid of programs, exchange tiles through each other's
memory, call after call and in replayed graphs, without the host.

Algorithm: every rank owns a region that all others can address: words, then two buffers. A call is
an epoch. There are two sets of words and buffers, one for each parity of the epoch. A word is
(signature << 32 | epoch), or (data << 32 | epoch) in csrc/cuda/ll.cuh. It is pushed into
the region of the rank that waits for it, so every wait polls local memory.

Sync: a producer writes its data, then pushes a word (`publish`: release, system scope). A consumer
waits for the word (`wait_for`: acquire, system scope), then reads. One thread of a program stores
or polls the word, and a barrier of the program orders that after, or before, what the others do.
After data for all ranks, a thread for each rank stores the word (`publish_to_all`): a release waits
until the stores before it have arrived. `wait_for_all` looks at the words of all ranks likewise.
The first program of every rank pushes an ENTERED word to every peer when it starts, and waits for
their ENTERED words before it ends.

Invariant (no overwritten read): when rank A starts epoch e+2, its kernel of e+1 has ended, so it
has seen the ENTERED word of e+1 from every peer B. B pushed that word after its kernel of e had
ended, and that kernel was B's last reader of any buffer of epoch e, A's or its own. So A may write
the buffers of parity e: its own, and its slots in B's. For the same reason no word can be two
epochs ahead of a waiter; hence words are compared for equality.

Programs: a program waits only for words of a peer's first program, or of the peer's program of the
same number. Words that a program waits for before it publishes (the results of a two-shot) depend
only on programs of lower numbers or the same number. So it is enough that every rank starts its
programs in increasing order, however many run at a time.

The epoch lives in device memory, and the last program of a grid to end advances it. That makes a
captured graph replay correctly.

Failure: a wait ends at its deadline, when the peer's ENTERED word belongs to another call, when the
host sets ABORT, or when another wait of the grid has failed. From then on the grid publishes
nothing, so no peer mistakes garbage for data. The kernel runs to its end, and its last program
fills the results with NaN. The host sees FAILED the next time it looks. Calls that were queued by
then store into no buffer (`usable`): a peer may be further behind them than the invariant allows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.kernels.words import (
    THREADS,
    any_lacks,
    clock,
    load_by_one,
    pause_for,
    poll,
    store_release,
    store_release_at_all,
)
from tpkernels.symm import device
from tpkernels.symm.device import DeviceWorkspace, signed

# Shared with the host; see symm/device.py.
STATE_EPOCH, STATE_ENDED = tl.constexpr(device.EPOCH), tl.constexpr(device.ENDED)
STATE_STATUS, STATE_PEER = tl.constexpr(device.STATUS), tl.constexpr(device.PEER)
STATE_EXPECTED, STATE_SEEN = tl.constexpr(device.EXPECTED), tl.constexpr(device.SEEN)
STATE_CLOCK, STATE_LOST = tl.constexpr(device.CLOCK), tl.constexpr(device.LOST)
STATE_LOOKED, LOOK_NS = tl.constexpr(device.LOOKED), tl.constexpr(device.LOOK_NS)
LAST_EPOCH = tl.constexpr(device.LAST_EPOCH)
ABORT, FAILED = tl.constexpr(device.ABORT), tl.constexpr(device.FAILED)
FAILED_MISMATCH, FAILED_TIMEOUT = tl.constexpr(device.MISMATCH), tl.constexpr(device.TIMEOUT)
FAILED_ABORT = tl.constexpr(device.ABORTED)
ENTERED, TILES = tl.constexpr(0), tl.constexpr(1)  # words from one source: TILES + tile or piece


class Workspace(NamedTuple):
    """A ``DeviceWorkspace`` as one launch argument, which kernels read by name."""

    regions: torch.Tensor  # the ranks' regions: a table of addresses
    state: torch.Tensor
    control: torch.Tensor
    words: int  # from one source
    buffers_at: int  # bytes from the start of a region
    buffer_stride: int  # bytes from one buffer to the other
    world: tl.constexpr
    chaos: tl.constexpr  # see `delay`


# Launch arguments that differ between ranks or calls. They are not fields of `Workspace`: Triton
# 3.6 and 3.7 specialise the values in a tuple even if the argument is listed in
# do_not_specialize, and would compile a kernel for rank 1 and another for multiples of 16.
SCALARS = ["rank", "signature", "timeout_ns", "seed"]


def launch_arguments(space: DeviceWorkspace, signature: int) -> tuple[Any, ...]:
    """Return the arguments of every kernel that communicates: `workspace`, and those in SCALARS."""
    if space.argument is None:
        space.argument = Workspace(
            space.regions,
            space.state,
            space.control,
            space.words,
            space.buffers_at,
            space.buffer_stride,
            tl.constexpr(space.world),
            tl.constexpr(space.chaos),
        )
    return space.argument, space.rank, signed(signature), space.timeout_ns, space.seed


class Peers(NamedTuple):
    """One call as a kernel sees it; made by ``join``."""

    space: Workspace
    rank: tl.tensor
    word: tl.tensor
    parity: tl.tensor
    timeout_ns: tl.tensor
    seed: tl.tensor  # of the delays that `chaos` asks for
    usable: tl.tensor  # False once a wait has failed: nothing may be stored in a buffer any more


@triton.jit
def delay(peers, place):
    """Pause, for tests. `chaos`: 2 * the longest delay in ns (0: none), + 1 if no wait waits."""
    if peers.space.chaos > 1:
        mixed = (peers.word + peers.seed) * 0x9E3779B1 + tl.program_id(0) * 0x5EBCA6B
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D + place * 0x297A2D3
        pause_for(((mixed >> 11) & 0x7FFFFFFF) % (peers.space.chaos >> 1))


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """Make a pointer of an address that is a multiple of 16, which allows vector accesses."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def next_epoch(state):
    """Return the epoch of the next call: 1 to LAST_EPOCH, then 1 again, of the other parity."""
    ended = tl.load(state + STATE_EPOCH)
    return tl.where(ended == LAST_EPOCH, 1, ended + 1)


@triton.jit
def next_buffer(workspace, rank):
    """Return the address of the buffer of ``rank`` in the call that the next kernel begins."""
    parity = next_epoch(workspace.state) & 1
    region = tl.load(workspace.regions + rank)
    return region + workspace.buffers_at + parity * workspace.buffer_stride


@triton.jit
def failed(state):
    """Return whether a wait has failed, in this grid or in an earlier one."""
    return tl.atomic_add(state + STATE_STATUS, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def join(workspace, rank, signature, timeout_ns, seed):
    """Return the next call. `enter` and `finish` begin and end it, unless other launches do."""
    epoch = next_epoch(workspace.state)
    word = (signature.to(tl.int64) << 32) | epoch
    return Peers(workspace, rank, word, epoch & 1, timeout_ns, seed, not failed(workspace.state))


@triton.jit
def enter(peers):
    """Begin a call: the first program announces it to all peers."""
    if tl.program_id(0) == 0:
        publish_to_all(peers, ENTERED)


@triton.jit
def finish(peers):
    """End a call: the first program waits for every peer, the last one advances the epoch. Returns
    true in the last program of a grid in which a wait has failed: it must `poison` the results."""
    if tl.program_id(0) == 0:
        wait_for_all(peers, ENTERED)
    tl.debug_barrier()  # one thread counts, all threads have stored results
    ended = tl.atomic_add(peers.space.state + STATE_ENDED, 1, sem="acq_rel", scope="gpu")
    broken = failed(peers.space.state)
    last = ended == tl.num_programs(0) - 1
    if last:
        tl.store(peers.space.state + STATE_ENDED, 0)
        tl.store(peers.space.state + STATE_EPOCH, peers.word & 0xFFFFFFFF)
        if (peers.word & 0xFFFFFFFF) >= LAST_EPOCH - 1:
            _clear_words(peers)
    return last & broken


@triton.jit
def _clear_words(peers):
    """Leave no word whose epoch comes again, as `advance` of csrc/cuda/sync.cuh does."""
    _fill(word_of(peers, peers.rank, 0, 0), peers.space.words * peers.space.world, 0)


@triton.jit
def poison(out, count):
    """Fill ``out`` with NaN, so it cannot be mistaken for a result."""
    _fill(out, count, float("nan"))


@triton.jit
def _fill(to, count, value):
    BLOCK: tl.constexpr = 1024
    values = tl.full((BLOCK,), value, to.dtype.element_ty)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(to + at, values, mask=at < count)


@triton.jit
def place_of(peers, source, index):
    """Return the place of the word ``index`` from ``source`` among the words of a region."""
    return (peers.parity * peers.space.world + source) * peers.space.words + index


@triton.jit
def word_of(peers, rank, source, index):
    """Point at the word ``index`` from ``source`` in the region of ``rank``."""
    region = tl.load(peers.space.regions + rank).to(tl.pointer_type(tl.int64))
    return region + place_of(peers, source, index)


@triton.jit
def buffer_of(peers, rank):
    """Return the address of the buffer of ``rank`` in this call."""
    region = tl.load(peers.space.regions + rank)
    return region + peers.space.buffers_at + peers.parity * peers.space.buffer_stride


@triton.jit
def publish(peers, to, index):
    """Tell ``to`` that everything this program has written is complete. Release."""
    publish_from(peers, to, peers.rank, index)


@triton.jit
def publish_to_all(peers, index):
    """Tell all ranks, this one too: one barrier, and the releases at the same time."""
    delay(peers, index)
    working = not failed(peers.space.state)
    offset = tl.cast(place_of(peers, peers.rank, index), tl.int64) * 8
    store_release_at_all(peers.space.regions, peers.space.world, offset, peers.word, working)


@triton.jit
def publish_from(peers, to, source, index):
    """Tell it of data that came from ``source``. Nothing is published after a wait has failed: what
    was written since is not the data."""
    delay(peers, index)
    word = word_of(peers, to, source, index)
    store_release(word, peers.word, not failed(peers.space.state))


@triton.jit
def wait_for(peers, source, index):
    """Return when the word ``index`` from ``source`` has arrived or a wait has failed. Acquire."""
    await_value(peers, source, word_of(peers, peers.rank, source, index), peers.word, index)


@triton.jit
def await_value(peers, source, word, value, place):
    """Wait likewise for any word that gets ``value`` once ``source`` has come."""
    delay(peers, place)
    if peers.space.chaos & 1 == 0:
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        if seen != value:
            _poll(peers, source, word, value)


@triton.jit
def wait_for_all(peers, index):
    """Wait for the word ``index`` from all ranks, this one too; at once if all are there."""
    world = peers.space.world
    source = tl.arange(0, THREADS)
    words = word_of(peers, peers.rank, source, index)
    if any_lacks(words, source < world, peers.word) | (peers.space.chaos != 0):
        for rank in range(world):
            wait_for(peers, rank, index)


@triton.jit
def wait_for_range(peers, source, first, last):
    """Wait for the words [first, last) from one rank; THREADS at once if these are there."""
    for begin in range(first, last, THREADS):
        index, end = begin + tl.arange(0, THREADS), tl.minimum(begin + THREADS, last)
        awaited = word_of(peers, peers.rank, source, index)
        if any_lacks(awaited, index < end, peers.word) | (peers.space.chaos != 0):
            for word in range(begin, end):
                wait_for(peers, source, word)


# Threads read a clock or memory at different times, but all threads of a program must take the same
# branch. An atomic is done by one thread, which shares the result with the others.


@triton.jit
def _now(state):
    """Return the latest time that any program has recorded."""
    tl.atomic_max(state + STATE_CLOCK, tl.cast(clock(), tl.int64), sem="relaxed", scope="gpu")
    return tl.atomic_add(state + STATE_CLOCK, 0, sem="relaxed", scope="gpu")


@triton.jit
def _lost(peers, now):
    """Return ABORT, as read by the first program that asks after LOOK_NS."""
    state = peers.space.state
    looked = tl.atomic_add(state + STATE_LOOKED, 0, sem="relaxed", scope="gpu")
    if now - looked > LOOK_NS:  # noqa: SIM102 - an atomic that is to be rare
        if tl.atomic_cas(state + STATE_LOOKED, looked, now, sem="relaxed", scope="gpu") == looked:
            abort = load_by_one(peers.space.control + ABORT)
            tl.atomic_max(state + STATE_LOST, abort, sem="relaxed", scope="gpu")
    return tl.atomic_add(state + STATE_LOST, 0, sem="relaxed", scope="gpu")


@triton.jit
def _poll(peers, source, awaited, value):
    state, word = peers.space.state, peers.word
    entered = word_of(peers, peers.rank, source, ENTERED)
    begin = _now(state)
    status = tl.atomic_add(state + STATE_STATUS, 0, sem="relaxed", scope="gpu")
    seen = tl.atomic_add(awaited, 0, sem="acquire", scope="sys")
    while (seen != value) & (status == 0):
        poll(awaited, value)
        arrived = tl.atomic_add(entered, 0, sem="relaxed", scope="sys")
        now = _now(state)
        lost = _lost(peers, now)
        if (arrived != word) & ((arrived & 0xFFFFFFFF) == (word & 0xFFFFFFFF)):
            _fail(peers, FAILED_MISMATCH, source, arrived)
        elif lost != 0:
            _fail(peers, FAILED_ABORT, lost - 1, arrived)
        elif now - begin > peers.timeout_ns:
            _fail(peers, FAILED_TIMEOUT, source, seen)
        status = tl.atomic_add(state + STATE_STATUS, 0, sem="relaxed", scope="gpu")
        seen = tl.atomic_add(awaited, 0, sem="acquire", scope="sys")


@triton.jit
def _fail(peers, kind: tl.constexpr, source, seen):
    """Record the first failure of a grid."""
    state = peers.space.state
    none, status = tl.full((), 0, tl.int64), tl.full((), kind, tl.int64)
    if tl.atomic_cas(state + STATE_STATUS, none, status, sem="acq_rel", scope="gpu") == 0:
        tl.store(state + STATE_PEER, tl.cast(source, tl.int64))
        tl.store(state + STATE_EXPECTED, peers.word)
        tl.store(state + STATE_SEEN, seen)
        store_release(peers.space.control + FAILED, none + 1, tl.full((), True, tl.int1))
