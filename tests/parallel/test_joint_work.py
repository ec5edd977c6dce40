"""Work that all ranks run together, such as loading and saving. An error on one rank promptly
reaches all ranks, and the group remains usable."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT, Ending, record_ending, run_op
from tpkernels import groups
from tpkernels.groups.group import Group
from tpkernels.parallel import joint_work

WORLD = 2


def work_job(fault: str, seconds: float = 20.0) -> tuple[Ending, Ending]:
    """Run joint work under a fault. Return its ending and the ending of the next call on the
    group."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group, timeout=seconds)
    start, rank = threading.Thread.start, dist.get_rank()

    def fail_to_start(self: threading.Thread) -> None:
        if self.name == joint_work.THREAD:
            raise RuntimeError("can't start new thread")
        start(self)

    def fail_to_send(*args: Any, **options: Any) -> Any:
        raise MemoryError("simulated")

    def work() -> None:
        name = groups.group_name(group)
        with joint_work.joint_work(name, torch.device("cpu"), "the work") as state:
            if rank == 0 and fault == "raises":
                raise OSError("cannot write folder/\udcff")
            if fault == "late":
                time.sleep(1.1 * rank)
            state.report = f"rank {rank}"
        assert state.reports == [f"rank {peer}" for peer in range(WORLD)]

    patches = {
        "thread": mock.patch.object(threading.Thread, "start", fail_to_start),
        "message": mock.patch.object(Group, "exchange", fail_to_send),
    }
    with patches[fault] if rank == 0 and fault in patches else contextlib.nullcontext():
        first = record_ending(work)
    first = Ending(first.error, ascii(first.message), first.peer, first.time, first.seconds)
    dist.barrier()
    return first, record_ending(lambda: run_op("all_reduce", group))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("raises", "OSError", "cannot write folder/"),
        ("thread", "RuntimeError", "can't start new thread"),
    ],
)
def test_all_ranks_raise_the_error_of_rank_0(
    ranks: RanksFixture, fault: str, error: str, message: str
) -> None:
    for rank, (first, next_call) in enumerate(ranks(WORLD).run(work_job, fault)):
        assert first.error == (error if rank == 0 else "PeerFailedError"), first
        assert rank == 0 or f"the work failed on rank 0: {error}: {message}" in first.message, first
        assert message in first.message and first.seconds < PROMPT, first
        assert not next_call.error, next_call


def test_a_message_that_rank_0_cannot_send_breaks_the_group(ranks: RanksFixture) -> None:
    for rank, (first, next_call) in enumerate(ranks(WORLD).run(work_job, "message")):
        assert first.error == ("PeerLostError" if rank else "MemoryError"), first
        assert "simulated" in first.message and first.seconds < 3 * PROMPT, first
        assert next_call.error == "GroupBrokenError", next_call


def test_all_ranks_wait_for_a_slow_rank(ranks: RanksFixture) -> None:
    """Rank 1 exceeds the group timeout, and no rank raises."""
    for first, next_call in ranks(WORLD).run(work_job, "late", 0.7):
        assert not first.error and first.seconds > 1.0 and not next_call.error, (first, next_call)
