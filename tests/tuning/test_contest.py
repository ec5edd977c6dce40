"""What ``auto`` tries in the first calls of a problem, and what follows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tpkernels.planning.table import Series
from tpkernels.tuning.contest import ELIGIBLE, MOST_CALLS, UNTRIED_CALLS, Sample, Trial

SERIES = Series("all_gather_matmul", "cpu", 2, 512, "bfloat16", ())
Time = Callable[[str, int], float]  # of an algorithm in the n-th call


class Run:
    """The calls of a trial on two ranks, the second of which arrives a second late. The calls go
    through the other extents in turn. ``waits``: whether the first rank gets its core back only
    after a time slice.

    Attributes:
        made: what was run.
        ms: the outcome, by the other extent over both ranks.
    """

    def __init__(
        self,
        time: Time,
        candidates: Sequence[str] = ELIGIBLE,
        others: Sequence[int] = (64,),
        waits: Callable[[str, int], bool] = lambda name, call: False,
    ) -> None:
        trial, late = Trial(SERIES, 1024, candidates, "direct"), list[Sample]()
        self.made: list[str] = []
        while not trial.over:
            call, name = len(self.made), trial.algorithm
            other, begin, seconds = others[call % len(others)], 1000.0 + call, time(name, call)
            waited = 2e-3 if waits(name, call) else seconds
            trial.samples.append(Sample(begin, begin + 1 + waited, other))
            late.append(Sample(begin + 1, begin + 1 + seconds, other))
            self.made.append(name)
            if trial.stage_over:
                if trial.begun:
                    trial.advance([trial.samples, late])
                else:
                    trial.begin()
                late = []
        assert all(one.tried and one.extent == 1024 for one in trial.measurements)
        self.ms = {one.other: dict(one.ms) for one in trial.measurements}

    @property
    def only(self) -> dict[str, float]:
        (ms,) = self.ms.values()
        return ms

    @property
    def fastest(self) -> str:
        return min(self.only, key=self.only.__getitem__)


def constant(**seconds: float) -> Time:
    return lambda name, _: seconds[name]


SAME = constant(unfused=1e-3, direct=1e-3, pipelined=1e-3)


def test_first_what_the_thresholds_give_then_all_then_the_fast_ones() -> None:
    """The time counts from the arrival of the rank that comes a second late."""
    run = Run(constant(unfused=3e-3, direct=1e-3, pipelined=1.1e-3))
    assert run.made[:UNTRIED_CALLS] == ["direct"] * UNTRIED_CALLS
    assert Counter(run.made[UNTRIED_CALLS:]) == {"unfused": 5, "direct": 13, "pipelined": 13}
    assert run.made[-16:].count("unfused") == 0
    assert run.only == pytest.approx({"unfused": 3.0, "direct": 1.0, "pipelined": 1.1})


@pytest.mark.parametrize("pipelined", [1.1e-3, 2e-3])
def test_a_burst_of_other_work_drops_nothing(pipelined: float) -> None:
    """Three of the first four calls of the fastest meet it."""
    calls: Counter[str] = Counter()

    def time(name: str, _: int) -> float:
        calls[name] += 1
        met = name == "direct" and UNTRIED_CALLS + 2 <= calls[name] <= UNTRIED_CALLS + 4
        return {"unfused": 3e-3, "direct": 1e-3, "pipelined": pipelined}[name] * (10 if met else 1)

    expected = {"unfused": 3.0, "direct": 1.0, "pipelined": 1e3 * pipelined}
    assert Run(time).only == pytest.approx(expected)


def test_what_has_dropped_out_does_not_win_by_a_later_burst() -> None:
    """All calls of the last stage meet it, in which the slowest no longer runs."""

    def time(name: str, call: int) -> float:
        late = call >= UNTRIED_CALLS + 5 * len(ELIGIBLE)
        return {"unfused": 1.3e-3, "direct": 1e-3, "pipelined": 1.1e-3}[name] * (2 if late else 1)

    assert Run(time).fastest == "direct"


@pytest.mark.parametrize(("until", "fastest"), [(14, "direct"), (46, "direct"), (999, "unfused")])
def test_a_candidate_whose_calls_are_all_disturbed_for_a_while(until: int, fastest: str) -> None:
    """Other work on the core: in calls by `direct` the rank that waited goes on only after a time
    slice, while the one that came last needs 30 us. Bounded."""
    times = constant(unfused=7e-4, direct=3e-5)
    run = Run(times, ("unfused", "direct"), waits=lambda *at: at[0] == "direct" and at[1] < until)
    assert run.fastest == fastest and len(run.made) <= MOST_CALLS


def test_clocks_that_differ_leave_the_time_of_one_rank() -> None:
    trial, seconds = Trial(SERIES, 1024, ("unfused", "direct"), "direct"), {"unfused": 2e-3}
    while not trial.over:
        trial.samples.append(Sample(5.0, 5.0 + seconds.get(trial.algorithm, 1e-3), 64))
        if trial.stage_over and trial.begun:
            ahead = [Sample(s.begin + 1e4, s.end + 1e4, 64) for s in trial.samples]
            trial.advance([trial.samples, ahead])
        elif trial.stage_over:
            trial.begin()
    (measured,) = trial.measurements
    assert measured.ms == pytest.approx({"unfused": 2.0, "direct": 1.0}, rel=1e-3)


def test_the_order_is_the_same_on_all_ranks_and_new_in_each_round() -> None:
    first, second = Run(SAME).made, Run(SAME).made
    assert first == second and len(first) < MOST_CALLS
    rounds = {tuple(first[at : at + 3]) for at in range(UNTRIED_CALLS, len(first) - 2, 3)}
    assert len(rounds) > 3 and all(sorted(each) == sorted(ELIGIBLE) for each in rounds)
    long = Run(constant(unfused=0.1, direct=0.1, pipelined=0.1)).made
    assert len(long) < len(first)  # long calls are tried less often


def test_the_median_counts_without_the_warm_up() -> None:
    times = iter([1e-4, *[1e-3, 1.2e-3] * 6])

    def time(name: str, call: int) -> float:
        return next(times) if name == "pipelined" else {"unfused": 3e-3, "direct": 1e-3}[name]

    assert Run(time).only == pytest.approx({"unfused": 3.0, "direct": 1.0, "pipelined": 1.1})


def test_calls_with_other_extents_are_compared_apart() -> None:
    """Two weights share their input; the wide one takes three times as long. Those that hardly
    recur count together."""
    usual = {"unfused": 3e-3, "direct": 1e-3, "pipelined": 1.5e-3}
    found = Run(lambda name, call: (3 if call % 2 else 1) * usual[name], others=(50, 150)).ms
    assert set(found) == {100, 300}  # over both ranks
    assert (found[100]["direct"], found[300]["direct"]) == pytest.approx((1.0, 3.0))
    together = Run(constant(**usual), others=range(1, 90)).only
    assert together == pytest.approx({name: 1e3 * seconds for name, seconds in usual.items()})


def test_a_candidate_stays_that_is_fast_for_one_extent() -> None:
    def time(name: str, call: int) -> float:
        fast = "pipelined" if call % 2 else "direct"
        return 1e-3 if name == fast else 2e-3

    assert {"direct", "pipelined"} <= set(Run(time, others=(50, 150)).made[-6:])
