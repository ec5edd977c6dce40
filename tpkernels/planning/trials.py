"""Which algorithm ``auto`` runs in the first calls of a problem, and what follows from their times.
Pure.

Problem: thresholds measured on one processor are wrong on another. The algorithms give the same
bits, so ``auto`` can try them in the calls that are to be made anyway.

Algorithm: the first calls run what the thresholds give, because many problems are met only a few
times. Then the candidates run in the rounds of a `Contest`. After a stage of rounds the ranks
exchange their times and drop the candidates that are clearly slower; the last stage tries the rest
some more. The first stage is repeated if there are too few calls of one other extent. The outcome
is measurements like those of `tpkernels tune`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpkernels.planning.contest import Contest, Sample
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement, Series, Table

ELIGIBLE = ("unfused", "direct", "pipelined")  # `ring` needs no shared memory, and loses to these
UNTRIED_CALLS = 4
_ROUNDS = 5  # the first is a warm-up
# Rounds of the last stage. Long calls vary less, and cost more.
_MORE_ROUNDS, _FEW_MORE_ROUNDS, _LONG_SECONDS = 8, 3, 20e-3
MOST_CALLS = UNTRIED_CALLS + len(ELIGIBLE) * (2 * _ROUNDS + _MORE_ROUNDS)


def is_eligible(problem: Problem, shared_memory: bool, tuned: Table) -> bool:
    """Return whether ``auto`` may try algorithms for a problem: nothing was measured for it or for
    nearly the same extent (prompts have any number of tokens), several make sense, and the ranks
    are processes of one machine, which have one clock. A scaled product is not split."""
    if problem.device != "cpu" or problem.world == 1 or not shared_memory or problem.spec.scaled:
        return False
    key = problem.tuning_key
    return problem.spec.has_matmul and key is not None and not tuned.near(*key)


class Trial:
    """The calls in which ``auto`` tries the candidates for one series and extent. All ranks make
    the same calls, so all are at the same place of the same schedule."""

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
            long = max(min(each.values()) for each in contest.times().values()) >= _LONG_SECONDS
            self._start_stage(_FEW_MORE_ROUNDS if long else _MORE_ROUNDS)
            return
        self.over = True
        self.measurements = contest.measurements(self._series, self._extent)
