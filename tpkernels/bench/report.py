"""The folder that `tpkernels bench --out` writes: CSV, plots, and one self-contained HTML page."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.bench.results import Interval, Report, Result, gemm
from tpkernels.integers import ceil_div
from tpkernels.terminal import byte_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
import base64
import csv

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.inputs import warm_cases
from tpkernels.bench.results import Algorithm, Speedup, Time
from tpkernels.terminal import milliseconds, table, writing

_COLUMNS, _WIDTH, _HEIGHT = 2, 5.6, 3.2  # panels side by side; inches of one panel
_DPI = 110
_COMPUTE, _EXPOSED = "#4878a8", "#d8743c"

# The panels of a figure: the cases of a panel differ only in M, or the bytes of a collective.
Panels = dict[str, list[Result]]


@dataclass(frozen=True)
class Figure:
    """A picture, as PNG."""

    name: str
    title: str
    png: bytes


def unsupported() -> str | None:
    """Return why nothing can be drawn; None: it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is missing (pip install 'tpkernels[plots]')"
    return None


def figures(report: Report) -> list[Figure]:
    """Return the pictures for which there are results."""
    panels = _panels(report)
    names = report["sweep"]["algorithms"]
    matmuls = {title: cases for title, cases in panels.items() if cases[0]["shape"]}
    drawn = [
        _figure("speedup", "Speed-up over the baselines", panels, _speedup, names),
        _figure("overlap", "Overlap efficiency, E_overlap", matmuls, _overlap, names),
        _figure("split", "Compute and exposed communication", matmuls, _split, names),
    ]
    return [figure for figure in drawn if figure is not None]


def _panels(report: Report) -> Panels:
    panels: Panels = {}
    for result in sorted(report["results"], key=_x):
        shape = result["shape"]
        size = f" N={shape[1]} K={shape[2]}" if shape else ""
        labels = f"\n{', '.join(result['labels'])}" if result["labels"] else ""
        title = f"{result['op']}{size}, {result['dtype']}, {result['tp']} ranks{labels}"
        panels.setdefault(title, []).append(result)
    return panels


def _x(result: Result) -> int:
    return result["shape"][0] if result["shape"] else result["bytes"]


def _figure(
    name: str,
    title: str,
    panels: Panels,
    draw: Callable[[Axes, list[Result], list[str]], bool],
    names: list[str],
) -> Figure | None:
    """Draw a panel for each group of cases; return None if none has anything to show."""
    from matplotlib.figure import Figure as Canvas  # without pyplot: no display, no global state

    drawn = {panel: cases for panel, cases in panels.items() if cases}
    if not drawn:
        return None
    columns = min(_COLUMNS, len(drawn))
    lines = ceil_div(len(drawn), columns)
    canvas = Canvas(figsize=(columns * _WIDTH, lines * _HEIGHT + 0.4), layout="constrained")
    canvas.suptitle(title)
    grid = canvas.subplots(lines, columns, squeeze=False).flatten()
    shown = False
    for axes, (panel, cases) in zip(grid, drawn.items(), strict=False):
        axes.set_title(panel, fontsize=8, parse_math=False)
        has = draw(axes, cases, names)
        shown = shown or has
        if not has:
            axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes)
    for axes in grid[len(drawn) :]:
        axes.set_axis_off()
    if not shown:
        return None
    file = io.BytesIO()
    canvas.savefig(file, format="png", dpi=_DPI)
    return Figure(name, title, file.getvalue())


def _intervals(
    axes: Axes, points: Sequence[tuple[int, Interval]], name: str, scale: float = 1.0
) -> None:
    """Draw a line with a vertical bar for each interval."""
    xs = [x for x, _ in points]
    axes.plot(xs, [scale * each["value"] for _, each in points], marker="o", ms=4, label=name)
    color = axes.lines[-1].get_color()
    for x, each in points:
        if each["low"] is not None and each["high"] is not None:
            axes.vlines(x, scale * each["low"], scale * each["high"], color=color, lw=1)


