"""An explicit-state model of kernels that fill a GPU and wait for the kernels of their peers.

Each rank has a GPU with streams, and each stream a list of steps in the order in which the host has
issued them: a kernel of a group's call, a wait for an event, a record of one. A GPU runs one kernel
at a time, because a fused kernel fills it. A kernel ends when the kernels of the same call are
running or have ended on all ranks of its group. `check` visits all schedules.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from tpkernels.symm.streams import DeviceOrder


class Step(NamedTuple):
    action: str  # "kernel", "wait" or "record"
    name: str  # of the group or the event
    number: int  # of the group's call, or of the record


class Event:
    def __init__(self, name: str) -> None:
        self.name, self.records = name, 0


class Stream:
    """Stands in for a stream of torch, and keeps what is queued on it."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def wait_event(self, event: Event) -> None:
        self.steps.append(Step("wait", event.name, event.records))

    def record_event(self, event: Event) -> None:
        event.records += 1
        self.steps.append(Step("record", event.name, event.records))


Turn = Callable[[str, Any, Any], AbstractContextManager[None]]


@contextmanager
def _turn(order: DeviceOrder, group: str, stream: Any, event: Any) -> Iterator[None]:
    order.begin(group, stream)
    try:
        yield
    finally:
        order.end(stream, event)


def one_order() -> Turn:
    """What the package does: one chain for all groups of a device."""
    return functools.partial(_turn, DeviceOrder())


def order_per_group() -> Turn:
    """A chain for each group."""
    orders: dict[str, DeviceOrder] = {}
    return lambda name, *rest: _turn(orders.setdefault(name, DeviceOrder()), name, *rest)


def issued(calls: Sequence[tuple[str, str]], turn: Turn) -> list[list[Step]]:
    """The streams of a rank whose host issues these calls: (group, stream) pairs."""
    streams, events, made = dict[str, Stream](), dict[str, Event](), dict[str, int]()
    for group, stream in calls:
        on = streams.setdefault(stream, Stream())
        with turn(group, on, events.setdefault(group, Event(group))):
            made[group] = made.get(group, 0) + 1
            on.steps.append(Step("kernel", group, made[group]))
    return [stream.steps for stream in streams.values()]


# Per rank and stream: how many steps are over. Per rank: the stream whose kernel runs, or -1.
State = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]


def deadlock(ranks: Sequence[list[list[Step]]], groups: Mapping[str, Sequence[int]]) -> str:
    """The steps that are stuck in a schedule that comes to a standstill; "" if there is none."""
    start: State = (tuple((0,) * len(streams) for streams in ranks), (-1,) * len(ranks))
    seen, queue = {start}, deque([start])
    while queue:
        state = queue.popleft()
        following = list(_following(state, ranks, groups))
        heads = _heads(state, ranks)
        if not following and heads:
            return ", ".join(f"rank {rank}: {step}" for rank, _, step in heads)
        for after in following:
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return ""


def _heads(state: State, ranks: Sequence[list[list[Step]]]) -> list[tuple[int, int, Step]]:
    """(rank, stream, first step that is not over) of all streams."""
    over, _ = state
    return [
        (rank, at, steps[over[rank][at]])
        for rank, streams in enumerate(ranks)
        for at, steps in enumerate(streams)
        if over[rank][at] < len(steps)
    ]


def _following(
    state: State, ranks: Sequence[list[list[Step]]], groups: Mapping[str, Sequence[int]]
) -> list[State]:
    over, running = state
    found = []
    for rank, at, step in _heads(state, ranks):
        if step.action == "kernel" and running[rank] != at:
            if running[rank] < 0:
                found.append((over, _with(running, rank, at)))
            continue
        if step.action == "kernel":
            if not all(_has_begun(state, ranks, peer, step) for peer in groups[step.name]):
                continue
            running_after = _with(running, rank, -1)
        else:
            record = step._replace(action="record")
            if step.action == "wait" and not _is_over(state, ranks, rank, record):
                continue
            running_after = running
        ended = _with(over[rank], at, over[rank][at] + 1)
        found.append((_with(over, rank, ended), running_after))
    return found


def _is_over(state: State, ranks: Sequence[list[list[Step]]], rank: int, step: Step) -> bool:
    over = state[0][rank]
    return any(step in steps[:done] for steps, done in zip(ranks[rank], over, strict=True))


def _has_begun(state: State, ranks: Sequence[list[list[Step]]], rank: int, step: Step) -> bool:
    at = state[1][rank]
    runs = at >= 0 and ranks[rank][at][state[0][rank][at]] == step
    return runs or _is_over(state, ranks, rank, step)


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
