"""The CUDA kernels, run on the CPU, if a rank is absent, makes a different call, or is lost.

Also covers the launch code if the driver fails.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda.test_rms_norm import WORKSPACE_SIZE, launch
from tests.support import emulated
from tests.support.emulated import (
    all_reduce,
    configure_driver,
    get_counter,
    interpreted,
    is_all_nan,
    make_workspace,
    on_ranks,
)
from tests.support.tiers import sweep
from tpkernels import _C, cuda
from tpkernels.cuda import image
from tpkernels.cuda.operands import kernel_workspace
from tpkernels.launch import Ranks
from tpkernels.symm.device import ABORTED, LAST_CHECK, MISMATCH, TIMEOUT, DeviceWorkspace

SHORT = 0.5
PROMPT = 5.0  # s; the default timeout of a wait is 20 s
NORMED = ("normed ll", "normed ll_two_shot", "normed two_shot")


def run_variant(variant: str, workspace: DeviceWorkspace, signature: int) -> list[torch.Tensor]:
    """Run one call of this variant that contains a wait, and return its results."""
    if variant == "barrier":
        cuda.barrier(workspace, signature)
        return []
    if variant == "copies":
        with cuda.CopyCall(workspace, signature) as copies:
            peer = (workspace.rank + 1) % workspace.world
            copies.publish(1)
            copies.fetch(peer, 1, torch.empty(8), 0)
        return []
    if variant in NORMED:
        x = torch.ones(3, 4160)
        return list(launch(workspace, signature, x, x[0], variant.removeprefix("normed ")))
    x = torch.ones(192)  # two-shot: one segment per rank
    all_reduce(workspace, signature, x, x, variant=variant)
    return [x]


@pytest.mark.parametrize(
    "variant", [*sweep(["copies", "barrier", "two_shot", *NORMED[1:]]), "ll", NORMED[0]]
)
@on_ranks(2)
def test_an_absent_rank_is_a_timeout(variant: str) -> None:
    """Rank 1 skips the second call of rank 0, which queues two more calls.

    The queued calls access no peer. A two-shot call publishes its shard before its first wait.
    """
    workspace = make_workspace(SHORT, **WORKSPACE_SIZE)
    run_variant(variant, workspace, 5)
    dist.barrier()
    if workspace.rank == 1:
        dist.barrier()  # rank 0 has timed out
        entered = (5 << 32) | (int(workspace.state[0]) + 1)
        signals = torch.frombuffer(workspace._memory[1], dtype=torch.int64)
        sources = signals[: 4 * workspace.signals].view(2, 2, workspace.signals)[:, 0]
        num_signals = int((sources == entered)[:, 1:].sum())
        publishes = variant in ("two_shot", NORMED[2])
        assert (num_signals > 0) == publishes, num_signals
        return
    begin = time.monotonic()
    results = run_variant(variant, workspace, 5)
    seconds, failure = time.monotonic() - begin, workspace.failure()
    region = torch.frombuffer(workspace._memory[1], dtype=torch.uint8)
    before, begin = region.clone(), time.monotonic()
    for _ in range(2):
        run_variant(variant, workspace, 5)
    assert torch.equal(region, before) and time.monotonic() - begin < 2 * SHORT
    dist.barrier()
    assert is_all_nan(results) and SHORT <= seconds < 2 * SHORT + PROMPT, seconds
    assert failure is not None and failure[:2] == (TIMEOUT, 1) and failure[2] >> 32 == 5, failure


@pytest.mark.parametrize(
    ("variant", "other"),
    [(variant, variant) for variant in ("two_shot", "barrier", "copies", "ll", "ll_two_shot")]
    + [("ll", "two_shot"), ("ll", "ll_two_shot")],
)
@on_ranks(2)
def test_different_calls_are_a_mismatch_on_both_ranks(variant: str, other: str) -> None:
    """Run two variants or signatures against each other.

    Signals of another variant also contain the epoch, at offsets of data.
    """
    workspace = make_workspace(**WORKSPACE_SIZE)
    rank, begin = workspace.rank, time.monotonic()
    results = run_variant((variant, other)[rank], workspace, 5 + rank)
    failure = workspace.failure()
    assert is_all_nan(results) and time.monotonic() - begin < PROMPT
    assert failure is not None and failure[:2] == (MISMATCH, 1 - rank), failure
    if variant == other:
        assert (failure[2] >> 32, failure[3] >> 32) == (5 + rank, 6 - rank), failure


@on_ranks(2)
def test_abort_ends_a_wait() -> None:
    """Rank 0 waits while the host reports that rank 1 is lost."""
    workspace, begin = make_workspace(), time.monotonic()
    if workspace.rank == 0:
        timer = threading.Timer(0.2, workspace.abort, [1])
        timer.start()
        run_variant("two_shot", workspace, 5)
        timer.join()
        failure = workspace.failure()
        assert failure is not None and failure[:2] == (ABORTED, 1), failure
        assert 0.2 <= time.monotonic() - begin < 0.2 + PROMPT
    dist.barrier()


def _wait_after_check(call: Callable[[DeviceWorkspace], object]) -> None:
    """Rank 0 waits for rank 1, which the host has lost.

    The device believes that its last check is in the future. So it does not see the abort flag, and
    the wait times out.
    """
    workspace = make_workspace(SHORT, **WORKSPACE_SIZE)
    if workspace.rank == 0:
        workspace.abort(1)
        workspace.state[LAST_CHECK] = time.monotonic_ns() + int(100e9)
        call(workspace)
        failure = workspace.failure()
        assert failure is not None and failure[:2] == (TIMEOUT, 1), failure
    dist.barrier()


@pytest.mark.parametrize("variant", ["two_shot", "ll"])
@on_ranks(2)
def test_device_waits_check_the_host_periodically(variant: str) -> None:
    """Set the abort flag right after a check. The wait does not see it before the next check.

    Reads of host memory by every waiting block slow an H200 down to a tenth.
    """
    _wait_after_check(lambda workspace: run_variant(variant, workspace, 5))


@interpreted(2)
def test_programs_check_the_host_periodically() -> None:
    def multiply(workspace: DeviceWorkspace) -> None:
        x, w, out = torch.ones(4, 8), torch.ones(8, 8), torch.empty(2, 8)
        sizes, wire = (2, 2), torch.float32
        prepared = matmul_reduce_scatter.prepare(INTERPRETER, x, w, sizes, wire)
        prepared.bind(workspace, 5)(x, w, None, None, out)

    from tpkernels.kernels import matmul_reduce_scatter
    from tpkernels.kernels.configs import INTERPRETER

    _wait_after_check(multiply)


@pytest.mark.parametrize("variant", sweep(["ll_two_shot", "two_shot"], num_thorough=1))
@on_ranks(3)
def test_results_of_a_failed_wait_are_not_used(variant: str) -> None:
    """Rank 2 arrives after the timeout of rank 0 but before the timeout of rank 1.

    Each rank gets either the correct result, or NaN and a failure.
    """
    rank = dist.get_rank()
    workspace = make_workspace(SHORT if rank == 0 else 2 * SHORT)
    out = torch.zeros(192)
    if rank == 2:
        dist.recv(torch.empty(1), 0)
    all_reduce(workspace, 5, torch.full((192,), 1.0 + rank), out, variant=variant)
    if rank == 0:
        dist.send(torch.empty(1), 2)
    dist.barrier()
    correct, failed = (
        bool((out == 6.0).all()),
        workspace.failure() is not None and is_all_nan([out]),
    )
    assert correct != failed and not (correct and rank == 0)


def _litmus_args(workspace: DeviceWorkspace) -> tuple[Any, Any]:
    """Return the arguments of a litmus test that never runs."""
    return kernel_workspace(workspace, 1), _C.cuda.Litmus(0, 0, 0, 16)


def driver_job(driver: str) -> None:
    """Check the errors when driver functions fail, and that calls then work again."""
    emulated.load(driver)
    x = torch.ones(8)

    def call() -> None:
        cuda.sum_partials(torch.empty(8), [x, x])

    def raises(error: type[Exception], match: str, call: Callable[[], object] = call) -> None:
        with pytest.raises(error, match=match):
            call()

    with configure_driver("cuInit", 100):
        raises(NotImplementedError, "found no usable GPU: cuInit: on request")
    with configure_driver("cuModuleLoadData", 209, capability=75):
        raises(
            NotImplementedError, r"CUDA kernels on GPU 0 \(sm_75\): no kernel image is available"
        )
    with configure_driver("cuLaunchKernelEx", 719):
        raises(RuntimeError, r"^cuLaunchKernelEx: CUDA_ERROR_EMULATED \(on request\)$")
    raises(
        NotImplementedError,
        "^GPU 3 does not exist; the driver reports a GPU count of 1$",
        lambda: image.kernels(3),
    )
    workspace, device = make_workspace(), torch.device("cpu")
    with configure_driver(capability=80):
        obstacle = cuda.multicast_unsupported(device)
        assert obstacle == "needs compute capability 9.0 or higher; cpu has 8.0", obstacle
        litmus = functools.partial(image.launch, "litmus_bulk", device, *_litmus_args(workspace))
        raises(NotImplementedError, "litmus_bulk needs a GPU of compute capability 9.0", litmus)
    assert cuda.multicast_unsupported(device) is None
    with (
        configure_driver("cuStreamWriteValue64", 719),
        cuda.CopyCall(workspace, 1, flags=1) as copies,
    ):
        match = r"^cuStreamWriteValue64: CUDA_ERROR_EMULATED \(on request\)$"
        raises(RuntimeError, match, lambda: copies.set_flag(0))
    call()
    assert cuda.driver_status() == "for CUDA 13.0, GPUs: sm_90"
    assert get_counter("depth") == 0


def test_driver_errors_have_names(cuda_driver: str) -> None:
    with Ranks(1) as fresh:  # a rank without an initialized driver
        fresh.run(driver_job, cuda_driver)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_every_entry_raises() -> None:
    x = torch.ones(4)
    region = torch.zeros(1 << 16, dtype=torch.uint8)
    workspace = DeviceWorkspace([region.data_ptr()], region, 0, 8, 1 << 10, 1.0)
    entries = [
        lambda: all_reduce(workspace, 1, x, x),
        lambda: cuda.sum_partials(x, [x]),
        lambda: cuda.barrier(workspace, 1),
        lambda: cuda.CopyCall(workspace, 1),
        _C.cuda.driver_version,
        _C.cuda.device_count,
        lambda: _C.cuda.Kernels(0, b"an image"),
    ]
    for entry in entries:
        with pytest.raises(NotImplementedError, match=r"^no NVIDIA driver on this machine"):
            entry()
    assert cuda.driver_status().startswith("no NVIDIA driver on this machine")
