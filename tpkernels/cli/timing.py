"""Times of several ways to do the same thing, measured by turns in one run on all ranks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# A timed region is at least this long (as far as _MOST_CALLS allows): ranks leave a barrier some
# 0.1 ms apart, which counts in full on the first of them.
_REGION_SECONDS = 4e-3
_MOST_CALLS = 100
_WARM_SECONDS = 0.25  # what takes longer needs no second run to be warm


@dataclass(frozen=True)
class Variant:
    """One way. ``reset`` runs before each timed region, outside of it."""

    run: Callable[[], object]
    reset: Callable[[], object] | None = None


@dataclass(frozen=True)
class Samples:
    """Seconds of one call in each repetition, on one rank; a repetition is ``calls`` calls."""

    seconds: tuple[float, ...]
    calls: int


@dataclass(frozen=True)
class Time:
    """What all ranks' samples come to: of each repetition the slowest rank, then over repetitions.
    Milliseconds."""

    median: float
    p95: float
    least: float
    runs: int
    calls: int


def measure(
    variants: Mapping[str, Variant], *, repeat: int, budget: float = math.inf
) -> dict[str, Samples]:
    """Times each variant ``repeat`` times, by turns. Collective.

    Args:
        budget: seconds after which no further repetition starts, if there have been three.
    """
    calls = {name: _calls_per_region(variant) for name, variant in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    started = time.perf_counter()
    for repetition in range(repeat):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_region(variants[name], calls[name]))
        elapsed = _slowest(time.perf_counter() - started)
        if elapsed > budget and repetition >= 2:
            break
    return {name: Samples(tuple(seconds[name]), calls[name]) for name in names}


def summary(ranks: Sequence[Samples]) -> Time:
    """The times of all ranks as one."""
    slowest = sorted(1e3 * max(each) for each in zip(*(s.seconds for s in ranks), strict=True))
    p95 = slowest[math.ceil(0.95 * len(slowest)) - 1]
    return Time(statistics.median(slowest), p95, slowest[0], len(slowest), ranks[0].calls)


def _region(variant: Variant, calls: int) -> float:
    """Seconds of one call, over ``calls`` calls in a row."""
    if variant.reset is not None:
        variant.reset()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        variant.run()
    return (time.perf_counter() - begin) / calls


def _calls_per_region(variant: Variant) -> int:
    """The same on all ranks. Warms up too."""
    took = _slowest(_region(variant, 1))
    if took < _WARM_SECONDS:
        took = _slowest(_region(variant, 1))
    return min(max(1, math.ceil(_REGION_SECONDS / took)), _MOST_CALLS)


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)
