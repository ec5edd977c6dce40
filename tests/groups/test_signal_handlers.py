"""Signal handlers that use a group while their thread waits in a collective operation: they are
refused, and the operation goes on."""

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
# In what rank 0 waits, and what its handler tries.
WAITS = [("init", "first call"), ("growth", "finalize"), ("communicator", "first call")]
WAITS += [("first call", "finalize"), ("empty", "first call"), ("growth", "init")]
WAITS += [("growth", "empty"), ("growth", "communicator")]
LARGE = 1 << 20  # elements, for which a workspace must grow


@contextlib.contextmanager
def handler_of_rank_0(handle: Callable[[], object]) -> Iterator[list[Ending]]:
    """Rank 0 handles a signal while it waits for the others, which are late. Yields the endings of
    ``handle``."""
    endings: list[Ending] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: endings.append(faults.ending_of(handle)))
    if dist.get_rank() == 0:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
    else:
        time.sleep(0.5)
    try:
        yield endings
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(("waits_in", "uses"), sweep(WAITS, 3, later=3))
@on_ranks(WORLD)
def test_a_handler_is_refused_wherever_ranks_wait(waits_in: str, uses: str) -> list[str]:
    group = faults.group_of(dist.new_group())
    calls: dict[str, Callable[[], object]] = {
        "init": lambda: tpkernels.init(group, faults.PATIENCE, 8 << 20),
        "first call": lambda: faults.run_op("all_reduce", group),
        "empty": lambda: tpkernels.empty(4, group=group),
        "growth": lambda: tpkernels.all_reduce(torch.ones(LARGE), group, algorithm="direct"),
        "communicator": lambda: Communicator(group, timeout=faults.PATIENCE),
    }
    if waits_in != "init":
        calls["init"]()
    if waits_in in ("empty", "growth"):
        faults.run_op("all_reduce", group)
    failures = []
    handle = tpkernels.finalize if uses == "finalize" else calls[uses]
    with handler_of_rank_0(handle) as handled:
        ending = faults.ending_of(calls[waits_in])
    lacks_gpu = waits_in == "communicator" and ending.error == "NotImplementedError"
    assert not ending.error or lacks_gpu, f"what waited: {ending}"
    assert dist.get_rank() != 0 or [one.error for one in handled] == ["RuntimeError"], handled
    failures += [str(one) for one in handled if " during a call" not in one.text]
    faults.run_op("matmul_all_reduce", group)
    return failures


@on_ranks(WORLD)
def test_a_refused_backward_breaks_nothing() -> list[str]:
    """A handler whose backward is refused, and which catches the error."""
    group = faults.new_group()
    x = torch.ones(4, 4, requires_grad=True)
    result = tpkernels.all_gather_matmul(x, torch.ones(4, 4), group)
    with handler_of_rank_0(lambda: result.sum().backward()) as handled:
        first = faults.ending_of(lambda: faults.run_op("all_reduce", group))
    result.sum().backward()
    errors = [one.error for one in handled]
    wrong = [] if errors == ["RuntimeError"] * (dist.get_rank() == 0) else [str(handled)]
    return wrong + ([str(first)] if first.error else [])


@contextlib.contextmanager
def interrupted_later(seconds: float) -> Iterator[None]:
    """A signal handler raises, with an exception that wrong arguments may have, too."""

    def stop(*_: object) -> None:
        raise RuntimeError("the handler's")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("algorithm", sweep(["direct", "unfused"]))
@on_ranks(WORLD)
def test_an_error_while_waiting_for_the_turn_breaks_the_group(algorithm: str) -> None:
    """A handler of rank 0 raises while the thread waits for another thread's call, which is not
    disturbed."""
    group, x = faults.new_group(), torch.ones(4, 3)

    def call() -> Ending:
        return faults.ending_of(lambda: tpkernels.all_reduce(x, group, algorithm=algorithm))

    assert not call().error
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.6)
        assert not (peers := call()).error, peers
        lost = call()
        assert lost.error == "PeerLostError" and "the handler's" in lost.text, lost
        return
    others: list[Ending] = []
    thread = threading.Thread(target=lambda: others.append(call()))
    thread.start()
    time.sleep(0.2)
    with interrupted_later(0.1):
        first = call()
    thread.join()
    assert not others[0].error and first.text == "the handler's", (others, first)
    assert (then := call()).error == "GroupBrokenError", then


_OURS = str(Path(tpkernels.__file__).parent)


class _InterruptAt:
    """Raises KeyboardInterrupt at one event of our Python code: a line, or a function's start. The
    first line of the outermost function does not count. An interrupt in the body of a public
    function with one call, ``outside`` of what it enters, is one between two calls."""

    def __init__(self, event: int, outside: Sequence[str] = ()) -> None:
        self.left, self.depth, self.at, self.outside = event, 0, "", outside

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        self.depth += (event == "call") - (event == "return")
        within = frame.f_code.co_name not in self.outside
        if within and event in ("call", "line") and (event == "line" or self.depth > 1):
            self.left -= 1
            if self.left == 0:
                self.at = f"{frame.f_code.co_name}:{frame.f_lineno} {event}"
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("step", [7, thorough(3), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["forward", "backward", "dispatch"])
@on_ranks(1)
def test_an_interrupt_within_an_op_breaks_the_group(kind: str, step: int) -> list[str]:
    """Interrupts an op at every ``step``-th event, each on a group of its own."""
    x = torch.ones(4, 3, requires_grad=kind == "backward")
    w, failures, event, calls = torch.ones(3, 2), [], 2, 0
    way = {"algorithm": "unfused"}  # in Python, even when it is warm
    made, find = list[Any](), planned_calls.implementation
    outside = () if kind == "backward" else ("matmul_all_reduce", "entry", "name_of")

    def implementation(problem: Problem, plan: Plan) -> Callable[..., Any]:
        function = find(problem, plan)

        def running(*args: Any) -> Any:
            result = function(*args)
            made.append(result)
            return result

        return running

    while True:
        group = faults.group_of(dist.new_group())
        with mock.patch.object(planned_calls, "implementation", implementation):
            tpkernels.matmul_all_reduce(x, w, group, **way)
            out = tpkernels.all_gather_matmul(x, [w], group, **way)[0].sum()
            made.clear()
            interrupt = _InterruptAt(event, outside)
            sys.settrace(interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                if kind == "backward":
                    out.backward()
                else:
                    tpkernels.matmul_all_reduce(x, w, group, **way)
            sys.settrace(None)
        calls = max(calls, len(made))
        state = groups.get(group.group_name)  # in the `finally` that resets `in_call` none can come
        if interrupt.left == 0 and not made and state.open and not state.in_call:
            failures.append(f"event {event} at {interrupt.at}: no call, and the group is open")
        dist.destroy_process_group(group)
        if interrupt.left > 0:
            return failures if event > 10 and calls else ["the test shows nothing"]
        event += step


# ``tpkernels.finalize`` against other threads, signal handlers, interrupts and itself.


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
