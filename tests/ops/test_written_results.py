"""Large sums of two ranks, which each writes into the other's result: csrc/host/written_results.h.

The results lie in memory that both ranks map. They have the bits of sums in place, and nobody
writes to them outside of their call.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

import tpkernels
from tests.local.test_memory import HOLDERS
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.written import LARGE, MIB, WORLD, shared, shared_at_once
from tpkernels import _C, errors
from tpkernels.defaults import POOL_VARIABLE, RESULT_POOL_BYTES
from tpkernels.launch import Ranks
from tpkernels.symm.steps import PRIVATE_CALLS

ODD = LARGE + 12345


def partial(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(rank + count)
    return torch.randn(count, generator=numbers).to(dtype)


def in_place(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tpkernels.all_reduce_(x.clone(), group)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@contextlib.contextmanager
def pool_limit(nbytes: int) -> Iterator[None]:
    """That of this process, and of what groups share that are set up within."""
    usual = os.environ.get(POOL_VARIABLE)
    os.environ[POOL_VARIABLE] = str(nbytes)
    _C.calls.limit_result_pool(nbytes)
    try:
        yield
    finally:
        _C.calls.limit_result_pool(RESULT_POOL_BYTES)
        os.environ.pop(POOL_VARIABLE)
        if usual is not None:
            os.environ[POOL_VARIABLE] = usual


@shared_at_once()
def bits_job() -> list[str]:
    failures = []
    with fresh_group() as group:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for nbytes in (4 * MIB, 4 * MIB + 8 * 4099, 9 * MIB + 8):
                x = partial(dist.get_rank(), nbytes // dtype.itemsize, dtype)
                expected = in_place(x, group)
                tpkernels.all_reduce(x, group)  # plans
                for _ in range(3):
                    y = tpkernels.all_reduce(x, group)
                    if not same_bits(y, expected):
                        failures.append(f"other bits of {dtype}, {nbytes} bytes")
                    if not shared(y):
                        failures.append(f"{dtype}, {nbytes} bytes, in private memory")
        if shared(tpkernels.all_reduce(torch.ones(LARGE - 1), group)):
            failures.append("a small result in shared memory")
        wide = tpkernels.all_reduce(partial(0, LARGE).half(), group, out_dtype=torch.float32)
        if not torch.equal(wide, 2 * partial(0, LARGE).half().float()):
            failures.append("a wrong sum in a wider dtype")
        if shared(tpkernels.all_reduce(x.half(), group, out_dtype=torch.float32)):
            failures.append("what no peer can write is in shared memory")
    return failures


def test_sums_have_the_same_bits(ranks: RanksFixture) -> None:
    report(itertools.chain(*ranks(WORLD).run(bits_job)))


def patient_job() -> list[bool]:
    """Which of the first results are in shared memory."""
    with fresh_group() as group:
        x = torch.ones(LARGE)
        return [shared(tpkernels.all_reduce(x, group)) for _ in range(PRIVATE_CALLS + 2)]


def test_only_sizes_that_come_often_are_worth_shared_memory(ranks: RanksFixture) -> None:
    assert ranks(WORLD).run(patient_job) == [[False] * PRIVATE_CALLS + [True] * 2] * WORLD


@shared_at_once()
def mixed_job() -> list[str]:
    """The ranks differ in whether their results can be written. They tell each other."""
    failures, rank = [], dist.get_rank()

    def check(what: str, y: torch.Tensor, expected: torch.Tensor, is_shared: bool) -> None:
        if not same_bits(y, expected):
            failures.append(f"{what}: a wrong sum")
        if shared(y) != is_shared:
            failures.append(f"{what}: shared is {shared(y)}")

    x = partial(rank, ODD)
    with pool_limit(20 * MIB), fresh_group() as group:
        expected = in_place(x, group)
        tpkernels.all_reduce(x, group)  # plans
        check("both", tpkernels.all_reduce(x, group), expected, True)
        if rank == 0:
            check("the peer in place", tpkernels.all_reduce(x, group), expected, True)
        else:
            check("in place", in_place(x, group), expected, False)
        held = [tpkernels.all_reduce(x, group) for _ in range(5)]
        for y, has_room in zip(held, (True, True, True, True, False), strict=True):
            check("held", y, expected, has_room)
        if rank == 1:
            del held[:]
        check("full on rank 0", tpkernels.all_reduce(x, group), expected, rank == 1)
        del held[:]
        check("room again", tpkernels.all_reduce(x, group), expected, True)
        if rank == 1:
            _C.calls.limit_result_pool(0)
        check("no pool on rank 1", tpkernels.all_reduce(x, group), expected, rank == 0)
    for limit in (0, (rank + 1) * 24 * MIB):  # nothing to share, or no agreement
        with pool_limit(limit), fresh_group() as group:
            check(f"limit {limit}", tpkernels.all_reduce(x, group), expected, False)
            check(f"again, {limit}", tpkernels.all_reduce(x, group), expected, False)
    return failures


def test_ranks_may_differ_in_what_they_can(ranks: RanksFixture) -> None:
    report(itertools.chain(*ranks(WORLD).run(mixed_job)))


@shared_at_once()
def delayed_job(skip_waits: bool) -> list[str]:
    rank, failures = dist.get_rank(), []
    with fresh_group() as group:
        tpkernels.all_reduce(torch.ones(LARGE), group)
        workspace = faults.workspace_of(group)
        workspace.set_chaos(seed=rank + 1, max_delay_us=2000, skip_waits=skip_waits)
        for call in range(4):
            x = torch.full((ODD,), float(10 * call + rank))
            try:
                y = tpkernels.all_reduce(x, group)
            except errors.TpkernelsError as error:
                return [str(error)]
            if not (y == 20 * call + 1).all():
                failures.append(f"call {call} gave {y.unique()[:9]}")
    return failures


def test_results_are_complete_whoever_is_late(ranks: RanksFixture) -> None:
    report(itertools.chain(*ranks(WORLD).run(delayed_job, False)))


def test_without_waits_they_would_not_be() -> None:
    """The negative control."""
    with Ranks(WORLD) as ranks:
        assert any(ranks.run(delayed_job, True))


@shared_at_once()
def held_job() -> list[str]:
    failures, rank = [], dist.get_rank()
    with fresh_group() as group:

        def large(value: float) -> torch.Tensor:
            return tpkernels.all_reduce(torch.full((1024, 1024), value / WORLD), group)

        large(0.0)  # plans
        for name, (hold, read) in HOLDERS.items():
            x = large(1.0)
            address = x.data_ptr()
            if not shared(x):
                failures.append(f"{name}: in private memory")
            held = hold(x)
            del x
            others = [large(2.0) for _ in range(3)]
            for _ in range(3):
                others[rank] = large(3.0)
                if address in [other.data_ptr() for other in others]:
                    failures.append(f"{name}: the memory was handed out")
            if not (read(held) == 1).all():
                failures.append(f"{name}: has changed")
            del held, others
            if address not in [block.data_ptr() for block in [large(4.0) for _ in range(6)]]:
                failures.append(f"{name}: the memory did not come back")
    return failures


def test_memory_in_use_is_never_handed_out(ranks: RanksFixture) -> None:
    report(itertools.chain(*ranks(WORLD).run(held_job)))


@shared_at_once()
def gradient_job() -> list[str]:
    with fresh_group() as group:
        x = torch.full((LARGE,), 2.0, requires_grad=True)
        tpkernels.all_reduce(x, group)  # plans
        y = tpkernels.all_reduce(x, group)
        z = y.square().sum()  # saves y
        is_shared = shared(y)
        del y
        for _ in range(3):
            tpkernels.all_reduce(torch.ones(LARGE), group)
        z.backward()
        assert x.grad is not None
        good = is_shared and bool((x.grad == 2 * WORLD * 2.0).all())
    return [] if good else [f"shared: {is_shared}, gradient: {x.grad.unique()}"]


def test_a_graph_saves_them(ranks: RanksFixture) -> None:
    report(itertools.chain(*ranks(WORLD).run(gradient_job)))