def _over_m(axes: Axes, cases: list[Result], ylabel: str, neutral: float) -> None:
    axes.axhline(neutral, color="grey", lw=0.8, ls="--")
    axes.set_xscale("log", base=2)
    xs = sorted({_x(each) for each in cases})
    labels = [str(x) if cases[0]["shape"] else byte_size(x) for x in xs]
    axes.set_xticks(xs, labels=labels, fontsize=8)
    axes.set_xlabel("M" if cases[0]["shape"] else "bytes", fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(fontsize=7)


def _speedup(axes: Axes, cases: list[Result], names: list[str]) -> bool:
    for name, other in _pairs(names):
        points = [
            (_x(each), each["algorithms"][name]["speedup"][other])
            for each in cases
            if other in each["algorithms"][name]["speedup"]
        ]
        if points:
            _intervals(axes, points, f"{name} vs. {other}")
    if not axes.lines:
        return False
    _over_m(axes, cases, "speed-up", 1.0)
    return True


def _pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        for other in ("unfused", "torch"):
            if name != other:
                yield name, other


def _overlap(axes: Axes, cases: list[Result], names: list[str]) -> bool:
    for name in names:
        hidden = [(_x(each), each["algorithms"][name]["e_overlap"]) for each in cases]
        points = [(x, each) for x, each in hidden if each is not None]
        if points:
            _intervals(axes, points, name, 100.0)
    if not axes.lines:
        return False
    _over_m(axes, cases, "E_overlap, %", 0.0)
    return True


def _split(axes: Axes, cases: list[Result], names: list[str]) -> bool:
    """Draw bars relative to the local matmul, so that every M is visible."""
    labels, exposed = [], []
    for each in cases:
        local = gemm(each["times"])
        for name in dict.fromkeys([*names, "unfused"]):
            time = each["times"].get(name)
            if local is not None and time is not None:
                labels.append(f"{size_of(each).split(',')[0]} {name}")
                exposed.append(100 * (time["median"] / local["median"] - 1))
    if not labels:
        return False
    at = range(len(labels))
    axes.barh(at, [100 + min(0.0, each) for each in exposed], color=_COMPUTE, label="compute")
    left = [100.0] * len(labels)
    positive = [max(0.0, each) for each in exposed]
    axes.barh(at, positive, left=left, color=_EXPOSED, label="exposed communication")
    axes.axvline(100, color="grey", lw=0.8, ls="--")
    axes.set_yticks(at, labels=labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the local matmul's time; left: M and algorithm", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=7, loc="lower left")
    return True


_PAGE_COLUMNS = 260
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>tpkernels bench</title></head>
<body><h1>tpkernels bench</h1><!-- pictures -->
<pre id="results" style="font-size: 12px">{code}</pre></body>
</html>
"""
_NUMBERS = (
    *(
        "tpkernels\nms",
        "p95",
        "skew",
        "runs",
        "inputs/\ncache",
        "TFLOP/s",
        "GB/s",
        "% of\nroofline",
    ),
    *("unfused\nms", "torch\nms", "matmul\nms", "local_\nmatmul\nms"),
    *("ECT\nms", "E_over-\nlap", "speed-up\nover\nunfused", "speed-up\nover\ntorch"),
)
COLUMNS = ("unfused", "torch", "matmul", "local_matmul")

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


def size_of(result: Result) -> str:
    """Return M, N, K of a matmul op, the bytes of a collective."""
    if result["shape"] is None:
        return byte_size(result["bytes"])
    return ", ".join(map(str, result["shape"]))


def rows(report: Report) -> list[tuple[Result, str]]:
    """Return the rows: every case with every requested algorithm."""
    names = report["sweep"]["algorithms"]
    return [(result, name) for result in report["results"] for name in names]


def show(report: Report, console: Console) -> None:
    """Print the table, the meaning of its columns, and notes; nothing without results."""
    if not report["results"]:
        return
    grid = table("op\nM, N, K", _NUMBERS, "algorithm: reason")
    for result, name in rows(report):
        grid.add_row(*_cells(result, name))
    console.print(grid)
    for line in (LEGEND, *notes(report)):
        console.print(line, markup=False)


def notes(report: Report) -> list[str]:
    """Describe the conditions of the run in sentences."""
    sweep = report["sweep"]
    lines = []
    for rates in report["rooflines"]:
        lines.append(
            f"Roofline, measured in this run on all {rates['tp']} ranks at once, {rates['dtype']}: "
            f"a local matmul at {rates['tflops']:.3g} TFLOP/s (torch.matmul "
            f"{rates['torch_tflops']:.3g}), a copy of {rates['copy_over_cache']:.2g}x the "
            f"last-level cache at {rates['copy_gb_per_s']:.3g} GB/s."
        )
    limit = "" if sweep["seconds"] is None else f", fewer after {sweep['seconds']:g} s per case"
    over_cache = {result["case"]: result["inputs_over_cache"] for result in report["results"]}
    warm = warm_cases(over_cache) if sweep["cold"] else ""
    cache = "not in the cache" if sweep["cold"] else "the same in each call, possibly in the cache"
    exceptions = " except as listed below" if warm else ""
    lines.append(f"{sweep['repeat']} repetitions{limit}; inputs {cache}{exceptions}.")
    if warm:
        lines.append(warm)
    left_out: dict[str, list[str]] = {}
    for result in report["results"]:
        for reason in dict.fromkeys(result["left_out"].values()):
            names = [name for name, why in result["left_out"].items() if why == reason]
            left_out.setdefault(reason, []).append(f"{result['case']} ({', '.join(names)})")
    for reason, cases in left_out.items():
        lines.append(f"Left out, {reason}: {'; '.join(cases)}")
    if not report["complete"]:
        lines.append(
            f"Incomplete: {len(report['results'])} of {len(report['cases'])} cases are measured."
        )
    return lines


def _cells(result: Result, name: str) -> list[str]:
    size = f"{size_of(result)} {result['dtype']} x{result['tp']}"
    lines = [
        escape(result["op"]),
        f"[dim]{escape(size)}[/]",
        *(f"[dim]{escape(label)}[/]" for label in result["labels"]),
    ]
    algorithm, times = result["algorithms"][name], result["times"]
    others = [milliseconds(times[each]["median"]) if each in times else "" for each in COLUMNS]
    chosen = escape(f"{algorithm['algorithm']}: {algorithm['reason']}")
    own = times.get(name)
    if own is None:
        wrong = ["[bold red]WRONG[/]", *[""] * 7]
        return ["\n".join(lines), *wrong, *others, "", "", "", "", chosen]
    measured = _measured(own, result["inputs_over_cache"])
    return ["\n".join(lines), *measured, *others, *_derived(algorithm), chosen]


def _measured(own: Time, over_cache: float) -> list[str]:
    calls = "" if own["calls"] == 1 else f"x{own['calls']}"
    return [
        f"[bold]{milliseconds(own['median'])}[/]",
        milliseconds(own["p95"]),
        milliseconds(own["skew"]),
        f"{own['iterations']}{calls}",
        f"{over_cache:.2g}x",
        _digits(own["tflops"]),
        _digits(own["gb_per_s"]),
        f"{100 * own['roofline']:.0f}",
    ]


def _derived(algorithm: Algorithm) -> list[str]:
    ect, hidden, speedup = algorithm["ect"], algorithm["e_overlap"], algorithm["speedup"]
    return [
        "" if ect is None else f"{ect:.3g}",
        ("" if ect is None else "-") if hidden is None else _percent(hidden),
        *(_speedup_text(speedup.get(name)) for name in ("unfused", "torch")),
    ]


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _percent(interval: Interval) -> str:
    text = f"{100 * interval['value']:.0f} %"
    if interval["low"] is None or interval["high"] is None:
        return f"{text} ?"
    return f"{text}\n[dim]{100 * interval['low']:.0f}..{100 * interval['high']:.0f}[/]"


def _speedup_text(speedup: Speedup | None) -> str:
    if speedup is None:
        return ""
    mark = {"no difference": " ~", "too few repetitions": " ?"}.get(speedup["verdict"], "")
    text = f"{speedup['value']:.2f}x{mark}"
    if speedup["low"] is None or speedup["high"] is None:
        return text
    return f"{text}\n[dim]{speedup['low']:.2f}..{speedup['high']:.2f}[/]"


def write(report: Report, folder: Path) -> None:
    """Write bench.csv, report.html and, with matplotlib, the plots as PNG. ``UsageError`` if that
    fails."""
    pictures = figures(report) if unsupported() is None else []
    with writing(folder):
        (folder / "bench.csv").write_text(as_csv(report), encoding="utf-8")
        for figure in pictures:
            (folder / f"{figure.name}.png").write_bytes(figure.png)
        (folder / "report.html").write_text(as_html(report, pictures), encoding="utf-8")


def as_csv(report: Report) -> str:
    """Write one line per variant of every case, each with the environment."""
    lines = [line for result in report["results"] for line in _lines(result)]
    constants: dict[str, Any] = {
        f"environment.{name}": value for name, value in report["environment"].items()
    }
    constants |= {f"sweep.{name}": value for name, value in report["sweep"].items()}
    constants |= {f"run.{name}": value for name, value in report["runs"][-1].items()}
    file = io.StringIO()
    writer = csv.DictWriter(file, [*(lines[0] if lines else []), *constants], lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow(line | constants)
    return file.getvalue()


def as_html(report: Report, pictures: Sequence[Figure]) -> str:
    """Return a page that loads nothing: the pictures, then the tables as a terminal shows them."""
    screen = Console(record=True, width=_PAGE_COLUMNS, file=io.StringIO(), highlight=False)
    show(report, screen)
    facts = Table.grid(padding=(0, 2))
    for part in (report["environment"], report["sweep"]):
        for name, value in part.items():
            facts.add_row(escape(name), escape(str(value)))
    for run in report["runs"]:
        facts.add_row(f"run {escape(run['date'])}", escape(f"{run['command']}, load {run['load']}"))
    screen.print(facts)
    images = [
        f'<h2>{figure.title}</h2><img id="{figure.name}" alt="{figure.title}" '
        f'src="data:image/png;base64,{base64.b64encode(figure.png).decode()}">'
        for figure in pictures
    ]
    page = screen.export_html(inline_styles=True, code_format=_PAGE)
    nothing = "<p>No plots: matplotlib is missing, or there is nothing to draw.</p>"
    return page.replace("<!-- pictures -->", "".join(images) or nothing)


def _lines(result: Result) -> list[dict[str, Any]]:
    """Return all variants of a case, including wrong ones and those that were left out."""
    variants = dict.fromkeys([*result["algorithms"], *result["times"], *result["left_out"]])
    shape: Sequence[int | None] = result["shape"] or [None] * 3
    lines: list[dict[str, Any]] = []
    for name in variants:
        time: Any = result["times"].get(name)
        own = result["algorithms"].get(name)
        line: dict[str, Any] = {"op": result["op"], **dict(zip("MNK", shape, strict=True))}
        line |= {each: result[each] for each in ("bytes", "dtype", "tp", "inputs_over_cache")}
        line |= {"labels": "; ".join(result["labels"]), "variant": name}
        line["algorithm"] = own and own["algorithm"]
        line["right"] = own and own["right"]
        line["left_out"] = result["left_out"].get(name)
        for field in ("median", "p95", "min", "max", "mean", "stdev", "skew", "iterations"):
            line[field] = time and time[field]
        for field in ("calls", "tflops", "gb_per_s", "roofline"):
            line[field] = time and time[field]
        line["ect"] = own and own["ect"]
        line |= _interval("e_overlap", own and own["e_overlap"])
        for other in ("unfused", "torch", "local_matmul"):
            line |= _interval(f"over_{other}", own and own["speedup"].get(other))
        lines.append(line)
    return lines


def _interval(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {
        name: interval and interval["value"],
        f"{name}_low": interval and interval["low"],
        f"{name}_high": interval and interval["high"],
    }
