"""Rates of devices and links: the data that the cost model multiplies by.

`machines.yaml` has machines by name. `tpkernels tune --machine` measures this one and keeps the
rates in the cache folder. Nothing in that file is trusted, as in `planning.store`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml

from tpkernels.cache import cache_folder, read_trusted, replace_file
from tpkernels.planning.machine import Machine, this_machine, versions

FORMAT = "tpkernels machine 3"
MEASURED = "this"  #: the name of the machine that `tpkernels tune --machine` measured
DEFAULTS: Mapping[str, str] = MappingProxyType({"cpu": "zen4-core", "cuda": "h100"})
_MOST_BYTES = 1 << 16
_BITS = (16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A class of links.

    Attributes:
        call: seconds that a collective takes at least.
        step: seconds of each step of a ring over W ranks, which takes W - 1.
        bandwidth: bytes per second that a rank receives.
    """

    call: float
    step: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine: devices of one kind, one for each rank.

    Attributes:
        title: for people.
        device: "cpu" or "cuda".
        flops: per second that a large product reaches, for elements of 2, 4 and 8 bytes.
        bandwidth: bytes per second of the device's memory that a large copy reaches.
        memory: bytes of the device's memory; 0: not known.
        node: ranks of a node, with consecutive numbers.
        within, between: the links of a node, and those between nodes.
        host: a GPU's link to the host; None: the device is the host.
        overlaps: whether the device multiplies while it reads its memory or data travels.
        source: where the figures come from.
        multiprocessors: of a GPU.
    """

    title: str
    device: str
    flops: tuple[float, float, float]
    bandwidth: float
    memory: int
    node: int
    within: Link
    between: Link
    host: Link | None
    overlaps: bool
    source: str
    multiprocessors: int = 0

    def rate(self, itemsize: int) -> float:
        """Flops per second of a product."""
        return self.flops[{2: 0, 4: 1, 8: 2}[itemsize]]


def machines() -> tuple[str, ...]:
    """Return the names in `machines.yaml`."""
    return tuple(_data()["machines"])


def machine_named(name: str) -> Profile:
    """A machine of `machines.yaml`.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in machines():
        raise ValueError(
            f"unknown machine '{name}'; choose from {MEASURED}, {', '.join(machines())}"
        )
    return _machine(name)


def own_machine(device: str, ranks: int) -> tuple[str, Profile]:
    """The name and the rates of this process's machine: as measured for so many ranks; else those
    of its device in `machines.yaml`; else those of `DEFAULTS`. Touches no GPU if it is measured or
    ``device`` is "cpu"."""
    measured = load(this_machine(device, ranks, 1, True))
    if measured is not None:
        return MEASURED, measured
    name = name_of_own(device)
    return name, machine_named(name)


def name_of_own(device: str) -> str:
    """Return the name in `machines.yaml` of this machine's device; that of `DEFAULTS` if it has
    none."""
    if device == "cuda":
        title = torch.cuda.get_device_name()
        for name, entry in _data()["machines"].items():
            if entry["device"] == "cuda" and entry["matches"] in title:
                return name
    return DEFAULTS[device]


@functools.cache
def _data() -> Any:
    return yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text())


@functools.cache
def _machine(name: str) -> Profile:
    entry = _data()["machines"][name]
    compute, copy = entry["efficiency"]
    flops16, flops32, flops64 = (1e12 * compute * entry["tflops"][bits] for bits in _BITS)
    return Profile(
        title=entry["title"],
        device=entry["device"],
        flops=(flops16, flops32, flops64),
        bandwidth=1e9 * copy * entry["memory_gb_per_s"],
        memory=int(1e9 * entry["memory_gb"]),
        node=entry["node"],
        within=_link(entry["within"]),
        between=_link(entry["between"]),
        host=_link(entry["host"]) if "host" in entry else None,
        overlaps=entry["overlaps"],
        source=entry["source"],
        multiprocessors=entry.get("multiprocessors", 0),
    )


def _link(name: str) -> Link:
    entry = _data()["links"][name]
    return Link(
        call=1e-6 * entry["call_us"],
        step=1e-6 * entry["step_us"],
        bandwidth=1e9 * entry["gb_per_s"],
    )


def path_for(machine: Machine) -> Path:
    """Return the file of a machine's measured rates. ``RuntimeError`` if the user has no home."""
    return cache_folder() / machine.file_name.replace("tuning-", "machine-", 1)


def load(machine: Machine) -> Profile | None:
    """A machine's measured rates; None: there is no file, or it is not usable."""
    try:
        data = json.loads(read_trusted(path_for(machine), most=_MOST_BYTES))
        return from_json(data["profile"]) if _of(machine) == data["of"] else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, RecursionError):
        return None


def keep(machine: Machine, profile: Profile) -> Path:
    """Write a machine's measured rates. ``OSError`` if the file cannot be written."""
    path = path_for(machine)
    content = {"of": _of(machine), "profile": asdict(profile)}
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def _of(machine: Machine) -> dict[str, Any]:
    return {"format": FORMAT, "machine": asdict(machine), "versions": versions()}


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Profile:
    """Return the profile in the JSON of ``asdict``."""
    return from_json(json.loads(text))


def to_text(profile: Profile) -> str:
    """Return the JSON that `parse` reads."""
    return json.dumps(asdict(profile))


def from_json(value: Any) -> Profile:
    """Return the profile of ``asdict``. ``ValueError``, ``KeyError`` or ``TypeError`` if it is
    none."""
    flops16, flops32, flops64 = map(_positive, value["flops"])
    return Profile(
        title=str(value["title"]),
        device=str(value["device"]),
        flops=(flops16, flops32, flops64),
        bandwidth=_positive(value["bandwidth"]),
        memory=int(value["memory"]),
        node=int(_positive(value["node"])),
        within=_link_from_json(value["within"]),
        between=_link_from_json(value["between"]),
        host=None if value["host"] is None else _link_from_json(value["host"]),
        overlaps=bool(value["overlaps"]),
        source=str(value["source"]),
        multiprocessors=int(value["multiprocessors"]),
    )


def _link_from_json(value: Any) -> Link:
    return Link(
        call=_positive(value["call"]),
        step=float(value["step"]),
        bandwidth=_positive(value["bandwidth"]),
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"a rate is {value!r}")
    return number
