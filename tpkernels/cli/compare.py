"""``tpkernels compare``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.inputs import COLD
from tpkernels.bench.measuring import BASELINES
from tpkernels.bench.results import Report, Result, load
from tpkernels.bench.statistics import Array, Speedup, independent, ratio
from tpkernels.terminal import UsageError, check_known, console, milliseconds, table


def compare(
    first: Annotated[Path, typer.Argument(help="bench.json, or the folder that contains it.")],
    second: Annotated[Path, typer.Argument(help="The same of the later run.")],
    threshold: Annotated[float, typer.Option(help="Tolerated slowdown: 0.05 is 5 percent.")] = 0.05,
    relative_to: Annotated[
        str | None,
        typer.Option(
            help="Compare times relative to a baseline in the same run, for machines with other "
            f"load: {', '.join(BASELINES)}."
        ),
    ] = None,
) -> None:
    """Compare two results of `tpkernels bench`, case by case.

    The exit code is 1 on a regression: the 95 % interval of the ratio of the times lies entirely
    above the threshold, or a result has become wrong.
    """
    if not threshold >= 0:
        raise UsageError(f"--threshold is {threshold:g}; it must be at least 0")
    if relative_to is not None:
        check_known("baseline", [relative_to], BASELINES)
    a, b = load(_file(first)), load(_file(second))
    compared = changes(a, b, relative_to)
    if not any(change.comparable for change in compared):
        with_baseline = f" with baseline '{relative_to}'" if relative_to else ""
        raise UsageError(
            f"'{first}' and '{second}' have no case and algorithm in common{with_baseline}"
        )
    out = console()
    for line in differences(a, b):
        out.print(line, markup=False)
    out.print(_table(compared, threshold))
    out.print(summary(compared, a, b, threshold))
    if any(change.regressed(threshold) for change in compared):
        raise typer.Exit(1)


def _file(path: Path) -> Path:
    return path / "bench.json" if path.is_dir() else path


def _table(compared: list[Change], threshold: float) -> Table:
    grid = table("case", ("algorithm", "first\nms", "second\nms", "second /\nfirst"), "")
    for change in compared:
        medians = [
            "WRONG" if value is None else milliseconds(value)
            for value in (change.first, change.second)
        ]
        grid.add_row(
            escape(change.case),
            escape(change.algorithm),
            *medians,
            _ratio_text(change),
            _verdict(change, threshold),
        )
    return grid


def _ratio_text(change: Change) -> str:
    estimate = change.ratio
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [dim]{estimate.low:.3f}..{estimate.high:.3f}[/]"


def _verdict(change: Change, threshold: float) -> str:
    if change.regressed(threshold):
        return "[bold red]REGRESSION[/]"
    if change.ratio is None:
        return "not timed in both"
    # The ratio is one of times: above 1 is slower.
    words = {"faster": "slower, within the threshold", "slower": "faster"}
    return words.get(change.ratio.verdict, change.ratio.verdict)


# Facts of an environment that may differ without notice.
_VOLATILE = {"launcher"}


@dataclass(frozen=True)
class Change:
    """A case and algorithm in both files.

    Attributes:
        first, second: median milliseconds; None if the result was wrong and not timed.
        ratio: the second time over the first; None unless both were timed.
        right: whether the second result is right.
    """

    case: str
    algorithm: str
    first: float | None
    second: float | None
    ratio: Speedup | None
    right: bool

    @property
    def comparable(self) -> bool:
        """Return whether a verdict is possible: both are timed, or one of them is wrong."""
        return self.ratio is not None or self.first is None or self.second is None

    def regressed(self, threshold: float) -> bool:
        """Return whether it is newly wrong, or slower by more than ``threshold`` over the whole
        interval."""
        if not self.right:
            return self.first is not None
        low = None if self.ratio is None else self.ratio.low
        return low is not None and low > 1 + threshold


def changes(first: Report, second: Report, relative_to: str | None = None) -> list[Change]:
    """List every case and requested algorithm that both reports contain."""
    earlier = {result.case: result for result in first.results}
    names = [name for name in second.sweep.algorithms if name in first.sweep.algorithms]
    return [
        _change(earlier[result.case], result, name, relative_to)
        for result in second.results
        if result.case in earlier
        for name in names
    ]


def differences(first: Report, second: Report) -> Iterator[str]:
    """Yield sentences on what differs between the runs besides the code."""
    old, new = first.environment, second.environment
    for name in sorted((old.keys() | new.keys()) - _VOLATILE):
        if old.get(name) != new.get(name):
            yield f"{name} differs: {old.get(name)} and {new.get(name)}"
    for name in ("cold", "threads"):
        a, b = getattr(first.sweep, name), getattr(second.sweep, name)
        if a != b:
            yield f"{name} differs: {a} and {b}"
    earlier = {result.case: result.inputs_over_cache for result in first.results}
    for result in second.results:
        before, now = earlier.get(result.case), result.inputs_over_cache
        if before is not None and (before < COLD) != (now < COLD):
            yield (
                f"the inputs of {result.case} differ: {before:.2g}x and {now:.2g}x the "
                f"last-level cache (cold from {COLD:g}x)"
            )


def summary(compared: list[Change], first: Report, second: Report, threshold: float) -> str:
    """Say how many cases were compared, and how many regressed, in one sentence."""
    regressions = sum(change.regressed(threshold) for change in compared)
    undecided = sum(change.ratio is not None and change.ratio.low is None for change in compared)
    old, new = ({result.case for result in report.results} for report in (first, second))
    percent = 100 * threshold
    parts = [f"{len(compared)} compared, {regressions} slower by more than {percent:g} % or wrong"]
    if undecided:
        parts.append(f"{undecided} undecided: fewer than 6 repetitions")
    if old ^ new:
        parts.append(f"{len(old ^ new)} cases in one file only")
    return "; ".join(parts) + "."


def _change(first: Result, second: Result, name: str, relative_to: str | None) -> Change:
    old, new = first.times.get(name), second.times.get(name)
    names = [name] if relative_to is None else [name, relative_to]
    return Change(
        case=second.case,
        algorithm=name,
        first=None if old is None else old.median,
        second=None if new is None else new.median,
        ratio=_ratio(first, second, names),
        right=second.algorithms[name].right,
    )


def _ratio(first: Result, second: Result, names: list[str]) -> Speedup | None:
    """Return the second time over the first, each relative to its baseline if ``names`` has one."""
    if not all(name in result.times for result in (first, second) for name in names):
        return None
    series = [[result.times[name].samples for name in names] for result in (second, first)]
    function = ratio if len(names) == 1 else _ratio_to_baselines
    return Speedup.of(independent(function, *series))


def _ratio_to_baselines(b: Array, b_base: Array, a: Array, a_base: Array) -> Array:
    return (b / b_base) / (a / a_base)
