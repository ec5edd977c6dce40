"""Algorithms that `auto` may select on CUDA tensors: they passed `tpkernels qualify` on this
machine. All further algorithms run only if requested by name, even if the timing tables contain
them.

An algorithm has variants. Each variant is qualified separately and per world size. The variants of
`direct` are its protocols. The remaining algorithms have one variant per collective, and `fused`
also has the copy engines. Ops on routed tokens have the variant `routed`.

The qualification report is one file per machine. Its key consists of the GPUs (UUIDs), driver,
NCCL, package versions and a digest of the kernel sources, so a changed kernel must qualify again.
Like all files in the cache folder, it is read only if no other user can have written it
(`cache.read_trusted`).
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
from tpkernels.common.text import safe_repr
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.machine import nccl_version, versions
from tpkernels.planning.op_spec import OPS, OpSpec
from tpkernels.planning.records import from_json

FORMAT = "tpkernels qualification 1"
QUALIFIED, DISQUALIFIED, NOT_RUN = "qualified", "disqualified", "not run"
_MAX_BYTES = 4 << 20
_FOLDERS = ("algorithms", "cuda", "kernels", "symm")  # folders that `kernels_digest` covers

# The variants of `direct`, with their names in `tpkernels.cuda`.
SUMS = ("ll", "ll_two_shot", "two_shot")
SHARDS = ("ll", "one_shot")
COPY_ENGINES = "copy_engines"  # all-gather variant of `fused`


@functools.lru_cache  # each call of `direct` uses it
def select_variants(variants: frozenset[str], family: tuple[str, ...]) -> frozenset[str]:
    """Return the qualified variants of a family. If no variant is qualified, return the full
    family: the algorithm was then requested by name."""
    return variants.intersection(family) or frozenset(family)


def get_collective(spec: OpSpec) -> str:
    """Return the collective of an op. It is the variant name of algorithms with one variant per
    collective."""
    if spec.gathers:
        return "all_gather"
    if spec.exchanges:
        return "all_to_all"
    return "reduce_scatter" if spec.scatters else "all_reduce"


def get_variants(spec: OpSpec, algorithm: str) -> tuple[str, ...]:
    """Return the variants of an algorithm that support an op. One qualified variant suffices."""
    if spec.routed:
        return (f"{algorithm}/routed",)
    if algorithm != "direct":
        return (f"{algorithm}/{get_collective(spec)}",)
    names = SHARDS if spec.gathers or spec.scatters else SUMS
    return tuple(f"direct/{name}" for name in names)


@dataclass(frozen=True)
class Qualification:
    """The qualified variants of a group, from the report of rank 0. Identical on all ranks.

    Attributes:
        variants: variants that are qualified for this world size, as "algorithm/variant".
        reasons: for each further variant, the reason why it is not qualified.
        summary: summary of the report for messages. Without a report: the command that writes it.
    """

    variants: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    summary: str = "`tpkernels qualify` has not run on this machine"

    def reason_against(self, op: str, algorithm: str) -> str | None:
        """Return the reason why `auto` may not select an algorithm for an op, or None if it may."""
        variants = get_variants(OPS[op], algorithm)
        if algorithm == "unfused" or any(variant in self.variants for variant in variants):
            return None
        reasons = [
            f"{variant}: {self.reasons[variant]}" for variant in variants if variant in self.reasons
        ]
        return f"is not qualified: {'; '.join(reasons) or self.summary}"

    def variants_for(self, algorithm: str) -> frozenset[str]:
        """Return the qualified variants of an algorithm, without the "algorithm/" prefix."""
        pairs = (variant.split("/") for variant in self.variants)
        return frozenset(name for owner, name in pairs if owner == algorithm)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "variants": sorted(self.variants),
            "reasons": dict(self.reasons),
            "summary": self.summary,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Qualification:
        """Return the qualification that `to_json` serialized."""
        return cls(frozenset(values["variants"]), values["reasons"], values["summary"])


@dataclass(frozen=True)
class Failure:
    """The failure that disqualified a variant.

    Attributes:
        kind: "wrong", "error", "crash", "hang", "memory", "unsupported" if this machine cannot run
            the variant, or "lost" if a peer failed first.
        call: the op, shape, dtype and data, eager or replayed.
        rank: the rank that observed the failure.
        peer: the rank that it waited for, if the error contains it.
        text: the error message, with the expected and the actual signal.
        elements: number of elements of the result.
        wrong: number of wrong elements.
        first: index, actual and expected value of the first wrong elements.
        looks: "zero", "NaN" or "the previous call's" if that describes all wrong elements.
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
        location = f"{self.call}, rank {self.rank}" if self.rank is not None else self.call
        if self.kind != "wrong":
            return f"{self.kind} in {location}: {self.text}"
        looks = f" (all are {self.looks})" if self.looks else ""
        examples = "; ".join(f"[{i}] is {got}, expected {want}" for i, got, want in self.first[:2])
        return (
            f"{self.wrong} of {self.elements} elements are wrong{looks} in {location}: {examples}"
        )


@dataclass(frozen=True)
class StageOutcome:
    """Result of a variant or a litmus test."""

    status: str  #: `QUALIFIED`, `DISQUALIFIED` or `NOT_RUN`
    checks: int = 0  #: number of checked calls
    seconds: float = 0.0
    why: str = ""  #: reason why it was not run
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if self.status not in (QUALIFIED, DISQUALIFIED, NOT_RUN):
            raise ValueError(
                f"status is {safe_repr(self.status)}; it must be '{QUALIFIED}', "
                f"'{DISQUALIFIED}' or '{NOT_RUN}'"
            )

    @property
    def reason(self) -> str:
        """Return the reason why the variant is not qualified."""
        return self.why if self.failure is None else f"{self.status}: {self.failure}"


