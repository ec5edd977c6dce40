"""The CUDA kernels, run on the CPU, when a rank does not come, comes with another call, or is lost;
and the launch code when the driver fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support import emulated
from tests.support.cases import RanksFixture
from tests.support.tiers import sweep
from tpkernels import _C, cuda
from tpkernels.cuda import image
from tpkernels.launch import Ranks
from tpkernels.symm import device
from tpkernels.symm.device import DeviceWorkspace

TIMEOUT = 0.6
PROMPT = 5.0  # other waits would take 20 s
Failure = tuple[int, int, int, int] | None


def call_of(way: str, space: DeviceWorkspace, signature: int) -> None:
    """One call of any kind, with a wait."""
    if way == "barrier":
        return cuda.barrier(space, signature)
    if way == "copies":
        with cuda.CopyCall(space, signature) as copies:
            peer = (space.rank + 1) % space.world
            copies.publish(1)
            copies.fetch(peer, 1, torch.empty(8), 0)
        return
    x = torch.ones(100)
    cuda.all_reduce(space, signature, x, x, way=way)


def words_of(space: DeviceWorkspace) -> torch.Tensor:
    """All signal words of this rank's region."""
    region = space._memory[space.rank]
    count = 2 * space.world * space.words
    return torch.frombuffer(region, dtype=torch.int64, count=count).clone()


def late_job(driver: str, way: str) -> tuple[Failure, float, bool, int]:
    """Rank 1 does not come to the second call of rank 0, which queues three more before it looks.
    Returns rank 0's failure and the seconds that its first wait took, whether it has written
    nothing into rank 1's region after that, and how many words it has told it before."""
    space = emulated.space_of(driver, TIMEOUT)
    call_of(way, space, 5)
    dist.barrier()
    if space.rank == 1:
        dist.barrier()  # rank 0 has given up
        entered = (5 << 32) | (int(space.state[0]) + 1)
        told = words_of(space).view(2, space.world, space.words)[:, 0]
        return None, 0.0, True, int((told == entered)[:, 1:].sum())
    begin = time.monotonic()
    call_of(way, space, 5)
    seconds = time.monotonic() - begin
    region = torch.frombuffer(space._memory[1], dtype=torch.uint8)
    before, begin = region.clone(), time.monotonic()
    for _ in range(3):
        call_of(way, space, 5)
    untouched = bool((region == before).all()) and time.monotonic() - begin < 2.5 * TIMEOUT
    dist.barrier()
    return space.failure(), seconds, untouched, 0


@pytest.mark.parametrize("way", [*sweep(["copies", "multimem", "barrier", "two_shot"]), "ll"])
def test_a_rank_that_does_not_come_is_a_timeout(
    ranks: RanksFixture, cuda_driver: str, way: str
) -> None:
    """Calls queued behind the failure touch no peer."""
    (failure, seconds, untouched, _), (*_, told) = ranks(2).run(late_job, cuda_driver, way)
    assert failure is not None and failure[:2] == (device.TIMEOUT, 1), failure
    assert failure[2] == (5 << 32) | (int(failure[2]) & 0xFFFFFFFF)
    assert TIMEOUT <= seconds < 2 * TIMEOUT + PROMPT, seconds
    before_any_wait = {"two_shot": 1, "multimem": 1}  # the word of its only shard
    assert untouched and told == before_any_wait.get(way, 0)


def mismatch_job(driver: str, way: str) -> tuple[Failure, float]:
    space = emulated.space_of(driver)
    begin = time.monotonic()
    call_of(way, space, 5 + space.rank)
    return space.failure(), time.monotonic() - begin


@pytest.mark.parametrize("way", ["two_shot", "barrier", "copies", "ll", "ll_two_shot", "ll128"])
def test_another_call_is_a_mismatch_on_both(
    ranks: RanksFixture, cuda_driver: str, way: str
) -> None:
    for rank, (failure, seconds) in enumerate(ranks(2).run(mismatch_job, cuda_driver, way)):
        assert failure is not None and failure[:2] == (device.MISMATCH, 1 - rank), failure
        assert failure[2] >> 32 == 5 + rank and failure[3] >> 32 == 6 - rank, failure
        assert seconds < PROMPT


def abort_job(driver: str) -> tuple[Failure, float]:
    """Rank 0 waits; the host says that rank 1 is lost."""
    import threading

    space = emulated.space_of(driver)
    begin = time.monotonic()
    if space.rank == 0:
        timer = threading.Timer(0.2, space.abort, [1])
        timer.start()
        call_of("two_shot", space, 5)
        timer.join()
    seconds = time.monotonic() - begin
    dist.barrier()
    return space.failure(), seconds


def test_abort_ends_a_wait(ranks: RanksFixture, cuda_driver: str) -> None:
    failure, seconds = ranks(2).run(abort_job, cuda_driver)[0]
    assert failure is not None and failure[:2] == (device.ABORTED, 1), failure
    assert 0.2 <= seconds < 0.2 + PROMPT


