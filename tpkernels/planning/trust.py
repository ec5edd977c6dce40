"""Which algorithms `auto` may take on CUDA tensors: those that `tpkernels qualify` has seen give
right results on this machine. The others run only by name, whatever the tables of times say.

An algorithm has ways, each qualified by itself and for a number of ranks: the protocols of
`direct`, the kinds of ops of the others, and the copy engines of `fused`. The record is a file per
machine: its GPUs by UUID, driver, NCCL, the versions of the packages and a digest of the kernels'
sources, so that a changed kernel has to prove itself again. Like the other files of the cache
folder it is read only if nobody else can have written it (`cache.read_trusted`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tpkernels import _C
from tpkernels.common import nvml
from tpkernels.common.cache import cache_folder, read_trusted, replace_file
from tpkernels.common.text import shown
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.machine import nccl_version, versions
from tpkernels.planning.op_spec import OPS, OpSpec
from tpkernels.planning.records import from_json

FORMAT = "tpkernels qualified 1"
QUALIFIED, DISQUALIFIED, NOT_RUN = "qualified", "disqualified", "not run"
_MOST_BYTES = 4 << 20
_FOLDERS = ("algorithms", "cuda", "kernels", "symm")  # whose sources the digest covers

# The ways of `direct`, by their names in `tpkernels.cuda`.
SUMS = ("ll", "ll_two_shot", "two_shot")
SHARDS = ("ll", "one_shot")
COPY_ENGINES = "copy_engines"  # of `fused`, for an all-gather


@functools.lru_cache  # for each call of `direct`
def usable(ways: frozenset[str], family: tuple[str, ...]) -> frozenset[str]:
    """Return the qualified ``ways`` of a family; all of them if none is qualified, because an
    algorithm was asked for by name."""
    return ways.intersection(family) or frozenset(family)


def kind_of(spec: OpSpec) -> str:
    """Return what an op communicates: the way of an algorithm that has one way for it."""
    if spec.gathers:
        return "all_gather"
    if spec.exchanges:
        return "all_to_all"
    return "reduce_scatter" if spec.scatters else "all_reduce"


def ways_of(spec: OpSpec, algorithm: str) -> tuple[str, ...]:
    """Return the ways of an algorithm for an op, of which one suffices."""
    if spec.routed:
        return (f"{algorithm}/routed",)
    if algorithm != "direct":
        return (f"{algorithm}/{kind_of(spec)}",)
    names = SHARDS if spec.gathers or spec.scatters else SUMS
    return tuple(f"direct/{name}" for name in names)


@dataclass(frozen=True)
class Trust:
    """What rank 0's record says for a group; the same on all ranks.

    Attributes:
        ways: those that are qualified for this number of ranks, as "algorithm/way".
        reasons: why others are not.
        record: the source of the record; if there is none, the command that makes one.
    """

    ways: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    record: str = "`tpkernels qualify` has not run on this machine"

    def why_not(self, op: str, algorithm: str) -> str | None:
        """Return why `auto` may not take an algorithm for an op; None: it may."""
        ways = ways_of(OPS[op], algorithm)
        if algorithm == "unfused" or any(way in self.ways for way in ways):
            return None
        reasons = [f"{way}: {self.reasons[way]}" for way in ways if way in self.reasons]
        return f"is not qualified: {'; '.join(reasons) or self.record}"

    def of(self, algorithm: str) -> frozenset[str]:
        """Return the qualified ways of an algorithm, by their own names."""
        pairs = (way.split("/") for way in self.ways)
        return frozenset(name for of, name in pairs if of == algorithm)

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON ones."""
        return {"ways": sorted(self.ways), "reasons": dict(self.reasons), "record": self.record}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Trust:
        """Return what `to_json` was made of."""
        return cls(frozenset(values["ways"]), values["reasons"], values["record"])


@dataclass(frozen=True)
class Failure:
    """What disqualified a way, with the place of the fault.

    Attributes:
        kind: "wrong", "error", "crash", "hang", "memory", "unsupported" if it cannot run here, or
            "lost" if a peer failed first.
        call: the op, shape, dtype and data, eager or replayed.
        rank: that saw it.
        peer: that it waited for, if the error names one.
        text: the error, with the words that were expected and seen.
        elements, wrong: of the result, and how many of them are wrong.
        first: the first wrong ones: index, result, expected.
        looks: "zero", "NaN" or "the previous call's" if all wrong elements are.
    """

    kind: str
    call: str
    rank: int | None = None
    peer: int | None = None
    text: str = ""
    elements: int = 0
    wrong: int = 0
    first: tuple[tuple[int, str, str], ...] = ()
    looks: str = ""

    def __str__(self) -> str:
        where = f"{self.call}, rank {self.rank}" if self.rank is not None else self.call
        if self.kind != "wrong":
            return f"{self.kind} in {where}: {self.text}"
        looks = f", all {self.looks}" if self.looks else ""
        at = "; ".join(f"[{i}] {got} for {want}" for i, got, want in self.first[:2])
        return f"{self.wrong} of {self.elements} elements wrong in {where}{looks}: {at}"