@dataclass(frozen=True)
class QualificationReport:
    """Results of `tpkernels qualify`.

    Attributes:
        date: ISO date of the last run.
        litmus: outcomes by world size, then test. Tests of stores and signals, and of rank faults.
        variants: outcomes by world size, then variant.
    """

    date: str = ""
    litmus: Mapping[str, Mapping[str, StageOutcome]] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, StageOutcome]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for world in (*self.litmus, *self.variants):
            if re.fullmatch("[1-9][0-9]{0,8}", world) is None:
                raise ValueError(
                    f"a world size is {safe_repr(world)}; it must be a positive integer"
                )
        for variant in (name for outcomes in self.variants.values() for name in outcomes):
            algorithm, *names = variant.split("/")
            if algorithm not in ALGORITHMS or len(names) != 1:
                raise ValueError(f"a variant is {safe_repr(variant)}; it must be ALGORITHM/NAME")

    def qualification(self, world: int) -> Qualification:
        """Return the qualification of a group of ``world`` ranks."""
        outcomes = self.variants.get(str(world))
        if outcomes is None:
            worlds = ", ".join(self.variants) or "none"
            covered = f"the report of {self.date} has results for these world sizes: {worlds}"
            return Qualification(summary=f"{covered}; run `tpkernels qualify --tp {world}`")
        passed = {variant for variant, outcome in outcomes.items() if outcome.status == QUALIFIED}
        reasons = {
            variant: outcomes[variant].reason for variant in outcomes if variant not in passed
        }
        return Qualification(
            frozenset(passed), reasons, f"the report of {self.date} contains no qualified variant"
        )

    def has(self, name: str, world: int) -> bool:
        """Return whether a variant or litmus test was run with ``world`` ranks."""
        outcomes = {**self.litmus.get(str(world), {}), **self.variants.get(str(world), {})}
        return name in outcomes and outcomes[name].status != NOT_RUN

    def extended(self, new: QualificationReport) -> QualificationReport:
        """Return this report merged with a newer report. New outcomes replace old outcomes."""
        merged = {
            name: {
                world: {**old_outcomes.get(world, {}), **new_outcomes.get(world, {})}
                for world in sorted({*old_outcomes, *new_outcomes}, key=int)
            }
            for name, old_outcomes, new_outcomes in (
                ("litmus", self.litmus, new.litmus),
                ("variants", self.variants, new.variants),
            )
        }
        return QualificationReport(new.date, merged["litmus"], merged["variants"])


def machine_key(device: str) -> dict[str, Any]:
    """Return the key of this machine and these kernels. A report is valid only for its key."""
    key: dict[str, Any] = {"format": FORMAT, "device": device, "versions": versions()}
    key["kernels"] = kernels_digest()
    if device == "cuda":
        key |= {"nccl": nccl_version(), "gpus": [], "driver": "unknown"}
        try:
            key |= {"gpus": nvml.uuids(), "driver": nvml.driver_version()}
        except nvml.ERRORS:  # without NVML, use the GPUs that torch sees
            key["gpus"] = [nvml.get_uuid(i) for i in range(torch.cuda.device_count())]
        key["gpus"] = sorted(key["gpus"])
    return key


@functools.cache
def kernels_digest() -> str:
    """Return a digest of the sources that a report covers: `_FOLDERS` and csrc/cuda."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    for name, source in _C.cuda.sources():
        digest.update(f"{name}\n{source}".encode())
    return digest.hexdigest()[:16]


def get_report_path(key: Mapping[str, Any]) -> Path:
    """Return the path of a report. ``RuntimeError`` if the user has no home."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"qualified-{key['device']}-{digest}.json"


def load(device: str) -> tuple[QualificationReport | None, str]:
    """Return the report of this machine, and a warning for the user if a file was ignored.

    The report is None if no valid file exists. The warning is "" if no file was ignored.
    """
    path: Path | str = "of `tpkernels qualify`"
    try:
        expected = machine_key(device)
        path = get_report_path(expected)
        data = json.loads(read_trusted(path, max_bytes=_MAX_BYTES))
        if not isinstance(data, dict) or any(data.get(key) != expected[key] for key in expected):
            raise ValueError("it was written on a different machine or by different versions")
        return from_json(QualificationReport, data.get("report"), "report"), ""
    except (FileNotFoundError, RuntimeError):
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        warning = (
            f"ignoring the qualification report {path}: {error}. Run `tpkernels qualify` to write "
            "a new report."
        )
        return None, warning


def load_qualification(world: int) -> Qualification:
    """Load the qualification of a group of ``world`` ranks on the GPUs of this machine."""
    report, _ = load("cuda")
    return Qualification() if report is None else report.qualification(world)


def save(device: str, report: QualificationReport) -> Path:
    """Write the report of this machine. ``OSError`` if the file cannot be written."""
    path = get_report_path(machine_key(device))
    replace_file(path, report_to_json(device, report).encode())
    return path


def report_to_json(device: str, report: QualificationReport) -> str:
    """Return a report and the machine key as JSON."""
    return json.dumps({**machine_key(device), "report": asdict(report)}, indent=1) + "\n"
