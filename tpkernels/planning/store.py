"""The file that keeps a `Table`: one for each machine and topology, in the cache folder.

It is JSON, it is replaced as a whole, and nothing in it is taken on trust: who can have written it
(`cache.read_trusted`), the format's version, the machine, the versions of the software and every
value are checked, and a file in which anything is wrong is not used at all. The worst that a
well-formed file can do is to have a slower algorithm chosen.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from tpkernels import dtypes
from tpkernels.cache import cache_folder, locked, make_folder, read_trusted, replace_file
from tpkernels.planning.machine import Machine, versions
from tpkernels.planning.table import Measurement, Series, Table
from tpkernels.text import shown

FORMAT = "tpkernels tuning 2"
_MOST_BYTES = 1 << 20  # a case takes some 300
_MOST_MS = 1e9
_MOST_COUNT = 1 << 63
_LOCK_SECONDS = 10.0  # an update takes milliseconds
_DTYPES = frozenset(map(dtypes.name, dtypes.CODES))


def path_for(machine: Machine) -> Path:
    """Where the table of a machine is kept. ``RuntimeError`` for a user without a home."""
    return cache_folder() / machine.file_name


def load(machine: Machine) -> tuple[Table, str]:
    """The table of a machine, empty where there is none, and why a file that is there is ignored:
    a warning for the user, "" for none."""
    try:
        path = path_for(machine)
    except RuntimeError:
        return Table(), ""
    try:
        return parse(read_trusted(path, most=_MOST_BYTES), machine), ""
    except FileNotFoundError:
        return Table(), ""
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        why = str(error)
    hint = "`tpkernels tune` writes a new one"
    return Table(), f"the tuning cache {path} is ignored: {why}. {hint}."


def load_or_warn(machine: Machine) -> Table:
    """The table of a machine; a ``RuntimeWarning`` where a file is ignored."""
    table, ignored = load(machine)
    if ignored:
        warnings.warn(ignored, RuntimeWarning, stacklevel=2)
    return table


def update(machine: Machine, *new: Measurement) -> tuple[Path, Table]:
    """Adds measurements to the table of a machine, in place of what it had of the same cases.
    Returns where the table is and what it holds now. Processes that update at once take turns.

    Raises:
        OSError: the file cannot be written, or another process kept it locked.
    """
    path = path_for(machine)
    make_folder(path.parent)
    with locked(path.with_suffix(".lock"), seconds=_LOCK_SECONDS):
        table = load_or_warn(machine)
        for one in new:
            table = table.with_measurement(one)
        content = {
            "format": FORMAT,
            "machine": asdict(machine),
            "versions": versions(),
            "measurements": to_json(table),
        }
        replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
    return path, table


def to_json(table: Table) -> list[dict[str, Any]]:
    """The measurements as JSON has them."""
    return [asdict(one) for one in table.measurements]


def parse(content: bytes, machine: Machine) -> Table:
    """The table in a file's content. ``ValueError`` or ``RecursionError`` where it is not one of
    ``machine`` with today's versions."""
    try:
        found = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError("it is no text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    _same(found, "format", FORMAT)
    for name, value in asdict(machine).items():
        _same(_member(found, "machine", dict), name, value)
    for name, value in versions().items():
        _same(_member(found, "versions", dict), name, value)
    return from_json(_member(found, "measurements", list))


def from_json(found: Iterable[Any]) -> Table:
    """The table of checked measurements. ``ValueError`` where one is none."""
    return Table(tuple(_measurement(one) for one in found))


def _measurement(found: Any) -> Measurement:
    series = _member(found, "series", dict)
    times = _member(found, "ms", dict)
    for name, ms in times.items():
        if type(ms) not in (int, float) or not 0 < ms < _MOST_MS:
            raise ValueError(f"the time of {shown(name)} is {shown(ms)}")
    day = _member(found, "date", str)
    try:
        date.fromisoformat(day)
    except ValueError as error:
        raise ValueError(f"a date is {shown(day)}") from error
    options = _member(series, "options", list)
    if not all(isinstance(option, str) for option in options):
        raise ValueError(f"options are {shown(options)}")
    dtype = _member(series, "dtype", str)
    if dtype not in _DTYPES:
        raise ValueError(f"a dtype is {shown(dtype)}")
    return Measurement(
        Series(
            op=_member(series, "op", str),
            device=_member(series, "device", str),
            world=_count(series, "world", 2),
            width=_count(series, "width", 1),
            dtype=dtype,
            options=tuple(options),
        ),
        extent=_count(found, "extent", 1),
        other=_count(found, "other", 0),
        ms=times,
        date=day,
        config=tuple(map(_field, _member(found, "config", list))),
    )


def _field(found: Any) -> tuple[str, int]:
    """A field of a kernel's config. Whether there is such a config is for the kernels to know."""
    if not isinstance(found, list) or [type(each) for each in found] != [str, int]:
        raise ValueError(f"a field of a config is {shown(found)}")
    return found[0], found[1]


def _member(found: Any, name: str, kind: type) -> Any:
    if not isinstance(found, dict) or type(found.get(name)) is not kind:
        raise ValueError(f"'{name}' is missing, or no {kind.__name__}")
    return found[name]


def _count(found: dict[str, Any], name: str, least: int) -> int:
    value: int = _member(found, name, int)
    if not least <= value < _MOST_COUNT:
        raise ValueError(f"'{name}' is {shown(value)}")
    return value


def _same(found: Any, name: str, expected: object) -> None:
    value = _member(found, name, type(expected))
    if value != expected:
        raise ValueError(f"{name} is {shown(value)}, here it is {expected!r}")
