"""Tests of memory shortage: an allocation fails on one rank during an op, or shared memory cannot
be set up.

After an op fails, the peers must not mistake the next call of that rank for the call that it left.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import CASES, SCALED_AND_ROUTED_CASES, Ending
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels.ops import autograd

WORLD, POOR = 3, 1
RANKS = 4  # world size of the tests of shared memory
FIRST_CASES = [
    ("all_reduce_", "direct"),
    ("matmul_reduce_scatter", "pipelined"),
    ("all_gather", "ring"),
]
FIRST_CASES += [("matmul_all_reduce", "unfused"), ("all_gather_matmul", "direct")]


@contextmanager
def no_memory(number: int) -> Iterator[list[int]]:
    """Make allocation ``number`` of the block fail; yield a list with the count of allocations."""
    count = [0]

    def failing(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_or_fail(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                raise MemoryError("simulated")
            return allocate(*args, **options)

        return allocate_or_fail

    with (
        mock.patch.object(torch, "empty", failing(torch.empty)),
        mock.patch.object(torch, "mm", failing(torch.mm)),
        mock.patch.object(torch, "addmm", failing(torch.addmm)),
    ):
        yield count


def shortage_job(op: str, algorithm: str, number: int) -> tuple[list[Ending], bool]:
    """Return the endings of two calls with different values, and whether an allocation failed."""
    group = faults.new_group()
    fails = group.rank() == POOR

    def call(value: float) -> None:
        faults.run_op(op, group, algorithm, 6, value=value, converts=True)

    call(3.0)
    with no_memory(number if fails else 0) as count:
        first = faults.record_ending(lambda: call(1.0))
    failed = fails and count[0] >= number  # False if the call has fewer allocations
    return [first, faults.record_ending(lambda: call(2.0))], failed


@pytest.mark.parametrize(
    ("op", "algorithm"),
    sweep(
        [
            *FIRST_CASES,
            *(case for case in [*CASES, *SCALED_AND_ROUTED_CASES] if case not in FIRST_CASES),
        ],
        3,
        num_thorough=3,
    ),
)
def test_no_memory_anywhere_in_an_op(ranks: RanksFixture, op: str, algorithm: str) -> None:
    for number in range(1, 40):
        results = ranks(WORLD).run(shortage_job, op, algorithm, number, timeout=100)
        if not results[POOR][1]:
            assert not any(ending.error for endings, _ in results for ending in endings), results
            break
        for rank, (endings, _) in enumerate(results):
            errors = [ending.error for ending in endings]
            assert all(ending.seconds < faults.PROMPT for ending in endings), endings
            if rank == POOR:
                assert errors == ["MemoryError", "GroupBrokenError"], endings
                continue
            # The peers may have received all its data before the failure.
            assert errors in (["PeerLostError", "GroupBrokenError"], ["", "PeerLostError"]), endings
            lost = endings[errors.index("PeerLostError")]
            assert lost.peer == POOR and "MemoryError: simulated" in lost.message, lost
    else:
        pytest.fail("more than 40 allocations")
    assert number > 1, "nothing was allocated"


def backward_job(op: str) -> list[Ending]:
    """The weight gradient fails on one rank, before or after the collective of the backward."""
    group = faults.new_group()
    x = torch.ones(6, 6, requires_grad=True)
    w = torch.ones(6, 6, requires_grad=True)

    def step() -> None:
        result = getattr(tpkernels, op)(x, w, group)
        result.sum().backward()

    step()
    if group.rank() == POOR:
        compute: Callable[..., Any] = autograd.WeightGrad.compute

        def fail(*_: Any) -> None:
            raise MemoryError("simulated")

        autograd.WeightGrad.compute = fail  # type: ignore[method-assign, assignment]
        first = faults.record_ending(step)
        autograd.WeightGrad.compute = compute  # type: ignore[method-assign]
        return [first, faults.record_ending(step)]
    return [faults.record_ending(step), faults.record_ending(step)]


@pytest.mark.parametrize("op", sweep(["all_gather_matmul", "matmul_reduce_scatter"]))
def test_no_memory_in_a_backward(op: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        results = faults.values(faults.collect(ranks, backward_job, op))
    for rank, (first, then) in results.items():
        if rank == POOR:
            assert (first.error, then.error) == ("MemoryError", "GroupBrokenError"), first
        else:
            assert "PeerLostError" in (first.error, then.error), (first, then)


# Setup of shared memory.


@pytest.mark.parametrize("nbytes", sweep([1 << 50, 1 << 44, 1 << 56]))
@on_ranks(RANKS)
def test_too_large_a_workspace_is_an_error_on_all_ranks(nbytes: int) -> None:
    group = faults.require_group(dist.new_group())
    first = faults.record_ending(lambda: tpkernels.init(group, faults.PATIENCE, nbytes))
    tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    then = faults.record_ending(lambda: faults.run_op("matmul_all_reduce", group))
    assert first.error == "MemoryError" and first.seconds < faults.PROMPT, first
    assert "cannot map" in first.message or "cannot size" in first.message, first
    assert "pass tpkernels.init a workspace_bytes smaller than" in first.message, first
    assert not then.error, then


@contextmanager
def little_address_space(nbytes: int) -> Any:
    """Let this process map only ``nbytes`` more bytes during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    ("poor", "step"),
    sweep([((1, 3), "init"), ((0,), "empty"), ((0, 1, 2, 3), "init")], num_thorough=2),
)
@on_ranks(RANKS)
def test_too_little_memory_on_some_ranks_is_an_error_on_all(
    poor: tuple[int, ...], step: str
) -> None:
    """The ranks in ``poor`` have too little address space to map the memory. All ranks raise
    `MemoryError`, and a smaller setup succeeds."""
    group, other_group = faults.require_group(dist.new_group()), faults.new_group()
    if step == "empty":
        tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)

    def call() -> None:
        if step == "empty":
            tpkernels.empty(32 << 20, group=group)
        else:
            tpkernels.init(group, faults.PATIENCE, 64 << 20)

    if group.rank() in poor:
        with little_address_space(100 << 20):
            first = faults.record_ending(call)
    else:
        first = faults.record_ending(call)
    faults.run_op("all_gather", other_group)
    if step == "init":
        tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    then = faults.record_ending(lambda: faults.run_op("all_gather", group))
    assert first.error == "MemoryError" and first.seconds < faults.PROMPT, first
    assert "cannot create shared memory for the group: rank" in first.message, first
    assert "cannot map" in first.message and "Cannot allocate memory" in first.message, first
    assert not then.error, then
