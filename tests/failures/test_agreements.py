"""A rank that fails alone in what all ranks do together between calls, such as rank 0 when it reads
its file of measured times: the others, which wait for its statement, are told."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT, Ending
from tests.support.ranked import apart, on_hosts
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.planning import store

MEMORY = {
    "apart": apart,
    "of each host": lambda: on_hosts("0011"),
    "shared": contextlib.nullcontext,
}


def unread_job(memory: str) -> tuple[Ending, Ending]:
    """A call by `auto` that reads rank 0's times, which fails there, and the next one."""
    with MEMORY[memory]():
        group = faults.group_of(dist.new_group())
        tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    own = groups.get(group.group_name)
    with mock.patch.object(store, "load", side_effect=OSError("a damaged disk")):
        first = faults.ending_of(lambda: own.tuned("cpu"))
    return first, faults.ending_of(lambda: tpkernels.all_reduce(torch.ones(4), group))


@pytest.mark.parametrize("memory", sweep(MEMORY, count=2))
def test_all_learn_that_a_rank_has_failed_alone(ranks: RanksFixture, memory: str) -> None:
    for rank, (first, again) in enumerate(ranks(4).run(unread_job, memory)):
        assert first.error == ("PeerLostError" if rank else "OSError"), first
        assert "a damaged disk" in first.text and first.seconds < PROMPT, first
        assert first.peer == (0 if rank else None), first
        assert again.error == "GroupBrokenError" and again.seconds < PROMPT, again
