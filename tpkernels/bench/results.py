"""Results of `tpkernels bench`: computed from the ranks' reports, kept as JSON, and read again.

Times are milliseconds, each repetition counting with its slowest rank's time. The file is replaced
as a whole after every case: a run that dies loses at most the case it was measuring.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics as plain
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tpkernels import _C
from tpkernels.bench.measuring import LOCAL, CaseReport, Choice
from tpkernels.bench.statistics import Estimate, Speedup, difference, overlap, paired, ratio
from tpkernels.bench.sweep import Item, Method, Sweep
from tpkernels.cache import locked, replace_file
from tpkernels.dtypes import name as dtype_name
from tpkernels.launch.session import is_leader, under_torchrun
from tpkernels.planning import machine
from tpkernels.planning.cost import Cost, Rates
from tpkernels.planning.machine import last_level_cache_bytes, processor
from tpkernels.records import from_json
from tpkernels.symm.limits import available_bytes
from tpkernels.terminal import UsageError, make_output_folder, read_input, writable, writing
from tpkernels.text import all_printable, short, shown
from tpkernels.timing import Samples, Timing, summary

FORMAT = "tpkernels-bench/4"
_MOST_BYTES = 256 << 20  # a case takes about 10 KiB
_MOST_MESSAGE = 300  # characters


@dataclass(frozen=True)
class Time(Timing):
    """The times of one variant, all samples, and derived values.

    ``skew``: median difference between the slowest and the fastest rank. ``tflops`` and
    ``gb_per_s`` (of the bytes from peers): at the median, None without a matmul or without
    communication. ``roofline``: the roofline's time over the median.
    """

    skew: float
    samples: list[float]
    tflops: float | None
    gb_per_s: float | None
    roofline: float


@dataclass(frozen=True, kw_only=True)
class Algorithm:
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
    e_overlap: Estimate | None
    speedup: dict[str, Speedup]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case.

    ``shape``: M, N, K before the split, None for a collective. ``bytes``: size of the whole tensor
    that travels. ``flops`` and ``traffic`` (bytes from peers): of the busiest rank.
    ``inputs_over_cache``: bytes of all input copies over the last-level cache, on the rank with the
    least; below `cases.COLD` inputs may have been cached. ``roofline``: milliseconds at the
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

    @property
    def is_right(self) -> bool:
        """Return whether every requested algorithm's result is right."""
        return all(algorithm.right for algorithm in self.algorithms.values())


@dataclass(frozen=True)
class Roofline:
    """The rates that every rank reaches while all ranks run the probes."""

    tp: int
    dtype: str
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that contributed, with the system's load when it began."""

    date: str
    command: str
    load: list[float]


@dataclass(kw_only=True)
class Report:
    """The content of a file. ``sweep``: what runs must have in common, besides the cases, to share
    it. ``cases``: all cases of the sweep, measured or not."""

    format: str
    complete: bool
    sweep: Method
    cases: list[str]
    environment: dict[str, str | int | float | bool | list[int] | list[str] | None]
    runs: list[Run]
    rooflines: list[Roofline]
    results: list[Result]

    @property
    def done(self) -> set[str]:
        """Return the cases that are measured."""
        return {result.case for result in self.results}


def result(item: Item, rates: Rates, reports: Sequence[CaseReport]) -> Result:
    """Compute the result of a case from the reports of all ranks."""
    spec, first = item.spec, reports[0]
    cost = spec.cost(item.world)
    ranks = {name: [report.samples[name] for report in reports] for name in first.samples}
    # The machine may have been slower during the probe than during the case.
    fastest = [summary(ranks[name]).min for name in LOCAL if name in ranks]
    least = min([1e3 * rates.least_seconds(cost), *fastest])
    times = {name: _time(name, cost, least, samples) for name, samples in ranks.items()}
    return Result(
        case=item.key,
        op=spec.op,
        shape=list(spec.shape) if spec.op_spec.has_matmul else None,
        bytes=spec.problem(item.world).nbytes,
        dtype=dtype_name(spec.dtype),
        tp=item.world,
        labels=list(item.labels),
        flops=cost.flops,
        traffic=cost.traffic,
        inputs_over_cache=min(report.inputs_over_cache for report in reports),
        roofline=least,
        algorithms={
            name: _algorithm(name, choice, times) for name, choice in first.choices.items()
        },
        times=times,
        left_out=first.left_out,
    )


def gemm(times: Mapping[str, Time]) -> Time | None:
    """Return the times of the faster local matmul, which no fused op can beat."""
    local = (times[name] for name in LOCAL if name in times)
    return min(local, key=lambda time: time.median, default=None)


def _time(name: str, cost: Cost, least: float, ranks: Sequence[Samples]) -> Time:
    """Compute the statistics of a variant. ``least``: milliseconds of the roofline."""
    timing = summary(ranks)
    repetitions = list(zip(*(rank.seconds for rank in ranks), strict=True))
    median = timing.median / 1e3
    moves = name not in LOCAL and cost.traffic > 0
    return Time(
        **asdict(timing),
        skew=1e3 * plain.median(max(seconds) - min(seconds) for seconds in repetitions),
        samples=[1e3 * max(seconds) for seconds in repetitions],
        tflops=cost.flops / median / 1e12 if cost.flops else None,
        gb_per_s=cost.traffic / median / 1e9 if moves else None,
        roofline=least / timing.median,
    )


