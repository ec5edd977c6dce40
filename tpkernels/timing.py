"""Time functions: `tpkernels.benchmark` one, `measure` several variants interleaved.

Ranks leave a gloo barrier about 0.1 ms apart, which is charged to the first call after it. So short
calls are timed several in a row.
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

_SECONDS = 0.5  # of timed calls by `benchmark`, by default
_MIN_CALL_MS = 1e-4  # less than any Python call; a coarse clock may measure 0
_REGION_SECONDS = 4e-3  # of a region timed by `measure`, if _MOST_CALLS suffice
_MAX_CALLS = 100
_WARM_SECONDS = 0.25  # a variant that takes longer is warm after one call
_ROUNDS_BEFORE_DROP = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call.

    There are ``iterations`` samples, each the mean of ``calls`` consecutive calls, after ``warmup``
    untimed calls. ``stdev`` is the sample standard deviation (n - 1; 0 for a single sample).
    ``p95`` and ``p99`` are the smallest samples that at least 95 and 99 % of all do not exceed.
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

        def percentile(part: float) -> float:
            return ordered[math.ceil(part * len(ordered)) - 1]

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
        in_a_row = f" of {self.calls} calls" if self.calls > 1 else ""
        return (
            f"median {self.median:.4g} ms, mean {self.mean:.4g} +- {self.stdev:.2g}, "
            f"min {self.min:.4g}, max {self.max:.4g}, p95 {self.p95:.4g}, p99 {self.p99:.4g} "
            f"({self.iterations} iterations{in_a_row}, {self.warmup} warm-up)"
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
    """Time ``fn(*args)``. Pass keyword arguments of ``fn`` by ``functools.partial``.

    On a CUDA device, times are taken by events on the current stream: all iterations are queued and
    the stream is synchronised once, at the end. On the CPU, by the host's clock.

    Args:
        warmup: untimed calls before the first iteration.
        iterations: number of samples. By default about as many as fill ``min_seconds`` (default
            0.5), estimated from the warm-up.
        calls: consecutive calls per iteration; a sample is their mean. Use several for collectives
            on CPUs that take less than a millisecond.
        group: the ranks that run ``fn`` together, which makes this call collective. All ranks run
            the same number of iterations, each after an untimed barrier, and return the same
            result: each sample is the slowest rank's. The process group's timeout bounds the waits.
        device: the device whose clock is used. The default is the device of the first tensor in
            ``args``, also within lists, tuples and dicts, else the CPU. Pass it if ``fn`` holds
            its tensors itself.
        flush_l2: overwrite the GPU's L2 cache before each iteration, untimed.

    Raises:
        ValueError: a number out of range, two options that exclude each other, or options that
            differ between ranks.
        NotImplementedError: another kind of device.
    """
    clock = torch.device(device) if device is not None else _device_of(args)
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
    pg = None if group is None else groups.get(groups.name_of(group)).pg
    if pg is not None:
        _check_alike(pg, warmup=warmup, iterations=iterations or 0, calls=calls, seconds=seconds)
    scratch = None
    if flush_l2:
        size = 2 * torch.cuda.get_device_properties(clock).L2_cache_size
        scratch = torch.empty(size, dtype=torch.uint8, device=clock)

    def stamp() -> Any:
        """Return the host's time, or an event on the current stream."""
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
    """Return the maximum of each value over all ranks, which pass equally many. Collective."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    everyone = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(everyone, dist.ReduceOp.MAX, group=group)
    largest: list[float] = everyone.tolist()
    return largest


def _check_alike(pg: dist.ProcessGroup, **options: float) -> None:
    """Refuse options that differ: ranks with different iteration counts would deadlock."""
    values = list(options.values())
    largest = slowest([*values, *(-value for value in values)], pg)
    for i, (name, value) in enumerate(options.items()):
        smallest = -largest[len(values) + i]
        if smallest != largest[i]:
            raise ValueError(
                f"rank {pg.rank()} has {name}={value:g}, but in the group it ranges from "
                f"{smallest:g} to {largest[i]:g}; all ranks must pass the same value"
            )


def _device_of(value: object) -> torch.device:
    """Return the device of the first tensor in ``value``; the CPU if there is none."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


# Several variants, interleaved.


def interleaved(names: Iterable[str], rounds: int, seed: int = 0) -> Iterator[str]:
    """Yield each name once per round, in a new random order each time, the same on all ranks:
    a variant is affected by the caches and the busy threads that its predecessor leaves behind."""
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
    """Take one sample of each variant per round, in the order of `interleaved`.

    Args:
        sample: runs a variant and returns its seconds.
        elapsed: returns the seconds so far, the same on all ranks.
        budget: seconds after which no further round starts, once there are ``min_rounds``.
        drop_beyond: after three rounds, a variant whose shortest time exceeds the fastest's by
            this factor drops out, and the last one that remains ends the timing. Needs samples
            that are the same on all ranks.
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
    """Time each variant ``repeat`` times, interleaved. Collective.

    Args:
        budget: seconds after which no further repetition starts, once there are three.
        synchronize: waits for the work that a variant queues, as calls on CUDA tensors do.
    """
    finish = synchronize or (lambda: None)
    warmup, per_region = {}, {}
    for name, variant in variants.items():
        warmup[name], longest = 0, 0.0
        while warmup[name] < 2 and longest < _WARM_SECONDS:
            (longest,) = slowest([_region(variant, 1, finish)])
            warmup[name] += 1
        # As many calls make a timed region long enough; the same on all ranks.
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
    """Compute the statistics over all ranks: a repetition counts with its slowest rank's time."""
    samples = [1e3 * max(each) for each in zip(*(s.seconds for s in ranks), strict=True)]
    return Timing.of(samples, warmup=ranks[0].warmup, calls=ranks[0].calls)


def _region(variant: Variant, calls: int, finish: Callable[[], object]) -> float:
    """Return seconds of one call, the mean of ``calls`` consecutive calls."""
    if variant.reset is not None:
        variant.reset()
    finish()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        variant.run()
    finish()
    return (time.perf_counter() - begin) / calls
