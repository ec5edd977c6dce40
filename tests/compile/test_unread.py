"""A call whose result one rank alone has no use for is still made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group


def unread_job(backend: str) -> bool:
    """Only rank 0 reads the sum."""
    rank = dist.get_rank()
    with fresh_group() as group, torch._inductor.config.patch(force_disable_caches=True):
        name = group.group_name

        def read_by_one(x: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = torch.ops.tpkernels.all_reduce(x, name)
            return total + 1 if rank == 0 else x + 1

        out = torch.compile(read_by_one, fullgraph=True, backend=backend)(torch.ones(4))
    return torch.equal(out, torch.full((4,), 3.0 if rank == 0 else 2.0))


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_a_sum_that_one_rank_does_not_read(ranks: RanksFixture, backend: str) -> None:
    assert ranks(2).run(unread_job, backend, timeout=120) == [True, True]
