"""``tpkernels.finalize`` against other threads, signal handlers, interrupts and itself."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.ranked import on_ranks
from tpkernels import groups

alone = on_ranks(2, timeout=30, fixture="own_ranks")


def in_call_of_a_thread(group: dist.ProcessGroup) -> threading.Thread:
    """Starts a thread that waits for its peers in a call."""
    thread = threading.Thread(
        target=lambda: faults.ending_of(lambda: faults.run_op("all_gather", group))
    )
    thread.start()
    while not groups.get(group.group_name).in_call:
        time.sleep(0.001)
    return thread


def used_group(timeout: float = faults.PATIENCE) -> dist.ProcessGroup:
    group = faults.new_group(timeout)
    faults.run_op("all_gather", group)
    return group


@alone
def test_a_handler_that_finalizes_while_finalize_waits() -> None:
    """While finalize waits for a thread's call, a signal handler finalizes too."""
    group, handled = used_group(), list[str]()
    if dist.get_rank() == 1:
        time.sleep(0.6)
        faults.run_op("all_gather", group)
        return
    call = in_call_of_a_thread(group)

    def handle(*_: object) -> None:
        handled.append("begins")
        tpkernels.finalize()
        handled.append("ends")

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    tpkernels.finalize()
    call.join()
    assert handled == ["begins", "ends"], handled


@alone
def test_a_call_that_waited_for_its_turn_finds_the_group_closed() -> None:
    """A thread waits for its turn when its group is closed."""
    group = used_group()
    endings: list[faults.Ending] = []
    waiting = threading.Thread(
        target=lambda: endings.append(faults.ending_of(lambda: faults.run_op("all_gather", group)))
    )
    with groups.get(group.group_name).lock:
        waiting.start()
        time.sleep(0.3)
        tpkernels.finalize()
    waiting.join()
    dist.barrier()
    faults.run_op("all_gather", group)  # which sets it up again
    assert endings[0].error == "GroupBrokenError", endings
    assert "tpkernels.finalize" in endings[0].text, endings


@pytest.mark.thorough
@alone
def test_after_an_interrupted_finalize_groups_can_be_used() -> None:
    """Ctrl-C while finalize waits for the second of two groups; then the first group is used."""
    first, second = used_group(), used_group()
    if dist.get_rank() == 1:
        time.sleep(0.6)
        faults.run_op("all_gather", second)
        tpkernels.finalize()
    else:
        call = in_call_of_a_thread(second)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            tpkernels.finalize()
        call.join()
    dist.barrier()
    faults.run_op("all_reduce", first)
    assert faults.shares_memory(first)


@alone
def test_a_group_is_not_closed_within_a_call() -> None:
    """The process group ends while this thread, in a handler, is within a call on it."""
    group = used_group()
    made = groups.get(group.group_name)
    with made.turn():
        made.close("the end of its process group")
    assert made.workspace is not None
    got = tpkernels.all_reduce(torch.ones(3), group)
    assert torch.equal(got, torch.full((3,), 2.0)), got
