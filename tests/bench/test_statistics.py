"""Statistics of the benchmark on samples with known answers."""

from __future__ import annotations

import random

import pytest

from tpkernels.bench.statistics import (
    FEWEST,
    Estimate,
    Speedup,
    independent,
    overlap,
    paired,
    ratio,
)


def noisy(center: float, count: int, seed: int, spread: float = 0.02) -> list[float]:
    generator = random.Random(seed)
    return [center * (1 + generator.gauss(0, spread)) for _ in range(count)]


def verdict(estimate: Estimate) -> str:
    return Speedup.of(estimate).verdict


def test_a_clear_difference_is_told() -> None:
    estimate = paired(ratio, noisy(3.0, 20, 1), noisy(2.0, 20, 2))
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low < 1.5 < estimate.high and estimate.high - estimate.low < 0.1
    assert verdict(estimate) == "faster"
    assert verdict(paired(ratio, noisy(2.0, 20, 2), noisy(3.0, 20, 1))) == "slower"
    assert verdict(paired(ratio, noisy(2.0, 20, 1), noisy(2.0, 20, 2))) == "no difference"
    same = noisy(2.0, 20, 1)
    assert verdict(paired(ratio, same, same)) == "no difference"


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    held = 0
    for seed in range(200):
        estimate = paired(ratio, noisy(2.0, 20, seed), noisy(1.0, 20, 1000 + seed))
        assert estimate.low is not None and estimate.high is not None
        held += estimate.low <= 2.0 <= estimate.high
    assert held >= 180  # 95 % of 200, less a margin for chance and for percentile intervals


def test_what_slows_both_is_no_difference_between_them() -> None:
    """Repetitions are drawn in pairs, and each pair differs by 1 % whatever the load."""
    load = [random.Random(3).uniform(1, 4) for _ in range(1)] + noisy(2.0, 19, 3, spread=0.5)
    slower, faster = [1.01 * each for each in load], load
    estimate = paired(ratio, slower, faster)
    assert (estimate.low, estimate.high) == (pytest.approx(1.01), pytest.approx(1.01))
    apart = independent(ratio, [slower], [faster])
    assert verdict(apart) == "no difference"


def test_few_repetitions_have_no_interval() -> None:
    few = paired(ratio, noisy(9.0, FEWEST - 1, 1), noisy(1.0, FEWEST - 1, 2))
    assert (few.low, few.high, verdict(few)) == (None, None, "too few repetitions")
    assert few.value == pytest.approx(9.0, rel=0.1)
    assert verdict(paired(ratio, noisy(9.0, FEWEST, 1), noisy(1.0, FEWEST, 2))) == "faster"
    uneven = independent(ratio, [noisy(9.0, 20, 1)], [noisy(1.0, FEWEST - 1, 2)])
    assert verdict(uneven) == "too few repetitions"


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize(("op", "share"), [(10.0, 1.0), (12.5, 0.5), (25.0, -2.0)])
def test_overlap_is_the_share_that_is_hidden(op: float, share: float, count: int) -> None:
    unfused, gemm = noisy(15.0, count, 1, 0.003), noisy(10.0, count, 2, 0.003)
    estimate = overlap(noisy(op, count, 3, 0.003), unfused, gemm)
    assert estimate is not None
    assert estimate.value == pytest.approx(share, abs=0.05)
    assert (estimate.low is None) == (count < FEWEST)


def test_nothing_to_hide_gives_no_overlap() -> None:
    for count in (3, 20):
        gemm = noisy(10.0, count, 2)
        assert overlap(noisy(9.0, count, 3), list(reversed(gemm)), gemm) is None
