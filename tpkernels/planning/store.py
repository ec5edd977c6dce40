"""What was measured on a machine, in the cache folder: its times, a `Table`, and its rates, a
`Profile`.

The files are JSON and are replaced as a whole. Nothing in them is trusted: their owner and
permissions (`cache.read_trusted`), the format version, the machine, the software versions and every
value are checked, and a file with any error is ignored entirely. The worst a well-formed file can
do is to select a slower algorithm.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tpkernels.common.cache import cache_folder, locked, make_folder, read_trusted, replace_file
from tpkernels.common.text import shown
from tpkernels.planning.cost import DEFAULTS, MEASURED, Profile, gpu_named, machine_named
from tpkernels.planning.machine import Machine, this_machine, versions
from tpkernels.planning.records import from_json
from tpkernels.planning.table import Measurement, Table

FORMAT = "tpkernels tuning 3"
_PROFILE_FORMAT = "tpkernels machine 3"
_MOST_BYTES = 1 << 20  # a case takes about 300
_MOST_MS = 1e9
_LOCK_SECONDS = 10.0  # an update takes milliseconds


def path_for(machine: Machine) -> Path:
    """Return the file of a machine's times. ``RuntimeError`` if the user has no home."""
    return cache_folder() / machine.file_name


def load(machine: Machine) -> tuple[Table, str]:
    """Return a machine's table, empty if there is none, and a warning for the user if a file was
    ignored ("" if not)."""
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
    hint = "Run `tpkernels tune` to write a new cache"
    return Table(), f"ignoring the tuning cache {path}: {why}. {hint}."


def load_or_warn(machine: Machine) -> Table:
    """Return a machine's table, with a ``RuntimeWarning`` if a file was ignored."""
    table, ignored = load(machine)
    if ignored:
        warnings.warn(ignored, RuntimeWarning, stacklevel=2)
    return table


def update(machine: Machine, *new: Measurement) -> tuple[Path, Table]:
    """Add measurements to a machine's table, replacing those of the same cases; return the file and
    the new table. Concurrent updates are serialised by a lock.

    Raises:
        OSError: the file cannot be written, or another process held its lock.
    """
    path = path_for(machine)
    make_folder(path.parent)
    with locked(path.with_suffix(".lock"), seconds=_LOCK_SECONDS):
        table = load_or_warn(machine).extended(new)
        _write(path, _head(FORMAT, machine) | {"measurements": to_json(table)})
    return path, table


def parse(content: bytes, machine: Machine) -> Table:
    """Return the table in a file's content. ``ValueError`` or ``RecursionError`` if it is not a
    table for ``machine`` and the current versions."""
    try:
        data = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError("it is not text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    _require_same(data, _head(FORMAT, machine))
    return table_from(data.get("measurements"), "measurements")


def to_json(table: Table) -> list[dict[str, Any]]:
    """Return the measurements as JSON values."""
    return [asdict(one) for one in table.measurements]


def table_from(values: object, where: str = "$") -> Table:
    """Return the table of these measurements. ``ValueError`` if one is malformed. A series that is
    none matches no problem."""
    measurements = from_json(list[Measurement], values, where)
    for one in measurements:
        for name, ms in one.ms.items():
            if not 0 < ms < _MOST_MS:
                raise ValueError(
                    f"the time of {shown(name)} is {shown(ms)}; it must be positive and less than "
                    f"{_MOST_MS:g} ms"
                )
        try:
            date.fromisoformat(one.date)
        except ValueError as error:
            raise ValueError(f"a date is {shown(one.date)}; it must be YYYY-MM-DD") from error
    return Table(tuple(measurements))


def profile_path_for(machine: Machine) -> Path:
    """Return the file of a machine's rates. ``RuntimeError`` if the user has no home."""
    return cache_folder() / machine.file_name.replace("tuning-", "machine-", 1)


def load_profile(machine: Machine) -> Profile | None:
    """Return a machine's measured rates; None: there is no file, or it is not usable."""
    try:
        data = json.loads(read_trusted(profile_path_for(machine), most=_MOST_BYTES))
        _require_same(data, {"of": _head(_PROFILE_FORMAT, machine)})
        return from_json(Profile, data["profile"])
    except (OSError, RuntimeError, ValueError, KeyError, RecursionError):
        return None


def save_profile(machine: Machine, profile: Profile) -> Path:
    """Write a machine's measured rates. ``OSError`` if the file cannot be written."""
    path = profile_path_for(machine)
    _write(path, {"of": _head(_PROFILE_FORMAT, machine), "profile": asdict(profile)})
    return path


def profile_in(text: str) -> Profile:
    """Return the profile in the JSON of `profile_text`."""
    return from_json(Profile, json.loads(text))


def profile_text(profile: Profile) -> str:
    """Return a profile as JSON."""
    return json.dumps(asdict(profile))


def machine_here(device: str, ranks: int) -> tuple[str, Profile]:
    """Return the name and the rates of this process's machine: as measured with ``ranks`` ranks;
    else those of its device in `machines.yaml`; else those of `DEFAULTS`. Touches no GPU if it is
    measured or ``device`` is "cpu"."""
    measured = load_profile(this_machine(device, ranks, 1, True))
    if measured is not None:
        return MEASURED, measured
    name = preset_name_here(device)
    return name, machine_named(name)


def preset_name_here(device: str) -> str:
    """Return the name in `machines.yaml` of this machine's device, or that of `DEFAULTS`."""
    return gpu_named(torch.cuda.get_device_name()) if device == "cuda" else DEFAULTS[device]


def _head(file_format: str, machine: Machine) -> dict[str, Any]:
    """Return what a file must say for it to be of this machine."""
    return {"format": file_format, "machine": machine.facts, "versions": versions()}


def _require_same(data: object, expected: dict[str, Any]) -> None:
    for name, wanted in expected.items():
        value = data.get(name) if isinstance(data, dict) else None
        if type(value) is not type(wanted):
            raise ValueError(f"'{name}' is missing or not of type {type(wanted).__name__}")
        if isinstance(wanted, dict):
            _require_same(value, wanted)
        elif value != wanted:
            raise ValueError(f"{name} is {shown(value)}, but {wanted!r} on this machine")


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
