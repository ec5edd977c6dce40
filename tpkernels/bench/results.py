"""Results of `tpkernels bench`: a row per case and variant, stored as JSON lines.

The first line of a file is the `Run`, and each further line is a `Row`. Lines are written when a
case is finished, so an interrupted run keeps the finished cases. Statistics are medians and
quartiles over repetitions. The time of a repetition is the time of its slowest rank.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from tpkernels import _C
from tpkernels.bench.measuring import CaseReport
from tpkernels.bench.sweep import Item, Method
from tpkernels.common import dtypes
from tpkernels.common.text import all_printable, shorten
from tpkernels.launch.terminal import UsageError, read_input
from tpkernels.planning import machine
from tpkernels.planning.cost import Rates
from tpkernels.planning.records import from_json

FORMAT = "tpkernels-bench/5"
_MAX_BYTES = 256 << 20  # file size limit; a row has about 1 KiB
_MAX_MESSAGE = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Run:
    """Method and environment of the rows in a file."""

    format: str
    date: str
    command: str
    method: Method
    environment: dict[str, str | int | float | bool | list[int] | list[str] | None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of a variant (a requested algorithm or a baseline) on a case."""

    case: str  #: name of the case, identical in every run
    op: str
    shape: list[int] | None  #: M, N, K over all ranks; None for a collective
    bytes: int  #: size of the tensor that is sent, over all ranks
    dtype: str
    tp: int
    labels: list[str]  #: model projections with this shape
    flops: int  #: flops of the busiest rank; ``traffic`` and ``touched`` also count that rank
    traffic: int  #: bytes from peers
    touched: int  #: bytes read or written, ``traffic`` included
    peak_flops: float  #: per second, on every rank while all ranks multiply
    copy_bytes: float  #: per second, reads plus writes, on every rank while all ranks copy
    inputs_over_cache: float  #: size of all input copies; below 2, inputs may be in the cache
    variant: str  #: the requested algorithm, or the baseline
    algorithm: str  #: selected algorithm
    reason: str  #: reason of the plan, or reason why a baseline was skipped
    status: str  #: "timed", "wrong" or "left out"
    error_over_bound: float | None
    ms: list[float]  #: mean of ``calls`` calls on the slowest rank, for each repetition
    calls: int
    q1: float | None
    median: float | None
    q3: float | None
    roofline: float | None  #: roofline time / median
    #: Quartiles of the speed-up over each of the other variants, with ratios per repetition.
    speedup: dict[str, list[float]]
    e_overlap: float | None  #: see `overlap`

    def __post_init__(self) -> None:
        if (self.status == "timed") != bool(self.ms) or not all(ms > 0 for ms in self.ms):
            raise ValueError(f"status {self.status!r} does not fit ms={self.ms[:3]}")


def make_rows(item: Item, rates: Rates, reports: Sequence[CaseReport]) -> list[Row]:
    """Compute the rows of a case from the reports of all ranks."""
    spec, first, cost = item.spec, reports[0], item.spec.cost(item.world)
    times = {
        name: 1e3 * np.max([report.samples[name].seconds for report in reports], axis=0)
        for name in first.samples
    }
    local, min_ms = times.get("local_matmul"), 1e3 * rates.roofline_seconds(cost)
    if local is not None:  # the machine may have been slower during the probe
        min_ms = min(min_ms, float(local.min()))
    case: dict[str, Any] = {
        "case": item.key,
        "op": spec.op,
        "shape": list(spec.shape) if spec.op_spec.has_matmul else None,
        "bytes": spec.problem(item.world).nbytes,
        "dtype": dtypes.name(spec.dtype),
        "tp": item.world,
        "labels": list(item.labels),
        **asdict(cost),
        "peak_flops": rates.flops,
        "copy_bytes": rates.copy_bytes,
        "inputs_over_cache": min(report.inputs_over_cache for report in reports),
    }
    rows = []
    for name in dict.fromkeys([*first.choices, *times, *first.skipped]):
        row: dict[str, Any] = dict(case, variant=name, algorithm="", ms=[], calls=0, speedup={})
        row |= dict.fromkeys(("error_over_bound", "q1", "median", "q3", "roofline", "e_overlap"))
        row |= {"status": "left out", "reason": first.skipped.get(name, "")}
        if choice := first.choices.get(name):
            row |= {"status": "wrong", "algorithm": choice.algorithm, "reason": choice.reason}
            if math.isfinite(choice.error_over_bound):
                row["error_over_bound"] = choice.error_over_bound
        if (ms := times.get(name)) is not None:
            row |= zip(("q1", "median", "q3"), quartiles(ms), strict=True)
            row |= {"status": "timed", "ms": ms.tolist(), "calls": first.samples[name].calls}
            row["roofline"] = min_ms / row["median"]
            row["speedup"] = {base: quartiles(times[base] / ms) for base in times if base != name}
            if local is not None and "unfused" in times and name != "local_matmul":
                row["e_overlap"] = overlap(ms, times["unfused"], local)
        rows.append(Row(**row))
    return rows


def quartiles(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return np.percentile(values, [25, 50, 75]).tolist()


def overlap(op: ArrayLike, unfused: ArrayLike, local: ArrayLike) -> float | None:
    """Return E_overlap (Flux, arXiv:2406.06858), the fraction of the exposed communication time of
    unfused that the op hides. 1: all, 0: as fast as unfused, below 0: slower than unfused.

    None if unfused is not clearly slower than the local matmul, so it has no exposed communication.
    """
    op, unfused, local = map(np.asarray, (op, unfused, local))
    if quartiles(unfused - local)[0] <= 0:
        return None
    return float(1 - (np.median(op) - np.median(local)) / (np.median(unfused) - np.median(local)))


def group_by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Group rows by case, then variant."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.variant] = row
    return cases


# Files.


def create_run(method: Method) -> Run:
    """Return the `Run` of this process, with the current time and the machine."""
    environment = {
        **machine.versions(),
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu": machine.processor(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "vector_unit": _C.host.vector_unit(),
        "last_level_cache_bytes": machine.last_level_cache_bytes(method.device),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    return Run(
        format=FORMAT,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["tpkernels", *sys.argv[1:]]),
        method=method,
        environment=all_printable(environment),
    )


def line(record: Run | Row) -> str:
    """Return the JSON line of a record."""
    return json.dumps(asdict(record), allow_nan=False) + "\n"


def load(path: Path) -> tuple[Run, list[Row]]:
    """Read a file. Control characters in strings are escaped. ``UsageError`` if it is invalid."""
    content, records = read_input(path, max_bytes=_MAX_BYTES), list[Any]()
    try:
        for json_line in content.splitlines() or [b"null"]:
            value = all_printable(json.loads(json_line))
            if not records and not (isinstance(value, dict) and value.get("format") == FORMAT):
                raise ValueError(f"expected a run of format '{FORMAT}'")
            records.append(from_json(Row if records else Run, value))
    except (ValueError, RecursionError) as error:
        reason = shorten(str(error), _MAX_MESSAGE)
        raise UsageError(f"'{path}' line {len(records) + 1}: {reason}; measure again") from error
    return records[0], records[1:]