def impatient_job(driver: str, way: str) -> tuple[bool, bool]:
    """Rank 2 comes when rank 0 has given up, but in time for rank 1. Whether this rank's sums are
    right, and whether it has been told of a failure."""
    space = emulated.space_of(driver, TIMEOUT if dist.get_rank() == 0 else 3 * TIMEOUT)
    x = torch.full((192,), 1.0 + space.rank)  # two-shot: a segment for each rank
    out = torch.zeros_like(x)
    if space.rank == 2:
        time.sleep(2 * TIMEOUT)
    cuda.all_reduce(space, 5, x, out, way=way)
    dist.barrier()
    return bool((out == 6.0).all()), space.failure() is not None and bool(out.isnan().all())


@pytest.mark.parametrize("way", sweep(["ll128", "ll_two_shot", "two_shot"], later=2))
def test_no_rank_takes_what_another_made_of_a_failed_wait(
    ranks: RanksFixture, cuda_driver: str, way: str
) -> None:
    told = ranks(3).run(impatient_job, cuda_driver, way)
    assert told[0] == (False, True)
    assert all(right != failed for right, failed in told), told


@contextlib.contextmanager
def failing(driver: str, function: str, code: int, capability: int = 90) -> Iterator[None]:
    """The driver fails in one of its functions."""
    library = emulated.load(driver)
    image.kernels.cache_clear()
    library.emulated_fail(function.encode(), code)
    library.emulated_capability(capability)
    try:
        yield
    finally:
        library.emulated_fail(b"", 0)
        library.emulated_capability(90)
        image.kernels.cache_clear()


def error_of(error: type[Exception], call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except error as raised:
        return str(raised)
    return "nothing was raised"


def driver_job(driver: str) -> dict[str, str | int]:
    """What is raised when driver functions fail, and whether it recovers."""
    x = torch.ones(8)
    told: dict[str, str | int] = {}

    def call() -> None:
        cuda.sum_partials(torch.empty(8), [x, x])

    with failing(driver, "cuInit", 100):
        told["init"] = error_of(NotImplementedError, call)
    with failing(driver, "cuModuleLoadData", 209, capability=75):
        told["load"] = error_of(NotImplementedError, call)
    with failing(driver, "cuLaunchKernelEx", 719):
        told["launch"] = error_of(RuntimeError, call)
    told["device"] = error_of(NotImplementedError, lambda: image.kernels(3))
    space = emulated.space_of(driver)
    with failing(driver, "", 0, capability=80):
        reduce = lambda: cuda.all_reduce(space, 1, x, x, way="multimem")  # noqa: E731
        told["multimem"] = error_of(NotImplementedError, reduce)
    with (
        failing(driver, "cuStreamWriteValue64", 719),
        pytest.raises(RuntimeError) as raised,
        cuda.CopyCall(space, 1, flags=1) as copies,
    ):
        copies.raise_flag(0)
    told["write"] = str(raised.value)
    call()
    told["status"] = cuda.driver_status()
    told["depth"] = int(emulated.load(driver).emulated_depth())
    return told


def test_driver_errors_have_names(cuda_driver: str) -> None:
    with Ranks(1) as fresh:  # whose driver is not initialised
        told = fresh.run(driver_job, cuda_driver)[0]
    assert "found no usable GPU: cuInit: on request" in str(told["init"])
    assert "CUDA kernels on GPU 0 (sm_75): no kernel image is available" in str(told["load"])
    assert told["launch"] == "cuLaunchKernelEx: CUDA_ERROR_EMULATED (on request)"
    assert told["write"] == "cuStreamWriteValue64: CUDA_ERROR_EMULATED (on request)"
    assert told["device"] == "no GPU 3: the driver reports 1"
    assert "compute capability 9.0" in str(told["multimem"])
    assert told["status"] == "for CUDA 13.0, GPUs: sm_90"
    assert told["depth"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_each_entry_says_so() -> None:
    x = torch.ones(4)
    region = torch.zeros(1 << 16, dtype=torch.uint8)
    space = DeviceWorkspace([region.data_ptr()], region, 0, 8, 1 << 10, 1.0)
    entries = [
        lambda: cuda.all_reduce(space, 1, x, x),
        lambda: cuda.sum_partials(x, [x]),
        lambda: cuda.barrier(space, 1),
        lambda: cuda.paced_copy(x, x.clone(), 1.0),
        lambda: cuda.CopyCall(space, 1),
        _C.cuda.driver_version,
        _C.cuda.device_count,
        lambda: _C.cuda.Kernels(0, b"an image"),
    ]
    for entry in entries:
        with pytest.raises(NotImplementedError, match=r"^no NVIDIA driver on this machine"):
            entry()
    assert cuda.driver_status().startswith("no NVIDIA driver on this machine")
