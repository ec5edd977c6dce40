"""Algorithms timed against each other: their rounds, and what their times say. Pure.

Problem: on a shared machine a single time says little, and an algorithm is affected by the caches
and the threads that its predecessor leaves behind.

Algorithm: the candidates run in rounds, each in a random order that is the same on all ranks.
Medians are compared. A candidate that is clearly slower than the fastest drops out, so that the
remaining rounds go to those that are close. That is decided by the shortest time of each: after few
rounds other work on the machine would decide by the medians.

The calls of one problem may differ in the extent that is not part of it: the projections to QKV
and to gate and up share their input but not their N. Times are compared between calls of one
extent.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import NamedTuple

from tpkernels.planning.table import Measurement, Series

_CLEARLY_SLOWER = 1.25  # than the fastest
_FEWEST = 2  # times of each candidate from which calls of one extent are compared


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
        self._seconds: dict[int, dict[str, list[float]]] = {}  # by the other extent

    def rounds(self, count: int, seed: int) -> list[str]:
        """Return the order in which the candidates run: each once in every round."""
        names, chance = self.remaining, random.Random(seed)
        return [name for _ in range(count) for name in chance.sample(names, len(names))]

    def add(
        self, order: Sequence[str], calls: Iterable[Sequence[Sample]], *, one_clock: bool = True
    ) -> None:
        """Record calls that ran in this order, each with the samples of all ranks.

        Args:
            one_clock: whether the ranks read one clock.
        """
        seconds = _from_last_arrival if one_clock else _longest
        for name, ranks in zip(order, calls, strict=True):
            times = self._seconds.setdefault(sum(int(rank.other) for rank in ranks), {})
            times.setdefault(name, []).append(seconds(ranks))

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
            if any(each[name] <= _CLEARLY_SLOWER * min(each.values()) for each in shortest)
        ]

    @property
    def all_compared(self) -> bool:
        """Return whether every extent that came up has enough calls of each candidate."""
        return len(self._compared()) == len(self._seconds)

    def _compared(self) -> dict[int, dict[str, list[float]]]:
        """Return the times by the other extent, where all candidates have been timed often
        enough."""
        return {
            other: times
            for other, times in self._seconds.items()
            if all(len(times.get(name, ())) >= _FEWEST for name in self.remaining)
        }

    def times(self) -> dict[int, dict[str, float]]:
        """Return what the outcome follows from, by the other extent: the median of each candidate
        that remains, or its shortest time if it is the only one. What has dropped out keeps its
        ratio to the fastest of these by the shortest times, for which it dropped out."""
        typical = min if len(self.remaining) == 1 else statistics.median
        found = {}
        for other, times in self._comparable().items():
            shortest = _shortest(times)
            fastest = min(self.remaining, key=lambda name: shortest.get(name, math.inf))
            scale = typical(times[fastest]) / shortest[fastest]
            found[other] = {
                name: typical(seconds) if name in self.remaining else scale * shortest[name]
                for name, seconds in times.items()
            }
        return found

    def _comparable(self) -> dict[int, dict[str, list[float]]]:
        """`_compared`, or all extents together where none has enough calls."""
        compared = self._compared()
        if not compared:
            together: dict[str, list[float]] = {}
            for times in self._seconds.values():
                for name, seconds in times.items():
                    together.setdefault(name, []).extend(seconds)
            compared = {max(self._seconds): together}
        return compared

    def measurements(self, series: Series, extent: int) -> list[Measurement]:
        """Today's measurements of one problem, one for each other extent."""
        today = date.today().isoformat()
        return [
            Measurement(
                series,
                extent,
                other=other,
                ms={name: 1e3 * seconds for name, seconds in each.items()},
                date=today,
                tried=True,
            )
            for other, each in self.times().items()
        ]


def _shortest(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: min(seconds) for name, seconds in times.items()}


def _from_last_arrival(ranks: Sequence[Sample]) -> float:
    """From the arrival of the last rank to the end of the last: a rank that comes late is no fault
    of the algorithm. If their clocks differ, the time of the rank whose clock is ahead."""
    return max(rank.end for rank in ranks) - max(rank.begin for rank in ranks)


def _longest(ranks: Sequence[Sample]) -> float:
    """The slowest rank's."""
    return max(rank.end - rank.begin for rank in ranks)
