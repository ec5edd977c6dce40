"""Results as they stand in a file, computed from what the ranks report. schema.json describes them.

Times are milliseconds: of each repetition the slowest rank's.
"""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict, cast

from tpkernels import dtypes
from tpkernels.bench.baselines import LOCAL
from tpkernels.bench.cases import MATMUL_OPS
from tpkernels.bench.measuring import CaseReport, Choice
from tpkernels.bench.roofline import Rates, Work
from tpkernels.bench.statistics import Estimate, difference, overlap, paired, ratio
from tpkernels.bench.sweep import Item
from tpkernels.bench.timing import Samples, summary


class Interval(TypedDict):
    """95 %; None where there were too few repetitions."""

    value: float
    low: float | None
    high: float | None


class Speedup(Interval):
    """How many times as fast as something else; ``verdict`` in words."""

    verdict: str


class Time(TypedDict):
    """One variant: the fields of `bench.benchmark.Timing`, each repetition, and what follows from
    the median. ``skew``: the median difference between the slowest rank and the fastest.
    ``gb_per_s``: of what must come from the peers; None without communication. ``roofline``: the
    roofline's time over the median."""

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
    skew: float
    samples: list[float]
    tflops: float | None
    gb_per_s: float | None
    roofline: float


class Algorithm(TypedDict):
    """One algorithm by the name asked for, and, where it was right, what its time says.

    ``ect``: effective communication time, ms: the median over that of the faster local product.
    ``e_overlap``: see `statistics.overlap`; None where there is nothing to hide. ``speedup``: over
    each baseline.
    """

    algorithm: str
    reason: str
    right: bool
    error_over_bound: float | None
    ect: float | None
    e_overlap: Interval | None
    speedup: dict[str, Speedup]


class Result(TypedDict):
    """One case. ``shape`` is M, N, K before the split, None for a collective alone; ``bytes`` the
    size of the whole tensor that travels; ``flops`` and ``traffic`` (bytes from the peers) are a
    rank's. ``inputs_over_cache``: all copies of the inputs over the last-level cache, in bytes, on
    the rank with the fewest; below `inputs.COLD` they may have been in it. ``roofline``:
    milliseconds by the probes' rates, or of the fastest local product of the case, if that is less.
    """

    case: str
    op: str
    shape: list[int] | None
    bytes: int
    dtype: str
    tp: int
    labels: list[str]
    flops: int
    traffic: int
    inputs_over_cache: float
    roofline: float
    algorithms: dict[str, Algorithm]
    times: dict[str, Time]
    left_out: dict[str, str]


class Roofline(TypedDict):
    """What a local matmul and a copy reach on each rank while all run them: see `Rates`.
    ``copy_over_cache``: what the copy reads and writes, over the last-level cache, in bytes."""

    tp: int
    dtype: str
    tflops: float
    torch_tflops: float
    copy_gb_per_s: float
    copy_over_cache: float


class Report(TypedDict):
    """All of a file. ``runs``: when, with which command and at which load it was measured;
    ``cases``: what the sweep consists of, measured or not."""

    format: str
    complete: bool
    sweep: dict[str, Any]
    cases: list[str]
    environment: dict[str, Any]
    runs: list[dict[str, Any]]
    rooflines: list[Roofline]
    results: list[Result]


def key(item: Item) -> str:
    """A case by name, the same in every run."""
    spec = item.spec
    size = "x".join(map(str, spec.shape))
    return f"{spec.op} {size} {dtypes.name(spec.dtype)} tp{item.world}"


def result(item: Item, rates: Rates, reports: Sequence[CaseReport]) -> Result:
    """What the ranks found about a case."""
    spec, work = item.spec, Work.of(item.spec, item.world)
    first = reports[0]
    ranks = {name: [report.samples[name] for report in reports] for name in first.samples}
    # The probe may have met a slower moment of the machine than the case did.
    fastest = (
        [min(summary(ranks[name]).min for name in LOCAL if name in ranks)] if work.flops else []
    )
    least = min(1e3 * work.least_seconds(rates), *fastest, math.inf)
    times = {name: _time(name, work, least, each) for name, each in ranks.items()}
    return {
        "case": key(item),
        "op": spec.op,
        "shape": list(spec.shape) if spec.op in MATMUL_OPS else None,
        "bytes": spec.problem(item.world).nbytes,
        "dtype": dtypes.name(spec.dtype),
        "tp": item.world,
        "labels": list(item.labels),
        "flops": work.flops,
        "traffic": work.traffic,
        "inputs_over_cache": min(report.inputs_over_cache for report in reports),
        "roofline": least,
        "algorithms": {
            name: _algorithm(name, choice, times) for name, choice in first.choices.items()
        },
        "times": times,
        "left_out": first.left_out,
    }


def gemm(times: Mapping[str, Time]) -> Time | None:
    """The best unsplit local product, which no fused op can beat."""
    return min((times[name] for name in LOCAL if name in times), key=_median, default=None)


def is_right(found: Result) -> bool:
    return all(algorithm["right"] for algorithm in found["algorithms"].values())


def _median(time: Time) -> float:
    return time["median"]


def _time(name: str, work: Work, least: float, ranks: Sequence[Samples]) -> Time:
    """``least``: the roofline's milliseconds."""
    timing = summary(ranks)
    repetitions = list(zip(*(rank.seconds for rank in ranks), strict=True))
    seconds = timing.median / 1e3
    moves = name not in LOCAL and work.traffic > 0
    values: dict[str, Any] = {
        **asdict(timing),
        "skew": 1e3 * plain.median(max(each) - min(each) for each in repetitions),
        "samples": [1e3 * max(each) for each in repetitions],
        "tflops": work.flops / seconds / 1e12 if work.flops else None,
        "gb_per_s": work.traffic / seconds / 1e9 if moves else None,
        "roofline": least / timing.median,
    }
    return cast(Time, values)


def _algorithm(name: str, choice: Choice, times: Mapping[str, Time]) -> Algorithm:
    error = choice.verdict.ratio
    found: Algorithm = {
        "algorithm": choice.algorithm,
        "reason": choice.reason,
        "right": choice.verdict.right,
        "error_over_bound": error if math.isfinite(error) else None,
        "ect": None,
        "e_overlap": None,
        "speedup": {},
    }
    if name not in times:
        return found
    own, local = times[name]["samples"], gemm(times)
    found["speedup"] = {
        other: _speedup(paired(ratio, time["samples"], own))
        for other, time in times.items()
        if other != name
    }
    if local is not None:
        found["ect"] = paired(difference, own, local["samples"]).value
        if "unfused" in times:
            hidden = overlap(own, times["unfused"]["samples"], local["samples"])
            found["e_overlap"] = None if hidden is None else _interval(hidden)
    return found


def _interval(estimate: Estimate) -> Interval:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _speedup(estimate: Estimate) -> Speedup:
    return {**_interval(estimate), "verdict": estimate.verdict}
