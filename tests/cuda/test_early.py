"""All-reduces that start while the product before them still runs, on the CPU: the emulated driver
hides what that product writes until a while after the start (support/emulated.py)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.cuda.test_failures import failing
from tests.cuda.test_rms_norm import launch as normed_all_reduce
from tests.support import emulated
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import pretending
from tests.support.emulated import BF16, F32, host_sum, random, same_bits
from tests.support.ranked import fresh_group
from tpkernels import cuda
from tpkernels.algorithms.direct import cuda as direct
from tpkernels.symm.device import DeviceWorkspace

WAYS = ("ll", "two_shot", "ll_two_shot", "ll128")
CASES = [(way, norm) for way in WAYS for norm in (False, True) if not (norm and way == "ll128")]
SHAPE = (3, 264)


@contextlib.contextmanager
def hidden(library: ctypes.CDLL, results: torch.Tensor, awaited: bool) -> Iterator[None]:
    """``results`` are there only a while after the next early launch begins."""
    nbytes = ctypes.c_size_t(results.numel() * results.element_size())
    library.emulated_previous(ctypes.c_void_p(results.data_ptr()), nbytes, awaited)
    try:
        yield
    finally:
        library.emulated_previous(None, ctypes.c_size_t(0), True)


def reduced(
    space: DeviceWorkspace, signature: int, x: torch.Tensor, way: str, norm: bool
) -> torch.Tensor:
    """The sum by one early launch."""
    if norm:
        return normed_all_reduce(space, signature, x, torch.ones(x.shape[-1]), way, early=True)[1]
    cuda.all_reduce(space, signature, x, out := torch.empty_like(x), way=way, early=True)
    return out


def early_job(driver: str, awaited: bool) -> tuple[int, int]:
    """How many sums were wrong, and how many launches were early."""
    library = emulated.load(driver)
    space = emulated.space_of(driver, words=1 << 14)
    begin, wrong = library.emulated_early_launches(), 0
    for number, (way, norm) in enumerate(2 * CASES):
        xs = [random(SHAPE[0] * SHAPE[1], BF16, 10 * number + r) for r in range(space.world)]
        x = xs[space.rank].clone().view(SHAPE)
        with hidden(library, x, awaited):
            got = reduced(space, number + 1, x, way, norm)
        wrong += not same_bits(got.view(-1), host_sum(xs, BF16))
        wrong += space.failure() is not None
        dist.barrier()
    return wrong, library.emulated_early_launches() - begin


def test_an_early_launch_waits_for_its_input(ranks: RanksFixture, cuda_driver: str) -> None:
    assert ranks(3).run(early_job, cuda_driver, True) == [(0, 2 * len(CASES))] * 3


def test_without_that_wait_it_is_wrong(ranks: RanksFixture, cuda_driver: str) -> None:
    """Negative control. A rank that the machine delays may find its input there all the same."""
    assert all(wrong > 0 for wrong, _ in ranks(3).run(early_job, cuda_driver, False))


def gated_job(driver: str, capability: int, version: int) -> tuple[bool, int]:
    """Whether a sum is right, and how many launches were early."""
    library = emulated.load(driver)
    space = emulated.space_of(driver, words=1 << 14)
    begin = library.emulated_early_launches()
    library.emulated_driver_version(version)
    try:
        with failing(driver, "", 0, capability):
            got = reduced(space, 1, torch.ones(SHAPE), "ll", False)
    finally:
        library.emulated_driver_version(13000)
    return bool((got == space.world).all()), library.emulated_early_launches() - begin


@pytest.mark.parametrize(
    ("capability", "version", "early"), [(90, 12030, 1), (90, 12020, 0), (89, 13000, 0)]
)
def test_where_launches_are_early(
    ranks: RanksFixture, cuda_driver: str, capability: int, version: int, early: int
) -> None:
    assert ranks(2).run(gated_job, cuda_driver, capability, version) == [(True, early)] * 2


def ops_job(driver: str) -> list[int]:
    """Early launches of each op by `direct`."""
    library, found = emulated.load(driver), []
    x, w, weight = torch.ones(4, 6), torch.ones(6, 8), torch.ones(8)
    product = tpkernels.LocalProduct(lambda x: x @ w, (6, 8), F32)
    with pretending(), fresh_group() as group:
        for call in (
            lambda: tpkernels.matmul_all_reduce(x, w, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce_rms_norm(x, w, weight, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce(x, product, group, algorithm="direct"),
            lambda: tpkernels.matmul_all_reduce(x[:0], w, group, algorithm="direct"),
            lambda: tpkernels.all_reduce(x, group, algorithm="direct"),
        ):
            begin = library.emulated_early_launches()
            call()
            found.append(library.emulated_early_launches() - begin)
    return found


def test_only_kernels_behind_torchs_products_are_early(
    ranks: RanksFixture, cuda_driver: str
) -> None:
    """Before them the group's previous call has ended. What another product queues is not known."""
    assert ranks(2).run(ops_job, cuda_driver) == [[1, 1, 0, 0, 0]] * 2


def test_nothing_comes_between_the_product_and_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for another stream, with which a turn may begin, would come between."""
    order: list[str] = []

    @contextlib.contextmanager
    def turn(*_: Any) -> Iterator[Any]:
        order.append("turn begins")
        yield SimpleNamespace(current=None)
        order.append("turn ends")

    monkeypatch.setattr(direct, "queued", turn)
    monkeypatch.setattr(direct, "local_matmul", lambda *_: order.append("product"))
    launch = SimpleNamespace(
        words=0, buffer_bytes=0, sizes=(), run=lambda *_: order.append("kernel")
    )
    x, call = torch.ones(2, 2), SimpleNamespace(plan=SimpleNamespace(signature=1))
    direct._queue(call, x, x, x, launch)  # type: ignore[arg-type]
    assert order == ["turn begins", "product", "kernel", "turn ends"]
