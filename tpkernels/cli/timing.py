"""Times of several ways to do the same thing, measured by turns in one run on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from tpkernels.benchmarking import Timing, slowest

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
    """Seconds of one call in each repetition, on one rank; a repetition is ``calls`` calls, and
    ``warmup`` calls came before."""

    seconds: tuple[float, ...]
    calls: int
    warmup: int


def measure(
    variants: Mapping[str, Variant], *, repeat: int, budget: float = math.inf
) -> dict[str, Samples]:
    """Times each variant ``repeat`` times, by turns. Collective.

    Args:
        budget: seconds after which no further repetition starts, if there have been three.
    """
    sizes = {name: _calls_per_region(variant) for name, variant in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    started = time.perf_counter()
    for repetition in range(repeat):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_region(variants[name], sizes[name][0]))
        (elapsed,) = slowest([time.perf_counter() - started])
        if elapsed > budget and repetition >= 2:
            break
    return {name: Samples(tuple(seconds[name]), *sizes[name]) for name in names}


def summary(ranks: Sequence[Samples]) -> Timing:
    """The times of all ranks as one: of each repetition the slowest rank's."""
    samples = [1e3 * max(each) for each in zip(*(s.seconds for s in ranks), strict=True)]
    return Timing.of(samples, warmup=ranks[0].warmup, calls=ranks[0].calls)


def _region(variant: Variant, calls: int) -> float:
    """Seconds of one call, over ``calls`` calls in a row."""
    if variant.reset is not None:
        variant.reset()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        variant.run()
    return (time.perf_counter() - begin) / calls


def _calls_per_region(variant: Variant) -> tuple[int, int]:
    """The same on all ranks, and how many calls it took to find out: they warm up too."""
    (took,) = slowest([_region(variant, 1)])
    warmup = 1
    if took < _WARM_SECONDS:
        (took,) = slowest([_region(variant, 1)])
        warmup = 2
    return min(max(1, math.ceil(_REGION_SECONDS / took)), _MOST_CALLS), warmup
