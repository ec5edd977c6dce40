"""Algorithms timed against each other: in which order they run, and what their times say. Pure.

Problem: thresholds measured on one processor are wrong on another, and on a shared machine a single
time says little.

Algorithm: the candidates run in interleaved rounds, and their medians are compared; their shortest
times, where other work on the machine has more than doubled a median. A candidate that is clearly
slower than the fastest drops out, so that the remaining rounds go to those that are close. That is
decided by the shortest time of each: after few rounds other work would decide by the medians.

Other work may also hit every call of one candidate: a rank that waited gets its core back only
after another process's time slice of some milliseconds, where the call takes microseconds. But the
rank that came last waited for nobody. A candidate stays while that rank's time, in any call, is
less than half of the fastest candidate's, and the last stage is repeated, a bounded number of
times.

The calls of one problem may differ in the extent that is not part of it: the projections to QKV
and to gate and up share their input but not their N. Times are compared between calls of one
extent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import date
from typing import NamedTuple

from tpkernels.interleaved import interleaved
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement, Series, Table

_CLEARLY_SLOWER = 1.25  # than the fastest
_DISTURBED = 2.0  # a median over its minimum, or the fastest over what another may reach
_FEWEST = 2  # times of each candidate from which calls of one extent are compared

ELIGIBLE = ("unfused", "direct", "pipelined")  # `ring` needs no shared memory, and loses to these
UNTRIED_CALLS = 4
_ROUNDS = 5  # the first is a warm-up
# Rounds of the last stage. Long calls vary less, and cost more.
_MORE_ROUNDS, _FEW_MORE_ROUNDS, _LONG_SECONDS = 8, 3, 20e-3
_REPEATS = 4  # of the last stage, while calls are disturbed
# Calls of a whole trial at most, without and with repeats of the last stage.
UNDISTURBED_CALLS = UNTRIED_CALLS + len(ELIGIBLE) * (2 * _ROUNDS + _MORE_ROUNDS)
MOST_CALLS = UNDISTURBED_CALLS + len(ELIGIBLE) * _REPEATS * _MORE_ROUNDS


class Sample(NamedTuple):
    """One call on one rank: begin and end in seconds of the machine's clock, and the extent of the
    matmul that is not part of the problem, on this rank."""

    begin: float
    end: float
    other: float


class _Times:
    """Seconds of one candidate's calls.

    Attributes:
        calls: of all ranks together.
        bound: the shortest of the ranks that came last, which waited for nobody.
    """

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.bound = math.inf

    @property
    def shortest(self) -> float:
        return min(self.calls)

    @property
    def median(self) -> float:
        return statistics.median(self.calls)

    def add(self, calls: Sequence[float], bound: float) -> None:
        self.calls += calls
        self.bound = min(self.bound, bound)


class Contest:
    """The candidates that remain, and their times."""

    def __init__(self, candidates: Sequence[str]) -> None:
        self.remaining = list(candidates)
        self._times: dict[int, dict[str, _Times]] = {}  # by the other extent

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
            if one_clock:
                last = max(ranks)
                seconds, bound = max(rank.end for rank in ranks) - last.begin, last.end - last.begin
            else:
                seconds = bound = max(rank.end - rank.begin for rank in ranks)
            times = self._times.setdefault(sum(int(rank.other) for rank in ranks), {})
            times.setdefault(name, _Times()).add([seconds], bound)

    def leave_out(self, name: str) -> None:
        """Take a candidate out, and its times."""
        self.remaining.remove(name)
        for times in self._times.values():
            times.pop(name, None)

    def drop_slower(self) -> None:
        """Drop the candidates that are clearly slower than the fastest at every other extent,
        except those in `_doubtful`."""
        doubtful, kept = self._doubtful(), set[str]()
        for times in self._comparable().values():
            most = _CLEARLY_SLOWER * min(one.shortest for one in times.values())
            kept |= {name for name, one in times.items() if one.shortest <= most}
        self.remaining = [name for name in self.remaining if name in kept | doubtful]

    @property
    def disturbed(self) -> bool:
        """Return whether a candidate that remains may be far faster than its times say."""
        return not self._doubtful().isdisjoint(self.remaining)

    def _doubtful(self) -> set[str]:
        """Return the candidates whose calls may all have been disturbed: by the rank that came
        last, they may be far faster than the fastest."""
        doubtful = set()
        for times in self._comparable().values():
            fastest = min(one.shortest for one in times.values())
            doubtful |= {name for name, one in times.items() if _DISTURBED * one.bound < fastest}
        return doubtful

    @property
    def all_compared(self) -> bool:
        """Return whether every extent that came up has enough calls of each candidate."""
        return len(self._compared()) == len(self._times)

    def _compared(self) -> dict[int, dict[str, _Times]]:
        """Return the times by the other extent, where each candidate has been timed often
        enough."""
        return {
            other: times
            for other, times in self._times.items()
            if all(name in times and len(times[name].calls) >= _FEWEST for name in self.remaining)
        }

    def _comparable(self) -> dict[int, dict[str, _Times]]:
        """Return `_compared`, or, if no extent has enough calls, the calls of all pooled under the
        largest extent."""
        compared = self._compared()
        if compared:
            return compared
        together: dict[str, _Times] = {}
        for times in self._times.values():
            for name, one in times.items():
                together.setdefault(name, _Times()).add(one.calls, one.bound)
        return {max(self._times): together}

    def times(self) -> dict[int, dict[str, float]]:
        """Return the seconds by which candidates are compared, by the other extent: medians, or
        shortest times if one candidate remains or a median was disturbed. A dropped candidate keeps
        the ratio of shortest times by which it was dropped."""
        outcome = {}
        for other, times in self._comparable().items():
            left = {name: times[name] for name in self.remaining if name in times}
            by_shortest = len(left) == 1 or any(
                one.median > _DISTURBED * one.shortest for one in left.values()
            )
            fastest = min(left.values(), key=lambda one: one.shortest)
            scale = 1.0 if by_shortest else fastest.median / fastest.shortest
            outcome[other] = {
                name: one.median if name in left and not by_shortest else scale * one.shortest
                for name, one in times.items()
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
    other extent, the last one while the contest is disturbed.
    """

    def __init__(
        self, series: Series, extent: int, candidates: Sequence[str], thresholds_give: str
    ) -> None:
        self._series, self._extent = series, extent
        self._contest = Contest(candidates)
        self._order = [thresholds_give] * UNTRIED_CALLS
        self._uncounted = 0  # calls of the stage, from its beginning
        self._stage, self._last_stages = 0, 0
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
        again = contest.disturbed and self._last_stages <= _REPEATS
        if len(contest.remaining) > 1 and (again or not self._last_stages):
            self._last_stages += 1
            long = max(min(times.values()) for times in contest.times().values()) >= _LONG_SECONDS
            self._start_stage(_FEW_MORE_ROUNDS if long else _MORE_ROUNDS)
            return
        self.over = True
        self.measurements = contest.measurements(self._series, self._extent)
