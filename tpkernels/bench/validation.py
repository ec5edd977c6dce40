"""Whether a file's content is a report: by schema.json, and by what a schema cannot say."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from tpkernels.bench.cases import MATMUL_OPS
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.text import all_printable, printable, short, shown

if TYPE_CHECKING:
    from tpkernels.bench.results import Report, Result

FORMAT = "tpkernels-bench/3"
_MOST_NUMBER = 1e30  # beyond it lies nothing that was measured
_MOST_MESSAGE = 300  # characters


def parse(content: bytes) -> Report:
    """The report in a file's content. Its texts can be printed: control characters are escaped.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(content, parse_int=_integer, parse_float=_real, parse_constant=_real)
        _check_format(found)
        _check_schema(found)
    except RecursionError as error:
        raise ValueError("is no JSON that can be read: it is nested too deeply") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    _check_rules(found)
    report: Report = all_printable(found)
    return report


def _integer(text: str) -> int:
    _real(text)
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not abs(value) <= _MOST_NUMBER:
        raise ValueError(f"is damaged: {short(text, 40)} is no number that was measured")
    return value


def _check_format(found: Any) -> None:
    there = found.get("format") if isinstance(found, dict) else None
    if there != FORMAT:
        has = "no format" if there is None else f"format {shown(there)}"
        raise ValueError(f"is no result of this `tpkernels bench`: {has}, not '{FORMAT}'")


def _check_schema(found: Any) -> None:
    error = next(_validator().iter_errors(found), None)
    if error is not None:
        where, what = printable(error.json_path), printable(error.message)
        raise ValueError(f"is damaged: {short(f'{where}: {what}', _MOST_MESSAGE)}")


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    schema = resources.files("tpkernels.bench").joinpath("schema.json").read_text("utf-8")
    return Draft202012Validator(json.loads(schema))


def _check_rules(report: Report) -> None:
    """What relates several values of a report that obeys the schema."""
    wanted, cases = set(report["cases"]), set[str]()
    for found in report["results"]:
        if found["case"] in cases:
            raise _inconsistent(found["case"], "is there more than once")
        if found["case"] not in wanted:
            raise _inconsistent(found["case"], "is not among the cases of the sweep")
        cases.add(found["case"])
    missing = [case for case in report["cases"] if case not in cases]
    if report["complete"] and missing:
        raise _inconsistent(missing[0], "has no result, though the file is marked complete")
    for found in report["results"]:
        _check_result(found, report["sweep"]["algorithms"])


def _check_result(found: Result, wanted: list[str]) -> None:
    case, algorithms, times = found["case"], found["algorithms"], found["times"]
    if (found["op"] in MATMUL_OPS) != (found["shape"] is not None):
        raise _inconsistent(case, f"has op {found['op']} and shape {found['shape']}")
    for name in wanted:
        if name not in algorithms:
            raise _inconsistent(case, f"has nothing about algorithm {name}")
    right = {name for name, one in algorithms.items() if one["right"]}
    odd = right ^ (times.keys() & {"auto", *ALGORITHMS})
    if odd:
        word = "no time" if min(odd) in right else "a time"
        raise _inconsistent(case, f"has {word} for {min(odd)}; what is right has one")
    counts = {name: len(time["samples"]) for name, time in times.items()}
    if len({*counts.values(), *(time["iterations"] for time in times.values())}) > 1:
        raise _inconsistent(case, f"has unequal numbers of samples: {counts}")


def _inconsistent(case: str, what: str) -> ValueError:
    return ValueError(f"is damaged: {short(f'case {shown(case)} {what}', _MOST_MESSAGE)}")