def _algorithm(name: str, choice: Choice, times: Mapping[str, Time]) -> Algorithm:
    ect, hidden, speedup, local = None, None, {}, gemm(times)
    if name in times:
        samples = times[name].samples
        speedup = {
            other: Speedup.of(paired(ratio, time.samples, samples))
            for other, time in times.items()
            if other != name
        }
        if local is not None:
            ect = paired(difference, samples, local.samples).value
            if "unfused" in times:
                hidden = overlap(samples, times["unfused"].samples, local.samples)
    error = choice.verdict.ratio
    return Algorithm(
        algorithm=choice.algorithm,
        reason=choice.reason,
        right=choice.verdict.right,
        error_over_bound=error if math.isfinite(error) else None,
        ect=ect,
        e_overlap=hidden,
        speedup=speedup,
    )


# Files.


@contextmanager
def result_file(out: Path | None, json_file: Path | None, *, resume: bool) -> Iterator[Path | None]:
    """Open the file to write, checked to be writable; None if none was requested.

    Only the leader writes it, and no other run can write it until the block is left.
    """
    if out is not None and is_leader():
        make_output_folder(out)
    path = json_file or (out and out / "bench.json")
    if path is None and resume:
        raise UsageError("--resume needs the --out or --json of the run to resume")
    if path is None or not is_leader():
        yield path
        return
    with ExitStack() as stack:
        with writing(path):
            stack.enter_context(locked(path.with_name(f".{path.name}.lock"), seconds=1))
        yield writable(path)


def new_report(sweep: Sweep) -> Report:
    """Return a report without results."""
    run = Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["tpkernels", *sys.argv[1:]]),
        load=list(os.getloadavg()),
    )
    return Report(
        format=FORMAT,
        complete=False,
        sweep=sweep.method,
        cases=[item.key for item in sweep.items],
        environment=all_printable(environment(sweep.method.device)),
        runs=[run],
        rooflines=[],
        results=[],
    )


def resumed(path: Path, fresh: Report) -> Report:
    """Read the report to continue; return ``fresh`` if there is no such file.

    Raises:
        UsageError: the file is invalid or belongs to another sweep or machine.
    """
    if not path.exists():
        return fresh
    report = load(path)
    old, new = ({**each.environment, **asdict(each.sweep)} for each in (report, fresh))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise UsageError(
                f"cannot resume '{path}': its {name} is {shown(old.get(name))}, here it is "
                f"{shown(new.get(name))}; choose another --out or omit --resume"
            )
    different = sorted(set(report.cases) ^ set(fresh.cases))
    if different:
        raise UsageError(
            f"cannot resume '{path}': {len(different)} cases differ, such as "
            f"{short(different[0], 100)}; choose another --out or omit --resume"
        )
    report.runs += fresh.runs
    return report


def save(report: Report, path: Path) -> None:
    """Write the file atomically. ``UsageError`` if that fails."""
    text = json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"
    with writing(path):
        replace_file(path, text.encode(), private=False)


def load(path: Path) -> Report:
    """Read a report; control characters in its texts are escaped. ``UsageError`` if it is
    invalid."""
    content = read_input(path, most=_MOST_BYTES)
    try:
        return _parse(content)
    except ValueError as error:
        raise UsageError(f"'{path}' {error}; measure again") from error


def _parse(content: bytes) -> Report:
    try:
        data = json.loads(content)
    except RecursionError as error:
        raise ValueError("is not readable JSON: it is nested too deeply") from error
    except ValueError as error:  # also a number of more digits than Python converts
        raise ValueError(f"is not JSON: {error}") from error
    name = data.get("format") if isinstance(data, dict) else None
    if name != FORMAT:
        found = "no format" if name is None else f"format {shown(name)}"
        raise ValueError(f"is not a result of this `tpkernels bench`: {found}, not '{FORMAT}'")
    try:
        report = from_json(Report, all_printable(data))
        for result in report.results:
            _require_consistent(result, report.sweep.algorithms)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is damaged: {short(str(error), _MOST_MESSAGE)}") from error
    return report


def _require_consistent(result: Result, algorithms: Sequence[str]) -> None:
    """Check that every right algorithm, and no other, has times, as many as all."""
    case, times = f"case {shown(result.case)}", result.times
    for name in algorithms:
        if name not in result.algorithms:
            raise ValueError(f"{case} has no entry for algorithm {name}")
    for name, algorithm in result.algorithms.items():
        if algorithm.right != (name in times):
            raise ValueError(f"{case} has {'no' if algorithm.right else 'a'} time for {name}")
    counts = {name: len(time.samples) for name, time in times.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise ValueError(f"{case} has unequal numbers of samples: {counts}")


# Machines.


def environment(device: str) -> dict[str, Any]:
    """Collect what stays the same between runs on a machine."""
    hardware = devices()
    del hardware["available_bytes"]
    return {
        **versions(),
        **hardware,
        "vector_unit": vector_units()["in_use"],
        "last_level_cache_bytes": last_level_cache_bytes(device),
        "launcher": "torchrun" if under_torchrun() else "spawned",
    }


def versions() -> dict[str, str]:
    """Return those of tpkernels, torch, Triton, Python and the kernel."""
    system = f"{platform.system()} {platform.release()}"
    return {**machine.versions(), "python": platform.python_version(), "kernel": system}


def vector_units() -> dict[str, Any]:
    """Return the instruction sets of the extension's loops, those that multiplied wrongly when
    tried, and why AMX cannot be used ("": it can)."""
    return {
        "in_use": _C.host.vector_unit(),
        "available": _C.host.vector_units(),
        "failed": _C.host.failed_vector_units(),
        "amx_refused": _C.host.amx_refused(),
    }


def devices() -> dict[str, Any]:
    """Return the processor, memory in bytes, and the GPUs that torch sees."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_bytes(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
