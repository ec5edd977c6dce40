"""Algorithms timed against each other: in which order they run, and what their times say. Pure.

Problem: thresholds measured on one processor are wrong on another, and on a shared machine a single
time says little.

Algorithm: the candidates run in interleaved rounds, and their medians are compared. A candidate
that is clearly slower than the fastest drops out, so that the remaining rounds go to those that are
close. That is decided by the shortest time of each: after few rounds other work on the machine
would decide by the medians.

The calls of one problem may differ in the extent that is not part of it: the projections to QKV
and to gate and up share their input but not their N. Times are compared between calls of one
extent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import NamedTuple

from tpkernels.interleaved import interleaved
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement, Series, Table

_CLEARLY_SLOWER = 1.25  # than the fastest
_FEWEST = 2  # times of each candidate from which calls of one extent are compared

ELIGIBLE = ("unfused", "direct", "pipelined")  # `ring` needs no shared memory, and loses to these
UNTRIED_CALLS = 4
_ROUNDS = 5  # the first is a warm-up
# Rounds of the last stage. Long calls vary less, and cost more.
_MORE_ROUNDS, _FEW_MORE_ROUNDS, _LONG_SECONDS = 8, 3, 20e-3
MOST_CALLS = UNTRIED_CALLS + len(ELIGIBLE) * (2 * _ROUNDS + _MORE_ROUNDS)

Times = dict[str, list[float]]


class Sample(NamedTuple):
    """One call on one rank: begin and end in seconds of the machine's clock, and the extent of the
    matmul that is not part of the problem, on this rank."""

    begin: float
    end: float
    other: float


class Contest:
    """The candidates that remain, and their times."""

    def __init__(self, candidates: Sequence[str]) -> None:
        self.remaining = list(candidates)
        self._seconds: dict[int, Times] = {}  # by the other extent

    def rounds(self, count: int, seed: int) -> list[str]:
        """Return the order in which the candidates run, the same on all ranks."""
        return list(interleaved(self.remaining, count, seed))

    def add(
        self, order: Sequence[str], calls: Iterable[Sequence[Sample]], *, one_clock: bool = True
    ) -> None:
        """Record calls that ran in this order, each with the samples of all ranks.

        Args:
            one_clock: whether the ranks read one clock. Then a call counts from the arrival of the
                last rank: a rank that comes late is no fault of the algorithm.
        """
        for name, ranks in zip(order, calls, strict=True):
            seconds = max(rank.end - rank.begin for rank in ranks)
            if one_clock:
                seconds = max(rank.end for rank in ranks) - max(rank.begin for rank in ranks)
            times = self._seconds.setdefault(sum(int(rank.other) for rank in ranks), {})
            times.setdefault(name, []).append(seconds)

    def leave_out(self, name: str) -> None:
        """Take a candidate out, and its times."""
        self.remaining.remove(name)
        for times in self._seconds.values():
            times.pop(name, None)

    def drop_slower(self) -> None:
        """Drop the candidates that are clearly slower than the fastest, whatever the other
        extent."""
        shortest = [_shortest(times) for times in self._comparable().values()]
        self.remaining = [
            name
            for name in self.remaining
            if any(times[name] <= _CLEARLY_SLOWER * min(times.values()) for times in shortest)
        ]

    @property
    def all_compared(self) -> bool:
        """Return whether every extent that came up has enough calls of each candidate."""
        return len(self._compared()) == len(self._seconds)

    def _compared(self) -> dict[int, Times]:
        """Return the times by the other extent, where each candidate has been timed often
        enough."""
        return {
            other: times
            for other, times in self._seconds.items()
            if all(len(times.get(name, ())) >= _FEWEST for name in self.remaining)
        }

    def _comparable(self) -> dict[int, Times]:
        """Return `_compared`, or all extents together where none has enough calls."""
        compared = self._compared()
        if compared:
            return compared
        together: Times = {}
        for times in self._seconds.values():
            for name, seconds in times.items():
                together.setdefault(name, []).extend(seconds)
        return {max(self._seconds): together}

    def times(self) -> dict[int, dict[str, float]]:
        """Return what the outcome follows from, by the other extent: the median of each candidate
        that remains, or its shortest time if it is the only one. What has dropped out keeps its
        ratio to the fastest of these by the shortest times, for which it dropped out."""
        typical = min if len(self.remaining) == 1 else statistics.median
        outcome = {}
        for other, times in self._comparable().items():
            shortest = _shortest(times)
            fastest = min(self.remaining, key=lambda name: shortest.get(name, math.inf))
            scale = typical(times[fastest]) / shortest[fastest]
            outcome[other] = {
                name: typical(seconds) if name in self.remaining else scale * shortest[name]
                for name, seconds in times.items()
            }
        return outcome

    def measurements(self, series: Series, extent: int) -> list[Measurement]:
        """Return today's measurements of one problem, one for each other extent."""
        today = date.today().isoformat()
        return [
            Measurement(
                series,
                extent,
                other=other,
                ms={name: 1e3 * seconds for name, seconds in times.items()},
                date=today,
                tried=True,
            )
            for other, times in self.times().items()
        ]


