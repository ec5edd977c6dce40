"""Shards of an inner dim, such as sequences of a batch, by algorithms of GPUs that move whole rows.
Rehearsed as in test_queued.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cuda.test_queued import cases_job, copied_job
from tests.support.cases import Case, RanksFixture, each, uneven_splits
from tests.support.ranked import report
from tests.support.tiers import sweep

WAYS = ("direct", "pipelined")
F32 = torch.float32


def batches_of(world: int) -> list[Case]:
    """Shards of an inner dim, even and uneven, empty ones too."""
    found = []
    for total in (2 * world, 5):
        for sizes in uneven_splits(total, world):
            for lead, tail in (((3,), ()), ((2, 3), ()), ((2,), (3,))):
                split: dict[str, Any] = {"sizes": sizes, "dim": len(lead)}
                gathered, summed = (*lead, total, *tail, 12), (*lead, total, *tail, 10)
                more = {"biases": (F32,), "n": (4, 9), "return_gathered": True}
                found += [
                    Case(op="all_gather_matmul", shape=gathered, **split, n=(7,)),
                    Case(op="all_gather_matmul", shape=gathered, **split, **more),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,)),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,), residual=F32,
                         out_dtype=F32, biases=(F32,), layout="transposed"),
                ]  # fmt: skip
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("world", sweep([3, 1, 2]))
def test_shards_of_an_inner_dim(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    cases = each(*batches_of(world), algorithms=WAYS, integers=(True,))
    told = ranks(world).run(cases_job, cuda_driver, cases, timeout=240)
    report(failure for rank in told for failure in rank)


@pytest.mark.slow
def test_shards_of_an_inner_dim_by_fused(interpreting: RanksFixture, cuda_driver: str) -> None:
    """By programs of the kernel, then by copy engines."""
    cases = each(*batches_of(2)[::3], algorithms=("fused",), integers=(True,))
    for job in (cases_job, copied_job):
        told = interpreting(2).run(job, cuda_driver, cases, 0, timeout=240)
        report(failure for rank in told for failure in rank)
