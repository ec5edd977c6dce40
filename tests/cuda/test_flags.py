"""Flags by which the copy engines' streams tell a product of its chunks, and the results of a call
that has failed. Run on the CPU (support/emulated.py), the product under Triton's interpreter."""

from __future__ import annotations

import ctypes
import functools
import threading
import time

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import emulated, faults
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import pretending
from tests.support.faults import Ending
from tests.support.tiers import sweep
from tpkernels import _C, cuda
from tpkernels.symm import streams
from tpkernels.symm.device import FLAGS, FLAGS_AT

F32 = torch.float32


def raised_job(driver: str) -> list[list[int]]:
    """The first flags when a call begins and when it ends. The host gives the second call up."""
    space, found = emulated.space_of(driver), []

    def look() -> None:
        found.append(space.state[FLAGS_AT : FLAGS_AT + 3].tolist())

    def call(gives_up: bool) -> None:
        with cuda.CopyCall(space, 7, flags=2) as copies:
            look()
            copies.raise_flag(1)
            if gives_up:
                copies._kernels.call_end(
                    0, copies._words, _C.cuda.Results([])
                )  # so that the peer goes on
                raise KeyError("given up")
            copies.raise_flag(0)
        look()

    call(False)
    with pytest.raises(KeyError):
        call(True)
    call(False)
    return found


def test_a_call_begins_with_no_flag_raised(ranks: RanksFixture, cuda_driver: str) -> None:
    for found in ranks(2).run(raised_job, cuda_driver):
        assert found == [[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]]


def awaited_job(driver: str, late: bool) -> bool:
    """Whether a product is right whose chunks come one by one, the last first. Not ``late``: their
    flags are raised before."""
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.configs import INTERPRETER

    space = emulated.space_of(driver, buffer_bytes=1 << 14)
    rank, sizes, k = space.rank, (90, 50), 8
    shards = torch.arange(140.0 * k).remainder(11).view(-1, k).split(sizes)
    whole, w, out = torch.full((140, k), torch.nan), torch.ones(k, 33), torch.empty(140, 33)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_CHUNK_BYTES", 1)  # a row of tiles
        arriving = kernel.prepare_arriving(INTERPRETER, w, whole, F32, sizes)
    theirs, begin = 1 - rank, (90, 0)[rank]
    whole.split(sizes)[rank].copy_(shards[rank])
    tops = range(0, sizes[theirs], arriving.chunk_rows)

    def bring(copies: cuda.CopyCall) -> None:
        for chunk in reversed(range(len(tops))):
            rows = slice(tops[chunk], tops[chunk] + arriving.chunk_rows)
            if late:
                time.sleep(0.1)
            piece = shards[theirs][rows]
            whole[begin + tops[chunk] :][: len(piece)] = piece
            copies.raise_flag(theirs * arriving.chunks + chunk)

    with cuda.CopyCall(space, 9, [out], flags=2 * arriving.chunks) as copies:
        if not late:
            flags = FLAGS_AT, FLAGS_AT + 2 * arriving.chunks
            space.state[slice(*flags)] = 1
        thread = threading.Timer(0.0 if late else 0.5, bring, [copies])
        thread.start()
        arriving.prepared.launch(whole, w, None, out).run(space, 9)
        right = torch.equal(out, torch.cat(shards).sum(1, True).expand(-1, 33))
        thread.join()
    return right and space.failure() is None


@pytest.mark.parametrize("late", [True, False])
def test_a_product_waits_for_the_flag_of_each_chunk(
    interpreting: RanksFixture, cuda_driver: str, late: bool
) -> None:
    """Negative control: flags that are raised too early."""
    assert interpreting(2).run(awaited_job, cuda_driver, late) == [late] * 2


def launches_job(driver: str, way: str) -> tuple[int, int]:
    """Kernels of csrc/cuda, and words that streams write, in a warm gather of 5 chunks."""
    library = emulated.load(driver)
    with pretending() as patch:
        patch.setattr("tpkernels.algorithms.fused.COPY_ENGINE_BYTES", 0)
        patch.setattr("tpkernels.kernels.all_gather_matmul._CHUNK_BYTES", 1)
        group = faults.new_group()
        x, ws = torch.ones(150, 8), [torch.ones(8, 4)] * 3
        call = functools.partial(tpkernels.all_gather_matmul, x, ws, group, algorithm="fused")
        call()
        dist.barrier()
        patch.setattr(streams, "is_captured", lambda _: way == "captured")
        launches, writes = library.emulated_launches(), library.emulated_writes()
        for out in call():
            assert bool((out == 8).all())
        return library.emulated_launches() - launches, library.emulated_writes() - writes


