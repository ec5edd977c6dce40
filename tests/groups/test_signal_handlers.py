"""Signal handlers that use a group while their thread waits in a collective: the use is refused and
the collective completes. Also covers interrupts and `tpkernels.finalize`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.faults import Ending
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep, thorough
from tpkernels import groups
from tpkernels.nccl import Communicator
from tpkernels.ops import planned_calls
from tpkernels.planning.choose import Plan
from tpkernels.planning.problem import Problem

WORLD = 2
# For each test: the call in which rank 0 waits, and the call in its handler.
WAITS = [("init", "first call"), ("growth", "finalize"), ("communicator", "first call")]
WAITS += [("first call", "finalize"), ("empty", "first call"), ("growth", "init")]
WAITS += [("growth", "empty"), ("growth", "communicator")]
LARGE = 1 << 20  # number of elements that requires a larger workspace


@contextlib.contextmanager
def handler_of_rank_0(handle: Callable[[], object]) -> Iterator[list[Ending]]:
    """Handle a signal on rank 0 while it waits for its late peers. Yield the endings of
    ``handle``."""
    endings: list[Ending] = []
    previous_handler = signal.signal(
        signal.SIGUSR2, lambda *_: endings.append(faults.record_ending(handle))
    )
    if dist.get_rank() == 0:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
    else:
        time.sleep(0.5)
    try:
        yield endings
    finally:
        signal.signal(signal.SIGUSR2, previous_handler)


@pytest.mark.parametrize(("waiting_call", "handler_call"), sweep(WAITS, 3, num_thorough=3))
@on_ranks(WORLD)
def test_a_handler_is_refused_wherever_ranks_wait(
    waiting_call: str, handler_call: str
) -> list[str]:
    group = faults.require_group(dist.new_group())
    calls: dict[str, Callable[[], object]] = {
        "init": lambda: tpkernels.init(group, faults.PATIENCE, 8 << 20),
        "first call": lambda: faults.run_op("all_reduce", group),
        "empty": lambda: tpkernels.empty(4, group=group),
        "growth": lambda: tpkernels.all_reduce(torch.ones(LARGE), group, algorithm="direct"),
        "communicator": lambda: Communicator(group, timeout=faults.PATIENCE),
    }
    if waiting_call != "init":
        calls["init"]()
    if waiting_call in ("empty", "growth"):
        faults.run_op("all_reduce", group)
    failures = []
    handle = tpkernels.finalize if handler_call == "finalize" else calls[handler_call]
    with handler_of_rank_0(handle) as handled:
        ending = faults.record_ending(calls[waiting_call])
    lacks_gpu = waiting_call == "communicator" and ending.error == "NotImplementedError"
    assert not ending.error or lacks_gpu, f"what waited: {ending}"
    assert dist.get_rank() != 0 or [ending.error for ending in handled] == ["RuntimeError"], handled
    failures += [str(ending) for ending in handled if " during a call" not in ending.message]
    faults.run_op("matmul_all_reduce", group)
    return failures


@on_ranks(WORLD)
def test_a_refused_backward_leaves_the_group_usable() -> list[str]:
    """A handler runs a backward that is refused, and catches the error. The backward then succeeds
    outside the handler."""
    group = faults.new_group()
    x = torch.ones(4, 4, requires_grad=True)
    result = tpkernels.all_gather_matmul(x, torch.ones(4, 4), group)
    with handler_of_rank_0(lambda: result.sum().backward()) as handled:
        first = faults.record_ending(lambda: faults.run_op("all_reduce", group))
    result.sum().backward()
    errors = [ending.error for ending in handled]
    wrong = [] if errors == ["RuntimeError"] * (dist.get_rank() == 0) else [str(handled)]
    return wrong + ([str(first)] if first.error else [])


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise from a signal handler an exception type that invalid arguments may raise as well."""

    def raise_error(*_: object) -> None:
        raise RuntimeError("the handler's")

    previous_handler = signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


@pytest.mark.parametrize("algorithm", sweep(["direct", "unfused"]))
@on_ranks(WORLD)
def test_an_error_while_waiting_for_the_lock_breaks_the_group(algorithm: str) -> None:
    """A handler on rank 0 raises while the thread waits for the call of a second thread. The call
    of the second thread completes."""
    group, x = faults.new_group(), torch.ones(4, 3)

    def call() -> Ending:
        return faults.record_ending(lambda: tpkernels.all_reduce(x, group, algorithm=algorithm))

    assert not call().error
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.6)
        assert not (matching := call()).error, matching
        next_ending = call()
        assert next_ending.error == "PeerLostError" and "the handler's" in next_ending.message, (
            next_ending
        )
        return
    thread_endings: list[Ending] = []
    thread = threading.Thread(target=lambda: thread_endings.append(call()))
    thread.start()
    time.sleep(0.2)
    with interrupt_after(0.1):
        first = call()
    thread.join()
    assert not thread_endings[0].error and first.message == "the handler's", (thread_endings, first)
    assert (then := call()).error == "GroupBrokenError", then


_PACKAGE = str(Path(tpkernels.__file__).parent)


