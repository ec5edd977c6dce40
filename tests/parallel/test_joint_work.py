"""Work that all ranks do at once, such as loading and saving: whatever goes wrong on one rank
reaches the others in time, and the group remains usable."""

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
from tests.support.faults import PROMPT, Ending, ending_of, run_op
from tpkernels import groups
from tpkernels.groups.group import Group
from tpkernels.parallel import joint_work

WORLD = 2


def work_job(what: str, seconds: float = 20.0) -> tuple[Ending, Ending]:
    """Return how the work ends if something happens on rank 0, and how the group's next call
    ends."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group, timeout=seconds)
    start, rank = threading.Thread.start, dist.get_rank()

    def start_none(self: threading.Thread) -> None:
        if self.name == joint_work.THREAD:
            raise RuntimeError("can't start new thread")
        start(self)

    def send_none(*args: Any, **options: Any) -> Any:
        raise MemoryError("simulated")

    def work() -> None:
        name = groups.name_of(group)
        with joint_work.joint_work(name, torch.device("cpu"), "the work") as state:
            if rank == 0 and what == "raises":
                raise OSError("cannot write folder/\udcff")
            if what == "late":
                time.sleep(1.1 * rank)
            state.text = f"rank {rank}"
        assert state.texts == [f"rank {peer}" for peer in range(WORLD)]

    broken = {
        "thread": mock.patch.object(threading.Thread, "start", start_none),
        "message": mock.patch.object(Group, "exchange", send_none),
    }
    with broken[what] if rank == 0 and what in broken else contextlib.nullcontext():
        first = ending_of(work)
    first = Ending(first.error, ascii(first.text), first.peer, first.at, first.seconds)
    dist.barrier()
    return first, ending_of(lambda: run_op("all_reduce", group))


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raises", "OSError", "cannot write folder/"),
        ("thread", "RuntimeError", "can't start new thread"),
    ],
)
def test_the_others_raise_the_error_of_rank_0(
    ranks: RanksFixture, what: str, error: str, text: str
) -> None:
    for rank, (first, then) in enumerate(ranks(WORLD).run(work_job, what)):
        assert first.error == (error if rank == 0 else "PeerFailedError"), first
        assert rank == 0 or f"the work failed on rank 0: {error}: {text}" in first.text, first
        assert text in first.text and first.seconds < PROMPT, first
        assert not then.error, then


def test_a_message_that_rank_0_cannot_send_breaks_the_group(ranks: RanksFixture) -> None:
    for rank, (first, then) in enumerate(ranks(WORLD).run(work_job, "message")):
        assert first.error == ("PeerLostError" if rank else "MemoryError"), first
        assert "simulated" in first.text and first.seconds < 3 * PROMPT, first
        assert then.error == "GroupBrokenError", then


def test_the_others_wait_for_a_slow_rank(ranks: RanksFixture) -> None:
    """It takes longer than the group's timeout."""
    for first, then in ranks(WORLD).run(work_job, "late", 0.7):
        assert not first.error and first.seconds > 1.0 and not then.error, (first, then)
