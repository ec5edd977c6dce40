"""``tpkernels compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer import Option

from tpkernels.bench.results import Row, load, quartiles
from tpkernels.common.text import pluralize
from tpkernels.launch.terminal import UsageError, console, milliseconds, table

_REGRESSION = "[bold red]REGRESSION[/]"


def compare(
    first: Annotated[Path, typer.Argument(help="bench.jsonl of the earlier run, or its folder.")],
    second: Annotated[Path, typer.Argument(help="bench.jsonl of the later run, or its folder.")],
    threshold: Annotated[float, Option(help="Tolerated slowdown; 0.05 means 5%.")] = 0.05,
) -> None:
    """Compare two runs of `tpkernels bench`, case by case.

    A case is a regression if its median is slower by more than the threshold and the quartiles of
    the two runs do not overlap, or if its result is now wrong. The exit code is 1 if there is a
    regression.
    """
    if not threshold >= 0:
        raise UsageError(f"--threshold is {threshold:g}; it must be at least 0")
    paths = [path / "bench.jsonl" if path.is_dir() else path for path in (first, second)]
    (a, old), (b, new) = map(load, paths)
    algorithms = set(a.method.algorithms) & set(b.method.algorithms)
    before = {(row.case, row.variant): row for row in old if row.variant in algorithms}
    pairs = [(before[key], row) for row in new if (key := (row.case, row.variant)) in before]
    if not pairs:
        raise UsageError(f"'{paths[0]}' and '{paths[1]}' have no case with a common algorithm")
    grid = table("case", ("algorithm", "first\nms", "second\nms", "second /\nfirst"), "")
    regressions = 0
    for earlier, later in pairs:
        ratio, verdict = _compare_rows(earlier, later, threshold)
        regressions += verdict == _REGRESSION
        cells = map(escape, (later.case, later.variant))
        grid.add_row(*cells, _time(earlier), _time(later), ratio, verdict)
    out = console()
    first_run, second_run = (
        {**run.environment, "cold": run.method.cold, "threads": run.method.threads}
        for run in (a, b)
    )
    for name in sorted(first_run.keys() | second_run.keys()):
        if first_run.get(name) != second_run.get(name):
            note = f"{name} differs: {first_run.get(name)} and {second_run.get(name)}"
            out.print(note, markup=False, soft_wrap=True)
    out.print(grid)
    out.print(
        f"{pluralize(len(pairs), 'result')} compared: {regressions} slower by more than "
        f"{threshold:.4g} or wrong."
    )
    if regressions:
        raise typer.Exit(1)


def _compare_rows(earlier: Row, later: Row, threshold: float) -> tuple[str, str]:
    """Return the ratio of the medians, and the verdict."""
    if not (earlier.ms and later.ms):
        broken = earlier.ms and later.status == "wrong"
        return "", _REGRESSION if broken else "not timed in both runs"
    (low, median, high), (now_low, now, now_high) = quartiles(earlier.ms), quartiles(later.ms)
    if now_low <= high and low <= now_high:
        verdict = "no difference: the quartiles overlap"
    elif now > median * (1 + threshold):
        verdict = _REGRESSION
    else:
        verdict = "slower, within the threshold" if now > median else "faster"
    return f"{now / median:.3f}", verdict


def _time(row: Row) -> str:
    """Return the median with quartiles."""
    if not row.ms:
        return row.status.upper()
    low, median, high = map(milliseconds, quartiles(row.ms))
    return f"{median} [dim]{low}..{high}[/]"
