"""``tpkernels compare``: is the second run slower than the first?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.baselines import BASELINES
from tpkernels.bench.file import load
from tpkernels.bench.inputs import COLD
from tpkernels.bench.options import UsageError
from tpkernels.bench.output import console, milliseconds, table
from tpkernels.bench.results import Report, Result
from tpkernels.bench.statistics import Array, Estimate, independent, ratio
from tpkernels.cli.exit_codes import exit_codes

# What of an environment may differ without a word.
_VOLATILE = {"launcher"}


@dataclass(frozen=True)
class Change:
    """A case and algorithm in both files: milliseconds in each, and the time of the second over
    that of the first. None where one of them was wrong and not timed."""

    case: str
    algorithm: str
    first: float | None
    second: float | None
    ratio: Estimate | None
    right: bool  #: the second one's result

    @property
    def comparable(self) -> bool:
        """Whether the two can be told apart: both timed, or one of them wrong."""
        return self.ratio is not None or self.first is None or self.second is None

    def regressed(self, threshold: float) -> bool:
        """Wrong now, or slower by more than ``threshold`` for all that the interval says."""
        if not self.right:
            return self.first is not None
        low = None if self.ratio is None else self.ratio.low
        return low is not None and low > 1 + threshold


def compare(
    first: Annotated[Path, typer.Argument(help="bench.json, or the folder that has it.")],
    second: Annotated[Path, typer.Argument(help="The same of the later run.")],
    threshold: Annotated[
        float, typer.Option(help="How much slower it may be: 0.05 is 5 percent.")
    ] = 0.05,
    relative_to: Annotated[
        str | None,
        typer.Option(
            help=f"Compare times over those of a baseline in the same run: {', '.join(BASELINES)}. "
            "For runs that other work on the machine may have slowed."
        ),
    ] = None,
) -> None:
    """Compare two results of `tpkernels bench`, case by case.

    The exit code is 1 on a regression: the whole 95 % interval of the ratio of the times lies
    beyond the threshold, or a result has become wrong.
    """
    with exit_codes():
        if not threshold >= 0:
            raise UsageError(f"--threshold is {threshold:g}; it must be 0 or more")
        if relative_to is not None and relative_to not in BASELINES:
            raise UsageError(f"unknown baseline '{relative_to}'; there are {', '.join(BASELINES)}")
        a, b = load(_file(first)), load(_file(second))
        found = changes(a, b, relative_to)
        if not any(change.comparable for change in found):
            beside = f", timed beside '{relative_to}'" if relative_to else ""
            raise UsageError(
                f"'{first}' and '{second}' have no case and algorithm in common{beside}"
            )
        out = console()
        for line in _differences(a, b):
            out.print(line, markup=False)
        out.print(_table(found, threshold))
        out.print(_summary(found, a, b, threshold))
        if any(change.regressed(threshold) for change in found):
            raise typer.Exit(1)


def changes(a: Report, b: Report, relative_to: str | None = None) -> list[Change]:
    """All that both files have measured, `unfused` where it was asked for."""
    earlier = {found["case"]: found for found in a["results"]}
    names = [name for name in b["sweep"]["algorithms"] if name in a["sweep"]["algorithms"]]
    return [
        change
        for found in b["results"]
        if found["case"] in earlier
        for change in _changes(earlier[found["case"]], found, names, relative_to)
    ]


def _changes(a: Result, b: Result, names: list[str], relative_to: str | None) -> Iterator[Change]:
    for name in names:
        old, new = a["times"].get(name), b["times"].get(name)
        yield Change(
            case=b["case"],
            algorithm=name,
            first=old and old["median"],
            second=new and new["median"],
            ratio=_ratio_of(a, b, [name] if relative_to is None else [name, relative_to]),
            right=b["algorithms"][name]["right"],
        )


def _ratio_of(a: Result, b: Result, names: list[str]) -> Estimate | None:
    """Of the second time over the first, each over its baseline if ``names`` has one."""
    if not all(name in found["times"] for found in (a, b) for name in names):
        return None
    series = [[found["times"][name]["samples"] for name in names] for found in (b, a)]
    return independent(ratio if len(names) == 1 else _over_baselines, *series)


def _over_baselines(b: Array, b_base: Array, a: Array, a_base: Array) -> Array:
    return (b / b_base) / (a / a_base)


def _file(path: Path) -> Path:
    return path / "bench.json" if path.is_dir() else path


def _differences(a: Report, b: Report) -> Iterator[str]:
    """What besides the code may be the reason."""
    old, new = a["environment"], b["environment"]
    for name in sorted((old.keys() | new.keys()) - _VOLATILE):
        if old.get(name) != new.get(name):
            yield f"{name} differs: {old.get(name)} and {new.get(name)}"
    for name in ("cold", "threads"):
        if a["sweep"].get(name) != b["sweep"].get(name):
            yield f"{name} differs: {a['sweep'].get(name)} and {b['sweep'].get(name)}"
    earlier = {found["case"]: found["inputs_over_cache"] for found in a["results"]}
    for found in b["results"]:
        before, now = earlier.get(found["case"]), found["inputs_over_cache"]
        if before is not None and (before < COLD) != (now < COLD):
            yield (
                f"the inputs of {found['case']} differ: {before:.2g}x and {now:.2g}x the "
                f"last-level cache (cold from {COLD:g}x on)"
            )


def _table(found: list[Change], threshold: float) -> Table:
    shown = table("case", ("algorithm", "first\nms", "second\nms", "second /\nfirst"), "")
    for change in found:
        medians = [
            "WRONG" if value is None else milliseconds(value)
            for value in (change.first, change.second)
        ]
        shown.add_row(
            escape(change.case),
            change.algorithm,
            *medians,
            _ratio(change),
            _verdict(change, threshold),
        )
    return shown


def _ratio(change: Change) -> str:
    found = change.ratio
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} [dim]{found.low:.3f}..{found.high:.3f}[/]"


def _verdict(change: Change, threshold: float) -> str:
    if change.regressed(threshold):
        return "[bold red]REGRESSION[/]"
    if change.ratio is None:
        return "not timed in both"
    # A ratio of times: what is above 1 has become slower.
    words = {"faster": "slower, within the threshold", "slower": "faster"}
    return words.get(change.ratio.verdict, change.ratio.verdict)


def _summary(found: list[Change], a: Report, b: Report, threshold: float) -> str:
    worse = sum(change.regressed(threshold) for change in found)
    open_ = sum(change.ratio is not None and change.ratio.low is None for change in found)
    alone = len({each["case"] for each in a["results"]} ^ {each["case"] for each in b["results"]})
    said = [f"{len(found)} compared, {worse} slower by more than {100 * threshold:g} % or wrong"]
    if open_:
        said.append(f"{open_} with too few repetitions to tell (fewer than 6)")
    if alone:
        said.append(f"{alone} cases in one file only")
    return "; ".join(said) + "."
