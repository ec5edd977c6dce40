"""Captured graphs, and the end of a group whose kernels may still run, rehearsed on CPU tensors:
what a capture lacks is said before anything is queued; memory goes back only behind the last
kernel, and what a graph uses is kept."""

from __future__ import annotations

import functools
import gc
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cuda_rehearsal import pretending, space_of
from tests.support.emulated import on_ranks
from tests.support.tiers import sweep, thorough
from tpkernels import groups
from tpkernels.planning.op_spec import OPS
from tpkernels.symm import cuda, streams
from tpkernels.symm.device import ABORT, FAILED, PEER, STATUS, TIMEOUT, DeviceWorkspace

CALLS = [("all_gather", "direct"), ("all_reduce", "direct"), ("matmul_reduce_scatter", "direct"),
         ("all_gather_matmul", "pipelined"), ("matmul_all_reduce", "pipelined"),
         ("moe_dispatch", "direct"), ("moe_combine", "direct")]  # fmt: skip


def capture(patch: pytest.MonkeyPatch, captured: bool = True) -> None:
    """Whether a graph is captured from now on."""
    patch.setattr(streams, "is_captured", lambda _: captured)


@pytest.mark.parametrize(("op", "variant"), [*sweep(CALLS[:-1]), thorough(*CALLS[-1])])
@on_ranks(2)
def test_a_capture_that_lacks_something_breaks_nothing(op: str, variant: str) -> None:
    """A call that lacks everything, one that lacks a larger workspace, and the same calls once they
    have been made outside, as the errors say."""
    with pretending() as patch:
        group = faults.new_group()
        for rows in (12, 900):
            most = rows if OPS[op].routed else None
            call = functools.partial(faults.run_op, op, group, variant, rows, max_rows=most)
            capture(patch)
            ending = faults.ending_of(call)
            assert ending.error == "CaptureError", ending
            assert "call" in ending.text and "once" in ending.text, ending
            for captured in (False, True):
                capture(patch, captured)
                call()


@on_ranks(2)
def test_new_rows_break_nothing() -> None:
    """In a workspace that is large enough, in the middle of a backward."""
    with pretending() as patch:
        group = faults.new_group()
        gather = functools.partial(tpkernels.all_gather, group=group, algorithm="direct")
        gather(torch.ones(8, 4))
        tpkernels.reduce_scatter(torch.ones(16, 4), group, algorithm="direct")
        x = torch.ones(3, 4, requires_grad=True)
        capture(patch)
        with pytest.raises(
            tpkernels.errors.CaptureError, match=r"^the shard sizes \[3, 3\] are new .* once"
        ):
            gather(x)
        capture(patch, False)
        out = gather(x)
        capture(patch)
        with pytest.raises(tpkernels.errors.CaptureError, match=r"^the shard sizes \[2, 2\]"):
            gather(torch.ones(2, 4)).sum()
        capture(patch, False)
        out.sum().backward()
    assert x.grad is not None and x.grad.unique().tolist() == [2.0]


@on_ranks(2)
def test_a_failure_found_in_a_capture_is_raised_after_it() -> None:
    """A kernel's wait has failed before."""
    with pretending():
        group = faults.new_group()
        call = functools.partial(faults.run_op, "all_gather", group, "direct")
        call()
        dist.barrier()
        space = space_of(group).current
        space.state[STATUS], space.state[PEER] = TIMEOUT, 1 - dist.get_rank()
        space.control[FAILED] = 1
        with pytest.MonkeyPatch.context() as capturing:
            capture(capturing)
            capturing.setattr(DeviceWorkspace, "failure", None)  # it cannot be read there
            with pytest.raises(tpkernels.errors.CaptureError, match="failed on the GPU"):
                call()
        with pytest.raises(tpkernels.CollectiveTimeoutError):
            call()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@on_ranks(2)
def test_memory_that_a_graph_uses_is_kept(captured: bool, broken: bool) -> None:
    with pretending() as patch:
        group = faults.new_group()
        call = functools.partial(faults.run_op, "all_gather", group, "direct")
        call()
        capture(patch, captured)
        call()
        capture(patch, False)
        memory = weakref.ref(space_of(group).current)
        dist.barrier()
        if broken:
            groups.get(group.group_name).mark_broken(RuntimeError("of a test"))
        else:
            tpkernels.finalize()
        gc.collect()
        dist.barrier()
        assert (memory() is not None) == captured


