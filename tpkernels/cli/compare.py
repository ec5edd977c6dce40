"""``tpkernels compare``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer import Option

from tpkernels.bench.cases import COLD
from tpkernels.bench.measuring import BASELINES
from tpkernels.bench.results import Report, Result, load
from tpkernels.bench.statistics import Array, Speedup, independent, ratio
from tpkernels.terminal import UsageError, check_known, console, milliseconds, table

_VOLATILE = {"launcher"}  # of an environment: may differ without notice


def compare(
    first: Annotated[Path, typer.Argument(help="bench.json, or the folder that contains it.")],
    second: Annotated[Path, typer.Argument(help="The same of the later run.")],
    threshold: Annotated[float, Option(help="Tolerated slowdown: 0.05 is 5 percent.")] = 0.05,
    relative_to: Annotated[
        str | None,
        Option(
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
    a, b = (load(path / "bench.json" if path.is_dir() else path) for path in (first, second))
    earlier = {result.case: result for result in a.results}
    pairs = [(earlier[now.case], now) for now in b.results if now.case in earlier]
    changes = [
        Change.of(before, now, name, relative_to)
        for before, now in pairs
        for name in b.sweep.algorithms
        if name in a.sweep.algorithms
    ]
    if all(change.ratio is None and change.timed_in_both for change in changes):
        with_baseline = f" with baseline '{relative_to}'" if relative_to else ""
        raise UsageError(
            f"'{first}' and '{second}' have no case and algorithm in common{with_baseline}"
        )
    grid = table("case", ("algorithm", "first\nms", "second\nms", "second /\nfirst"), "")
    for change in changes:
        grid.add_row(*change.cells(threshold))
    regressions = sum(change.regressed(threshold) for change in changes)
    undecided = sum(change.ratio is not None and change.ratio.low is None for change in changes)
    parts = [f"{len(changes)} compared, {regressions} slower by more than {100 * threshold:g} % "]
    parts[0] += "or wrong"
    if undecided:
        parts.append(f"{undecided} undecided: fewer than 6 repetitions")
    if a.done ^ b.done:
        parts.append(f"{len(a.done ^ b.done)} cases in one file only")
    out = console()
    for line in differences(a, b):
        out.print(line, markup=False)
    out.print(grid)
    out.print("; ".join(parts) + ".")
    if regressions:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Change:
    """A case and algorithm in both files, and the second time over the first, each relative to its
    baseline if there is one; None unless all of them were timed."""

    first: Result
    second: Result
    algorithm: str
    ratio: Speedup | None

    @classmethod
    def of(cls, first: Result, second: Result, name: str, relative_to: str | None) -> Change:
        """Compare the times of an algorithm."""
        names = [name] if relative_to is None else [name, relative_to]
        if not all(one in result.times for result in (first, second) for one in names):
            return cls(first, second, name, None)
        series = [[result.times[one].samples for one in names] for result in (second, first)]
        function = ratio if relative_to is None else _ratio_to_baselines
        return cls(first, second, name, Speedup.of(independent(function, *series)))

    @property
    def timed_in_both(self) -> bool:
        """Return whether neither result was wrong, and so not timed."""
        return self.algorithm in self.first.times and self.algorithm in self.second.times

    def regressed(self, threshold: float) -> bool:
        """Return whether it is newly wrong, or slower by more than ``threshold`` over the whole
        interval."""
        if not self.second.algorithms[self.algorithm].right:
            return self.algorithm in self.first.times
        low = None if self.ratio is None else self.ratio.low
        return low is not None and low > 1 + threshold

    def cells(self, threshold: float) -> Iterator[str]:
        """Yield the cells of a row of the table."""
        yield from (escape(self.second.case), escape(self.algorithm))
        for result in (self.first, self.second):
            time = result.times.get(self.algorithm)
            yield "WRONG" if time is None else milliseconds(time.median)
        estimate = self.ratio
        value = "" if estimate is None else f"{estimate.value:.3f}"
        if estimate is not None and estimate.low is not None:
            value += f" [dim]{estimate.low:.3f}..{estimate.high:.3f}[/]"
        yield value
        if self.regressed(threshold):
            yield "[bold red]REGRESSION[/]"
        elif estimate is None:
            yield "not timed in both"
        else:  # the ratio is one of times: above 1 is slower
            words = {"faster": "slower, within the threshold", "slower": "faster"}
            yield words.get(estimate.verdict, estimate.verdict)


def _ratio_to_baselines(b: Array, b_base: Array, a: Array, a_base: Array) -> Array:
    return (b / b_base) / (a / a_base)


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
