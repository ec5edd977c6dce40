"""The protocol of the fused communication kernels is right in all interleavings (protocol_model).

The negative controls leave out one part of the protocol at a time, and say what goes wrong then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from tests.support.protocol_model import MIXED, Step, advance, check
from tests.support.tiers import sweep

ALL_CALLS = ("pull", "push", "push-empty", "two-shot", "two-shot-empty")
KINDS = {kind: (kind,) * 3 for kind in ALL_CALLS} | {
    "mixed": ("pull", "push", "pull"),
    # Epochs 1 and 3 share a buffer: here its slots are one kind's and the whole is another's.
    "push-then-pull": ("push", "two-shot", "pull"),
    "pull-then-push": ("pull", "push-empty", "two-shot"),
}
LL = [("ll",) * 4] + [(kind, "ll", kind) for kind in ("push", "pull")]
BAD, STUCK = "bad read", "deadlock"


def expect(failure: str, calls: Sequence[str], world: int, broken: str = "") -> None:
    verdict = check(calls, world, broken)
    assert verdict.failure == failure, f"{calls}, {world} ranks, {broken or 'whole'}: {verdict}"


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_right_and_broken(kind: str, world: int) -> None:
    expect("", KINDS[kind], world)
    for broken, failure in (("no_wait", BAD), ("single_words", STUCK), ("silent_empty", STUCK)):
        expect(failure, KINDS[kind], world, broken)
    if kind in ("pull", "push", "push-empty", "push-then-pull", "pull-then-push"):
        expect(BAD, KINDS[kind], world, "single_buffer")


@pytest.mark.slow
@pytest.mark.parametrize("world", sweep((2, 3)))
def test_right_in_any_order_of_calls(world: int) -> None:
    for calls in product(ALL_CALLS, repeat=3):
        expect("", calls, world)


def test_right_for_five_epochs_and_on_four_ranks() -> None:
    for kind in ALL_CALLS:
        expect("", (kind,) * 5, 3)
    expect("", KINDS["pull"], 4)


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("calls", LL)
def test_ll(calls: Sequence[str], world: int) -> None:
    """Its words are doubled like others, or one would be lost. Data of the calls around it are in
    buffers, so it counts as a call of theirs: its ENTERED words say that theirs have been read."""
    expect("", calls, world)
    expect(STUCK, calls, world, "single_words")


@pytest.mark.parametrize("world", (2, 3))
def test_no_final_wait(world: int) -> None:
    """A rank without rows waits for nothing else in a push: it runs ahead by two epochs, and writes
    slots that are still read. Any other call has a wait for each peer without the final one."""
    expect(BAD, KINDS["push-empty"], world, "no_final_wait")
    for kind in ("pull", "push", "two-shot", "two-shot-empty"):
        expect("", KINDS[kind], world, "never_final_wait")


def test_no_final_wait_matters_in_the_epoch_between() -> None:
    """What fails is always epoch 1 against epoch 3, because the call between let a rank through.
    It need not be data: a word of epoch 3 over that of epoch 1 is a deadlock."""
    for calls in product(ALL_CALLS, repeat=3):
        failure = check(calls, 2, "no_final_wait").failure
        assert (failure != "") == (calls[1] == "push-empty"), f"{calls}: {failure or 'right'}"
    expect(STUCK, ("two-shot", "push-empty", "two-shot"), 2, "no_final_wait")


@pytest.mark.parametrize("order", ("0011", "0101", "0110"))
def test_overlapping_writes_leave_mixed_data(order: str) -> None:
    """Ranks 0 and 1 write the same byte, of epochs 1 and 3; a digit is a step of that rank."""
    state = bytes(3)
    for digit in order:
        rank = int(digit)
        action = ("begin", "end")[state[rank]]
        after = advance(state, rank, Step(action, 2, 3, bytes([(3, 7)[rank]]), ""))
        assert after is not None
        state = after
    assert state[2] == {"0011": 6}.get(order, MIXED)
