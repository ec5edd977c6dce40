"""Memory runs out: on one rank within an op, after which its peers must not mistake its next call
for the one that it left; and where shared memory is set up."""

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
from tests.support.faults import CASES, CASES_APART, Ending
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels.ops import autograd

WORLD, POOR = 3, 1
RANKS = 4  # of those that set up shared memory
EACH = [("all_reduce_", "direct"), ("matmul_reduce_scatter", "pipelined"), ("all_gather", "ring")]
EACH += [("matmul_all_reduce", "unfused"), ("all_gather_matmul", "direct")]


@contextmanager
def no_memory(at: int) -> Iterator[list[int]]:
    """Makes the ops' ``at``-th allocation fail; yields how many there were."""
    made = [0]

    def poor(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocating(*args: Any, **options: Any) -> Any:
            made[0] += 1
            if made[0] == at:
                raise MemoryError("simulated")
            return allocate(*args, **options)

        return allocating

    with (
        mock.patch.object(torch, "empty", poor(torch.empty)),
        mock.patch.object(torch, "mm", poor(torch.mm)),
        mock.patch.object(torch, "addmm", poor(torch.addmm)),
    ):
        yield made


def poor_job(op: str, algorithm: str, at: int) -> tuple[list[Ending], bool]:
    """The endings of two calls that differ only in their values; whether an allocation failed."""
    group = faults.new_group()
    poor = group.rank() == POOR

    def call(value: float) -> None:
        faults.run_op(op, group, algorithm, 6, value=value, converts=True)

    call(3.0)
    with no_memory(at if poor else 0) as made:
        first = faults.ending_of(lambda: call(1.0))
    lacked = poor and made[0] >= at  # otherwise the call had fewer allocations
    return [first, faults.ending_of(lambda: call(2.0))], lacked


@pytest.mark.parametrize(
    ("op", "algorithm"),
    sweep([*EACH, *(case for case in [*CASES, *CASES_APART] if case not in EACH)], 3, later=3),
)
def test_no_memory_anywhere_in_an_op(ranks: RanksFixture, op: str, algorithm: str) -> None:
    for at in range(1, 40):
        results = ranks(WORLD).run(poor_job, op, algorithm, at, timeout=100)
        if not results[POOR][1]:
            assert not any(ending.error for endings, _ in results for ending in endings), results
            break
        for rank, (endings, _) in enumerate(results):
            errors = [ending.error for ending in endings]
            assert all(ending.seconds < faults.PROMPT for ending in endings), endings
            if rank == POOR:
                assert errors == ["MemoryError", "GroupBrokenError"], endings
                continue
            # The others may have received all they need from it before.
            assert errors in (["PeerLostError", "GroupBrokenError"], ["", "PeerLostError"]), endings
            lost = endings[errors.index("PeerLostError")]
            assert lost.peer == POOR and "MemoryError: simulated" in lost.text, lost
    else:
        pytest.fail("more than 40 allocations")
    assert at > 1, "nothing was allocated"


def backward_job(op: str) -> list[Ending]:
    """One rank fails in its backward, before or after the collective."""
    group = faults.new_group()
    x = torch.ones(6, 6, requires_grad=True)
    w = torch.ones(6, 6, requires_grad=True)

    def step() -> None:
        result = getattr(tpkernels, op)(x, w, group)
        result.sum().backward()

    step()
    if group.rank() == POOR:
        product: Callable[..., Any] = autograd.WeightGrad.product

        def fail(*_: Any) -> None:
            raise MemoryError("simulated")

        autograd.WeightGrad.product = fail  # type: ignore[method-assign, assignment]
        first = faults.ending_of(step)
        autograd.WeightGrad.product = product  # type: ignore[method-assign]
        return [first, faults.ending_of(step)]
    return [faults.ending_of(step), faults.ending_of(step)]


@pytest.mark.parametrize("op", sweep(["all_gather_matmul", "matmul_reduce_scatter"]))
def test_no_memory_in_a_backward(op: str) -> None:
    with faults.watched_ranks(WORLD) as ranks:
        results = faults.values(faults.collect(ranks, backward_job, op))
    for rank, (first, then) in results.items():
        if rank == POOR:
            assert (first.error, then.error) == ("MemoryError", "GroupBrokenError"), first
        else:
            assert "PeerLostError" in (first.error, then.error), (first, then)


# Shared memory.


@pytest.mark.parametrize("nbytes", sweep([1 << 50, 1 << 44, 1 << 56]))
@on_ranks(RANKS)
def test_too_large_a_workspace_is_an_error_on_all_ranks(nbytes: int) -> None:
    group = faults.group_of(dist.new_group())
    first = faults.ending_of(lambda: tpkernels.init(group, faults.PATIENCE, nbytes))
    tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    then = faults.ending_of(lambda: faults.run_op("matmul_all_reduce", group))
    assert first.error == "MemoryError" and first.seconds < faults.PROMPT, first
    assert "cannot map" in first.text or "cannot size" in first.text, first
    assert "pass tpkernels.init a workspace_bytes smaller than" in first.text, first
    assert not then.error, then


@contextmanager
def little_address_space(room: int) -> Any:
    """Lets this process map only ``room`` more bytes during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    ("poor", "step"), sweep([((1, 3), "init"), ((0,), "empty"), ((0, 1, 2, 3), "init")], later=2)
)
@on_ranks(RANKS)
def test_memory_that_one_rank_lacks_is_an_error_on_all(poor: tuple[int, ...], step: str) -> None:
    """Some ranks cannot map what the others can."""
    group, other = faults.group_of(dist.new_group()), faults.new_group()
    if step == "empty":
        tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)

    def call() -> None:
        if step == "empty":
            tpkernels.empty(32 << 20, group=group)
        else:
            tpkernels.init(group, faults.PATIENCE, 64 << 20)

    if group.rank() in poor:
        with little_address_space(100 << 20):
            first = faults.ending_of(call)
    else:
        first = faults.ending_of(call)
    faults.run_op("all_gather", other)
    if step == "init":
        tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    then = faults.ending_of(lambda: faults.run_op("all_gather", group))
    assert first.error == "MemoryError" and first.seconds < faults.PROMPT, first
    assert "cannot create shared memory for the group: rank" in first.text, first
    assert "cannot map" in first.text and "Cannot allocate memory" in first.text, first
    assert not then.error, then
