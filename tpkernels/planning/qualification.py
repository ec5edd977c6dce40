"""Which algorithms `auto` may select on CUDA tensors: those that passed `tpkernels qualify` on this
machine. The rest run only by name, whatever the timing tables contain.

An algorithm has variants. Each is qualified separately and per world size: the protocols of
`direct`, one variant per kind of op for the other algorithms, and the copy engines of `fused`. The
qualification report is one file per machine. It is keyed by the GPUs (UUIDs), driver, NCCL, package
versions and a digest of the kernel sources, so a changed kernel must qualify again. Like all files
in the cache folder it is read only if no other user can have written it (`cache.read_trusted`).
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

FORMAT = "tpkernels qualification 1"
QUALIFIED, DISQUALIFIED, NOT_RUN = "qualified", "disqualified", "not run"
_MOST_BYTES = 4 << 20
_FOLDERS = ("algorithms", "cuda", "kernels", "symm")  # whose sources the digest covers

# The variants of `direct`, by their names in `tpkernels.cuda`.
SUMS = ("ll", "ll_two_shot", "two_shot")
SHARDS = ("ll", "one_shot")
COPY_ENGINES = "copy_engines"  # of `fused`, for an all-gather


@functools.lru_cache  # for each call of `direct`
def usable(variants: frozenset[str], family: tuple[str, ...]) -> frozenset[str]:
    """Return the qualified ``variants`` of a family; all of them if none is qualified, because an
    algorithm was asked for by name."""
    return variants.intersection(family) or frozenset(family)


def kind_of(spec: OpSpec) -> str:
    """Return the collective of an op, which names the variant of algorithms with one per kind."""
    if spec.gathers:
        return "all_gather"
    if spec.exchanges:
        return "all_to_all"
    return "reduce_scatter" if spec.scatters else "all_reduce"


def variants_of(spec: OpSpec, algorithm: str) -> tuple[str, ...]:
    """Return the variants of an algorithm for an op, of which one suffices."""
    if spec.routed:
        return (f"{algorithm}/routed",)
    if algorithm != "direct":
        return (f"{algorithm}/{kind_of(spec)}",)
    names = SHARDS if spec.gathers or spec.scatters else SUMS
    return tuple(f"direct/{name}" for name in names)


@dataclass(frozen=True)
class Qualification:
    """What the report of rank 0 allows a group. Identical on all ranks.

    Attributes:
        variants: qualified for this world size, as "algorithm/variant".
        reasons: by variant, why it is not qualified.
        summary: of the report, for messages; without a report, the command that writes one.
    """

    variants: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    summary: str = "`tpkernels qualify` has not run on this machine"

    def why_not(self, op: str, algorithm: str) -> str | None:
        """Return why `auto` may not take an algorithm for an op; None: it may."""
        variants = variants_of(OPS[op], algorithm)
        if algorithm == "unfused" or any(variant in self.variants for variant in variants):
            return None
        reasons = [
            f"{variant}: {self.reasons[variant]}" for variant in variants if variant in self.reasons
        ]
        return f"is not qualified: {'; '.join(reasons) or self.summary}"

    def of(self, algorithm: str) -> frozenset[str]:
        """Return the qualified variants of an algorithm, by their own names."""
        pairs = (variant.split("/") for variant in self.variants)
        return frozenset(name for of, name in pairs if of == algorithm)

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON ones."""
        return {
            "variants": sorted(self.variants),
            "reasons": dict(self.reasons),
            "summary": self.summary,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Qualification:
        """Return what `to_json` was made of."""
        return cls(frozenset(values["variants"]), values["reasons"], values["summary"])


@dataclass(frozen=True)
class Failure:
    """What disqualified a variant, with the place of the fault.

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
        looks = f" (all are {self.looks})" if self.looks else ""
        at = "; ".join(f"[{i}] is {got}, expected {want}" for i, got, want in self.first[:2])
        return f"{self.wrong} of {self.elements} elements are wrong{looks} in {where}: {at}"


@dataclass(frozen=True)
class StageOutcome:
    """How a variant did, or a litmus test: ``status``, the calls that were checked, and why not."""

    status: str
    checks: int = 0
    seconds: float = 0.0
    why: str = ""  #: it was not run
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if self.status not in (QUALIFIED, DISQUALIFIED, NOT_RUN):
            raise ValueError(
                f"status is {shown(self.status)}; it must be '{QUALIFIED}', '{DISQUALIFIED}' or "
                f"'{NOT_RUN}'"
            )

    @property
    def reason(self) -> str:
        """Return why it is not qualified."""
        return self.why if self.failure is None else f"{self.status}: {self.failure}"


@dataclass(frozen=True)
class QualificationReport:
    """What `tpkernels qualify` found.

    Attributes:
        date: ISO, of the last run.
        litmus: by world size, then test: of single stores and signals, and of a rank's faults.
        variants: by world size, then variant.
    """

    date: str = ""
    litmus: Mapping[str, Mapping[str, StageOutcome]] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, StageOutcome]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for world in (*self.litmus, *self.variants):
            if re.fullmatch("[1-9][0-9]{0,8}", world) is None:
                raise ValueError(f"a world size is {shown(world)}; it must be a positive integer")
        for variant in (name for outcomes in self.variants.values() for name in outcomes):
            algorithm, *names = variant.split("/")
            if algorithm not in ALGORITHMS or len(names) != 1:
                raise ValueError(f"a variant is {shown(variant)}; it must be ALGORITHM/NAME")

    def qualification(self, world: int) -> Qualification:
        """Return what the report allows a group of ``world`` ranks."""
        outcomes = self.variants.get(str(world))
        if outcomes is None:
            known = ", ".join(self.variants) or "none"
            covered = f"the report of {self.date} has results for these world sizes: {known}"
            return Qualification(summary=f"{covered}; run `tpkernels qualify --tp {world}`")
        passed = {variant for variant, outcome in outcomes.items() if outcome.status == QUALIFIED}
        reasons = {
            variant: outcomes[variant].reason for variant in outcomes if variant not in passed
        }
        return Qualification(
            frozenset(passed), reasons, f"the report of {self.date} contains no qualified variant"
        )

    def has(self, name: str, world: int) -> bool:
        """Return whether a variant, or a litmus test, was run for a number of ranks."""
        outcomes = {**self.litmus.get(str(world), {}), **self.variants.get(str(world), {})}
        return name in outcomes and outcomes[name].status != NOT_RUN

    def extended(self, new: QualificationReport) -> QualificationReport:
        """Merge a newer report into this one; its outcomes replace older ones."""
        merged = {
            name: {
                world: {**mine.get(world, {}), **theirs.get(world, {})}
                for world in sorted({*mine, *theirs}, key=int)
            }
            for name, mine, theirs in (
                ("litmus", self.litmus, new.litmus),
                ("variants", self.variants, new.variants),
            )
        }
        return QualificationReport(new.date, merged["litmus"], merged["variants"])


def head(device: str) -> dict[str, Any]:
    """Return the key of this machine and these kernels, which a report must match."""
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
    """Return the path of a report. ``RuntimeError`` if the user has no home."""
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"qualified-{head['device']}-{digest}.json"


def load(device: str) -> tuple[QualificationReport | None, str]:
    """Return this machine's report, None if there is none, and a warning for the user if a file
    was ignored ("" if not)."""
    path: Path | str = "of `tpkernels qualify`"
    try:
        expected = head(device)
        path = path_of(expected)
        data = json.loads(read_trusted(path, most=_MOST_BYTES))
        if not isinstance(data, dict) or any(data.get(key) != expected[key] for key in expected):
            raise ValueError("it was written on a different machine or by different versions")
        return from_json(QualificationReport, data.get("report"), "report"), ""
    except (FileNotFoundError, RuntimeError):
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        why = (
            f"ignoring the qualification report {path}: {error}. Run `tpkernels qualify` to write "
            "a new report."
        )
        return None, why


def of_this_machine(world: int) -> Qualification:
    """Return what a group of ``world`` ranks may go by on this machine's GPUs."""
    report, _ = load("cuda")
    return Qualification() if report is None else report.qualification(world)


def save(device: str, report: QualificationReport) -> Path:
    """Write this machine's report. ``OSError`` if the file cannot be written."""
    path = path_of(head(device))
    replace_file(path, text_of(device, report).encode())
    return path


def text_of(device: str, report: QualificationReport) -> str:
    """Return a report as JSON, with the machine's key."""
    return json.dumps({**head(device), "report": asdict(report)}, indent=1) + "\n"
