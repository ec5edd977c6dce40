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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tpkernels import _C, dtypes
from tpkernels.bench.measuring import LOCAL, CaseReport, Choice
from tpkernels.bench.statistics import Estimate, Speedup, difference, overlap, paired, ratio
from tpkernels.bench.sweep import Item, Sweep
from tpkernels.cache import locked, replace_file
from tpkernels.launch.session import is_leader, under_torchrun
from tpkernels.planning.cost import Cost, Rates
from tpkernels.planning.machine import last_level_cache_bytes, processor
from tpkernels.records import from_json
from tpkernels.symm.limits import available_bytes
from tpkernels.terminal import UsageError, make_output_folder, read_input, writable, writing
from tpkernels.text import all_printable, short, shown
from tpkernels.timing import Samples, Timing, summary
from tpkernels.version import VERSION

FORMAT = "tpkernels-bench/3"
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

    @property
    def is_right(self) -> bool:
        """Return whether every requested algorithm's result is right."""
        return all(algorithm.right for algorithm in self.algorithms.values())

    @property
    def gemm(self) -> Time | None:
        """Return the times of the faster local matmul, which no fused op can beat."""
        return gemm(self.times)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The rates that every rank reaches while all ranks run the probes: see `Rates`."""

    tp: int
    dtype: str
    tflops: float
    torch_tflops: float
    copy_gb_per_s: float
    copy_over_cache: float

    @classmethod
    def of(cls, world: int, dtype: str, rates: Rates) -> Roofline:
        """Return the entry for the rates of ``world`` ranks."""
        return cls(
            tp=world,
            dtype=dtype,
            tflops=rates.flops / 1e12,
            torch_tflops=rates.torch_flops / 1e12,
            copy_gb_per_s=rates.copy_bytes / 1e9,
            copy_over_cache=rates.copy_over_cache,
        )

    @property
    def rates(self) -> Rates:
        """Return the rates in the entry."""
        return Rates(
            flops=self.tflops * 1e12,
            torch_flops=self.torch_tflops * 1e12,
            copy_bytes=self.copy_gb_per_s * 1e9,
            copy_over_cache=self.copy_over_cache,
        )


@dataclass(frozen=True, kw_only=True)
class SweepFacts:
    """What runs must have in common, besides the cases, to share a file."""

    algorithms: list[str]
    threads: int
    device: str
    repeat: int
    seconds: float | None
    cold: bool
    baselines: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that contributed, with the system's load when it began."""

    date: str
    command: str
    load: list[float]


@dataclass(kw_only=True)
class Report:
    """The content of a file. ``cases``: all cases of the sweep, measured or not."""

    format: str
    complete: bool
    sweep: SweepFacts
    cases: list[str]
    environment: dict[str, str | int | float | bool | list[int] | list[str] | None]
    runs: list[Run]
    rooflines: list[Roofline]
    results: list[Result]


def key(item: Item) -> str:
    """Return the name of a case, the same in every run."""
    spec = item.spec
    size = "x".join(map(str, spec.shape))
    return f"{spec.op} {size} {dtypes.name(spec.dtype)} tp{item.world}"


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
        case=key(item),
        op=spec.op,
        shape=list(spec.shape) if spec.op_spec.has_matmul else None,
        bytes=spec.problem(item.world).nbytes,
        dtype=dtypes.name(spec.dtype),
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
    """Return the faster local matmul."""
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
    ect, hidden, speedup = None, None, {}
    if name in times:
        samples, local = times[name].samples, gemm(times)
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
    return Report(
        format=FORMAT,
        complete=False,
        sweep=SweepFacts(
            algorithms=list(sweep.algorithms),
            threads=sweep.threads,
            device=sweep.device,
            **asdict(sweep.effort),
        ),
        cases=[key(item) for item in sweep.items],
        environment=all_printable(environment(sweep.device)),
        runs=[
            Run(
                date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                command=shlex.join(["tpkernels", *sys.argv[1:]]),
                load=list(os.getloadavg()),
            )
        ],
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
    for old, new in (
        (report.environment, fresh.environment),
        (asdict(report.sweep), asdict(fresh.sweep)),
    ):
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


def load(path: Path) -> Report:
    """Read a report; control characters in its texts are escaped. ``UsageError`` if it is
    invalid."""
    content = read_input(path, most=_MOST_BYTES)
    try:
        return _parse(content)
    except ValueError as error:
        raise UsageError(f"'{path}' {error}; measure again") from error


def save(report: Report, path: Path) -> None:
    """Write the file atomically. ``UsageError`` if that fails."""
    text = json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"
    with writing(path):
        replace_file(path, text.encode(), private=False)


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
        _require_consistent(report)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is damaged: {short(str(error), _MOST_MESSAGE)}") from error
    return report


def _require_consistent(report: Report) -> None:
    """Check that every right result, and no other, has times, as many as all."""
    for result in report.results:
        case, times = f"case {shown(result.case)}", result.times
        for name in report.sweep.algorithms:
            if name not in result.algorithms:
                raise ValueError(f"{case} has no entry for algorithm {name}")
        for name, algorithm in result.algorithms.items():
            if algorithm.right != (name in times):
                has = "no" if algorithm.right else "a"
                raise ValueError(f"{case} has {has} time for {name}")
        counts = {name: len(time.samples) for name, time in times.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ValueError(f"{case} has unequal numbers of samples: {counts}")


def environment(device: str) -> dict[str, Any]:
    """Collect what stays the same between runs on a machine."""
    machine = devices()
    del machine["available_bytes"]
    return {
        **versions(),
        **machine,
        "vector_unit": vector_units()["in_use"],
        "last_level_cache_bytes": last_level_cache_bytes(device),
        "launcher": "torchrun" if under_torchrun() else "spawned",
    }


def versions() -> dict[str, str]:
    """Return those of tpkernels, torch, Python and the kernel."""
    return {
        "tpkernels": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def vector_units() -> dict[str, Any]:
    """Return the instruction sets of the extension's loops."""
    return {"in_use": _C.host.vector_unit(), "available": _C.host.vector_units()}


def devices() -> dict[str, Any]:
    """Return the processor, memory in bytes, and the GPUs that torch sees."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_bytes(),
        "gpus": names,
    }
