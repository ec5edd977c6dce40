"""Time functions. `tpkernels.benchmark` times a single function, `measure` several variants in
interleaved order.

Ranks leave a gloo barrier about 0.1 ms apart, and the first call after it includes this delay.
Short calls are therefore timed in batches of consecutive calls.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.torch_private import tree_leaves

_SECONDS = 0.5  # default duration of the timed calls of `benchmark`
_MIN_CALL_MS = 1e-4  # shorter than any Python call; a coarse clock may measure 0
_REGION_SECONDS = 4e-3  # minimum duration of a timed region of `measure`, up to _MAX_CALLS calls
_MAX_CALLS = 100
_WARM_SECONDS = 0.25  # a call longer than this suffices as warm-up
_ROUNDS_BEFORE_DROP = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call.

    The statistics cover ``iterations`` samples. Each sample is the mean of ``calls`` consecutive
    calls. ``warmup`` untimed calls run first. ``stdev`` is the sample standard deviation (n - 1; 0
    for a single sample). ``p95`` and ``p99`` are nearest-rank percentiles.
    """

    mean: float
    median: float
    stdev: float
    min: float
    max: float
    p95: float
    p99: float
    iterations: int
    warmup: int
    calls: int

    @classmethod
    def of(cls, samples: Sequence[float], *, warmup: int, calls: int) -> Timing:
        """Compute the statistics of one or more samples in milliseconds."""
        ordered = sorted(samples)

        def percentile(fraction: float) -> float:
            return ordered[math.ceil(fraction * len(ordered)) - 1]

        return cls(
            mean=statistics.fmean(ordered),
            median=statistics.median(ordered),
            stdev=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
            min=ordered[0],
            max=ordered[-1],
            p95=percentile(0.95),
            p99=percentile(0.99),
            iterations=len(ordered),
            warmup=warmup,
            calls=calls,
        )

    def __str__(self) -> str:
        calls = f" of {self.calls} calls" if self.calls > 1 else ""
        return (
            f"median {self.median:.4g} ms, mean {self.mean:.4g} +- {self.stdev:.2g}, "
            f"min {self.min:.4g}, max {self.max:.4g}, p95 {self.p95:.4g}, p99 {self.p99:.4g} "
            f"({self.iterations} iterations{calls}, {self.warmup} warm-up)"
        )


def benchmark(
    fn: Callable[..., object],
    *args: object,
    warmup: int = 5,
    iterations: int | None = None,
    min_seconds: float | None = None,
    calls: int = 1,
    group: GroupLike | None = None,
    device: torch.device | str | None = None,
    flush_l2: bool = False,
) -> Timing:
    """Time ``fn(*args)``. Pass keyword arguments of ``fn`` with ``functools.partial``.

    On a CUDA device, times are measured with events on the current stream. All iterations are
    queued, and the stream is synchronised once at the end. On the CPU, times are measured with the
    host clock.

    Args:
        warmup: number of untimed calls before the first iteration.
        iterations: number of samples. Default: as many as fill ``min_seconds``, estimated from the
            warm-up.
        min_seconds: total duration of the samples, in seconds. Default: 0.5.
        calls: number of consecutive calls per iteration. A sample is their mean. Use several calls
            for collectives on CPUs that last less than a millisecond.
        group: the ranks that run ``fn`` together. The call is then collective. All ranks run the
            same number of iterations, each after an untimed barrier, and return the same result.
            Each sample is the time of the slowest rank. Waits have the timeout of the process
            group.
        device: the device that is timed. Default: the device of the first tensor in ``args``, also
            within lists, tuples and dicts, or the CPU without tensors. Pass it if ``fn`` uses
            tensors that are not in ``args``.
        flush_l2: overwrite the L2 cache of the GPU before each iteration, untimed.

    Returns:
        Statistics in milliseconds.

    Raises:
        ValueError: a number is out of range, two options are mutually exclusive, or options differ
            between ranks.
        NotImplementedError: the device is neither cpu nor cuda.
    """
    clock = torch.device(device) if device is not None else _find_device(args)
    if warmup < 0 or calls < 1 or (iterations is not None and iterations < 1):
        raise ValueError(
            f"warmup={warmup}, iterations={iterations}, calls={calls}; these must be at least 0, 1 "
            "and 1"
        )
    if min_seconds is not None and not 0 < min_seconds < math.inf:
        raise ValueError(f"min_seconds is {min_seconds}; it must be positive and finite")
    if iterations is not None and min_seconds is not None:
        raise ValueError(
            f"iterations={iterations} and min_seconds={min_seconds} are mutually exclusive; pass "
            "only one of them"
        )
    if iterations is None and warmup == 0:
        raise ValueError("with warmup=0 the iterations cannot be estimated; pass iterations")
    if clock.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {clock}; supported: cpu, cuda")
    on_cuda = clock.type == "cuda"
    if flush_l2 and not on_cuda:
        raise ValueError(f"flush_l2 needs a CUDA device, not {clock}")
    seconds = _SECONDS if min_seconds is None else min_seconds
    pg = None if group is None else groups.get(groups.group_name(group)).pg
    if pg is not None:
        _check_equal(pg, warmup=warmup, iterations=iterations or 0, calls=calls, seconds=seconds)
    scratch = None
    if flush_l2:
        size = 2 * torch.cuda.get_device_properties(clock).L2_cache_size
        scratch = torch.empty(size, dtype=torch.uint8, device=clock)

    def stamp() -> Any:
        """Return the host time, or an event on the current stream."""
        if not on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def samples(count: int, calls: int) -> list[float]:
        stamps = []
        with torch.cuda.device(clock) if on_cuda else contextlib.nullcontext():
            for _ in range(count):
                if scratch is not None:
                    scratch.zero_()
                if pg is not None:
                    if on_cuda:
                        torch.cuda.synchronize(clock)
                    dist.barrier(group=pg)
                begin = stamp()
                for _ in range(calls):
                    fn(*args)
                stamps.append((begin, stamp()))
            if on_cuda:
                torch.cuda.synchronize()
        times = [
            (begin.elapsed_time(end) if on_cuda else 1e3 * (end - begin)) / calls
            for begin, end in stamps
        ]
        return times if pg is None or not times else slowest(times, pg)

    warm = samples(warmup, 1)
    if iterations is None:
        call = max(statistics.median(warm), _MIN_CALL_MS)
        iterations = max(1, math.ceil(1e3 * seconds / (calls * call)))
    return Timing.of(samples(iterations, calls), warmup=warmup, calls=calls)


