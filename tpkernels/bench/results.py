"""The results in a file, computed from the ranks' reports. schema.json describes them.

Times are milliseconds, each repetition counting with its slowest rank's time.
"""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict, cast

from tpkernels import dtypes
from tpkernels.bench.baselines import LOCAL
from tpkernels.bench.measuring import CaseReport, Choice
from tpkernels.bench.roofline import Rates
from tpkernels.bench.statistics import Estimate, difference, overlap, paired, ratio
from tpkernels.bench.sweep import Item
from tpkernels.planning.cost import Cost
from tpkernels.timing import Samples, summary


class Interval(TypedDict):
    """A 95 % interval; None if there were too few repetitions."""

    value: float
    low: float | None
    high: float | None


class Speedup(Interval):
    """How many times as fast as a baseline; ``verdict`` says it in words."""

    verdict: str


class Time(TypedDict):
    """The times of one variant: the fields of `benchmark.Timing`, all samples, and derived values.

    ``skew``: median difference between the slowest and the fastest rank. ``tflops`` and
    ``gb_per_s`` (of the bytes from peers): at the median, None without a matmul or without
    communication. ``roofline``: the roofline's time over the median.
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
    skew: float
    samples: list[float]
    tflops: float | None
    gb_per_s: float | None
    roofline: float


class Algorithm(TypedDict):
    """One requested algorithm and, if its result was right, what its times say.

    ``ect``: effective communication time in ms, the median minus that of the faster local matmul.
    ``e_overlap``: see `statistics.overlap`; None if there is nothing to hide. ``speedup``: over
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
    """One case.

    ``shape``: M, N, K before the split, None for a collective. ``bytes``: size of the whole tensor
    that travels. ``flops`` and ``traffic`` (bytes from peers): of the busiest rank.
    ``inputs_over_cache``: bytes of all input copies over the last-level cache, on the rank with the
    least; below `inputs.COLD` inputs may have been cached. ``roofline``: milliseconds at the
    probes' rates, or of the case's fastest local matmul if that is less. ``left_out``: variants
    that were not run, with the reasons.
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
    """The rates that every rank reaches while all ranks run the probes: see `roofline.Rates`."""

    tp: int
    dtype: str
    tflops: float
    torch_tflops: float
    copy_gb_per_s: float
    copy_over_cache: float


class Report(TypedDict):
    """The content of a file. ``runs``: date, command and system load of each run that contributed;
    ``cases``: all cases of the sweep, measured or not."""

    format: str
    complete: bool
    sweep: dict[str, Any]
    cases: list[str]
    environment: dict[str, Any]
    runs: list[dict[str, Any]]
    rooflines: list[Roofline]
    results: list[Result]


def key(item: Item) -> str:
    """The name of a case, the same in every run."""
    spec = item.spec
    size = "x".join(map(str, spec.shape))
    return f"{spec.op} {size} {dtypes.name(spec.dtype)} tp{item.world}"


def result(item: Item, rates: Rates, reports: Sequence[CaseReport]) -> Result:
    """The result of a case from the reports of all ranks."""
    spec = item.spec
    cost = spec.cost(item.world)
    first = reports[0]
    ranks = {name: [report.samples[name] for report in reports] for name in first.samples}
    # The machine may have been slower during the probe than during the case.
    fastest = [summary(ranks[name]).min for name in LOCAL if name in ranks]
    least = min([1e3 * rates.least_seconds(cost), *fastest])
    times = {name: _time(name, cost, least, each) for name, each in ranks.items()}
    return {
        "case": key(item),
        "op": spec.op,
        "shape": list(spec.shape) if spec.has_matmul else None,
        "bytes": spec.problem(item.world).nbytes,
        "dtype": dtypes.name(spec.dtype),
        "tp": item.world,
        "labels": list(item.labels),
        "flops": cost.flops,
        "traffic": cost.traffic,
        "inputs_over_cache": min(report.inputs_over_cache for report in reports),
        "roofline": least,
        "algorithms": {
            name: _algorithm(name, choice, times) for name, choice in first.choices.items()
        },
        "times": times,
        "left_out": first.left_out,
    }


def roofline(world: int, dtype: str, rates: Rates) -> Roofline:
    """The entry for the rates of ``world`` ranks."""
    return {
        "tp": world,
        "dtype": dtype,
        "tflops": rates.flops / 1e12,
        "torch_tflops": rates.torch_flops / 1e12,
        "copy_gb_per_s": rates.copy_bytes / 1e9,
        "copy_over_cache": rates.copy_over_cache,
    }


def rates_of(entry: Roofline) -> Rates:
    """The rates in an entry."""
    return Rates(
        flops=entry["tflops"] * 1e12,
        torch_flops=entry["torch_tflops"] * 1e12,
        copy_bytes=entry["copy_gb_per_s"] * 1e9,
        copy_over_cache=entry["copy_over_cache"],
    )


def gemm(times: Mapping[str, Time]) -> Time | None:
    """The faster local matmul, which no fused op can beat."""
    return min((times[name] for name in LOCAL if name in times), key=_median, default=None)


def is_right(case: Result) -> bool:
    return all(algorithm["right"] for algorithm in case["algorithms"].values())


def _median(time: Time) -> float:
    return time["median"]


def _time(name: str, cost: Cost, least: float, ranks: Sequence[Samples]) -> Time:
    """``least``: milliseconds of the roofline."""
    timing = summary(ranks)
    repetitions = list(zip(*(rank.seconds for rank in ranks), strict=True))
    seconds = timing.median / 1e3
    moves = name not in LOCAL and cost.traffic > 0
    values: dict[str, Any] = {
        **asdict(timing),
        "skew": 1e3 * plain.median(max(each) - min(each) for each in repetitions),
        "samples": [1e3 * max(each) for each in repetitions],
        "tflops": cost.flops / seconds / 1e12 if cost.flops else None,
        "gb_per_s": cost.traffic / seconds / 1e9 if moves else None,
        "roofline": least / timing.median,
    }
    return cast(Time, values)


def _algorithm(name: str, choice: Choice, times: Mapping[str, Time]) -> Algorithm:
    error = choice.verdict.ratio
    entry: Algorithm = {
        "algorithm": choice.algorithm,
        "reason": choice.reason,
        "right": choice.verdict.right,
        "error_over_bound": error if math.isfinite(error) else None,
        "ect": None,
        "e_overlap": None,
        "speedup": {},
    }
    if name not in times:
        return entry
    own, local = times[name]["samples"], gemm(times)
    entry["speedup"] = {
        other: _speedup(paired(ratio, time["samples"], own))
        for other, time in times.items()
        if other != name
    }
    if local is not None:
        entry["ect"] = paired(difference, own, local["samples"]).value
        if "unfused" in times:
            hidden = overlap(own, times["unfused"]["samples"], local["samples"])
            entry["e_overlap"] = None if hidden is None else _interval(hidden)
    return entry


def _interval(estimate: Estimate) -> Interval:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _speedup(estimate: Estimate) -> Speedup:
    return {**_interval(estimate), "verdict": estimate.verdict}
