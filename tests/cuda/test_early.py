"""All-reduces that start while the product before them still runs, on the CPU: the emulated driver
hides what that product writes until a while after the start (support/emulated.py)."""

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
from tests.support.cuda_rehearsal import pretending
from tests.support.emulated import (
    BF16,
    F32,
    all_reduce,
    count_of,
    driver_that,
    host_sum,
    library,
    on_ranks,
    random,
    same_bits,
    space_of,
)
from tests.support.ranked import fresh_group
from tpkernels.algorithms.direct import cuda as direct
from tpkernels.cuda import queued
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import DeviceWorkspace

CASES = list(itertools.product(("ll", "two_shot", "ll_two_shot"), (False, True)))
SHAPE = (3, 264)


def reduced(
    space: DeviceWorkspace, signature: int, x: torch.Tensor, variant: str, norm: bool
) -> torch.Tensor:
    """The sum by one early launch."""
    if norm:
        return normed_all_reduce(space, signature, x, torch.ones(x.shape[-1]), variant, early=True)[
            1
        ]
    all_reduce(space, signature, x, out := torch.empty_like(x), variant=variant, early=True)
    return out


@pytest.mark.parametrize("awaited", [True, False])
@on_ranks(3)
def test_an_early_launch_waits_for_its_input(awaited: bool) -> None:
    """Negative control: nobody waits. (A rank that the machine delays may find its input there all
    the same.)"""
    space, begin, wrong = space_of(words=1 << 14), count_of("early"), 0
    with driver_that(awaited=awaited):
        for number, (variant, norm) in enumerate(2 * CASES):
            xs = [random(SHAPE[0] * SHAPE[1], BF16, 10 * number + r) for r in range(space.world)]
            x = xs[space.rank].clone().view(SHAPE)
            library().emulated_previous(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
            got = reduced(space, number + 1, x, variant, norm)
            library().emulated_previous(None, ctypes.c_size_t(0))
            wrong += not same_bits(got.view(-1), host_sum(xs, BF16))
            wrong += space.failure() is not None
            dist.barrier()
    assert (wrong == 0) == awaited and count_of("early") - begin == 2 * len(CASES), wrong


@pytest.mark.parametrize(
    ("capability", "version", "early"), [(90, 12030, 1), (90, 12020, 0), (89, 13000, 0)]
)
@on_ranks(2)
def test_where_launches_are_early(capability: int, version: int, early: int) -> None:
    space, begin = space_of(words=1 << 14), count_of("early")
    with driver_that(version=version, capability=capability):
        assert bool((reduced(space, 1, torch.ones(SHAPE), "ll", False) == space.world).all())
    assert count_of("early") - begin == early


@on_ranks(2)
def test_only_kernels_behind_torchs_products_are_early() -> None:
    """Before them the group's previous call has ended. What another product queues is not known."""
    x, w, weight, found = torch.ones(4, 6), torch.ones(6, 8), torch.ones(8), []
    product = tpkernels.CustomMatmul(lambda x: x @ w, (6, 8), F32)
    with pretending(), fresh_group() as group:
        for call in (
            lambda: tpkernels.matmul_all_reduce(x, w, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce_rms_norm(x, w, weight, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce(x, product, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce(x[:0], w, group, algorithm="direct"),
            lambda: tpkernels.all_reduce(x, group, algorithm="direct"),
        ):
            begin = count_of("early")
            call()
            found.append(count_of("early") - begin)
    assert found == [1, 1, 0, 0, 0], found


@on_ranks(2)
def test_nothing_comes_between_the_product_and_its_kernel() -> None:
    """The turn begins before the product: it may queue a wait for another stream."""
    bound, multiply, order = queued.bound, direct.local_matmul, []
    x, w, weight = torch.ones(4, 6), torch.ones(6, 8), torch.ones(8)

    @contextlib.contextmanager
    def turn(memory: CudaWorkspace) -> Iterator[None]:
        with memory:
            order.append("turn begins")
            yield
        order.append("turn ends")

    def recorded(*args: Any) -> tuple[Any, Any]:
        memory, run = bound(*args)
        return turn(memory), lambda *tensors: (order.append("kernel"), run(*tensors))

    with pretending() as patch, fresh_group() as group:
        patch.setattr(queued, "bound", recorded)
        patch.setattr(
            direct, "local_matmul", lambda *args: (order.append("product"), multiply(*args))
        )
        tpkernels.matmul_all_reduce(x, w, group, algorithm="direct")
        tpkernels.matmul_all_reduce_rms_norm(x, w, weight, group, algorithm="direct")
    assert order == ["turn begins", "product", "kernel", "turn ends"] * 2, order
