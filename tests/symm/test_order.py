"""One order for the calls of all groups on a device: without it, two groups on two streams come to
a standstill."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.residency_model import (
    Event,
    Stream,
    Turn,
    deadlock,
    issued,
    one_order,
    order_per_group,
)
from tpkernels.symm.device import MISMATCH, TIMEOUT, kernel_error

Calls = Sequence[tuple[str, str]]  # (group, stream) pairs, in the order in which a host issues them

PAIR = {"tp": (0, 1), "ep": (0, 1)}
# Four ranks as a 2 x 2 mesh of tensor and context parallelism.
MESH = {"tp0": (0, 1), "tp1": (2, 3), "cp0": (0, 2), "cp1": (1, 3)}


def on_mesh(calls: Calls) -> list[Calls]:
    """The calls of each rank of MESH: its tensor and context groups for "tp" and "cp"."""
    names = [{"tp": f"tp{rank // 2}", "cp": f"cp{rank % 2}"} for rank in range(4)]
    return [[(mine[group], stream) for group, stream in calls] for mine in names]


def stuck(calls: Sequence[Calls], groups: dict[str, tuple[int, ...]], make_turn: object) -> str:
    assert callable(make_turn)
    turns: list[Turn] = [make_turn() for _ in calls]
    return deadlock([issued(*each) for each in zip(calls, turns, strict=True)], groups)


TWO_STREAMS = [[("tp", "a"), ("ep", "b")]] * 2
CASES = {
    "two groups of the same ranks": (TWO_STREAMS, PAIR),
    "call after call": ([[("tp", "a"), ("ep", "b"), ("tp", "a"), ("ep", "b")]] * 2, PAIR),
    "a group on two streams": ([[("tp", "a"), ("tp", "b"), ("ep", "a")]] * 2, PAIR),
    "a mesh": (on_mesh([("tp", "a"), ("cp", "b"), ("tp", "a")]), MESH),
    "streams that differ between ranks": ([[("tp", "a"), ("ep", "b")], [("tp", "b"), ("ep", "a")]],
                                          PAIR),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls_in_one_order_all_end(name: str) -> None:
    calls, groups = CASES[name]
    assert stuck(calls, groups, one_order) == ""


@pytest.mark.parametrize("name", CASES)
def test_calls_ordered_per_group_can_come_to_a_standstill(name: str) -> None:
    """Negative control: what the package did before."""
    calls, groups = CASES[name]
    assert "kernel" in stuck(calls, groups, order_per_group)


@pytest.mark.parametrize("make_turn", [one_order, order_per_group])
def test_hosts_that_issue_in_different_orders_come_to_a_standstill(make_turn: object) -> None:
    """The rule for callers cannot be dropped."""
    calls = [[("tp", "a"), ("ep", "b")], [("ep", "b"), ("tp", "a")]]
    assert "kernel" in stuck(calls, PAIR, make_turn)


def test_one_stream_needs_no_events() -> None:
    steps = issued([("tp", "a"), ("ep", "a"), ("tp", "a")], one_order())
    assert [step.action for step in steps[0]] == ["kernel", "record"] * 3


def test_a_call_that_raises_keeps_its_place() -> None:
    """What it has queued by then may run."""
    turn, first, second = one_order(), Stream(), Stream()
    with pytest.raises(KeyError), turn("tp", first, Event("tp")):
        raise KeyError
    with turn("ep", second, Event("ep")):
        pass
    assert [step.action for step in first.steps] == ["record"]
    assert [(step.action, step.name) for step in second.steps] == [("wait", "tp"), ("record", "ep")]


def test_a_timeout_names_the_groups_on_its_gpu() -> None:
    def text(kind: int, groups: set[str]) -> str:
        failure = (kind, 1, 2, 3)
        return str(kernel_error(failure, where="here", rank=0, timeout=1.0, groups=groups))

    assert "Groups 'ep', 'tp' use this GPU" in text(TIMEOUT, {"tp", "ep"})
    assert "use this GPU" not in text(TIMEOUT, {"tp"}) + text(MISMATCH, {"tp", "ep"})