def _shortest(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: min(seconds) for name, seconds in times.items()}


def is_eligible(problem: Problem, shared_memory: bool, tuned: Table) -> bool:
    """Return whether ``auto`` may try algorithms for a problem: nothing was measured for it or for
    nearly the same extent (prompts have any number of tokens), several make sense, and the ranks
    are processes of one machine, which have one clock. A scaled product is not split."""
    if problem.device != "cpu" or problem.world == 1 or not shared_memory or problem.spec.scaled:
        return False
    key = problem.tuning_key
    return problem.spec.has_matmul and key is not None and not tuned.near(*key)


class Trial:
    """A contest in the first calls of a problem, which ``auto`` makes anyway: the algorithms give
    the same bits. All ranks make the same calls, so all are at the same place of one schedule.

    The first calls run what the thresholds give, because many problems are met only a few times.
    After a stage of rounds the ranks exchange their times and drop the slower candidates; the last
    stage tries the rest some more. The first stage is repeated if there are too few calls of one
    other extent.
    """

    def __init__(
        self, series: Series, extent: int, candidates: Sequence[str], thresholds_give: str
    ) -> None:
        self._series, self._extent = series, extent
        self._contest = Contest(candidates)
        self._order = [thresholds_give] * UNTRIED_CALLS
        self._uncounted = 0  # calls of the stage, from its beginning
        self._stage, self._last = 0, False
        self.samples: list[Sample] = []  #: this rank's, of the stage
        self.measurements: list[Measurement] = []  #: the outcome
        self.over = False

    @property
    def algorithm(self) -> str:
        """Return what the next call runs."""
        return self._order[len(self.samples)]

    @property
    def stage_over(self) -> bool:
        """Return whether the ranks are to exchange their samples and `advance`."""
        return len(self.samples) == len(self._order)

    @property
    def begun(self) -> bool:
        """Return whether the first calls are over, of which nothing is measured."""
        return self._stage > 0

    def begin(self) -> None:
        """Begin to try the candidates."""
        self._start_stage(_ROUNDS)
        self._uncounted = len(self._contest.remaining)

    def _start_stage(self, rounds: int) -> None:
        self._order = self._contest.rounds(rounds, self._stage)
        self._stage += 1
        self._uncounted, self.samples = 0, []

    def advance(self, ranks: Sequence[Sequence[Sample]]) -> None:
        """End a stage that has begun, given the samples of all ranks."""
        contest, counted = self._contest, slice(self._uncounted, None)
        calls = list(zip(*ranks, strict=True))
        contest.add(self._order[counted], calls[counted])
        if self._stage == 1 and not contest.all_compared:
            self._start_stage(_ROUNDS)  # once more
            return
        contest.drop_slower()
        if not self._last and len(contest.remaining) > 1:
            self._last = True
            long = max(min(times.values()) for times in contest.times().values()) >= _LONG_SECONDS
            self._start_stage(_FEW_MORE_ROUNDS if long else _MORE_ROUNDS)
            return
        self.over = True
        self.measurements = contest.measurements(self._series, self._extent)
