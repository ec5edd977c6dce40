"""Words, clocks and pauses: what depends on whether a GPU or Triton's interpreter runs a kernel.

Words are stored and polled by one thread of a program, or one for each receiver, in PTX: every
thread would do a load of Triton's own, and its stores take no memory order. Before a store there is
a barrier of the program. It is part of the PTX: Triton keeps no loads in flight from one tile to
the next in a loop with a barrier of its own. After a poll the caller puts a barrier.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

THREADS = tl.constexpr(128)  # of a program, at least (kernels/configs.py); a group has <= 72 ranks
POLLS = tl.constexpr(64)  # polls of a word between two looks for failure
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

if INTERPRETED.value:

    def clock() -> int:
        return time.monotonic_ns()

    def pause_for(nanoseconds: tl.tensor) -> None:
        time.sleep(int(nanoseconds.handle.data.item()) * 1e-9)

    def yield_core() -> None:
        """Let another rank run: there may be more ranks than cores."""
        time.sleep(0)

else:

    @triton.jit
    def clock():
        return tl.extra.cuda.globaltimer()

    @triton.jit
    def pause_for(nanoseconds):
        """Spin in PTX: a loop of Triton's would keep its compiler from specialising warps."""
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
def store_release(word, value, allowed):
    """Store a word by one thread, if it is ``allowed`` to, at system scope. Not an atomic: between
    GPUs that are connected by PCIe only, the link may not have them."""
    if INTERPRETED:
        if allowed:
            tl.atomic_xchg(word, value, sem="release", scope="sys")
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
            "=r,l,l,r", [word.to(tl.int64), value, allowed.to(tl.int32)], tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def store_release_at_all(regions, world, offset, value, allowed):
    """Store it in all ranks' regions, ``offset`` bytes from their start, by a thread for each rank:
    the releases wait for the stores before them at the same time."""
    if INTERPRETED:
        if allowed:
            for rank in range(world):
                word = (tl.load(regions + rank) + offset).to(tl.pointer_type(tl.int64))
                tl.atomic_xchg(word, value, sem="release", scope="sys")
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
def poll(word, value):
    """Poll a word by one thread until it has the value, at most POLLS times. The caller reads the
    word once more: by an atomic, whose result all threads share."""
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
            "=r,l,l,r", [word.to(tl.int64), value, tl.full((), POLLS, tl.int32)], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_acquire(words, wanted):
    """Read the words that are ``wanted``, each by its own thread, at system scope; else 0."""
    if INTERPRETED:
        return tl.atomic_add(words, 0, mask=wanted, sem="acquire", scope="sys")
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $2, 0;
            mov.u64 $0, 0;
            @p ld.acquire.sys.global.u64 $0, [$1];
            }""",
            "=&l,l,r", [words.to(tl.int64), wanted.to(tl.int32)], tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def any_lacks(words, wanted, value):
    """Return whether a ``wanted`` word has another value. Acquire, for all threads."""
    seen = load_acquire(words, wanted)
    lacking = tl.max(tl.where(wanted & (seen != value), 1, 0), 0) != 0
    tl.debug_barrier()  # some threads have acquired, all threads read
    return lacking


@triton.jit
def load_by_one(word):
    """Read a word of the host's memory in the thread that does atomics; 0 in the others."""
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
    """Order a wait before TMA reads of the data that it guards: TMA uses another proxy."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_bulk_stores():
    """Return when the bulk stores (TMA) that this thread has issued are complete. Needed before a
    release of what they stored: a release orders accesses of the generic proxy, and what Triton
    has waited for is only that the source in shared memory has been read (`wait_group.read`).

    `wait_group` without `.read` returns when the writes are visible to the thread that issued them,
    in the generic proxy too: a bulk copy's completion implies a fence between the proxies (PTX ISA,
    "Async proxy"). The barrier before a word is stored passes them on to the thread that stores it,
    and that thread's release to whoever acquires the word. All threads wait, each for its own:
    which one issues is Triton's choice."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )
