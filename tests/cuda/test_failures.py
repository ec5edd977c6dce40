"""The CUDA kernels, run on the CPU, when a rank does not come, comes with another call, or is lost;
and the launch code when the driver fails."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda.test_rms_norm import SPACE, launch
from tests.support import emulated
from tests.support.emulated import (
    all_reduce,
    count_of,
    driver_that,
    interpreted,
    is_spoilt,
    on_ranks,
    space_of,
)
from tests.support.tiers import sweep
from tpkernels import _C, cuda
from tpkernels.cuda import image
from tpkernels.cuda.operands import space_of as space_argument
from tpkernels.launch import Ranks
from tpkernels.symm.device import ABORTED, LOOKED, MISMATCH, TIMEOUT, DeviceWorkspace

SHORT = 0.5
PROMPT = 5.0  # other waits would take 20 s
NORMED = ("normed ll", "normed ll_two_shot", "normed two_shot")


def call_of(variant: str, space: DeviceWorkspace, signature: int) -> list[torch.Tensor]:
    """One call of any kind, with a wait; its results."""
    if variant == "barrier":
        cuda.barrier(space, signature)
        return []
    if variant == "copies":
        with cuda.CopyCall(space, signature) as copies:
            peer = (space.rank + 1) % space.world
            copies.publish(1)
            copies.fetch(peer, 1, torch.empty(8), 0)
        return []
    if variant in NORMED:
        x = torch.ones(3, 4160)
        return list(launch(space, signature, x, x[0], variant.removeprefix("normed ")))
    x = torch.ones(192)  # two-shot: a segment for each rank
    all_reduce(space, signature, x, x, variant=variant)
    return [x]


@pytest.mark.parametrize(
    "variant", [*sweep(["copies", "barrier", "two_shot", *NORMED[1:]]), "ll", NORMED[0]]
)
@on_ranks(2)
def test_a_rank_that_does_not_come_is_a_timeout(variant: str) -> None:
    """Rank 1 does not come to the second call of rank 0, which queues two more before it looks:
    those touch no peer. Before any wait a two-shot publishes its own shard."""
    space = space_of(SHORT, **SPACE)
    call_of(variant, space, 5)
    dist.barrier()
    if space.rank == 1:
        dist.barrier()  # rank 0 has given up
        entered = (5 << 32) | (int(space.state[0]) + 1)
        words = torch.frombuffer(space._memory[1], dtype=torch.int64)
        sources = words[: 4 * space.words].view(2, 2, space.words)[:, 0]
        told = int((sources == entered)[:, 1:].sum())
        publishes = variant in ("two_shot", NORMED[2])
        assert (told > 0) == publishes, told
        return
    begin = time.monotonic()
    results = call_of(variant, space, 5)
    seconds, failure = time.monotonic() - begin, space.failure()
    region = torch.frombuffer(space._memory[1], dtype=torch.uint8)
    before, begin = region.clone(), time.monotonic()
    for _ in range(2):
        call_of(variant, space, 5)
    assert torch.equal(region, before) and time.monotonic() - begin < 2 * SHORT
    dist.barrier()
    assert is_spoilt(results) and SHORT <= seconds < 2 * SHORT + PROMPT, seconds
    assert failure is not None and failure[:2] == (TIMEOUT, 1) and failure[2] >> 32 == 5, failure


@pytest.mark.parametrize(
    ("variant", "other"),
    [(variant, variant) for variant in ("two_shot", "barrier", "copies", "ll", "ll_two_shot")]
    + [("ll", "two_shot"), ("ll", "ll_two_shot")],
)
@on_ranks(2)
def test_another_call_is_a_mismatch_on_both(variant: str, other: str) -> None:
    """Words of another variant have the epoch as well, in the places of data."""
    space = space_of(**SPACE)
    rank, begin = space.rank, time.monotonic()
    results = call_of((variant, other)[rank], space, 5 + rank)
    failure = space.failure()
    assert is_spoilt(results) and time.monotonic() - begin < PROMPT
    assert failure is not None and failure[:2] == (MISMATCH, 1 - rank), failure
    if variant == other:
        assert (failure[2] >> 32, failure[3] >> 32) == (5 + rank, 6 - rank), failure


@on_ranks(2)
def test_abort_ends_a_wait() -> None:
    """Rank 0 waits; the host says that rank 1 is lost."""
    space, begin = space_of(), time.monotonic()
    if space.rank == 0:
        timer = threading.Timer(0.2, space.abort, [1])
        timer.start()
        call_of("two_shot", space, 5)
        timer.join()
        failure = space.failure()
        assert failure is not None and failure[:2] == (ABORTED, 1), failure
        assert 0.2 <= time.monotonic() - begin < 0.2 + PROMPT
    dist.barrier()


def _wait_after_a_look(call: Callable[[DeviceWorkspace], object]) -> None:
    """The host has lost rank 1. Rank 0 waits for it, and its device has looked in the future."""
    space = space_of(SHORT, **SPACE)
    if space.rank == 0:
        space.abort(1)
        space.state[LOOKED] = time.monotonic_ns() + int(100e9)
        call(space)
        failure = space.failure()
        assert failure is not None and failure[:2] == (TIMEOUT, 1), failure
    dist.barrier()


@pytest.mark.parametrize("variant", ["two_shot", "ll"])
@on_ranks(2)
def test_all_waits_of_a_device_look_at_the_host_once_in_a_while(variant: str) -> None:
    """Reads of the host's memory by every waiting block slow an H200 down to a tenth."""
    _wait_after_a_look(lambda space: call_of(variant, space, 5))


