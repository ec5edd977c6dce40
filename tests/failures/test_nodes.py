"""``hierarchical`` watches the ranks of its host while it waits for another host. Other faults are
in test_apart.py."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.faults import AT_ONCE, Ending
from tests.support.ranked import on_hosts
from tpkernels.algorithms.hierarchical import cpu as hierarchical

# Sums for the first host return from the second, with four ranks, after the last step.
HOSTS = "001111"


def returning_job(seconds: float, number: int) -> tuple[Ending, float]:
    """Rank 1 gets its sum late. Meanwhile rank 0, on the same host, has finished and ends, or it
    gets a signal while its own sum is under way."""
    rank, send, finish = dist.get_rank(), hierarchical.Shared.send, hierarchical.Sums._finish

    def late(levels: hierarchical.Shared, data: torch.Tensor, to: int) -> None:
        if to == 1:
            time.sleep(seconds)
        send(levels, data, to)

    def disturbed(ours: hierarchical.Sums) -> None:
        if number and rank == 0:
            time.sleep(0.2)  # rank 1 waits
            faults.disturb_now(number)
        finish(ours)

    with on_hosts(HOSTS):
        group = faults.new_group()
    hierarchical.Shared.send = late  # type: ignore[method-assign]
    hierarchical.Sums._finish = disturbed  # type: ignore[method-assign]

    def call() -> None:
        result = tpkernels.reduce_scatter(torch.ones(6), group, algorithm="hierarchical")
        assert result.tolist() == [6.0]

    ending = faults.ending_of(call)
    if rank == 0:
        os._exit(0)
    return ending, faults.disturbed_at() if number else 0.0


@pytest.mark.thorough
def test_a_rank_that_has_finished_may_end() -> None:
    with faults.watched_ranks(6) as ranks:
        outcomes = faults.collect(ranks, returning_job, 0.5, 0)
        assert outcomes[0].exitcode == 0, outcomes[0]
        for ending, _ in faults.values(outcomes, 0).values():
            assert not ending.error, ending


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_seen_from_its_host() -> None:
    with faults.watched_ranks(6) as ranks:
        outcomes = faults.collect(ranks, returning_job, 3.0, signal.SIGKILL)
        ending, killed_at = faults.values(outcomes, 0)[1]
        assert ending.error == "PeerLostError" and ending.peer == 0, ending
        assert "rank 1 waited for rank 0 (pid " in ending.text, ending
        assert ending.at - killed_at < AT_ONCE, ending
