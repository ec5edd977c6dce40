"""Results of `tpkernels bench`: one row per case and variant, kept as JSON lines.

The first line of a file describes the run (`Run`), each other line is a `Row`. Lines are written
as cases are finished, so an interrupted run keeps what it has measured. Statistics are medians and
quartiles over repetitions, each of which counts with the time of its slowest rank.
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
from tpkernels.common.text import all_printable, short
from tpkernels.launch.terminal import UsageError, read_input
from tpkernels.planning import machine
from tpkernels.planning.cost import Rates
from tpkernels.planning.records import from_json

FORMAT = "tpkernels-bench/5"
_MAX_BYTES = 256 << 20  # a row takes about 1 KiB
_MAX_MESSAGE = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Run:
    """How and where the rows of a file were measured."""

    format: str
    date: str
    command: str
    method: Method
    environment: dict[str, str | int | float | bool | list[int] | list[str] | None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one case: a requested algorithm or a baseline."""

    case: str  #: the name of the case, the same in every run
    op: str
    shape: list[int] | None  #: M, N, K over all ranks; None for a collective
    bytes: int  #: size of the tensor that is sent, over all ranks
    dtype: str
    tp: int
    labels: list[str]  #: the projections of models that this case is
    flops: int  #: of the busiest rank, as ``traffic`` and ``touched``
    traffic: int  #: bytes from peers
    touched: int  #: bytes read or written, ``traffic`` included
    peak_flops: float  #: per second, on every rank while all ranks multiply
    copy_bytes: float  #: per second, reads plus writes, on every rank while all ranks copy
    inputs_over_cache: float  #: size of all input copies; below 2, inputs may be in the cache
    variant: str  #: the requested algorithm, or the baseline
    algorithm: str  #: that the plan chose
    reason: str  #: of the plan, or why a baseline was left out
    status: str  #: "timed", "wrong" or "left out"
    error_over_bound: float | None
    ms: list[float]  #: of each repetition, the slowest rank's mean of ``calls`` calls
    calls: int
    q1: float | None
    median: float | None
    q3: float | None
    roofline: float | None  #: the least possible time over the median
    speedup: dict[str, list[float]]  #: quartiles over each baseline, paired by repetition
    e_overlap: float | None  #: see `overlap`

    def __post_init__(self) -> None:
        if (self.status == "timed") != bool(self.ms) or not all(ms > 0 for ms in self.ms):
            raise ValueError(f"status {self.status!r} does not fit ms={self.ms[:3]}")


def rows_of(item: Item, rates: Rates, reports: Sequence[CaseReport]) -> list[Row]:
    """Compute the rows of a case from the reports of all ranks."""
    spec, first, cost = item.spec, reports[0], item.spec.cost(item.world)
    times = {
        name: 1e3 * np.max([report.samples[name].seconds for report in reports], axis=0)
        for name in first.samples
    }
    local, least = times.get("local_matmul"), 1e3 * rates.least_seconds(cost)
    if local is not None:  # the machine may have been slower during the probe
        least = min(least, float(local.min()))
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
    for name in dict.fromkeys([*first.choices, *times, *first.left_out]):
        row: dict[str, Any] = dict(case, variant=name, algorithm="", ms=[], calls=0, speedup={})
        row |= dict.fromkeys(("error_over_bound", "q1", "median", "q3", "roofline", "e_overlap"))
        row |= {"status": "left out", "reason": first.left_out.get(name, "")}
        if choice := first.choices.get(name):
            row |= {"status": "wrong", "algorithm": choice.algorithm, "reason": choice.reason}
            if math.isfinite(choice.error_over_bound):
                row["error_over_bound"] = choice.error_over_bound
        if (ms := times.get(name)) is not None:
            row |= zip(("q1", "median", "q3"), quartiles(ms), strict=True)
            row |= {"status": "timed", "ms": ms.tolist(), "calls": first.samples[name].calls}
            row["roofline"] = least / row["median"]
            row["speedup"] = {one: quartiles(times[one] / ms) for one in times if one != name}
            if local is not None and "unfused" in times and name != "local_matmul":
                row["e_overlap"] = overlap(ms, times["unfused"], local)
        rows.append(Row(**row))
    return rows


def quartiles(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return np.percentile(values, [25, 50, 75]).tolist()


def overlap(op: ArrayLike, unfused: ArrayLike, local: ArrayLike) -> float | None:
    """Return E_overlap (Flux, arXiv:2406.06858), the fraction of the unfused op's exposed
    communication that the op hides: 1 all, 0 none, below 0 the op is slower than unfused.

    None if the unfused op is not clearly slower than the local matmul, and so exposes nothing.
    """
    op, unfused, local = map(np.asarray, (op, unfused, local))
    if quartiles(unfused - local)[0] <= 0:
        return None
    return float(1 - (np.median(op) - np.median(local)) / (np.median(unfused) - np.median(local)))


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows of each case by variant."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.variant] = row
    return cases


# Files.


def new_run(method: Method) -> Run:
    """Describe the run that starts now, and the machine."""
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
    """Read a file; control characters in its texts are escaped. ``UsageError`` if it is invalid."""
    content, records = read_input(path, most=_MAX_BYTES), list[Any]()
    try:
        for text in content.splitlines() or [b"null"]:
            value = all_printable(json.loads(text))
            if not records and not (isinstance(value, dict) and value.get("format") == FORMAT):
                raise ValueError(f"expected a run of format '{FORMAT}'")
            records.append(from_json(Row if records else Run, value))
    except (ValueError, RecursionError) as error:
        reason = short(str(error), _MAX_MESSAGE)
        raise UsageError(f"'{path}' line {len(records) + 1}: {reason}; measure again") from error
    return records[0], records[1:]
