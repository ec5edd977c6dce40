"""One order of calls per device for all groups: a call waits for the previous call of any group on
a different stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tpkernels.symm.device import MISMATCH, TIMEOUT, kernel_error
from tpkernels.symm.streams import DeviceOrder


class Stream:
    """Record the queued steps: ("wait", "kernel" or "record", group)."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []

    def wait_event(self, event: str) -> None:
        self.steps.append(("wait", event))

    def record_event(self, event: str) -> None:
        self.steps.append(("record", event))


@contextmanager
def ordered_call(order: DeviceOrder, group: str, stream: Any) -> Iterator[None]:
    """Run a call of a group; its event is the group name."""
    event: Any = group
    order.begin(group, stream)
    try:
        yield
    finally:
        order.end(stream, event)


def queued_steps(calls: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the steps on each stream, without the records, for calls given as (group, stream)."""
    order, streams = DeviceOrder(), {stream: Stream() for _, stream in calls}
    for group, stream in calls:
        with ordered_call(order, group, streams[stream]):
            streams[stream].steps.append(("kernel", group))
    return {
        name: [
            f"{action} {group_name}" for action, group_name in stream.steps if action != "record"
        ]
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
def test_calls_of_all_groups_form_a_chain(
    calls: list[tuple[str, str]], expected: dict[str, list[str]]
) -> None:
    """Without the waits, two groups on two streams can deadlock. A single stream needs no waits."""
    assert queued_steps(calls) == expected


def test_a_call_that_raises_stays_in_the_order() -> None:
    """The kernels that it queued may still run, so the next call waits for them."""
    order, first, second = DeviceOrder(), Stream(), Stream()
    with pytest.raises(KeyError), ordered_call(order, "tp", first):
        raise KeyError
    with ordered_call(order, "ep", second):
        pass
    assert first.steps == [("record", "tp")]
    assert second.steps == [("wait", "tp"), ("record", "ep")]


def test_a_timeout_names_the_groups_on_its_gpu() -> None:
    def error_message(kind: int, groups: set[str]) -> str:
        failure = (kind, 1, 2, 3)
        return str(kernel_error(failure, where="here", rank=0, timeout=1.0, groups=groups))

    assert "Groups 'ep', 'tp' use this GPU" in error_message(TIMEOUT, {"tp", "ep"})
    assert "use this GPU" not in error_message(TIMEOUT, {"tp"}) + error_message(
        MISMATCH, {"tp", "ep"}
    )
