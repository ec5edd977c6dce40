"""Captured graphs, and the end of a group whose kernels may still run, as a dry run.

A capture that lacks setup raises before it queues work. Memory is released after the last kernel.
Memory of a graph is kept.
"""

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
from tests.support.cuda_rehearsal import cuda_code_path, get_cuda_workspace
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
    """Start or end a simulated capture."""
    patch.setattr(streams, "is_captured", lambda _: captured)


@pytest.mark.parametrize(("op", "algorithm"), [*sweep(CALLS[:-1]), thorough(*CALLS[-1])])
@on_ranks(2)
def test_a_failed_capture_breaks_nothing(op: str, algorithm: str) -> None:
    """Capture a call without setup, and a call that needs a larger workspace.

    The same calls succeed after one call outside of a capture, as the errors suggest.
    """
    with cuda_code_path() as patch:
        group = faults.new_group()
        for rows in (12, 900):
            max_rows = rows if OPS[op].routed else None
            call = functools.partial(faults.run_op, op, group, algorithm, rows, max_rows=max_rows)
            capture(patch)
            ending = faults.record_ending(call)
            assert ending.error == "CaptureError", ending
            assert "call" in ending.message and "once" in ending.message, ending
            for captured in (False, True):
                capture(patch, captured)
                call()


@on_ranks(2)
def test_new_shard_sizes_in_a_capture_break_nothing() -> None:
    """Capture new shard sizes twice, the second time between a forward and its backward.

    The workspace is large enough, but both captures raise. The backward then succeeds.
    """
    with cuda_code_path() as patch:
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
    """Capture a call after a wait of a kernel has failed.

    The capture raises `CaptureError`, and the next call raises the timeout.
    """
    with cuda_code_path():
        group = faults.new_group()
        call = functools.partial(faults.run_op, "all_gather", group, "direct")
        call()
        dist.barrier()
        workspace = get_cuda_workspace(group).current
        workspace.state[STATUS], workspace.state[PEER] = TIMEOUT, 1 - dist.get_rank()
        workspace.control[FAILED] = 1
        with pytest.MonkeyPatch.context() as capturing:
            capture(capturing)
            # A capture must not read the failure record.
            capturing.setattr(DeviceWorkspace, "failure", None)
            with pytest.raises(tpkernels.errors.CaptureError, match="failed on the GPU"):
                call()
        with pytest.raises(tpkernels.CollectiveTimeoutError):
            call()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@on_ranks(2)
def test_memory_of_a_graph_stays_alive(captured: bool, broken: bool) -> None:
    with cuda_code_path() as patch:
        group = faults.new_group()
        call = functools.partial(faults.run_op, "all_gather", group, "direct")
        call()
        capture(patch, captured)
        call()
        capture(patch, False)
        memory = weakref.ref(get_cuda_workspace(group).current)
        dist.barrier()
        if broken:
            groups.get(group.group_name).mark_broken(RuntimeError("of a test"))
        else:
            tpkernels.finalize()
        gc.collect()
        dist.barrier()
        assert (memory() is not None) == captured


# The end of a group whose kernels still run. The test controls the events.

LIMIT = 0.3  # s, limit of the waits for running kernels


class Event:
    """``query`` returns True if the work before the event has ended."""

    def __init__(self, passed: Callable[[], bool]) -> None:
        self.query, self.records = passed, 0


class Stream:
    def record_event(self, event: Event) -> None:
        event.records += 1

    def wait_event(self, event: Event) -> None:
        pass


def use_events(patch: pytest.MonkeyPatch, passed: Callable[[], bool]) -> None:
    """Let workspaces on CPUs treat their calls as queued."""
    stream: Any = Stream()
    patch.setattr(streams, "get_device_order", lambda _: streams.DeviceOrder())
    patch.setattr(streams, "current_stream", lambda _: stream)
    patch.setattr(streams, "new_event", lambda _: Event(passed))


# Per case: end of the group; seconds until its kernels end (None: past all limits) or "fails";
# abort flag at the first and the last query; is the memory leaked; logged line.
NEVER_FREED = "still run 0.3 s after the group was closed; their workspaces are never freed"
ENDS: dict[str, tuple[str, float | str | None, tuple[bool, bool] | None, bool, str]] = {
    "finalize": ("finalize", 0.15, (False, False), False, ""),
    "failure": ("failure", 0.15, (True, True), False, ""),
    "late": ("finalize", LIMIT + 0.15, (False, True), False, ""),
    "never": ("finalize", None, (False, True), True, NEVER_FREED),
    "never after a failure": ("failure", None, (True, True), True, NEVER_FREED),
    "device fails": ("finalize", "fails", None, True, "may still run: an illegal memory"),
    "exit": ("exit", None, None, True, ""),  # does not wait for kernels
}


@pytest.mark.parametrize(
    "end", [end if ENDS[end][1] is not None else thorough(end) for end in ENDS]
)
@on_ranks(2)
def test_memory_is_released_after_the_last_kernel(end: str) -> None:
    how, lasts, expected, leaked, line = ENDS[end]
    logged, aborted, freed_early, end_time = [], [], [], float("-inf")
    with cuda_code_path() as patch:
        patch.setattr(cuda, "_GRACE_S", LIMIT)
        patch.setattr(cuda, "_ABORT_S", LIMIT)

        def passed() -> bool:
            if lasts == "fails":
                raise RuntimeError("an illegal memory access was encountered")
            if time.monotonic() > end_time:
                return True
            workspace = memory()
            freed_early.append(workspace is None)
            aborted.append(workspace is not None and bool(workspace.control[ABORT]))
            return False

        use_events(patch, passed)
        group = faults.new_group()
        faults.run_op("all_gather", group, "direct")
        memory = weakref.ref(get_cuda_workspace(group).current)
        dist.barrier()
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tpkernels").addHandler(handler)
        begin = time.monotonic()
        end_time = begin + (lasts if isinstance(lasts, float) else 1e9)
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
        assert (memory() is not None) == leaked and not any(freed_early)
    assert len(logged) == bool(line) and all(line in message for message in logged), logged
    if expected is None:
        assert not aborted and seconds < LIMIT
        return
    min_seconds = lasts if isinstance(lasts, float) else LIMIT
    assert min_seconds <= seconds < min_seconds + LIMIT + faults.PROMPT, seconds
    assert (aborted[0], aborted[-1]) == expected, aborted


@on_ranks(2)
def test_the_event_covers_a_call_that_raised() -> None:
    """Raise in a call that has queued some of its work."""
    with cuda_code_path() as patch:
        use_events(patch, lambda: True)
        group = faults.new_group()
        faults.run_op("all_gather", group, "direct")
        cuda_workspace, joined = get_cuda_workspace(group), []
        patch.setattr(cuda_workspace.side_streams, "join", lambda: joined.append("joined"))
        event = cuda_workspace.event
        assert isinstance(event, Event)
        before = event.records
        with pytest.raises(KeyError), cuda_workspace:
            raise KeyError
        assert joined == ["joined"] and event.records - before == 1
        dist.barrier()