def slowest(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the maximum of each value over all ranks. All ranks pass the same number of values.
    Collective."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    largest: list[float] = tensor.tolist()
    return largest


def _check_equal(pg: dist.ProcessGroup, **options: float) -> None:
    """Raise ``ValueError`` if options differ between ranks. Different iteration counts would
    deadlock."""
    values = list(options.values())
    largest = slowest([*values, *(-value for value in values)], pg)
    for i, (name, value) in enumerate(options.items()):
        smallest = -largest[len(values) + i]
        if smallest != largest[i]:
            raise ValueError(
                f"rank {pg.rank()} has {name}={value:g}, but in the group it ranges from "
                f"{smallest:g} to {largest[i]:g}; all ranks must pass the same value"
            )


def _find_device(value: object) -> torch.device:
    """Return the device of the first tensor in ``value``, or the CPU without tensors."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


# Several variants, interleaved.


def interleaved(names: Iterable[str], rounds: int, seed: int = 0) -> Iterator[str]:
    """Yield each name once per round, in random order. The order is identical on all ranks.

    A fixed order would bias the times, because each variant leaves caches and busy threads to the
    next variant."""
    candidates, chance = list(names), random.Random(seed)
    for _ in range(rounds):
        yield from chance.sample(candidates, len(candidates))


def time_interleaved(
    names: Iterable[str],
    sample: Callable[[str], float],
    elapsed: Callable[[], float],
    *,
    rounds: int,
    budget: float,
    min_rounds: int,
    drop_beyond: float = math.inf,
) -> dict[str, list[float]]:
    """Sample each variant once per round, in the order of `interleaved`.

    Args:
        sample: runs a variant and returns its seconds.
        elapsed: returns the elapsed seconds, identical on all ranks.
        budget: seconds after which no new round starts. The first ``min_rounds`` always run.
        drop_beyond: from the third round on, drop variants whose shortest time exceeds the shortest
            time of all variants by this factor. Stop when only one variant remains. If finite,
            samples must be identical on all ranks.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    remaining = list(seconds)
    for done in range(rounds):
        if done >= min_rounds and elapsed() > budget:
            break
        for name in interleaved(remaining, 1, seed=done):
            seconds[name].append(sample(name))
        if drop_beyond < math.inf and done >= _ROUNDS_BEFORE_DROP - 1:
            limit = drop_beyond * min(map(min, seconds.values()))
            remaining = [name for name in remaining if min(seconds[name]) <= limit]
            if len(remaining) == 1:
                break
    return seconds


@dataclass(frozen=True)
class Variant:
    """A function to time. ``reset`` runs before each timed region, untimed."""

    run: Callable[[], object]
    reset: Callable[[], object] | None = None


@dataclass(frozen=True)
class Samples:
    """Seconds of one call in each repetition on one rank. A repetition consists of ``calls`` calls.
    ``warmup`` untimed calls ran first."""

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
    """Time each variant ``repeat`` times, interleaved. Collective.

    Args:
        budget: seconds after which no new repetition starts. The first three always run.
        synchronize: waits for queued work, such as calls on CUDA tensors.
    """
    finish = synchronize or (lambda: None)
    warmup, per_region = {}, {}
    for name, variant in variants.items():
        warmup[name], longest = 0, 0.0
        while warmup[name] < 2 and longest < _WARM_SECONDS:
            (longest,) = slowest([_region(variant, 1, finish)])
            warmup[name] += 1
        # Calls per timed region, so that it is long enough. Identical on all ranks.
        per_region[name] = min(max(1, math.ceil(_REGION_SECONDS / longest)), _MAX_CALLS)
    begun = time.perf_counter()
    seconds = time_interleaved(
        variants,
        lambda name: _region(variants[name], per_region[name], finish),
        lambda: slowest([time.perf_counter() - begun])[0],
        rounds=repeat,
        budget=budget,
        min_rounds=3,
    )
    return {
        name: Samples(tuple(seconds[name]), per_region[name], warmup[name]) for name in variants
    }


def summary(ranks: Sequence[Samples]) -> Timing:
    """Compute the statistics over all ranks. The time of a repetition is the time of its slowest
    rank."""
    samples = [1e3 * max(times) for times in zip(*(s.seconds for s in ranks), strict=True)]
    return Timing.of(samples, warmup=ranks[0].warmup, calls=ranks[0].calls)


def _region(variant: Variant, calls: int, finish: Callable[[], object]) -> float:
    """Return the seconds per call, the mean of ``calls`` consecutive calls."""
    if variant.reset is not None:
        variant.reset()
    finish()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        variant.run()
    finish()
    return (time.perf_counter() - begin) / calls
