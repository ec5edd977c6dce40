"""The file that holds a `Table`: one per machine and topology, in the cache folder.

The file is JSON and is replaced as a whole. Nothing in it is trusted: its owner and permissions
(`cache.read_trusted`), the format version, the machine, the software versions and every value are
checked, and a file with any error is ignored entirely. The worst a well-formed file can do is to
select a slower algorithm.
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
_MOST_BYTES = 1 << 20  # a case takes about 300
_MOST_MS = 1e9
_MOST_COUNT = 1 << 63
_LOCK_SECONDS = 10.0  # an update takes milliseconds
_DTYPES = frozenset(map(dtypes.name, dtypes.CODES))


def path_for(machine: Machine) -> Path:
    """Return the file for a machine. ``RuntimeError`` if the user has no home."""
    return cache_folder() / machine.file_name


def load(machine: Machine) -> tuple[Table, str]:
    """A machine's table, empty if there is none, and a warning for the user if a file was ignored
    ("" if not)."""
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
    """A machine's table, with a ``RuntimeWarning`` if a file was ignored."""
    table, ignored = load(machine)
    if ignored:
        warnings.warn(ignored, RuntimeWarning, stacklevel=2)
    return table


def update(machine: Machine, *new: Measurement) -> tuple[Path, Table]:
    """Add measurements to a machine's table, replacing those of the same cases. Returns the file
    and the new table. Concurrent updates are serialised by a lock.

    Raises:
        OSError: the file cannot be written, or another process held its lock.
    """
    path = path_for(machine)
    make_folder(path.parent)
    with locked(path.with_suffix(".lock"), seconds=_LOCK_SECONDS):
        table = load_or_warn(machine)
        table = table.extended(new)
        content = {
            "format": FORMAT,
            "machine": asdict(machine),
            "versions": versions(),
            "measurements": to_json(table),
        }
        replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
    return path, table


def to_json(table: Table) -> list[dict[str, Any]]:
    """Return the measurements as JSON values."""
    return [asdict(one) for one in table.measurements]


def parse(content: bytes, machine: Machine) -> Table:
    """Return the table in a file's content. ``ValueError`` or ``RecursionError`` if it is not a
    table for ``machine`` and the current versions."""
    try:
        data = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError("it is not text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    _same(data, "format", FORMAT)
    for name, value in asdict(machine).items():
        _same(_member(data, "machine", dict), name, value)
    for name, value in versions().items():
        _same(_member(data, "versions", dict), name, value)
    return from_json(_member(data, "measurements", list))


def from_json(values: Iterable[Any]) -> Table:
    """Return the table of these measurements. ``ValueError`` if one is malformed."""
    return Table(tuple(_measurement(one) for one in values))


def _measurement(value: Any) -> Measurement:
    series = _member(value, "series", dict)
    times = _member(value, "ms", dict)
    for name, ms in times.items():
        if type(ms) not in (int, float) or not 0 < ms < _MOST_MS:
            raise ValueError(f"the time of {shown(name)} is {shown(ms)}")
    day = _member(value, "date", str)
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
        extent=_count(value, "extent", 1),
        other=_count(value, "other", 0),
        ms=times,
        date=day,
        config=tuple(map(_field, _member(value, "config", list))),
    )


def _field(value: Any) -> tuple[str, int]:
    """A field of a kernel's config. Whether that config exists is up to the kernels."""
    if not isinstance(value, list) or [type(each) for each in value] != [str, int]:
        raise ValueError(f"a field of a config is {shown(value)}")
    return value[0], value[1]


def _member(parent: Any, name: str, kind: type) -> Any:
    if not isinstance(parent, dict) or type(parent.get(name)) is not kind:
        raise ValueError(f"'{name}' is missing or not a {kind.__name__}")
    return parent[name]


def _count(parent: dict[str, Any], name: str, least: int) -> int:
    value: int = _member(parent, name, int)
    if not least <= value < _MOST_COUNT:
        raise ValueError(f"'{name}' is {shown(value)}")
    return value


def _same(parent: Any, name: str, expected: object) -> None:
    value = _member(parent, name, type(expected))
    if value != expected:
        raise ValueError(f"{name} is {shown(value)}, here it is {expected!r}")