def unable_job(driver: str, refuses: bool) -> tuple[int, int]:
    """The same on a device whose streams cannot write, or whose driver ``refuses`` each write."""
    with emulated.new_kernels(driver) as library:
        library.emulated_streams_write(refuses)
        library.emulated_fail(b"cuStreamWriteValue64", 801)
        return launches_job(driver, "unable")


@pytest.mark.parametrize("way", sweep(["eager", "captured", "unable", "refused"], 2, 2))
def test_a_chunk_is_told_without_a_kernel(
    interpreting: RanksFixture, cuda_driver: str, way: str
) -> None:
    """Kernels: begin, publish, a wait for each peer, end, whatever the number of results."""
    chunks = 5
    able = way in ("eager", "captured")
    job, given = (launches_job, way) if able else (unable_job, way == "refused")
    for launches, writes in interpreting(2).run(job, cuda_driver, given):
        assert (launches, writes) == ((4, chunks) if able else (4 + chunks, 0))


def late_job(driver: str) -> tuple[bool, Ending] | None:
    """Rank 1 does not come: every result of rank 0 is NaN, and its next call says why."""
    emulated.load(driver)
    with pretending() as patch:
        patch.setattr("tpkernels.algorithms.fused.COPY_ENGINE_BYTES", 0)
        patch.setattr("tpkernels.kernels.all_gather_matmul._CHUNK_BYTES", 1)
        group = faults.new_group(timeout=1.0)
        x, ws = torch.ones(70, 8), [torch.ones(8, n) for n in (4, 33, 1)]
        call = functools.partial(
            tpkernels.all_gather_matmul, x, ws, group, return_gathered=True, algorithm="fused"
        )
        call()
        if group.rank() == 1:
            dist.barrier()  # the other one has given up
            return None
        gathered, outs = call()
        spoilt = all(bool(each.isnan().all()) for each in (gathered, *outs))
        told = spoilt, faults.ending_of(call)
        dist.barrier()
        return told


@pytest.mark.thorough
def test_a_call_that_gave_up_leaves_nan(interpreting: RanksFixture, cuda_driver: str) -> None:
    told = interpreting(2).run(late_job, cuda_driver)[0]
    assert told is not None
    spoilt, after = told
    assert spoilt
    assert after.error == "CollectiveTimeoutError" and after.peer == 1, after


def refused_job(driver: str) -> list[str]:
    space = emulated.space_of(driver)
    call = functools.partial(cuda.CopyCall, space, 3)
    with call(flags=2) as copies:
        calls = [
            functools.partial(call, [torch.empty(1)] * 65),
            functools.partial(call, flags=FLAGS + 1),
            functools.partial(copies.raise_flag, 2),
            functools.partial(copies.raise_flag, -1),
        ]
        return [f"{(each := faults.ending_of(run)).error}: {each.text}" for run in calls]


def test_refusals(ranks: RanksFixture, cuda_driver: str) -> None:
    for results, flags, above, below in ranks(2).run(refused_job, cuda_driver):
        assert results.startswith("NotImplementedError: 65 results and 0 flags"), results
        assert flags.startswith(f"NotImplementedError: 0 results and {FLAGS + 1} flags"), flags
        assert (above, below) == ("ValueError: flag 2 of 2", "ValueError: flag -1 of 2")


def numbers_job() -> list[tuple[int, int, bool]]:
    """(a rank's flags, all ranks' flags, whether they cover the rows): of 8 ranks with shards of
    32 MiB, raised by streams and by kernels, then of calls with more rows than there are flags."""
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.configs import INTERPRETER

    found = []
    x, w = torch.empty(16384, 8192, dtype=torch.bfloat16), torch.empty(8192, 1)
    cases = [((2048,) * 8, x, w, by_kernels) for by_kernels in (False, True)]
    x, w = torch.empty(8, 1 << 18), torch.empty(1 << 18, 1)
    cases += [((1 << 22, *[5] * (world - 1)), x, w, False) for world in (2, 3, 72)]
    for sizes, x, w, by_kernels in cases:
        args = INTERPRETER, w, x, x.dtype, sizes, by_kernels
        _, rows, chunks = kernel.prepare_arriving(*args)
        found.append((chunks, len(sizes) * chunks, rows * chunks >= max(sizes)))
    return found