# The end of a group whose kernels still run: events pass when the test says so.

LIMIT = 0.3  # s that kernels may take to end


class Event:
    """``query`` is asked whether the work before it has ended."""

    def __init__(self, passed: Callable[[], bool]) -> None:
        self.query, self.records = passed, 0


class Stream:
    def record_event(self, event: Event) -> None:
        event.records += 1

    def wait_event(self, event: Event) -> None:
        pass


def use_events(patch: pytest.MonkeyPatch, passed: Callable[[], bool]) -> None:
    """From here on, workspaces on CPUs take their calls to be queued."""
    stream: Any = Stream()
    patch.setattr(streams, "order_of", lambda _: streams.DeviceOrder())
    patch.setattr(streams, "current_stream", lambda _: stream)
    patch.setattr(streams, "new_event", lambda _: Event(passed))


# How the group ends; the seconds for which its kernels still run (None: longer than anybody waits),
# or "fails"; whether waits within them were ended at the first look and at the last, and whether
# the memory is kept; the line logged.
NEVER_FREED = "still run 0.3 s after the group was closed; their workspaces are never freed"
ENDS: dict[str, tuple[str, float | str | None, tuple[bool, bool] | None, bool, str]] = {
    "finalize": ("finalize", 0.15, (False, False), False, ""),
    "failure": ("failure", 0.15, (True, True), False, ""),
    "late": ("finalize", LIMIT + 0.15, (False, True), False, ""),
    "never": ("finalize", None, (False, True), True, NEVER_FREED),
    "never after a failure": ("failure", None, (True, True), True, NEVER_FREED),
    "device fails": ("finalize", "fails", None, True, "may still run: an illegal memory"),
    "exit": ("exit", None, None, True, ""),  # waits for nothing
}


@pytest.mark.parametrize(
    "end", [end if ENDS[end][1] is not None else thorough(end) for end in ENDS]
)
@on_ranks(2)
def test_memory_goes_back_after_the_last_kernel(end: str) -> None:
    how, lasts, expected, kept, line = ENDS[end]
    logged, aborted, freed_early, ends_at = [], [], [], float("-inf")
    with pretending() as patch:
        patch.setattr(cuda, "_GRACE_S", LIMIT)
        patch.setattr(cuda, "_LAST_S", LIMIT)

        def passed() -> bool:
            if lasts == "fails":
                raise RuntimeError("an illegal memory access was encountered")
            if time.monotonic() > ends_at:
                return True
            space = memory()
            freed_early.append(space is None)
            aborted.append(space is not None and bool(space.control[ABORT]))
            return False

        use_events(patch, passed)
        group = faults.new_group()
        faults.run_op("all_gather", group, "direct")
        memory = weakref.ref(space_of(group).current)
        dist.barrier()
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tpkernels").addHandler(handler)
        begin = time.monotonic()
        ends_at = begin + (lasts if isinstance(lasts, float) else 1e9)
        if how == "finalize":
            tpkernels.finalize()
        elif how == "exit":
            groups.get(group.group_name).leave()
            groups._groups.clear()
        else:
            groups.get(group.group_name).mark_broken(RuntimeError("of a test"))
        seconds = time.monotonic() - begin
        logging.getLogger("tpkernels").removeHandler(handler)
        gc.collect()
        dist.barrier()
        assert (memory() is not None) == kept and not any(freed_early)
    assert len(logged) == bool(line) and all(line in one for one in logged), logged
    if expected is None:
        assert not aborted and seconds < LIMIT
        return
    least = lasts if isinstance(lasts, float) else LIMIT
    assert least <= seconds < least + LIMIT + faults.PROMPT, seconds
    assert (aborted[0], aborted[-1]) == expected, aborted


@on_ranks(2)
def test_the_event_covers_a_call_that_raised() -> None:
    """When it has queued some of its work."""
    with pretending() as patch:
        use_events(patch, lambda: True)
        group = faults.new_group()
        faults.run_op("all_gather", group, "direct")
        space, joined = space_of(group), []
        patch.setattr(space.side, "join", lambda: joined.append("joined"))
        event = space.event
        assert isinstance(event, Event)
        before = event.records
        with pytest.raises(KeyError), space:
            raise KeyError
        assert joined == ["joined"] and event.records - before == 1
        dist.barrier()
