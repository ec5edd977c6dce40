"""Times of several ways to do the same thing, measured by turns in one run on all ranks."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from tpkernels.bench.benchmark import Timing, slowest

# A timed region is at least this long (as far as _MOST_CALLS allows): ranks leave a barrier some
# 0.1 ms apart, which counts in full on the first of them.
_REGION_SECONDS = 4e-3
_MOST_CALLS = 100
_WARM_SECONDS = 0.25  # what takes longer needs no second run to be warm
_LONG_SECONDS = 0.5  # and what takes longer than this, none before it is measured


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
    variants: Mapping[str, Variant],
    *,
    repeat: int,
    budget: float = math.inf,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, Samples]:
    """Times each variant ``repeat`` times, by turns. Collective.

    Args:
        budget: seconds after which no further repetition starts, if there have been three. With
            a budget, the warm-up counts as a repetition where every variant takes long.
        synchronize: waits for what a variant has only queued, as calls on CUDA tensors do.
    """
    if not variants:
        return {}
    finish = synchronize or _nothing
    started = time.perf_counter()
    warmed = {name: _warm(variant, finish) for name, variant in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    if budget < math.inf and all(warm.slowest >= _LONG_SECONDS for warm in warmed.values()):
        seconds = {name: [warm.seconds] for name, warm in warmed.items()}
        warmed = {name: replace(warm, calls=0) for name, warm in warmed.items()}
    else:
        started = time.perf_counter()
    names = list(variants)
    begin = len(seconds[names[0]])
    for repetition in range(begin, repeat):
        # In a new order, the same on all ranks: what runs before a variant leaves caches, and gloo
        # threads at work, to it.
        for name in random.Random(repetition).sample(names, len(names)):
            seconds[name].append(_region(variants[name], warmed[name].per_region, finish))
        (elapsed,) = slowest([time.perf_counter() - started])
        if elapsed > budget and repetition >= 2:
            break
    return {
        name: Samples(tuple(seconds[name]), warmed[name].per_region, warmed[name].calls)
        for name in names
    }


def summary(ranks: Sequence[Samples]) -> Timing:
    """The times of all ranks as one: of each repetition the slowest rank's."""
    samples = [1e3 * max(each) for each in zip(*(s.seconds for s in ranks), strict=True)]
    return Timing.of(samples, warmup=ranks[0].warmup, calls=ranks[0].calls)


def _nothing() -> None:
    """What there is to wait for on a CPU."""


def _region(variant: Variant, calls: int, finish: Callable[[], object]) -> float:
    """Seconds of one call, over ``calls`` calls in a row."""
    if variant.reset is not None:
        variant.reset()
    finish()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        variant.run()
    finish()
    return (time.perf_counter() - begin) / calls


@dataclass(frozen=True)
class _Warmed:
    """What a variant's warm-up found: seconds of its last call here and on the slowest rank, and
    how many calls it took."""

    seconds: float
    slowest: float
    calls: int

    @property
    def per_region(self) -> int:
        """Calls that make a region long enough; the same on all ranks."""
        return min(max(1, math.ceil(_REGION_SECONDS / self.slowest)), _MOST_CALLS)


def _warm(variant: Variant, finish: Callable[[], object]) -> _Warmed:
    own = _region(variant, 1, finish)
    (took,) = slowest([own])
    if took >= _WARM_SECONDS:
        return _Warmed(own, took, 1)
    own = _region(variant, 1, finish)
    (took,) = slowest([own])
    return _Warmed(own, took, 2)