def test_chunks_have_flags_enough(interpreting: RanksFixture) -> None:
    """Large shards come in larger chunks. So do chunks whose flags take kernels; others of such a
    call are begin, publish and end, and a wait for each peer."""
    by_streams, by_kernels, *large = interpreting(1).run(numbers_job)[0]
    assert (by_streams[0], by_kernels[0], 3 + 7 * (1 + by_kernels[0])) == (8, 4, 38)
    assert all(FLAGS // 2 < flags <= FLAGS for _, flags, _ in large)
    assert all(covered for *_, covered in (by_streams, by_kernels, *large))


# Captured graphs: streams write flags where a capture records that, which is tried in a capture of
# its own, in these steps.

STEPS = ["cuThreadExchangeStreamCaptureMode", "cuStreamCreate", "cuStreamBeginCapture",
         "cuStreamEndCapture", "cuGraphInstantiate"]  # fmt: skip


def replayed_job(driver: str) -> list[tuple[list[int], ...]]:
    """What four replays of a call fetch, and its flags behind its begin and before its end."""
    space = emulated.space_of(driver)
    library, found = ctypes.CDLL(driver), []
    x, got = torch.empty(50, dtype=torch.int64), torch.empty(50, dtype=torch.int64)
    flags = space.state[FLAGS_AT:][:3]
    begun, ended = torch.empty(2, 3, dtype=torch.int64).unbind()

    def call() -> None:
        with cuda.CopyCall(space, 5, flags=2) as copies:
            keep = functools.partial(copies._kernels.copy, 0, src=flags.data_ptr(), nbytes=24)
            keep(dst=begun.data_ptr())
            copies.put(x, 0)
            copies.publish(1)
            copies.fetch(1 - space.rank, 1, got, 0)
            copies.raise_flag(1)
            copies.raise_flag(0)
            keep(dst=ended.data_ptr())

    call()
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    launches = library.emulated_launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "is_captured", lambda _: True)
        library.cuStreamBeginCapture_v2(None, 0)
        call()
        library.cuStreamEndCapture(None, ctypes.byref(graph))
    found.append(([library.emulated_launches() - launches],))
    library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
    for i in range(4):
        x.fill_(10 * i + space.rank)
        library.cuGraphLaunch(executable, None)
        found.append((got.unique().tolist(), begun.tolist(), ended.tolist()))
    library.cuGraphExecDestroy(executable)
    library.cuGraphDestroy(graph)
    return found


def test_replays_clear_and_raise_flags(ranks: RanksFixture, cuda_driver: str) -> None:
    """With as many kernels as the eager call: begin, publish, wait, end."""
    for rank, found in enumerate(ranks(2).run(replayed_job, cuda_driver)):
        wanted = [([10 * i + 1 - rank], [0, 0, 0], [1, 1, 0]) for i in range(4)]
        assert found == [([4],), *wanted]


def spoilt_job(driver: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Launches and writes, eager and captured, where a write spoils the capture it is made in."""
    with emulated.new_kernels(driver) as library:
        library.emulated_captures_writes(False)
        return launches_job(driver, "eager"), launches_job(driver, "captured")


@pytest.mark.thorough
def test_kernels_raise_flags_where_captures_have_no_writes(
    interpreting: RanksFixture, cuda_driver: str
) -> None:
    for eager, captured in interpreting(2).run(spoilt_job, cuda_driver):
        assert (eager, captured) == ((4, 5), (4 + 5, 0))


def tried_job(driver: str) -> list[tuple[bool, bool, bool, int]]:
    """Whether captures have writes before the first eager call and behind it, whether streams write
    outside captures, and what was left behind: with no refusal, a write that spoils its capture,
    and a refusal at each step of the trial."""
    space, found = emulated.space_of(driver), []
    for step in ("", "write", *STEPS):
        with emulated.new_kernels(driver) as library:
            library.emulated_captures_writes(step != "write")
            library.emulated_fail(step.encode(), 900)
            kernels = cuda.image.kernels(0)
            before = kernels.streams_write(True)
            with cuda.CopyCall(space, 7, flags=1) as copies:
                copies.raise_flag(0)
            eager, behind = kernels.streams_write(False), kernels.streams_write(True)
            found.append((before, behind, eager, library.emulated_left()))
    return found


def test_the_first_eager_write_tries_a_captured_one(ranks: RanksFixture, cuda_driver: str) -> None:
    refused = [(False, False, True, 0)] * (1 + len(STEPS))
    for found in ranks(2).run(tried_job, cuda_driver):
        assert found == [(False, True, True, 0), *refused]


def spoiling_job(driver: str) -> str:
    with emulated.new_kernels(driver) as library:
        space, kernels = emulated.space_of(driver), cuda.image.kernels(0)
        with cuda.CopyCall(space, 7, flags=1) as copies:
            copies.raise_flag(0)
        library.emulated_fail(b"cuStreamWriteValue64", 801)
        return faults.ending_of(lambda: kernels.raise_flag(0, copies._words, 0, True)).text


def test_a_refusal_within_a_capture_is_an_error(ranks: RanksFixture, cuda_driver: str) -> None:
    """The capture may be spoilt, so no kernel takes the write's place."""
    for text in ranks(2).run(spoiling_job, cuda_driver):
        assert text.startswith("cuStreamWriteValue64: ")