class _Interrupt:
    """Raise KeyboardInterrupt at one trace event in our Python code: a line or the start of a
    function.

    The start of the outermost function does not count, nor do events in the bodies of the functions
    ``outside``. These make a single call; an interrupt in their body falls between two calls.
    """

    def __init__(self, event: int, outside: Sequence[str] = ()) -> None:
        self.remaining, self.depth, self.location, self.outside = event, 0, "", outside

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        self.depth += (event == "call") - (event == "return")
        within = frame.f_code.co_name not in self.outside
        if within and event in ("call", "line") and (event == "line" or self.depth > 1):
            self.remaining -= 1
            if self.remaining == 0:
                self.location = f"{frame.f_code.co_name}:{frame.f_lineno} {event}"
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("step", [7, thorough(3), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["forward", "backward", "dispatch"])
@on_ranks(1)
def test_an_interrupt_within_an_op_breaks_the_group(kind: str, step: int) -> list[str]:
    """Interrupt an op at every ``step``-th trace event, each on a new group."""
    x = torch.ones(4, 3, requires_grad=kind == "backward")
    w, failures, event, calls = torch.ones(3, 2), [], 2, 0
    options = {"algorithm": "unfused"}  # runs in Python even with a cached plan
    results, get_implementation = list[Any](), planned_calls.implementation
    outside = () if kind == "backward" else ("matmul_all_reduce", "entry", "group_name")

    def implementation(problem: Problem, plan: Plan) -> Callable[..., Any]:
        function = get_implementation(problem, plan)

        def record_result(*args: Any) -> Any:
            result = function(*args)
            results.append(result)
            return result

        return record_result

    while True:
        group = faults.require_group(dist.new_group())
        with mock.patch.object(planned_calls, "implementation", implementation):
            tpkernels.matmul_all_reduce(x, w, group, **options)
            out = tpkernels.all_gather_matmul(x, [w], group, **options)[0].sum()
            results.clear()
            interrupt = _Interrupt(event, outside)
            sys.settrace(interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                if kind == "backward":
                    out.backward()
                else:
                    tpkernels.matmul_all_reduce(x, w, group, **options)
            sys.settrace(None)
        calls = max(calls, len(results))
        # An interrupt cannot occur in the `finally` that resets `in_call`.
        state = groups.get(group.group_name)
        if interrupt.remaining == 0 and not results and state.open and not state.in_call:
            failures.append(
                f"event {event} at {interrupt.location}: no call, and the group is open"
            )
        dist.destroy_process_group(group)
        if interrupt.remaining > 0:
            return failures if event > 10 and calls else ["the test shows nothing"]
        event += step


# ``tpkernels.finalize`` against other threads, signal handlers, interrupts and itself.


on_new_ranks = on_ranks(2, timeout=30, fixture="fresh_ranks")


def start_waiting_call(group: dist.ProcessGroup) -> threading.Thread:
    """Start a thread that waits for its peers in a call."""
    thread = threading.Thread(
        target=lambda: faults.record_ending(lambda: faults.run_op("all_gather", group))
    )
    thread.start()
    while not groups.get(group.group_name).in_call:
        time.sleep(0.001)
    return thread


def used_group(timeout: float = faults.PATIENCE) -> dist.ProcessGroup:
    group = faults.new_group(timeout)
    faults.run_op("all_gather", group)
    return group


@on_new_ranks
def test_a_handler_that_finalizes_while_finalize_waits() -> None:
    """A signal handler calls finalize while finalize waits for the call of a second thread."""
    group, handled = used_group(), list[str]()
    if dist.get_rank() == 1:
        time.sleep(0.6)
        faults.run_op("all_gather", group)
        return
    call = start_waiting_call(group)

    def handle(*_: object) -> None:
        handled.append("begins")
        tpkernels.finalize()
        handled.append("ends")

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    tpkernels.finalize()
    call.join()
    assert handled == ["begins", "ends"], handled


@on_new_ranks
def test_a_call_that_waits_for_the_lock_fails_if_the_group_is_closed() -> None:
    group = used_group()
    endings: list[faults.Ending] = []
    waiting = threading.Thread(
        target=lambda: endings.append(
            faults.record_ending(lambda: faults.run_op("all_gather", group))
        )
    )
    with groups.get(group.group_name).lock:
        waiting.start()
        time.sleep(0.3)
        tpkernels.finalize()
    waiting.join()
    dist.barrier()
    faults.run_op("all_gather", group)  # sets the group up again
    assert endings[0].error == "GroupBrokenError", endings
    assert "tpkernels.finalize" in endings[0].message, endings


@pytest.mark.thorough
@on_new_ranks
def test_after_an_interrupted_finalize_groups_can_be_used() -> None:
    """Interrupt finalize while it waits for the second of two groups, then use the first group."""
    first, second = used_group(), used_group()
    if dist.get_rank() == 1:
        time.sleep(0.6)
        faults.run_op("all_gather", second)
        tpkernels.finalize()
    else:
        call = start_waiting_call(second)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            tpkernels.finalize()
        call.join()
    dist.barrier()
    faults.run_op("all_reduce", first)
    assert faults.shares_memory(first)


@on_new_ranks
def test_a_group_is_not_closed_within_a_call() -> None:
    """A group stays open if its process group ends during a call of the same thread."""
    group = used_group()
    state = groups.get(group.group_name)
    with state.locked():
        state.close("the end of its process group")
    assert state.workspace is not None
    got = tpkernels.all_reduce(torch.ones(3), group)
    assert torch.equal(got, torch.full((3,), 2.0)), got
