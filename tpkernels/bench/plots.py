"""Pictures, with matplotlib (the extra `plots`).

A report: speed-up and overlap over M, and compute and communication time. A profile: a timeline
with a lane for each rank and thread or stream.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.bench.results import Interval, Report, Result, gemm
from tpkernels.bench.table import size_of
from tpkernels.bench.trace import COMPUTE, COPY, MOVE, WAIT, lanes
from tpkernels.integers import ceil_div
from tpkernels.terminal import byte_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS, _WIDTH, _HEIGHT = 2, 5.6, 3.2  # panels side by side; inches of one panel
_DPI = 110
_COMPUTE, _EXPOSED = "#4878a8", "#d8743c"

# Kinds of time in a timeline. Drawn in this order: a wait covers the copy that contains it.
COLOURS = {COMPUTE: "tab:blue", COPY: "tab:orange", WAIT: "tab:red", MOVE: "tab:green"}
_SPANS = {COMPUTE: (-0.4, 0.8), COPY: (-0.4, 0.3), WAIT: (-0.4, 0.8), MOVE: (0.1, 0.3)}
_MOST_INCHES = 30.0

# The panels of a figure: the cases of a panel differ only in M, or the bytes of a collective.
Panels = dict[str, list[Result]]


@dataclass(frozen=True)
class Figure:
    """A picture in both formats."""

    name: str
    title: str
    png: bytes
    svg: bytes


def unsupported() -> str | None:
    """Why nothing can be drawn; None: it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is missing (pip install 'tpkernels[plots]')"
    return None


def figures(report: Report) -> list[Figure]:
    """The pictures for which there are results."""
    panels = _panels(report)
    names = report["sweep"]["algorithms"]
    matmuls = {title: cases for title, cases in panels.items() if cases[0]["shape"]}
    drawn = [
        _figure("speedup", "Speed-up over the baselines", panels, _speedup, names),
        _figure("overlap", "Overlap efficiency, E_overlap", matmuls, _overlap, names),
        _figure("split", "Compute and exposed communication", matmuls, _split, names),
    ]
    return [figure for figure in drawn if figure is not None]


def timeline(trace: dict[str, Any], path: Path, title: str) -> None:
    """Draws a merged trace in the format given by the suffix of ``path``.

    Compute fills the lane. Copies use its upper part, and concurrent transfers its lower part.
    Waits cover compute and copies. Time counts from the first thing drawn.
    """
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch

    rows = lanes(trace)
    drawn = [span for lane in rows.values() for spans in lane.values() for span in spans]
    start = min((begin for begin, _ in drawn), default=0.0)
    canvas = Canvas(figsize=(10, min(1.5 + 0.5 * len(rows), _MOST_INCHES)), layout="constrained")
    axes = canvas.subplots()
    for row, lane in enumerate(rows.values()):
        for kind, colour in COLOURS.items():
            bottom, height = _SPANS[kind]
            spans = [
                ((begin - start) / 1e3, (end - begin) / 1e3) for begin, end in lane.get(kind, [])
            ]
            axes.broken_barh(spans, (row + bottom, height), color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [label for _, label in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize="medium", parse_math=False)
    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    canvas.savefig(path, dpi=150)


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
    """None if no panel has anything to show."""
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
    return Figure(name, title, _save(canvas, "png"), _save(canvas, "svg"))


def _save(canvas: Any, kind: str) -> bytes:
    file = io.BytesIO()
    canvas.savefig(file, format=kind, dpi=_DPI)
    return file.getvalue()


def _intervals(
    axes: Axes, points: Sequence[tuple[int, Interval]], name: str, scale: float = 1.0
) -> None:
    """A line with a vertical bar for each interval."""
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
    """Bars relative to the local matmul, so that every M is visible."""
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
