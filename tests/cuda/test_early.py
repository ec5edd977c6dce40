"""Early launches: all-reduces that start while the preceding matmul runs, on the CPU.

The emulated driver hides the output of the matmul until some time after the start
(support/emulated.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.cuda.test_rms_norm import launch as normed_all_reduce
from tests.support.cuda_rehearsal import cuda_code_path
from tests.support.emulated import (
    BF16,
    F32,
    all_reduce,
    configure_driver,
    get_counter,
    host_sum,
    library,
    make_workspace,
    on_ranks,
    random,
    same_bits,
)
from tests.support.ranked import fresh_group
from tpkernels.algorithms.direct import cuda as direct
from tpkernels.cuda import queued
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import DeviceWorkspace

CASES = list(itertools.product(("ll", "two_shot", "ll_two_shot"), (False, True)))
SHAPE = (3, 264)


def reduced(
    workspace: DeviceWorkspace, signature: int, x: torch.Tensor, variant: str, norm: bool
) -> torch.Tensor:
    """Return the sum of one early launch."""
    if norm:
        return normed_all_reduce(
            workspace, signature, x, torch.ones(x.shape[-1]), variant, early=True
        )[1]
    all_reduce(workspace, signature, x, out := torch.empty_like(x), variant=variant, early=True)
    return out


@pytest.mark.parametrize("awaited", [True, False])
@on_ranks(3)
def test_an_early_launch_waits_for_its_input(awaited: bool) -> None:
    """Launch early while the input is hidden.

    Negative control: launches do not wait. A delayed rank may then find its input by chance.
    """
    workspace, begin, wrong = make_workspace(signals=1 << 14), get_counter("early"), 0
    with configure_driver(awaited=awaited):
        for number, (variant, norm) in enumerate(2 * CASES):
            xs = [
                random(SHAPE[0] * SHAPE[1], BF16, 10 * number + r) for r in range(workspace.world)
            ]
            x = xs[workspace.rank].clone().view(SHAPE)
            library().emulated_previous(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
            got = reduced(workspace, number + 1, x, variant, norm)
            library().emulated_previous(None, ctypes.c_size_t(0))
            wrong += not same_bits(got.view(-1), host_sum(xs, BF16))
            wrong += workspace.failure() is not None
            dist.barrier()
    assert (wrong == 0) == awaited and get_counter("early") - begin == 2 * len(CASES), wrong


@pytest.mark.parametrize(
    ("capability", "version", "early"), [(90, 12030, 1), (90, 12020, 0), (89, 13000, 0)]
)
@on_ranks(2)
def test_requirements_of_early_launches(capability: int, version: int, early: int) -> None:
    workspace, begin = make_workspace(signals=1 << 14), get_counter("early")
    with configure_driver(version=version, capability=capability):
        assert bool(
            (reduced(workspace, 1, torch.ones(SHAPE), "ll", False) == workspace.world).all()
        )
    assert get_counter("early") - begin == early


@on_ranks(2)
def test_only_kernels_after_torch_matmuls_are_early() -> None:
    """Count early launches after several matmuls.

    Before a torch matmul the previous call of the group has ended. The work of a custom matmul is
    unknown.
    """
    x, w, weight, counts = torch.ones(4, 6), torch.ones(6, 8), torch.ones(8), []
    custom_matmul = tpkernels.CustomMatmul(lambda x: x @ w, (6, 8), F32)
    with cuda_code_path(), fresh_group() as group:
        for call in (
            lambda: tpkernels.matmul_all_reduce(x, w, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce_rms_norm(x, w, weight, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce(x, custom_matmul, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce(x[:0], w, group, algorithm="direct"),
            lambda: tpkernels.all_reduce(x, group, algorithm="direct"),
        ):
            begin = get_counter("early")
            call()
            counts.append(get_counter("early") - begin)
    assert counts == [1, 1, 0, 0, 0], counts


@on_ranks(2)
def test_the_lock_covers_the_matmul_and_its_kernel() -> None:
    """Record the order of lock, matmul and kernel.

    The lock begins before the matmul, because it may queue a wait for a second stream.
    """
    bind_launch, multiply, order = queued.bind_launch, direct.local_matmul, []
    x, w, weight = torch.ones(4, 6), torch.ones(6, 8), torch.ones(8)

    @contextlib.contextmanager
    def logged_lock(memory: CudaWorkspace) -> Iterator[None]:
        with memory:
            order.append("turn begins")
            yield
        order.append("turn ends")

    def recorded(*args: Any) -> tuple[Any, Any]:
        memory, run = bind_launch(*args)
        return logged_lock(memory), lambda *tensors: (order.append("kernel"), run(*tensors))

    with cuda_code_path() as patch, fresh_group() as group:
        patch.setattr(queued, "bind_launch", recorded)
        patch.setattr(
            direct, "local_matmul", lambda *args: (order.append("product"), multiply(*args))
        )
        tpkernels.matmul_all_reduce(x, w, group, algorithm="direct")
        tpkernels.matmul_all_reduce_rms_norm(x, w, weight, group, algorithm="direct")
    assert order == ["turn begins", "product", "kernel", "turn ends"] * 2, order
