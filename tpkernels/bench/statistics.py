"""Confidence intervals by the bootstrap.

Interleaved variants are resampled together, repetition by repetition, so a disturbance that slowed
both (another program, a lower clock) does not count as a difference. Percentile intervals, 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The smallest number of samples whose range contains the median with a probability above 95 %:
# 1 - 2 / 2^6. Fewer samples get no interval.
FEWEST = 6
_RESAMPLES = 2000
_SEED = 5

Samples = Sequence[float]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number and its interval, which is None if there were too few samples."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Speedup(Estimate):
    """A ratio, and in words: "faster", "slower", or why neither."""

    verdict: str

    @classmethod
    def of(cls, ratio: Estimate) -> Speedup:
        """Return the estimate of a ratio with its verdict."""
        low, high = ratio.low, ratio.high
        if low is None or high is None:
            verdict = "too few repetitions"
        elif low <= 1 <= high:
            verdict = "no difference"
        else:
            verdict = "faster" if low > 1 else "slower"
        return cls(ratio.value, low, high, verdict)


def paired(function: Callable[..., Array], *series: Samples) -> Estimate:
    """Estimate ``function`` of the medians of interleaved series: equally many samples, in the
    order of the repetitions."""
    return independent(function, series)


def independent(function: Callable[..., Array], *runs: Sequence[Samples]) -> Estimate:
    """Estimate ``function`` of the medians of all series of all runs. The series of a run were
    interleaved, the runs were not."""
    generator, medians, resampled, fewest = np.random.default_rng(_SEED), [], [], math.inf
    for run in runs:
        samples = np.array(run, dtype=np.float64)
        count = samples.shape[1]
        picks = generator.integers(count, size=(_RESAMPLES, count))
        resampled.append(np.median(samples[:, picks], axis=2))
        medians.append(np.median(samples, axis=1))
        fewest = min(fewest, count)
    value = float(function(*np.concatenate(medians)))
    if fewest < FEWEST:
        return Estimate(value, None, None)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.percentile(function(*np.concatenate(resampled)), [2.5, 97.5])
    if not (np.isfinite(low) and np.isfinite(high)):
        return Estimate(value, None, None)
    return Estimate(value, float(low), float(high))


def ratio(numerator: Array, denominator: Array) -> Array:
    return numerator / denominator


def difference(a: Array, b: Array) -> Array:
    return a - b


def overlap(op: Samples, unfused: Samples, gemm: Samples) -> Estimate | None:
    """Estimate E_overlap (Flux, arXiv:2406.06858): the fraction of the unfused op's exposed
    communication that the op hides. ``1 - (op - gemm) / (unfused - gemm)``: 1 hides all, 0 none,
    and below 0 the op is slower than unfused.

    None if the unfused op is not significantly slower than the gemm alone: there is nothing to
    hide.
    """
    exposed = paired(difference, unfused, gemm)
    if exposed.low is None:
        apart = all(u > g for u, g in zip(unfused, gemm, strict=True))
    else:
        apart = exposed.low > 0
    if not apart:
        return None

    return paired(lambda t, u, g: 1 - (t - g) / (u - g), op, unfused, gemm)
