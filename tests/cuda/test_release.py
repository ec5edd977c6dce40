"""The end of a group whose kernels may still run, rehearsed with events that pass when the test
says so: its memory goes back only after them."""

from __future__ import annotations

import functools
import gc
import logging
import time
import weakref

import pytest
import torch.distributed as dist

import tpkernels
from tests.support import emulated, fake_events, faults
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import pretending, space_of
from tpkernels import groups
from tpkernels.symm import cuda
from tpkernels.symm.device import ABORT

LIMIT = 0.5  # s that kernels may take to end


class Ended:
    """What a test saw while a group ended."""

    def __init__(self) -> None:
        self.aborted: list[bool] = []  # at each look while kernels ran: had waits been ended?
        self.logged: list[str] = []
        self.kept = False
        self.freed_early = False
        self.seconds = 0.0


def end_job(driver: str, how: str, passes_after: float | None, fails: bool = False) -> Ended:
    """The group ends by ``how`` while its kernels run for ``passes_after`` seconds more, or longer
    than anybody waits."""
    emulated.load(driver)
    told = Ended()
    with pretending() as patch:
        patch.setattr(cuda, "_GRACE_S", LIMIT)
        patch.setattr(cuda, "_LAST_S", LIMIT)
        passing_at = float("-inf")

        def passed() -> bool:
            if fails:
                raise RuntimeError("an illegal memory access was encountered")
            space = memory()
            told.freed_early |= space is None
            if time.monotonic() > passing_at:
                return True
            told.aborted.append(space is not None and bool(space.control[ABORT]))
            return False

        fake_events.use_events(patch, passed)
        group = faults.new_group()
        call = functools.partial(faults.run_op, "all_gather", group, "direct")
        call()
        memory = weakref.ref(space_of(group).current)
        dist.barrier()
        handler = logging.Handler()
        handler.emit = lambda record: told.logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tpkernels").addHandler(handler)
        begin = time.monotonic()
        passing_at = float("inf") if passes_after is None else begin + passes_after
        if how == "finalize":
            tpkernels.finalize()
        elif how == "exit":
            groups.get(group.group_name).leave()
            groups.registry._groups.clear()
        else:
            groups.get(group.group_name).mark_broken(RuntimeError("of a test"))
        told.seconds = time.monotonic() - begin
        logging.getLogger("tpkernels").removeHandler(handler)
        gc.collect()
        told.kept = memory() is not None
        dist.barrier()
        return told


@pytest.mark.parametrize("how", ["finalize", "failure"])
def test_memory_goes_back_after_the_last_kernel(
    ranks: RanksFixture, cuda_driver: str, how: str
) -> None:
    for told in ranks(2).run(end_job, cuda_driver, how, 0.2):
        assert not told.kept and not told.freed_early and not told.logged, vars(told)
        assert 0.2 <= told.seconds < 0.2 + faults.PROMPT
        assert told.aborted[0] == (how == "failure"), vars(told)


def test_an_orderly_end_lets_calls_end_first(ranks: RanksFixture, cuda_driver: str) -> None:
    for told in ranks(2).run(end_job, cuda_driver, "finalize", 0.2):
        assert not any(told.aborted), vars(told)
    for told in ranks(2).run(end_job, cuda_driver, "finalize", LIMIT + 0.2):
        assert any(told.aborted) and not all(told.aborted) and not told.kept, vars(told)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["finalize", "failure"])
def test_memory_of_kernels_that_do_not_end_is_never_freed(
    ranks: RanksFixture, cuda_driver: str, how: str
) -> None:
    for told in ranks(2).run(end_job, cuda_driver, how, None):
        assert told.kept and not told.freed_early, vars(told)
        assert LIMIT <= told.seconds < 2 * LIMIT + faults.PROMPT
        (line,) = told.logged
        assert "have not ended 0.5 s after their group; their workspaces are never freed" in line


def test_a_device_that_has_failed_keeps_its_memory(ranks: RanksFixture, cuda_driver: str) -> None:
    for told in ranks(2).run(end_job, cuda_driver, "finalize", 0.0, True):
        assert told.kept and told.seconds < faults.PROMPT, vars(told)
        (line,) = told.logged
        assert "may not have ended: an illegal memory access" in line


def test_the_end_of_the_process_waits_for_nothing(ranks: RanksFixture, cuda_driver: str) -> None:
    for told in ranks(2).run(end_job, cuda_driver, "exit", None):
        assert told.kept and not told.logged and told.seconds < LIMIT, vars(told)


def raising_job(driver: str) -> list[str]:
    """A call fails when it has queued some of its work."""
    emulated.load(driver)
    with pretending() as patch:
        fake_events.use_events(patch, lambda: True)
        group = faults.new_group()
        faults.run_op("all_gather", group, "direct")
        space = space_of(group)
        done: list[str] = []
        patch.setattr(space.side, "join", lambda: done.append("joined"))
        event = space.event
        assert isinstance(event, fake_events.Event)
        before = event.records
        try:
            with space:
                raise KeyError
        except KeyError:
            done.append(f"records: {event.records - before}")
        dist.barrier()
        return done


def test_the_event_covers_a_call_that_raised(ranks: RanksFixture, cuda_driver: str) -> None:
    assert ranks(2).run(raising_job, cuda_driver) == [["joined", "records: 1"]] * 2
