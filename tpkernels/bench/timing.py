"""Interleaved times of several variants of the same computation, in one run on all ranks."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from tpkernels.bench.benchmark import Timing, slowest

# Minimum length of a timed region, as far as _MOST_CALLS allows: ranks leave a barrier about 0.1 ms
# apart, which is charged to the first.
_REGION_SECONDS = 4e-3
_MOST_CALLS = 100
_WARM_SECONDS = 0.25  # a variant that takes longer is warm after one call
_LONG_SECONDS = 0.5  # a variant that takes longer needs no warm-up at all


@dataclass(frozen=True)
class Variant:
    """One variant. ``reset`` runs before each timed region, untimed."""

    run: Callable[[], object]
    reset: Callable[[], object] | None = None


@dataclass(frozen=True)
class Samples:
    """Seconds of one call in each repetition on one rank. A repetition consists of ``calls`` calls;
    ``warmup`` untimed calls came first."""

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
    """Times each variant ``repeat`` times, interleaved. Collective.

    Args:
        budget: seconds after which no further repetition starts, once there are three. With a
            budget, the warm-up counts as a repetition if every variant takes long.
        synchronize: waits for the work that a variant queues, as calls on CUDA tensors do.
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
        # In a new order each time, the same on all ranks: a variant is affected by the caches and
        # the busy gloo threads that its predecessor leaves behind.
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
    """The statistics over all ranks: each repetition counts with its slowest rank's time."""
    samples = [1e3 * max(each) for each in zip(*(s.seconds for s in ranks), strict=True)]
    return Timing.of(samples, warmup=ranks[0].warmup, calls=ranks[0].calls)


def _nothing() -> None:
    """Synchronises a CPU, which queues nothing."""


def _region(variant: Variant, calls: int, finish: Callable[[], object]) -> float:
    """Seconds of one call, the mean of ``calls`` consecutive calls."""
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
    """The result of a variant's warm-up: seconds of its last call here and on the slowest rank, and
    the number of calls."""

    seconds: float
    slowest: float
    calls: int

    @property
    def per_region(self) -> int:
        """Calls that make a timed region long enough; the same on all ranks."""
        return min(max(1, math.ceil(_REGION_SECONDS / self.slowest)), _MOST_CALLS)


def _warm(variant: Variant, finish: Callable[[], object]) -> _Warmed:
    own = _region(variant, 1, finish)
    (took,) = slowest([own])
    if took >= _WARM_SECONDS:
        return _Warmed(own, took, 1)
    own = _region(variant, 1, finish)
    (took,) = slowest([own])
    return _Warmed(own, took, 2)
