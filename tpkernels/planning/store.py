"""Measurements of a machine in the cache folder: times (a `Table`) and rates (a `Profile`).

The files are JSON and are replaced atomically. They are not trusted. `load` checks owner and
permissions (`cache.read_trusted`), format version, machine, software versions and every value, and
ignores a file with any error. A well-formed file can at worst select a slower algorithm.
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
from tpkernels.common.text import safe_repr
from tpkernels.planning.cost import DEFAULTS, MEASURED, Profile, find_gpu_preset_name, get_preset
from tpkernels.planning.machine import Machine, this_machine, versions
from tpkernels.planning.records import from_json
from tpkernels.planning.table import Measurement, Table

FORMAT = "tpkernels tuning 3"
_PROFILE_FORMAT = "tpkernels machine 3"
_MAX_BYTES = 1 << 20  # file size limit; a case has about 300 bytes
_MAX_MS = 1e9
_LOCK_SECONDS = 10.0  # timeout; an update lasts milliseconds


def get_table_path(machine: Machine) -> Path:
    """Return the path of the timing file. ``RuntimeError`` if the user has no home."""
    return cache_folder() / machine.file_name


def load(machine: Machine) -> tuple[Table, str]:
    """Return the timing table of a machine, and a warning for the user if a file was ignored.

    The table is empty if no valid file exists. The warning is "" if no file was ignored.
    """
    try:
        path = get_table_path(machine)
    except RuntimeError:
        return Table(), ""
    try:
        return parse(read_trusted(path, max_bytes=_MAX_BYTES), machine), ""
    except FileNotFoundError:
        return Table(), ""
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    hint = "Run `tpkernels tune` to write a new cache"
    return Table(), f"ignoring the tuning cache {path}: {reason}. {hint}."


def load_or_warn(machine: Machine) -> Table:
    """Return the timing table of a machine. Issue a ``RuntimeWarning`` if a file was ignored."""
    table, warning = load(machine)
    if warning:
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return table


def update(machine: Machine, *new: Measurement) -> tuple[Path, Table]:
    """Add measurements to the timing table of a machine. They replace old measurements of the same
    cases. A lock serialises concurrent updates.

    Returns:
        The path of the file, and the new table.

    Raises:
        OSError: the file cannot be written, or a different process held the lock.
    """
    path = get_table_path(machine)
    make_folder(path.parent)
    with locked(path.with_suffix(".lock"), seconds=_LOCK_SECONDS):
        table = load_or_warn(machine).extended(new)
        _write(path, _file_key(FORMAT, machine) | {"measurements": to_json(table)})
    return path, table


def parse(content: bytes, machine: Machine) -> Table:
    """Return the table in the content of a file. ``ValueError`` or ``RecursionError`` if it is not
    a table for ``machine`` and the current versions."""
    try:
        data = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError("it is not text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    _require_equal(data, _file_key(FORMAT, machine))
    return table_from_json(data.get("measurements"), "measurements")


def to_json(table: Table) -> list[dict[str, Any]]:
    """Return the measurements as JSON values."""
    return [asdict(measurement) for measurement in table.measurements]


def table_from_json(values: object, path: str = "$") -> Table:
    """Return the table of these measurements. ``ValueError`` if a measurement is malformed. A
    series with meaningless values, such as an unknown op, is accepted: it matches no problem."""
    measurements = from_json(list[Measurement], values, path)
    for measurement in measurements:
        for name, ms in measurement.ms.items():
            if not 0 < ms < _MAX_MS:
                raise ValueError(
                    f"the time of {safe_repr(name)} is {safe_repr(ms)}; it must be positive and "
                    f"less than {_MAX_MS:g} ms"
                )
        try:
            date.fromisoformat(measurement.date)
        except ValueError as error:
            raise ValueError(
                f"a date is {safe_repr(measurement.date)}; it must be YYYY-MM-DD"
            ) from error
    return Table(tuple(measurements))


def get_profile_path(machine: Machine) -> Path:
    """Return the path of the profile. ``RuntimeError`` if the user has no home."""
    return cache_folder() / machine.file_name.replace("tuning-", "machine-", 1)


def load_profile(machine: Machine) -> Profile | None:
    """Return the measured rates of a machine, or None without a valid file."""
    try:
        data = json.loads(read_trusted(get_profile_path(machine), max_bytes=_MAX_BYTES))
        _require_equal(data, {"of": _file_key(_PROFILE_FORMAT, machine)})
        return from_json(Profile, data["profile"])
    except (OSError, RuntimeError, ValueError, KeyError, RecursionError):
        return None


def save_profile(machine: Machine, profile: Profile) -> Path:
    """Write the measured rates of a machine. ``OSError`` if the file cannot be written."""
    path = get_profile_path(machine)
    _write(path, {"of": _file_key(_PROFILE_FORMAT, machine), "profile": asdict(profile)})
    return path


def profile_from_json(content: str) -> Profile:
    """Return a profile, given the JSON of `profile_to_json`."""
    return from_json(Profile, json.loads(content))


def profile_to_json(profile: Profile) -> str:
    """Return a profile as JSON."""
    return json.dumps(asdict(profile))


def load_local_profile(device: str, ranks: int) -> tuple[str, Profile]:
    """Return the name and the rates of this machine.

    The first available source is used: rates measured with ``ranks`` ranks, the device in
    `machines.yaml`, `DEFAULTS`. No GPU is accessed for "cpu".
    """
    measured = load_profile(this_machine(device, ranks, 1, True))
    if measured is not None:
        return MEASURED, measured
    name = get_local_preset_name(device)
    return name, get_preset(name)


def get_local_preset_name(device: str) -> str:
    """Return the name of this machine in `machines.yaml`, or the default of `DEFAULTS`."""
    return (
        find_gpu_preset_name(torch.cuda.get_device_name()) if device == "cuda" else DEFAULTS[device]
    )


def _file_key(file_format: str, machine: Machine) -> dict[str, Any]:
    """Return the fields that identify the files of a machine."""
    return {"format": file_format, "machine": machine.facts, "versions": versions()}


def _require_equal(data: object, expected: dict[str, Any]) -> None:
    for name, local in expected.items():
        value = data.get(name) if isinstance(data, dict) else None
        if type(value) is not type(local):
            raise ValueError(f"'{name}' is missing or not of type {type(local).__name__}")
        if isinstance(local, dict):
            _require_equal(value, local)
        elif value != local:
            raise ValueError(f"{name} is {safe_repr(value)}, but {local!r} on this machine")


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
