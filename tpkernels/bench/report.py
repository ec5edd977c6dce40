"""What `tpkernels bench` shows: the table in the terminal, and the folder that `--out` writes: CSV,
plots, and one self-contained HTML page."""

from __future__ import annotations

import base64
import csv
import functools
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.cases import COLD
from tpkernels.bench.results import Report, Result, gemm
from tpkernels.bench.statistics import Estimate
from tpkernels.integers import ceil_div
from tpkernels.terminal import byte_size, milliseconds, table, writing
from tpkernels.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 5.6, 3.2  # inches of a panel of a plot
_PAGE_COLUMNS = 260
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>tpkernels bench</title></head>
<body><h1>tpkernels bench</h1><!-- pictures -->
<pre id="results" style="font-size: 12px">{code}</pre></body>
</html>
"""
_COLUMNS = (
    *("tpkernels\nms", "p95", "skew", "runs", "inputs/\ncache", "TFLOP/s", "GB/s"),
    *("% of\nroofline", "unfused\nms", "torch\nms", "matmul\nms", "local_\nmatmul\nms"),
    *("ECT\nms", "E_over-\nlap", "speed-up\nover\nunfused", "speed-up\nover\ntorch"),
)
LEGEND = """\
tpkernels: median time, each repetition counting with its slowest rank; p95: 95th percentile; skew:
median difference between the slowest and the fastest rank; runs: repetitions x calls in each;
inputs/cache: size of all input copies, used in rotation, relative to the last-level cache.
Baselines, interleaved with the op: unfused: the op with nothing overlapped; torch: a collective of
torch.distributed and torch.matmul; matmul: torch.matmul of the local sizes alone; local_matmul: the
local matmul of tpkernels alone. TFLOP/s and GB/s (bytes received from peers) are per rank.
ECT: time minus the faster of matmul and local_matmul. E_overlap: the fraction of unfused's ECT that
is hidden: 100 % is perfect, below 0 is slower than unfused, - means that there is nothing to hide.
speed-up: over that baseline, with its 95 % interval (bootstrap); ~: no difference, the interval
contains 1; ?: too few repetitions for an interval, fewer than 6."""
_TIMES = (  # in the CSV
    *("median", "p95", "min", "max", "mean", "stdev", "skew", "iterations", "calls", "tflops"),
    *("gb_per_s", "roofline"),
)
_MARKS = {"no difference": " ~", "too few repetitions": " ?"}


def show(report: Report, console: Console) -> None:
    """Print the table, the meaning of its columns, and notes; nothing without results."""
    if not report.results:
        return
    grid = table("op\nM, N, K", _COLUMNS, "algorithm: reason")
    for result in report.results:
        for name in report.sweep.algorithms:
            grid.add_row(*_cells(result, name))
    console.print(grid)
    for line in (LEGEND, *_notes(report)):
        console.print(line, markup=False)


def _notes(report: Report) -> list[str]:
    """Describe the conditions of the run in sentences."""
    sweep = report.sweep
    lines = [
        f"Roofline, measured in this run on {counted(rates.tp, 'rank')} at once, {rates.dtype}: a "
        f"local matmul at {rates.tflops:.3g} TFLOP/s (torch.matmul {rates.torch_tflops:.3g}), a "
        f"copy of {rates.copy_over_cache:.2g}x the last-level cache at {rates.copy_gb_per_s:.3g} "
        "GB/s."
        for rates in report.rooflines
    ]
    limit = "" if sweep.seconds is None else f", fewer after {sweep.seconds:g} s per case"
    cache = "not in the cache" if sweep.cold else "the same in each call, possibly in the cache"
    warm = [
        f"{result.case} ({result.inputs_over_cache:.2g}x)"
        for result in report.results
        if sweep.cold and result.inputs_over_cache < COLD
    ]
    exceptions = " except as listed below" if warm else ""
    lines.append(f"{sweep.repeat} repetitions{limit}; inputs {cache}{exceptions}.")
    if warm:
        lines.append(
            "Inputs that may be partly or fully in the cache, with the size of all copies relative "
            f"to the cache (cold from {COLD:g}x): {'; '.join(warm)}."
        )
    left_out: dict[str, list[str]] = {}
    for result in report.results:
        for reason in dict.fromkeys(result.left_out.values()):
            names = [name for name, why in result.left_out.items() if why == reason]
            left_out.setdefault(reason, []).append(f"{result.case} ({', '.join(names)})")
    lines += [f"Left out, {reason}: {'; '.join(cases)}" for reason, cases in left_out.items()]
    if not report.complete:
        measured = f"{len(report.results)} of {len(report.cases)} cases"
        lines.append(f"Incomplete: {measured} are measured.")
    return lines


def _cells(result: Result, name: str) -> list[str]:
    size = byte_size(result.bytes) if result.shape is None else ", ".join(map(str, result.shape))
    case = [f"{size} {result.dtype} x{result.tp}", *result.labels]
    first = "\n".join([escape(result.op), *(f"[dim]{escape(line)}[/]" for line in case)])
    algorithm, times = result.algorithms[name], result.times
    others = [
        milliseconds(times[one].median) if one in times else ""
        for one in ("unfused", "torch", "matmul", "local_matmul")
    ]
    chosen = escape(f"{algorithm.algorithm}: {algorithm.reason}")
    if name not in times:
        return [first, "[bold red]WRONG[/]", *[""] * 7, *others, "", "", "", "", chosen]
    time, hidden = times[name], algorithm.e_overlap
    overlap = "" if algorithm.ect is None else "-"
    if hidden is not None:
        overlap = _with_interval(hidden, ".0f", " %" if hidden.low is not None else " % ?", 100)
    speedups = [algorithm.speedup.get(other) for other in ("unfused", "torch")]
    return [
        first,
        f"[bold]{milliseconds(time.median)}[/]",
        milliseconds(time.p95),
        milliseconds(time.skew),
        f"{time.iterations}" if time.calls == 1 else f"{time.iterations}x{time.calls}",
        f"{result.inputs_over_cache:.2g}x",
        "" if time.tflops is None else f"{time.tflops:.3g}",
        "" if time.gb_per_s is None else f"{time.gb_per_s:.3g}",
        f"{100 * time.roofline:.0f}",
        *others,
        "" if algorithm.ect is None else f"{algorithm.ect:.3g}",
        overlap,
        *(
            "" if one is None else _with_interval(one, ".2f", f"x{_MARKS.get(one.verdict, '')}")
            for one in speedups
        ),
        chosen,
    ]


def _with_interval(estimate: Estimate, form: str, unit: str, scale: float = 1.0) -> str:
    value = f"{scale * estimate.value:{form}}{unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value}\n[dim]{scale * estimate.low:{form}}..{scale * estimate.high:{form}}[/]"


# Files.


def write(report: Report, folder: Path) -> None:
    """Write bench.csv, report.html and, with matplotlib, the plots as PNG. ``UsageError`` if that
    fails."""
    pictures = plots(report) if unsupported() is None else {}
    with writing(folder):
        (folder / "bench.csv").write_text(as_csv(report), encoding="utf-8")
        for title, picture in pictures.items():
            (folder / f"{_PLOTS[title]}.png").write_bytes(picture)
        (folder / "report.html").write_text(as_html(report, pictures), encoding="utf-8")


def as_csv(report: Report) -> str:
    """Write one line per variant of every case, wrong and left out ones too, each with the
    environment."""
    parts = {
        "environment": report.environment,
        "sweep": asdict(report.sweep),
        "run": asdict(report.runs[-1]),
    }
    constants = {
        f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()
    }
    lines = [
        _csv_line(result, name) | constants
        for result in report.results
        for name in dict.fromkeys([*result.algorithms, *result.times, *result.left_out])
    ]
    file = io.StringIO()
    writer = csv.DictWriter(file, lines[0] if lines else constants, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _csv_line(result: Result, name: str) -> dict[str, Any]:
    time, algorithm = result.times.get(name), result.algorithms.get(name)
    shape: list[Any] = result.shape or [None] * 3
    line: dict[str, Any] = {"op": result.op, **dict(zip("MNK", shape, strict=True))}
    line |= {one: getattr(result, one) for one in ("bytes", "dtype", "tp", "inputs_over_cache")}
    line |= {"labels": "; ".join(result.labels), "variant": name}
    line |= {one: getattr(algorithm, one, None) for one in ("algorithm", "right")}
    line["left_out"] = result.left_out.get(name)
    line |= {one: getattr(time, one, None) for one in _TIMES}
    line["ect"] = getattr(algorithm, "ect", None)
    speedup = algorithm.speedup if algorithm else {}
    estimates: dict[str, Estimate | None] = {"e_overlap": getattr(algorithm, "e_overlap", None)}
    estimates |= {f"over_{one}": speedup.get(one) for one in ("unfused", "torch", "local_matmul")}
    for what, estimate in estimates.items():
        for end, field in (("", "value"), ("_low", "low"), ("_high", "high")):
            line[f"{what}{end}"] = getattr(estimate, field, None)
    return line


def as_html(report: Report, pictures: dict[str, bytes]) -> str:
    """Return a page that loads nothing: the pictures, then the tables as a terminal shows them."""
    screen = Console(record=True, width=_PAGE_COLUMNS, file=io.StringIO(), highlight=False)
    show(report, screen)
    facts = Table.grid(padding=(0, 2))
    for part in (report.environment, asdict(report.sweep)):
        for name, value in part.items():
            facts.add_row(escape(name), escape(str(value)))
    for run in report.runs:
        facts.add_row(f"run {escape(run.date)}", escape(f"{run.command}, load {run.load}"))
    screen.print(facts)
    images = [
        f'<h2>{title}</h2><img id="{_PLOTS[title]}" alt="{title}" '
        f'src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        for title, picture in pictures.items()
    ]
    page = screen.export_html(inline_styles=True, code_format=_PAGE)
    nothing = "<p>No plots: matplotlib is missing, or there is nothing to draw.</p>"
    return page.replace("<!-- pictures -->", "".join(images) or nothing)


# Plots.

_PLOTS = {  # names of the files, by title
    "Speed-up over the baselines": "speedup",
    "Overlap efficiency, E_overlap": "overlap",
    "Compute and exposed communication": "split",
}


def unsupported() -> str | None:
    """Return why nothing can be drawn; None: it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is missing (pip install 'tpkernels[plots]')"
    return None


