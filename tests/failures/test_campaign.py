"""A few trials of the campaign of faults (support/campaign.py), one of each kind, and negative
controls of the campaign itself."""

from __future__ import annotations

from itertools import count

import pytest

from tests.support import campaign
from tests.support.campaign import KINDS, Trial
from tests.support.tiers import sweep


def trial_of(kind: str, seed: int = 0) -> Trial:
    """The first trial of a kind, drawn from ``seed`` on, whose fault is not in the set-up."""
    drawn = (Trial.drawn(number) for number in count(seed))
    return next(one for one in drawn if one.kind == kind and not one.in_set_up)


@pytest.mark.parametrize("kind", sweep(KINDS, later=2))
def test_a_fault_of_each_kind(kind: str) -> None:
    wrong, _ = campaign.run_trial(trial_of(kind))
    assert not wrong, wrong


@pytest.mark.thorough
def test_a_fault_in_the_set_up() -> None:
    trial = next(one for one in map(Trial.drawn, count()) if one.in_set_up and one.kind == "kill")
    wrong, _ = campaign.run_trial(trial)
    assert not wrong, wrong