@dataclass(frozen=True)
class StageOutcome:
    """How a way did, or a litmus test: ``status``, the calls that were checked, and why not."""

    status: str
    checks: int = 0
    seconds: float = 0.0
    why: str = ""  #: it was not run
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if self.status not in (QUALIFIED, DISQUALIFIED, NOT_RUN):
            raise ValueError(f"a status is {shown(self.status)}")

    @property
    def reason(self) -> str:
        """Return why it is not qualified."""
        return self.why if self.failure is None else f"{self.status}: {self.failure}"


@dataclass(frozen=True)
class Record:
    """What `tpkernels qualify` found.

    Attributes:
        date: ISO, of the last run.
        litmus: by world size, then test: of single stores and signals, and of a rank's faults.
        ways: by world size, then way.
    """

    date: str = ""
    litmus: Mapping[str, Mapping[str, StageOutcome]] = field(default_factory=dict)
    ways: Mapping[str, Mapping[str, StageOutcome]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for world in (*self.litmus, *self.ways):
            if re.fullmatch("[1-9][0-9]{0,8}", world) is None:
                raise ValueError(f"a number of ranks is {shown(world)}")
        for way in (name for outcomes in self.ways.values() for name in outcomes):
            algorithm, *names = way.split("/")
            if algorithm not in ALGORITHMS or len(names) != 1:
                raise ValueError(f"a way is {shown(way)}")

    def trust(self, world: int) -> Trust:
        """Return what a group of ``world`` ranks may go by."""
        outcomes = self.ways.get(str(world))
        if outcomes is None:
            known = ", ".join(self.ways) or "no"
            text = (
                f"the record of {self.date} is of {known} ranks: `tpkernels qualify --tp {world}`"
            )
            return Trust(record=text)
        passed = {way for way, outcome in outcomes.items() if outcome.status == QUALIFIED}
        reasons = {way: outcomes[way].reason for way in outcomes if way not in passed}
        return Trust(frozenset(passed), reasons, f"no way in the record of {self.date}")

    def has(self, name: str, world: int) -> bool:
        """Return whether a way, or a litmus test, was run for a number of ranks."""
        outcomes = {**self.litmus.get(str(world), {}), **self.ways.get(str(world), {})}
        return name in outcomes and outcomes[name].status != NOT_RUN

    def extended(self, new: Record) -> Record:
        """Return this record with another's, which replaces what both have."""
        merged = {
            name: {
                world: {**mine.get(world, {}), **theirs.get(world, {})}
                for world in sorted({*mine, *theirs}, key=int)
            }
            for name, mine, theirs in (
                ("litmus", self.litmus, new.litmus),
                ("ways", self.ways, new.ways),
            )
        }
        return Record(new.date, merged["litmus"], merged["ways"])


def head(device: str) -> dict[str, Any]:
    """Return what a record must say for it to be of this machine and these kernels."""
    found: dict[str, Any] = {"format": FORMAT, "device": device, "versions": versions()}
    found["kernels"] = kernels_digest()
    if device == "cuda":
        found |= {"nccl": nccl_version(), "gpus": [], "driver": "unknown"}
        try:
            found |= {"gpus": nvml.uuids(), "driver": nvml.driver_version()}
        except nvml.ERRORS:  # what torch sees, then
            found["gpus"] = [nvml.uuid_of(i) for i in range(torch.cuda.device_count())]
        found["gpus"] = sorted(found["gpus"])
    return found


@functools.cache
def kernels_digest() -> str:
    """Return a digest of the sources that a qualification is of."""
    package, found = Path(__file__).parents[1], hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            found.update(path.read_bytes())
    for name, text in _C.cuda.sources():
        found.update(f"{name}\n{text}".encode())
    return found.hexdigest()[:16]


def path_of(head: Mapping[str, Any]) -> Path:
    """Return the file of a record. ``RuntimeError`` if the user has no home."""
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"qualified-{head['device']}-{digest}.json"


def load(device: str) -> tuple[Record | None, str]:
    """Return this machine's record, None if there is none, and a warning for the user if a file
    was ignored ("" if not)."""
    path: Path | str = "of `tpkernels qualify`"
    try:
        expected = head(device)
        path = path_of(expected)
        data = json.loads(read_trusted(path, most=_MOST_BYTES))
        if not isinstance(data, dict) or any(data.get(key) != expected[key] for key in expected):
            raise ValueError("it is of another machine")
        return from_json(Record, data.get("record"), "record"), ""
    except (FileNotFoundError, RuntimeError):
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        why = f"the record {path} is ignored: {error}. `tpkernels qualify` writes a new one."
        return None, why


def of_this_machine(world: int) -> Trust:
    """Return what a group of ``world`` ranks may go by on this machine's GPUs."""
    record, _ = load("cuda")
    return Trust() if record is None else record.trust(world)


def save(device: str, record: Record) -> Path:
    """Write this machine's record. ``OSError`` if the file cannot be written."""
    path = path_of(head(device))
    replace_file(path, text_of(device, record).encode())
    return path


def text_of(device: str, record: Record) -> str:
    """Return a record as JSON, with the machine that it is of."""
    return json.dumps({**head(device), "record": asdict(record)}, indent=1) + "\n"
