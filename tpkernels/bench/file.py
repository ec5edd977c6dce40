"""The result file: validated when read, replaced as a whole after every case.

A run that dies loses at most the case it was measuring. A file is valid if it obeys schema.json and
does not contradict itself.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from tpkernels.bench import info
from tpkernels.bench.results import Report, Result, key
from tpkernels.bench.sweep import Sweep
from tpkernels.cache import locked, replace_file
from tpkernels.launch.session import is_leader, under_torchrun
from tpkernels.op_spec import OPS
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.machine import last_level_cache_bytes
from tpkernels.terminal import UsageError, make_output_folder, read_input, writable, writing
from tpkernels.text import all_printable, printable, short, shown

FORMAT = "tpkernels-bench/3"
_MOST_BYTES = 256 << 20  # a case takes about 10 KiB
_MOST_NUMBER = 1e30  # larger numbers were not measured
_MOST_MESSAGE = 300  # characters


@contextmanager
def result_file(out: Path | None, json_file: Path | None, *, resume: bool) -> Iterator[Path | None]:
    """The file to write, checked to be writable; None if none was requested.

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
    """A report without results."""
    return {
        "format": FORMAT,
        "complete": False,
        "sweep": sweep.facts(),
        "cases": [key(item) for item in sweep.items],
        "environment": all_printable(_environment(sweep.device)),
        "runs": [_run()],
        "rooflines": [],
        "results": [],
    }


def resumed(path: Path, fresh: Report) -> Report:
    """The report in ``path``, to be continued; ``fresh`` if there is no such file.

    Raises:
        UsageError: the file is invalid or belongs to another sweep or machine.
    """
    if not path.exists():
        return fresh
    report = load(path)
    for part in ("environment", "sweep"):
        old, new = report[part], fresh[part]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                raise UsageError(
                    f"cannot resume '{path}': its {name} is {shown(old.get(name))}, here it is "
                    f"{shown(new.get(name))}; choose another --out or omit --resume"
                )
    different = sorted(set(report["cases"]) ^ set(fresh["cases"]))
    if different:
        raise UsageError(
            f"cannot resume '{path}': {len(different)} cases differ, such as "
            f"{short(different[0], 100)}; choose another --out or omit --resume"
        )
    report["runs"] = [*report["runs"], *fresh["runs"]]
    return report


def load(path: Path) -> Report:
    """The report in a file. ``UsageError`` if it is invalid."""
    content = read_input(path, most=_MOST_BYTES)
    try:
        return parse(content)
    except ValueError as error:
        raise UsageError(f"'{path}' {error}; measure again") from error


def save(report: Report, path: Path) -> None:
    """Writes the file atomically. ``UsageError`` if that fails."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    with writing(path):
        replace_file(path, text.encode(), private=False)


def parse(content: bytes) -> Report:
    """The report in a file's content. Control characters in its texts are escaped.

    Raises:
        ValueError: the content is not a valid report.
    """
    try:
        data = json.loads(content, parse_int=_integer, parse_float=_real, parse_constant=_real)
        _check_format(data)
        _check_schema(data)
    except RecursionError as error:
        raise ValueError("is not readable JSON: it is nested too deeply") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    _check_consistency(data)
    report: Report = all_printable(data)
    return report


def _integer(text: str) -> int:
    _real(text)
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not abs(value) <= _MOST_NUMBER:
        raise ValueError(f"is damaged: {short(text, 40)} is not a measured number")
    return value


def _check_format(data: Any) -> None:
    given = data.get("format") if isinstance(data, dict) else None
    if given != FORMAT:
        has = "no format" if given is None else f"format {shown(given)}"
        raise ValueError(f"is not a result of this `tpkernels bench`: {has}, not '{FORMAT}'")


def _check_schema(data: Any) -> None:
    error = next(_validator().iter_errors(data), None)
    if error is not None:
        where, what = printable(error.json_path), printable(error.message)
        raise ValueError(f"is damaged: {short(f'{where}: {what}', _MOST_MESSAGE)}")


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    schema = resources.files("tpkernels.bench").joinpath("schema.json").read_text("utf-8")
    return Draft202012Validator(json.loads(schema))


def _check_consistency(report: Report) -> None:
    """Relations between values, which a schema cannot express."""
    expected, cases = set(report["cases"]), set[str]()
    for result in report["results"]:
        if result["case"] in cases:
            raise _inconsistent(result["case"], "appears more than once")
        if result["case"] not in expected:
            raise _inconsistent(result["case"], "is not among the cases of the sweep")
        cases.add(result["case"])
    missing = [case for case in report["cases"] if case not in cases]
    if report["complete"] and missing:
        raise _inconsistent(missing[0], "has no result, though the file is marked complete")
    for result in report["results"]:
        _check_result(result, report["sweep"]["algorithms"])


def _check_result(result: Result, requested: list[str]) -> None:
    case, algorithms, times = result["case"], result["algorithms"], result["times"]
    if OPS[result["op"]].has_matmul != (result["shape"] is not None):
        raise _inconsistent(case, f"has op {result['op']} and shape {result['shape']}")
    for name in requested:
        if name not in algorithms:
            raise _inconsistent(case, f"has no entry for algorithm {name}")
    right = {name for name, one in algorithms.items() if one["right"]}
    mismatched = right ^ (times.keys() & {"auto", *ALGORITHMS})
    if mismatched:
        name = min(mismatched)
        has = "no time" if name in right else "a time"
        raise _inconsistent(case, f"has {has} for {name}; exactly the right results are timed")
    counts = {name: len(time["samples"]) for name, time in times.items()}
    if len({*counts.values(), *(time["iterations"] for time in times.values())}) > 1:
        raise _inconsistent(case, f"has unequal numbers of samples: {counts}")


def _inconsistent(case: str, what: str) -> ValueError:
    return ValueError(f"is damaged: {short(f'case {shown(case)} {what}', _MOST_MESSAGE)}")


def _environment(device: str) -> dict[str, Any]:
    """Facts that stay the same between runs on a machine."""
    devices = info.devices()
    del devices["available_bytes"]
    return {
        **info.versions(),
        **devices,
        "vector_unit": info.vector_units()["in_use"],
        "last_level_cache_bytes": last_level_cache_bytes(device),
        "launcher": "torchrun" if under_torchrun() else "spawned",
    }


def _run() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["tpkernels", *sys.argv[1:]]),
        "load": list(os.getloadavg()),
    }
