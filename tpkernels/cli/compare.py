"""``tpkernels compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.baselines import BASELINES
from tpkernels.bench.compare import Change, changes, differences, summary
from tpkernels.bench.file import load
from tpkernels.cli.exit_codes import exit_codes
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
    with exit_codes():
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
            change.algorithm,
            *medians,
            _ratio(change),
            _verdict(change, threshold),
        )
    return grid


def _ratio(change: Change) -> str:
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
