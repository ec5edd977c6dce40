"""Flags in captured graphs: streams write them where a capture records that, which is tried in a
capture of its own. Run on the CPU (support/emulated.py)."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch

from tests.cuda.test_flags import launches_job
from tests.support import emulated, faults
from tests.support.cases import RanksFixture
from tpkernels import cuda
from tpkernels.symm import streams
from tpkernels.symm.device import FLAGS_AT

# Of the trial, in its order.
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


def refused_job(driver: str) -> str:
    with emulated.new_kernels(driver) as library:
        space, kernels = emulated.space_of(driver), cuda.image.kernels(0)
        with cuda.CopyCall(space, 7, flags=1) as copies:
            copies.raise_flag(0)
        library.emulated_fail(b"cuStreamWriteValue64", 801)
        return faults.ending_of(lambda: kernels.raise_flag(0, copies._words, 0, True)).text


def test_a_refusal_within_a_capture_is_an_error(ranks: RanksFixture, cuda_driver: str) -> None:
    """The capture may be spoilt, so no kernel takes the write's place."""
    for text in ranks(2).run(refused_job, cuda_driver):
        assert text.startswith("cuStreamWriteValue64: ")


def chunks_job() -> list[int]:
    """Flags of a peer's rows: 8 ranks, shards of 32 MiB."""
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.configs import INTERPRETER

    x, w = torch.empty(16384, 8192, dtype=torch.bfloat16), torch.empty(8192, 1)
    prepare = functools.partial(
        kernel.prepare_arriving, INTERPRETER, w, x, torch.bfloat16, (2048,) * 8
    )
    return [prepare(by_kernels).chunks for by_kernels in (False, True)]


def test_flags_by_kernels_come_for_larger_chunks(interpreting: RanksFixture) -> None:
    """Kernels of the call: begin, publish and end; a wait for each peer; its flags."""
    chunks, larger = interpreting(1).run(chunks_job)[0]
    assert (chunks, larger, 3 + 7 * (1 + larger)) == (8, 4, 38)
