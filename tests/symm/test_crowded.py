"""Whether ranks outnumber cores, however they are bound to them."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.support.cases import RanksFixture
from tpkernels.symm.host import is_crowded

WORLD = 2


def bound_job(pids: list[int], cores: list[int]) -> bool:
    """Whether it is crowded where rank r is bound to core ``cores[r]``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[dist.get_rank()]})
    try:
        dist.barrier()
        crowded = is_crowded(pids)
        dist.barrier()
        return crowded
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_with_a_core_each_are_not_crowded(ranks: RanksFixture) -> None:
    """As vLLM binds its workers."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < WORLD:
        pytest.skip("needs 2 cores")
    two = ranks(WORLD)
    assert two.run(bound_job, two.pids, usable[:2]) == [False, False]
    assert two.run(bound_job, two.pids, usable[:1] * 2) == [True, True]


def test_processes_that_cannot_be_asked_do_not_count() -> None:
    alone = len(os.sched_getaffinity(0))
    assert not is_crowded([os.getpid()])
    assert is_crowded([os.getpid(), *[2**22] * alone])
