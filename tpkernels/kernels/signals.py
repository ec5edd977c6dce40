"""Signals, clocks and pauses: the operations that differ between a GPU and the Triton interpreter.

One thread of a program stores or polls a signal, in inline PTX. A store to all ranks uses one
thread per rank. Inline PTX is necessary because ``tl.load`` would run in every thread, and
``tl.store`` has no memory order.

A barrier of the program precedes every store. It is part of the PTX, because a
``tl.debug_barrier`` in a loop would keep Triton from having loads in flight across iterations.
After a poll the caller adds a barrier.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

THREADS = tl.constexpr(128)  # min threads per program (kernels/configs.py); max 72 ranks per group
POLLS = tl.constexpr(64)  # polls of a signal between two checks for failure
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

if INTERPRETED.value:

    def clock() -> int:
        return time.monotonic_ns()

    def pause_for(nanoseconds: tl.tensor) -> None:
        time.sleep(int(nanoseconds.handle.data.item()) * 1e-9)

    def yield_core() -> None:
        """Yield the CPU core, because ranks may outnumber cores."""
        time.sleep(0)

else:

    @triton.jit
    def clock():
        return tl.extra.cuda.globaltimer()

    @triton.jit
    def pause_for(nanoseconds):
        """Spin in PTX: a Triton loop would prevent warp specialization."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b64 begin; .reg .b64 passed;
            mov.u64 begin, %globaltimer;
            AGAIN:
            mov.u64 passed, %globaltimer;
            sub.u64 passed, passed, begin;
            setp.lt.u64 p, passed, $1;
            @p bra AGAIN;
            mov.u32 $0, 0;
            }""",
            "=r,l", [nanoseconds.to(tl.int64)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def yield_core():
        pass


@triton.jit
def store_release(signal, value, allowed):
    """Store a signal if ``allowed``, with one thread: release, system scope. On GPUs this is not an
    atomic, because a PCIe link between GPUs may not support atomics."""
    if INTERPRETED:
        if allowed:
            tl.atomic_xchg(signal, value, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            f"""{{
            .reg .pred first; .reg .b32 t;
            mov.u32 t, %tid.x;
            setp.ne.u32 first, $3, 0;
            setp.eq.and.u32 first, t, 0, first;
            bar.sync 0, {num_threads()};
            @first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }}""",
            "=r,l,l,r", [signal.to(tl.int64), value, allowed.to(tl.int32)], tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def store_release_to_all(regions, world, offset, value, allowed):
    """Store a signal at byte ``offset`` of the region of every rank, with one thread per rank, so
    that the releases wait for the preceding stores concurrently."""
    if INTERPRETED:
        if allowed:
            for rank in range(world):
                signal = (tl.load(regions + rank) + offset).to(tl.pointer_type(tl.int64))
                tl.atomic_xchg(signal, value, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            f"""{{
            .reg .pred first; .reg .b32 t; .reg .b64 at;
            mov.u32 t, %tid.x;
            setp.ne.u32 first, $5, 0;
            setp.lt.and.u32 first, t, $4, first;
            mad.wide.u32 at, t, 8, $1;
            @first ld.global.u64 at, [at];
            add.s64 at, at, $2;
            bar.sync 0, {num_threads()};
            @first st.release.sys.global.u64 [at], $3;
            mov.u32 $0, 0;
            }}""",
            "=r,l,l,l,r,r",
            [
                regions.to(tl.int64), offset, value, tl.full((), world, tl.int32),
                allowed.to(tl.int32),
            ],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def poll(signal, value):
    """Poll a signal with one thread until it equals ``value``, at most POLLS times. The caller then
    reads the signal with an atomic, so that all threads get the same value."""
    if INTERPRETED:
        yield_core()
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t; .reg .b32 n; .reg .b64 seen;
            mov.u32 t, %tid.x;
            setp.ne.u32 p, t, 0;
            @p bra DONE;
            mov.u32 n, $3;
            AGAIN:
            ld.acquire.sys.global.u64 seen, [$1];
            setp.eq.u64 p, seen, $2;
            @p bra DONE;
            nanosleep.u32 20;
            sub.u32 n, n, 1;
            setp.ne.u32 p, n, 0;
            @p bra AGAIN;
            DONE:
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r", [signal.to(tl.int64), value, tl.full((), POLLS, tl.int32)], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_acquire(signals, mask):
    """Load the signals selected by ``mask``, one per thread: acquire, system scope; 0 elsewhere."""
    if INTERPRETED:
        return tl.atomic_add(signals, 0, mask=mask, sem="acquire", scope="sys")
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $2, 0;
            mov.u64 $0, 0;
            @p ld.acquire.sys.global.u64 $0, [$1];
            }""",
            "=&l,l,r", [signals.to(tl.int64), mask.to(tl.int32)], tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def any_missing(signals, mask, value):
    """Return whether any signal selected by ``mask`` differs from ``value``. Acquire, for all
    threads of the program."""
    seen = load_acquire(signals, mask)
    missing = tl.max(tl.where(mask & (seen != value), 1, 0), 0) != 0
    tl.debug_barrier()  # some threads have acquired; all threads read data next
    return missing


@triton.jit
def load_in_one_thread(word):
    """Load a word of host memory in the thread that runs atomics; 0 in all remaining threads."""
    if INTERPRETED:
        return tl.load(word, volatile=True)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first; .reg .b32 t; .reg .b64 seen;
            mov.u32 t, %tid.x;
            setp.eq.u32 first, t, 0;
            mov.u64 seen, 0;
            @first ld.relaxed.sys.global.u64 seen, [$1];
            mov.u64 $0, seen;
            }""",
            "=l,l", [word.to(tl.int64)], tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def fence_async_proxy():
    """Order a wait before TMA reads of the awaited data, because TMA uses the async proxy."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_bulk_stores():
    """Wait until the TMA bulk stores issued by this thread are complete.

    This wait must precede the release that publishes the stored data. A release orders accesses of
    the generic proxy only, and Triton waits only until the source in shared memory has been read
    (`wait_group.read`).

    `wait_group` without `.read` returns when the writes are visible to the issuing thread, in the
    generic proxy as well: the completion of a bulk copy implies a proxy fence (PTX ISA, "Async
    proxy"). The barrier before a signal store makes the writes visible to the signaling thread. Its
    release makes them visible to the thread that acquires the signal. All threads wait, because
    Triton decides which thread issues a store."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )
