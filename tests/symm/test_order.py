"""One order for the calls of all groups on a device: a call waits for the last one of any group, if
that was on another stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tpkernels.symm.device import MISMATCH, TIMEOUT, kernel_error
from tpkernels.symm.streams import DeviceOrder


class Stream:
    """Notes what is queued: "wait", "kernel" or "record", and whose."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []

    def wait_event(self, event: str) -> None:
        self.steps.append(("wait", event))

    def record_event(self, event: str) -> None:
        self.steps.append(("record", event))


@contextmanager
def turn(order: DeviceOrder, group: str, stream: Any) -> Iterator[None]:
    """A group's event has the group's name."""
    event: Any = group
    order.begin(group, stream)
    try:
        yield
    finally:
        order.end(stream, event)


def queued(calls: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """What (group, stream) pairs queue on each stream, without the records."""
    order, streams = DeviceOrder(), {stream: Stream() for _, stream in calls}
    for group, stream in calls:
        with turn(order, group, streams[stream]):
            streams[stream].steps.append(("kernel", group))
    return {
        name: [f"{action} {whose}" for action, whose in stream.steps if action != "record"]
        for name, stream in streams.items()
    }


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("tp", "a"), ("ep", "a")], {"a": ["kernel tp", "kernel ep"]}),
        ([("tp", "a"), ("ep", "b")], {"a": ["kernel tp"], "b": ["wait tp", "kernel ep"]}),
        (
            [("tp", "a"), ("tp", "b"), ("ep", "a")],
            {"a": ["kernel tp", "wait tp", "kernel ep"], "b": ["wait tp", "kernel tp"]},
        ),
    ],
)
def test_calls_are_one_chain(calls: list[tuple[str, str]], expected: dict[str, list[str]]) -> None:
    """Without it, two groups on two streams come to a standstill. One stream needs no waits."""
    assert queued(calls) == expected


def test_a_call_that_raises_keeps_its_place() -> None:
    """What it has queued by then may run."""
    order, first, second = DeviceOrder(), Stream(), Stream()
    with pytest.raises(KeyError), turn(order, "tp", first):
        raise KeyError
    with turn(order, "ep", second):
        pass
    assert first.steps == [("record", "tp")]
    assert second.steps == [("wait", "tp"), ("record", "ep")]


def test_a_timeout_names_the_groups_on_its_gpu() -> None:
    def text(kind: int, groups: set[str]) -> str:
        failure = (kind, 1, 2, 3)
        return str(kernel_error(failure, where="here", rank=0, timeout=1.0, groups=groups))

    assert "Groups 'ep', 'tp' use this GPU" in text(TIMEOUT, {"tp", "ep"})
    assert "use this GPU" not in text(TIMEOUT, {"tp"}) + text(MISMATCH, {"tp", "ep"})
