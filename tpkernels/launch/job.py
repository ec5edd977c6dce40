"""A call or a stream of an executor while it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from tpkernels.launch.ranks import GRACE_SECONDS
from tpkernels.launch.worker import Outcome

LOST_GRACE_SECONDS = 0.2  # for the other ranks to report after one was lost


class GiveUp(Exception):
    """A transfer ended early: time is up, or a rank was lost. The job knows."""


class Job:
    """A call or a stream under way."""

    def __init__(self, what: str, world: int, timeout: float) -> None:
        self.what = what
        self.outcomes: dict[int, Outcome] = {}
        self.pending = set(range(world))  # ranks that have not given their last reply
        self.lost = False  # a rank ended without it
        self.begun = time.monotonic()
        self.deadline = self.begun + timeout

    @property
    def failed(self) -> bool:
        return any(not outcome.ok for outcome in self.outcomes.values())

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def check_time(self) -> None:
        if self.left() <= 0:
            raise GiveUp

    def at_most(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def note(self, rank: int, reply: tuple[Any, ...]) -> None:
        """The last reply of a rank."""
        kind, *fields = reply
        now = time.monotonic()
        if kind == "error":
            text, name, seconds = fields
            outcome = Outcome(rank, error=text, error_type=name, seconds=seconds, ended=now)
            self.at_most(GRACE_SECONDS)
        else:
            value = fields[0] if kind == "result" else None
            outcome = Outcome(rank, value=value, seconds=fields[-1], ended=now)
        self.add(outcome)

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.rank] = outcome
        self.pending.discard(outcome.rank)

    def lose(self, outcome: Outcome) -> None:
        self.add(replace(outcome, seconds=time.monotonic() - self.begun))
        self.lost = True
        self.at_most(LOST_GRACE_SECONDS)

    def by_rank(self, world: int) -> list[Outcome]:
        """The outcomes; ranks that have not answered have timed out."""
        now = time.monotonic()
        late = {
            rank: Outcome(rank, timed_out=True, seconds=now - self.begun, ended=now)
            for rank in self.pending
        }
        return [(self.outcomes | late)[rank] for rank in range(world)]
