"""Which algorithm ``auto`` runs in the first calls of a problem, and what follows from their times.
Pure.

Problem: thresholds measured on one processor are wrong on another. The algorithms give the same
bits, so ``auto`` can try them in the calls that are to be made anyway. What splits the matmul is
tried only where a product of some rows has the bits that they have in the product of all rows.

Algorithm: the first calls run what the thresholds give, because many problems are met only a few
times. Then the candidates run in rounds. The order within a round is random, since a call is
affected by the caches and the threads that its predecessor leaves behind, but the same on all
ranks. After a stage of rounds the ranks exchange their times and drop the candidates that are
clearly slower; the last stage tries the rest some more. The outcome is measurements like those of
`tpkernels tune`.

The calls of one problem may differ in the extent that is not part of it: the projections to QKV
and to gate and up share their input but not their N. Times are compared between calls of one
extent, and the first stage is repeated if there are too few of one.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement, Series, Table

ELIGIBLE = ("unfused", "direct", "pipelined")  # `ring` needs no shared memory, and loses to these
UNTRIED_CALLS = 4
_ROUNDS = 5  # the first is a warm-up
_CLEARLY_SLOWER = 1.25  # than the fastest: not in the last stage
# Rounds of the last stage. Long calls vary less, and cost more.
_MORE_ROUNDS, _FEW_MORE_ROUNDS, _LONG_SECONDS = 8, 3, 20e-3
_FEWEST = 2  # times of each candidate from which calls of one extent are compared
MOST_CALLS = UNTRIED_CALLS + len(ELIGIBLE) * (2 * _ROUNDS + _MORE_ROUNDS)


def is_eligible(problem: Problem, shared_memory: bool, tuned: Table) -> bool:
    """Whether ``auto`` may try algorithms for a problem: nothing was measured for it or for nearly
    the same extent (prompts have any number of tokens), several make sense, and the ranks are
    processes of one machine, which have one clock."""
    if problem.device != "cpu" or problem.world == 1 or not shared_memory:
        return False
    key = problem.tuning_key
    return problem.has_matmul and key is not None and not tuned.near(*key)


class Sample(NamedTuple):
    """One call on one rank: begin and end in seconds of the machine's clock, and the extent of the
    matmul that is not part of the problem, on this rank."""

    begin: float
    end: float
    other: float


class Trial:
    """The calls in which ``auto`` tries the candidates for one series and extent. All ranks make
    the same calls, so all are at the same place of the same schedule."""

    def __init__(
        self, series: Series, extent: int, candidates: Sequence[str], thresholds_give: str
    ) -> None:
        self._series, self._extent = series, extent
        self._remaining, self._thresholds_give = list(candidates), thresholds_give
        self._order = [thresholds_give] * UNTRIED_CALLS
        self._uncounted = 0  # calls of the stage, from its beginning
        self._seconds: dict[int, dict[str, list[float]]] = {}  # by the other extent
        self._stage, self._last = 0, False
        self.samples: list[Sample] = []  #: this rank's, of the stage
        self.measurements: list[Measurement] = []  #: the outcome
        self.over = False

    def _rounds(self, count: int) -> list[str]:
        names, chance = self._remaining, random.Random(self._stage)
        return [name for _ in range(count) for name in chance.sample(names, len(names))]

    @property
    def algorithm(self) -> str:
        """What the next call runs."""
        return self._order[len(self.samples)]

    @property
    def stage_over(self) -> bool:
        """Whether the ranks are to exchange their samples and `advance`."""
        return len(self.samples) == len(self._order)

    @property
    def begun(self) -> bool:
        """Whether the first calls are over, of which nothing is measured."""
        return self._stage > 0

    def begin(self, *, may_split: bool) -> None:
        """Begins to try the candidates; ``may_split``: those that split the matmul, too."""
        if not may_split and ALGORITHMS[self._thresholds_give].splits_matmul:
            self._remaining = [self._thresholds_give]
        elif not may_split:
            self._remaining = [
                name for name in self._remaining if not ALGORITHMS[name].splits_matmul
            ]
        self._start_stage(_ROUNDS)
        self._uncounted = len(self._remaining)
        self.over = len(self._remaining) < 2

    def _start_stage(self, rounds: int) -> None:
        self._order = self._rounds(rounds)
        self._stage += 1
        self._uncounted, self.samples = 0, []

    def advance(self, ranks: Sequence[Sequence[Sample]]) -> None:
        """Ends a stage that has begun, given the samples of all ranks."""
        for at in range(self._uncounted, len(self._order)):
            calls = [samples[at] for samples in ranks]
            times = self._seconds.setdefault(sum(int(call.other) for call in calls), {})
            times.setdefault(self._order[at], []).append(_seconds(calls))
        if self._stage == 1 and len(self._compared()) < len(self._seconds):
            self._start_stage(_ROUNDS)  # once more
            return
        medians = self._medians()
        fastest = {other: min(each.values()) for other, each in medians.items()}
        self._remaining = [
            name
            for name in self._remaining
            if any(
                each[name] <= _CLEARLY_SLOWER * fastest[other] for other, each in medians.items()
            )
        ]
        if not self._last and len(self._remaining) > 1:
            self._last = True
            long = max(fastest.values()) >= _LONG_SECONDS
            self._start_stage(_FEW_MORE_ROUNDS if long else _MORE_ROUNDS)
            return
        self.over = True
        today = date.today().isoformat()
        self.measurements = [
            Measurement(
                self._series,
                self._extent,
                other=other,
                ms={name: 1e3 * seconds for name, seconds in each.items()},
                date=today,
                tried=True,
            )
            for other, each in medians.items()
        ]

    def _compared(self) -> dict[int, dict[str, list[float]]]:
        """The times by the other extent, where all candidates have been timed often enough."""
        return {
            other: times
            for other, times in self._seconds.items()
            if all(len(times.get(name, ())) >= _FEWEST for name in self._remaining)
        }

    def _medians(self) -> dict[int, dict[str, float]]:
        """The median of each candidate, by the other extent. The extents count together where none
        has enough calls."""
        compared = self._compared()
        if not compared:
            together: dict[str, list[float]] = {}
            for times in self._seconds.values():
                for name, seconds in times.items():
                    together.setdefault(name, []).extend(seconds)
            compared = {max(self._seconds): together}
        return {
            other: {name: statistics.median(seconds) for name, seconds in times.items()}
            for other, times in compared.items()
        }


def _seconds(calls: Sequence[Sample]) -> float:
    """From the arrival of the last rank to the end of the last: a rank that comes late is no fault
    of the algorithm. If their clocks differ, the time of the rank whose clock is ahead."""
    return max(call.end for call in calls) - max(call.begin for call in calls)
