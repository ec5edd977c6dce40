"""Times of a function, with the statistics that all measurements of this package shard.

Not called benchmark.py: importing a module binds its name in the package, and there ``benchmark``
is the function.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpkernels import groups
from tpkernels.groups import GroupLike

_SECONDS = 0.5  # of timed calls, where nothing else is asked for
_LEAST_MS = 1e-4  # a Python call takes longer; a clock may still say 0


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call.

    Each of ``iterations`` samples is the mean of ``calls`` calls in a row; ``warmup`` calls came
    before. ``stdev`` is that of a sample (n - 1; 0 of a single one). ``p95`` and ``p99`` are the
    smallest samples that 95 and 99 % of all do not exceed.
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
        """The statistics of samples in milliseconds, of which there is at least one."""
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
        each = f" of {self.calls} calls" if self.calls > 1 else ""
        return (
            f"median {self.median:.4g} ms, mean {self.mean:.4g} +- {self.stdev:.2g}, "
            f"min {self.min:.4g}, max {self.max:.4g}, p95 {self.p95:.4g}, p99 {self.p99:.4g} "
            f"({self.iterations} iterations{each}, {self.warmup} warm-up)"
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
    """Times ``fn(*args)``; keyword arguments of ``fn`` go in by ``functools.partial``.

    On a CUDA device by events on its current stream: iterations are queued one after the other and
    waited for once, at the end. On the CPU by the host's clock.

    Args:
        warmup: calls before the first that counts.
        iterations: how many times to measure. Without it, about as many as fill ``min_seconds``
            (default 0.5), judged by the warm-up.
        calls: calls in a row in one iteration, whose mean is its time. For collectives on CPUs that
            take less than a millisecond: ranks leave a gloo barrier some 0.1 ms apart, which counts
            in full on the first call after it.
        group: the ranks that run ``fn`` together; collective then. All ranks run equally many
            iterations, each after a barrier that is not timed, and all get the same result: of each
            iteration the slowest rank's time. The process group's timeout bounds the waits.
        device: whose clock; that of the first tensor in ``args`` by default, of lists and tuples
            too, and the CPU where there is none: give it where ``fn`` holds its tensors itself.
        flush_l2: overwrite the GPU's L2 cache before each iteration, outside of its time.

    Raises:
        ValueError: a number out of range, two that exclude each other, ranks that give others.
        NotImplementedError: a device of another kind.
    """
    clock = torch.device(device) if device is not None else _device_of(args)
    _check(warmup, iterations, min_seconds, calls)
    if clock.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device {clock}; there are clocks for cpu and cuda")
    if flush_l2 and clock.type != "cuda":
        raise ValueError(f"flush_l2 is for CUDA devices, and this measures on {clock}")
    seconds = _SECONDS if min_seconds is None else min_seconds
    pg = None if group is None else groups.get(groups.name_of(group)).pg
    if pg is not None:
        _check_alike(pg, warmup=warmup, iterations=iterations or 0, calls=calls, seconds=seconds)
    run = functools.partial(fn, *args)
    prepare = _preparation(pg, clock, flush_l2)
    measure = functools.partial(_on_cuda, clock) if clock.type == "cuda" else _on_host

    def samples(count: int, calls: int) -> list[float]:
        own = measure(run, prepare, count, calls)
        return own if pg is None or not own else slowest(own, pg)

    warm = samples(warmup, 1)
    if iterations is None:
        call = max(statistics.median(warm), _LEAST_MS)
        iterations = max(1, math.ceil(1e3 * seconds / (calls * call)))
    return Timing.of(samples(iterations, calls), warmup=warmup, calls=calls)


def slowest(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Of each value the largest that any rank has; all give equally many. Collective."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    everyone = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(everyone, dist.ReduceOp.MAX, group=group)
    largest: list[float] = everyone.tolist()
    return largest


def _check(warmup: int, iterations: int | None, min_seconds: float | None, calls: int) -> None:
    if warmup < 0 or calls < 1 or (iterations is not None and iterations < 1):
        raise ValueError(
            f"warmup={warmup}, iterations={iterations}, calls={calls}: at least 0, 1 and 1"
        )
    if min_seconds is not None and not 0 < min_seconds < math.inf:
        raise ValueError(f"min_seconds is {min_seconds}; it must be positive and finite")
    if iterations is not None and min_seconds is not None:
        raise ValueError(
            f"iterations={iterations} and min_seconds={min_seconds} both say how long; give one"
        )
    if iterations is None and warmup == 0:
        raise ValueError("warmup=0 leaves nothing to judge the iterations by; give iterations")


def _check_alike(pg: dist.ProcessGroup, **own: float) -> None:
    """Ranks that run unequally many iterations would wait for each other."""
    values = list(own.values())
    most = slowest([*values, *(-value for value in values)], pg)
    for i, (name, value) in enumerate(own.items()):
        least = -most[len(values) + i]
        if least != most[i]:
            raise ValueError(
                f"rank {pg.rank()} gives {name}={value:g}, but over the group it goes from "
                f"{least:g} to {most[i]:g}; all ranks must give the same"
            )


def _device_of(value: object) -> torch.device:
    """That of the first tensor in ``value``; the CPU where there is none."""
    values = [value]
    while values:
        first = values.pop(0)
        if isinstance(first, torch.Tensor):
            return first.device
        if isinstance(first, (list, tuple)):
            values = [*first, *values]
    return torch.device("cpu")


def _preparation(
    pg: dist.ProcessGroup | None, device: torch.device, flush_l2: bool
) -> Callable[[], None]:
    """What comes before each iteration, outside of its time."""
    scratch: torch.Tensor | None = None
    if flush_l2:
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        scratch = torch.empty(size, dtype=torch.uint8, device=device)

    def prepare() -> None:
        if scratch is not None:
            scratch.zero_()
        if pg is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier(group=pg)

    return prepare


def _on_host(
    run: Callable[[], object], prepare: Callable[[], None], count: int, calls: int
) -> list[float]:
    """Milliseconds of a call in each of ``count`` iterations."""
    told = []
    for _ in range(count):
        prepare()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        told.append(1e3 * (time.perf_counter() - begin) / calls)
    return told


def _on_cuda(
    device: torch.device,
    run: Callable[[], object],
    prepare: Callable[[], None],
    count: int,
    calls: int,
) -> list[float]:
    """The same by events on the current stream of ``device``, waited for at the end."""
    told = []
    with torch.cuda.device(device):
        for _ in range(count):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            told.append((begin, end))
        torch.cuda.synchronize()
    return [begin.elapsed_time(end) / calls for begin, end in told]