def plots(report: Report) -> dict[str, bytes]:
    """Draw the plots for which there are results, as PNG by title. The cases of a panel differ only
    in M, or the bytes of a collective."""
    panels: dict[str, list[Result]] = {}
    for result in sorted(report.results, key=_x):
        size = f" N={result.shape[1]} K={result.shape[2]}" if result.shape else ""
        labels = f"\n{', '.join(result.labels)}" if result.labels else ""
        title = f"{result.op}{size}, {result.dtype}, {counted(result.tp, 'rank')}{labels}"
        panels.setdefault(title, []).append(result)
    matmuls = {title: cases for title, cases in panels.items() if cases[0].shape}
    names = report.sweep.algorithms
    drawn = (
        _picture(title, shown, functools.partial(draw, names=names))
        for title, shown, draw in zip(
            _PLOTS, (panels, matmuls, matmuls), (_speedups, _overlaps, _split), strict=True
        )
    )
    return {title: image for title, image in zip(_PLOTS, drawn, strict=True) if image is not None}


def _x(result: Result) -> int:
    return result.shape[0] if result.shape else result.bytes


def _picture(
    title: str, panels: dict[str, list[Result]], draw: Callable[[Axes, list[Result]], None]
) -> bytes | None:
    """Draw a panel for each group of cases; return None if none has anything to show."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    columns = min(2, len(panels))
    lines = ceil_div(len(panels), columns) if columns else 0
    figure = Figure(figsize=(columns * _WIDTH, lines * _HEIGHT + 0.4), layout="constrained")
    figure.suptitle(title)
    for at, (panel, cases) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, at)
        axes.set_title(panel, fontsize=8, parse_math=False)
        draw(axes, cases)
        if not axes.has_data():
            axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes)
    if not any(axes.has_data() for axes in figure.axes):
        return None
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _speedups(axes: Axes, cases: list[Result], names: list[str]) -> None:
    lines = {
        f"{name} vs. {other}": [(case, case.algorithms[name].speedup.get(other)) for case in cases]
        for name in names
        for other in ("unfused", "torch")
        if name != other
    }
    _over_size(axes, lines, "speed-up", neutral=1.0)


def _overlaps(axes: Axes, cases: list[Result], names: list[str]) -> None:
    lines = {name: [(case, case.algorithms[name].e_overlap) for case in cases] for name in names}
    _over_size(axes, lines, "E_overlap, %", neutral=0.0, scale=100.0)


def _over_size(
    axes: Axes,
    lines: Mapping[str, Sequence[tuple[Result, Estimate | None]]],
    ylabel: str,
    neutral: float,
    scale: float = 1.0,
) -> None:
    """Draw a line of estimates over M or the bytes, with a vertical bar for each interval. Where
    there is one M, draw `_bars`."""
    shown: list[Result] = []
    if len({_x(result) for points in lines.values() for result, _ in points}) == 1:
        _bars(axes, lines, ylabel, neutral, scale)
        return
    for label, points in lines.items():
        known = [(result, estimate) for result, estimate in points if estimate is not None]
        if not known:
            continue
        shown += [result for result, _ in known]
        xs, ys = [_x(result) for result, _ in known], [scale * e.value for _, e in known]
        (line,) = axes.plot(xs, ys, marker="o", ms=4, label=label)
        for x, (_, estimate) in zip(xs, known, strict=True):
            if estimate.low is not None and estimate.high is not None:
                low, high = scale * estimate.low, scale * estimate.high
                axes.vlines(x, low, high, color=line.get_color(), lw=1)
    if not shown:
        return
    axes.axhline(neutral, color="grey", lw=0.8, ls="--")
    axes.set_xscale("log", base=2)
    ticks, matmul = sorted({_x(result) for result in shown}), bool(shown[0].shape)
    axes.set_xticks(ticks, [str(x) if matmul else byte_size(x) for x in ticks], fontsize=8)
    axes.set_xlabel("M" if matmul else "bytes", fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(fontsize=7)


def _bars(
    axes: Axes,
    lines: Mapping[str, Sequence[tuple[Result, Estimate | None]]],
    ylabel: str,
    neutral: float,
    scale: float,
) -> None:
    """Draw estimates of one case as bars from the neutral value on, with a line for each
    interval."""
    known = [(label, points[0][1]) for label, points in lines.items()]
    bars = [(label, estimate) for label, estimate in known if estimate is not None]
    if not bars:
        return
    at, values = range(len(bars)), [scale * estimate.value - neutral for _, estimate in bars]
    axes.barh(at, values, left=neutral, color="#4878a8")
    for row, (_, estimate) in enumerate(bars):
        if estimate.low is not None and estimate.high is not None:
            axes.hlines(row, scale * estimate.low, scale * estimate.high, color="black", lw=1)
    axes.axvline(neutral, color="grey", lw=0.8, ls="--")
    axes.set_yticks(at, [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(ylabel, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _split(axes: Axes, cases: list[Result], names: list[str]) -> None:
    """Draw bars relative to the local matmul, so that every M is visible."""
    exposed: dict[str, float] = {}
    for result in cases:
        local = gemm(result.times)
        for name in dict.fromkeys([*names, "unfused"]):
            time = result.times.get(name)
            if local is not None and time is not None:
                exposed[f"{_x(result)} {name}"] = 100 * (time.median / local.median - 1)
    if not exposed:
        return
    at, values = range(len(exposed)), exposed.values()
    axes.barh(at, [100 + min(0.0, one) for one in values], color="#4878a8", label="compute")
    positive, label = [max(0.0, one) for one in values], "exposed communication"
    axes.barh(at, positive, left=[100.0] * len(exposed), color="#d8743c", label=label)
    axes.axvline(100, color="grey", lw=0.8, ls="--")
    axes.set_yticks(at, list(exposed), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the local matmul's time; left: M and algorithm", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=7, loc="lower left")
