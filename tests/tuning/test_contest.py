"""What ``auto`` tries in the first calls of a problem, and what follows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tpkernels.planning.table import Measurement, Series
from tpkernels.tuning.contest import ELIGIBLE, MOST_CALLS, UNTRIED_CALLS, Sample, Trial

SERIES = Series("all_gather_matmul", "cpu", 2, 512, "bfloat16", ())
Time = Callable[[str, int], float]  # of an algorithm in the n-th call


def trial(candidates: tuple[str, ...] = ELIGIBLE, thresholds_give: str = "direct") -> Trial:
    return Trial(SERIES, 1024, candidates, thresholds_give)


def run(one: Trial, time: Time, others: tuple[int, ...] = (64,)) -> list[str]:
    """Makes the calls of a trial on two ranks, the second of which arrives a second late. The calls
    go through the other extents in turn. Returns what was run."""
    made: list[str] = []
    late: list[Sample] = []
    while not one.over:
        name, other = one.algorithm, others[len(made) % len(others)]
        begin, seconds = 1000.0 + len(made), time(one.algorithm, len(made))
        one.samples.append(Sample(begin, begin + 1 + seconds, other))
        late.append(Sample(begin + 1, begin + 1 + seconds / 2, other))
        made.append(name)
        if one.stage_over:
            if one.begun:
                one.advance([one.samples, late])
            else:
                one.begin()
            late = []
    return made


def constant(**seconds: float) -> Time:
    return lambda name, _: seconds[name]


def ms_of(one: Trial) -> dict[str, float]:
    (measurement,) = one.measurements
    return dict(measurement.ms)


def test_first_what_the_thresholds_give_then_all_then_the_fast_ones() -> None:
    one = trial()
    made = run(one, constant(unfused=3e-3, direct=1e-3, pipelined=1.1e-3))
    assert made[:UNTRIED_CALLS] == ["direct"] * UNTRIED_CALLS
    assert Counter(made[UNTRIED_CALLS:]) == {"unfused": 5, "direct": 13, "pipelined": 13}
    assert made[-16:].count("unfused") == 0 and len(made) <= MOST_CALLS
    assert ms_of(one) == pytest.approx({"unfused": 3.0, "direct": 1.0, "pipelined": 1.1})
    assert one.measurements[0].tried and one.measurements[0].extent == 1024


@pytest.mark.parametrize("pipelined", [1.1e-3, 2e-3])
def test_a_burst_of_other_work_decides_nothing(pipelined: float) -> None:
    """Three of the first four calls of the fastest meet it."""
    calls: Counter[str] = Counter()

    def time(name: str, _: int) -> float:
        calls[name] += 1
        met = name == "direct" and UNTRIED_CALLS + 2 <= calls[name] <= UNTRIED_CALLS + 4
        return {"unfused": 3e-3, "direct": 1e-3, "pipelined": pipelined}[name] * (10 if met else 1)

    one = trial()
    run(one, time)
    expected = {"unfused": 3.0, "direct": 1.0, "pipelined": 1e3 * pipelined}
    assert ms_of(one) == pytest.approx(expected)


def test_what_has_dropped_out_does_not_win_by_a_later_burst() -> None:
    """All calls of the last stage meet it, in which the slowest no longer runs."""

    def time(name: str, call: int) -> float:
        late = call >= UNTRIED_CALLS + 5 * len(ELIGIBLE)
        return {"unfused": 1.3e-3, "direct": 1e-3, "pipelined": 1.1e-3}[name] * (2 if late else 1)

    one = trial()
    run(one, time)
    assert min(ms_of(one), key=ms_of(one).__getitem__) == "direct"


@pytest.mark.parametrize(("stages", "fastest"), [(1, "direct"), (4, "direct"), (99, "unfused")])
def test_a_candidate_whose_calls_are_all_disturbed_for_a_while(stages: int, fastest: str) -> None:
    """Other work on the core: in calls by `direct` the rank that waited goes on only after a time
    slice, while the one that came last needs 30 us. Bounded."""
    one, stage, made = trial(("unfused", "direct")), 0, 0
    while not one.over:
        late, made = list[Sample](), made + len(one.samples)
        while not one.stage_over:
            seconds = {"unfused": 7e-4, "direct": 3e-5}[one.algorithm]
            waited = 2e-3 if one.algorithm == "direct" and stage <= stages else seconds
            one.samples.append(Sample(5.0, 6.0 + waited, 64))
            late.append(Sample(6.0, 6.0 + seconds, 64))
        if stage:
            one.advance([one.samples, late])
        else:
            one.begin()
        stage += 1
    assert min(ms_of(one), key=ms_of(one).__getitem__) == fastest and made <= MOST_CALLS


def test_the_time_counts_from_the_last_arrival() -> None:
    """The rank that came a second early waited for it."""
    one = trial()
    run(one, constant(unfused=3e-3, direct=1e-3, pipelined=9e-3))
    assert max(ms_of(one).values()) < 10


def test_clocks_that_differ_leave_the_time_of_one_rank() -> None:
    one = trial(("unfused", "direct"))
    while not one.over:
        seconds = {"unfused": 2e-3, "direct": 1e-3}[one.algorithm]
        one.samples.append(Sample(5.0, 5.0 + seconds, 64))
        if one.stage_over and one.begun:
            one.advance(
                [one.samples, [Sample(s.begin + 1e4, s.end + 1e4, 64) for s in one.samples]]
            )
        elif one.stage_over:
            one.begin()
    assert ms_of(one) == pytest.approx({"unfused": 2.0, "direct": 1.0}, rel=1e-3)


def test_the_order_is_the_same_on_all_ranks_and_new_in_each_round() -> None:
    same = constant(unfused=1e-3, direct=1e-3, pipelined=1e-3)
    first, second = run(trial(), same), run(trial(), same)
    assert first == second
    rounds = {tuple(first[at : at + 3]) for at in range(UNTRIED_CALLS, len(first) - 2, 3)}
    assert len(rounds) > 3 and all(sorted(each) == sorted(ELIGIBLE) for each in rounds)


def test_long_calls_are_tried_less_often() -> None:
    short = run(trial(), constant(unfused=1e-3, direct=1e-3, pipelined=1e-3))
    long = run(trial(), constant(unfused=0.1, direct=0.1, pipelined=0.1))
    assert len(long) < len(short) < MOST_CALLS


def test_the_median_counts_without_the_warm_up() -> None:
    times = iter([1e-4, *[1e-3, 1.2e-3] * 6])

    def time(name: str, call: int) -> float:
        return next(times) if name == "pipelined" else {"unfused": 3e-3, "direct": 1e-3}[name]

    one = trial()
    run(one, time)
    assert ms_of(one) == pytest.approx({"unfused": 3.0, "direct": 1.0, "pipelined": 1.1})


def by_other(one: Trial) -> dict[int, Measurement]:
    return {measurement.other: measurement for measurement in one.measurements}


def test_calls_with_other_extents_are_compared_apart() -> None:
    """Two weights share their input; the wide one takes three times as long."""
    one = trial()

    def time(name: str, call: int) -> float:
        factor = 3 if call % 2 else 1
        return factor * {"unfused": 3e-3, "direct": 1e-3, "pipelined": 1.5e-3}[name]

    run(one, time, others=(50, 150))
    found = by_other(one)
    assert set(found) == {100, 300}  # over both ranks
    assert found[100].ms["direct"] == pytest.approx(1.0)
    assert found[300].ms["direct"] == pytest.approx(3.0)


def test_extents_that_hardly_recur_count_together() -> None:
    one = trial()
    run(one, constant(unfused=3e-3, direct=1e-3, pipelined=2e-3), others=tuple(range(1, 90)))
    assert ms_of(one) == pytest.approx({"unfused": 3.0, "direct": 1.0, "pipelined": 2.0})


def test_a_candidate_stays_that_is_fast_for_one_extent() -> None:
    def time(name: str, call: int) -> float:
        wide = call % 2 == 1
        fast = "pipelined" if wide else "direct"
        return 1e-3 if name == fast else 2e-3

    one = trial()
    made = run(one, time, others=(50, 150))
    assert {"direct", "pipelined"} <= set(made[-6:])