@interpreted(2)
def test_programs_look_at_the_host_once_in_a_while() -> None:
    def multiply(space: DeviceWorkspace) -> None:
        x, w, out = torch.ones(4, 8), torch.ones(8, 8), torch.empty(2, 8)
        sizes, wire = (2, 2), torch.float32
        prepared = matmul_reduce_scatter.prepare(INTERPRETER, x, w, sizes, wire)
        prepared.bind(space, 5)(x, w, None, None, out)

    from tpkernels.kernels import matmul_reduce_scatter
    from tpkernels.kernels.configs import INTERPRETER

    _wait_after_a_look(multiply)


@pytest.mark.parametrize("variant", sweep(["ll_two_shot", "two_shot"], later=1))
@on_ranks(3)
def test_no_rank_takes_what_another_made_of_a_failed_wait(variant: str) -> None:
    """Rank 2 comes when rank 0 has given up, but in time for rank 1."""
    rank = dist.get_rank()
    space = space_of(SHORT if rank == 0 else 2 * SHORT)
    out = torch.zeros(192)
    if rank == 2:
        dist.recv(torch.empty(1), 0)
    all_reduce(space, 5, torch.full((192,), 1.0 + rank), out, variant=variant)
    if rank == 0:
        dist.send(torch.empty(1), 2)
    dist.barrier()
    right, failed = bool((out == 6.0).all()), space.failure() is not None and is_spoilt([out])
    assert right != failed and not (right and rank == 0)


def _litmus_of(space: DeviceWorkspace) -> tuple[Any, Any]:
    """The arguments of a litmus test that no GPU runs."""
    return space_argument(space, 1), _C.cuda.Litmus(0, 0, 0, 16)


def driver_job(driver: str) -> None:
    """What is raised when driver functions fail; it recovers."""
    emulated.load(driver)
    x = torch.ones(8)

    def call() -> None:
        cuda.sum_partials(torch.empty(8), [x, x])

    def raises(error: type[Exception], match: str, call: Callable[[], object] = call) -> None:
        with pytest.raises(error, match=match):
            call()

    with driver_that("cuInit", 100):
        raises(NotImplementedError, "found no usable GPU: cuInit: on request")
    with driver_that("cuModuleLoadData", 209, capability=75):
        raises(
            NotImplementedError, r"CUDA kernels on GPU 0 \(sm_75\): no kernel image is available"
        )
    with driver_that("cuLaunchKernelEx", 719):
        raises(RuntimeError, r"^cuLaunchKernelEx: CUDA_ERROR_EMULATED \(on request\)$")
    raises(
        NotImplementedError,
        "^GPU 3 does not exist; the driver reports a GPU count of 1$",
        lambda: image.kernels(3),
    )
    space, on = space_of(), torch.device("cpu")
    with driver_that(capability=80):
        found = cuda.without_multicast(on)
        assert found == "needs compute capability 9.0 or higher; cpu has 8.0", found
        litmus = functools.partial(image.launch, "litmus_bulk", on, *_litmus_of(space))
        raises(NotImplementedError, "litmus_bulk needs a GPU of compute capability 9.0", litmus)
    assert cuda.without_multicast(on) is None
    with driver_that("cuStreamWriteValue64", 719), cuda.CopyCall(space, 1, flags=1) as copies:
        match = r"^cuStreamWriteValue64: CUDA_ERROR_EMULATED \(on request\)$"
        raises(RuntimeError, match, lambda: copies.raise_flag(0))
    call()
    assert cuda.driver_status() == "for CUDA 13.0, GPUs: sm_90"
    assert count_of("depth") == 0


def test_driver_errors_have_names(cuda_driver: str) -> None:
    with Ranks(1) as fresh:  # whose driver is not initialised
        fresh.run(driver_job, cuda_driver)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_each_entry_says_so() -> None:
    x = torch.ones(4)
    region = torch.zeros(1 << 16, dtype=torch.uint8)
    space = DeviceWorkspace([region.data_ptr()], region, 0, 8, 1 << 10, 1.0)
    entries = [
        lambda: all_reduce(space, 1, x, x),
        lambda: cuda.sum_partials(x, [x]),
        lambda: cuda.barrier(space, 1),
        lambda: cuda.CopyCall(space, 1),
        _C.cuda.driver_version,
        _C.cuda.device_count,
        lambda: _C.cuda.Kernels(0, b"an image"),
    ]
    for entry in entries:
        with pytest.raises(NotImplementedError, match=r"^no NVIDIA driver on this machine"):
            entry()
    assert cuda.driver_status().startswith("no NVIDIA driver on this machine")
