"""Plots of a report: speed-up and overlap over M, and what the time consists of. Needs matplotlib,
which the extra `plots` brings."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpkernels.bench.output import byte_size
from tpkernels.bench.results import Interval, Report, Result, gemm
from tpkernels.bench.table import size_of
from tpkernels.integers import ceil_div

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS, _WIDTH, _HEIGHT = 2, 5.6, 3.2  # of a grid of panels; inches of one
_DPI = 110
_COMPUTE, _EXPOSED = "#4878a8", "#d8743c"

# The panels of a figure: cases that differ in nothing but M, or the bytes of a collective.
Panels = dict[str, list[Result]]


@dataclass(frozen=True)
class Figure:
    """A picture in both formats."""

    name: str
    title: str
    png: bytes
    svg: bytes


def available() -> bool:
    """Whether there is matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def figures(report: Report) -> list[Figure]:
    """The pictures that the results suffice for."""
    panels = _panels(report)
    names = report["sweep"]["algorithms"]
    matmuls = {title: found for title, found in panels.items() if found[0]["shape"]}
    drawn = [
        _figure("speedup", "Speed-up over the unfused way", panels, _speedup, names),
        _figure("overlap", "Overlap efficiency, E_overlap", matmuls, _overlap, names),
        _figure("split", "Compute and exposed communication", matmuls, _split, names),
    ]
    return [figure for figure in drawn if figure is not None]


def _panels(report: Report) -> Panels:
    found: Panels = {}
    for result in sorted(report["results"], key=_x):
        shape = result["shape"]
        size = f" N={shape[1]} K={shape[2]}" if shape else ""
        labels = f"\n{', '.join(result['labels'])}" if result["labels"] else ""
        title = f"{result['op']}{size}, {result['dtype']}, {result['tp']} ranks{labels}"
        found.setdefault(title, []).append(result)
    return found


def _x(result: Result) -> int:
    return result["shape"][0] if result["shape"] else result["bytes"]


def _figure(
    name: str,
    title: str,
    panels: Panels,
    draw: Callable[[Axes, list[Result], list[str]], bool],
    names: list[str],
) -> Figure | None:
    """None where no panel has anything to show."""
    from matplotlib.figure import Figure as Canvas  # without pyplot: no display, no global state

    drawn = {panel: found for panel, found in panels.items() if found}
    if not drawn:
        return None
    columns = min(_COLUMNS, len(drawn))
    lines = ceil_div(len(drawn), columns)
    canvas = Canvas(figsize=(columns * _WIDTH, lines * _HEIGHT + 0.4), layout="constrained")
    canvas.suptitle(title)
    grid = canvas.subplots(lines, columns, squeeze=False).flatten()
    shown = False
    for axes, (panel, found) in zip(grid, drawn.items(), strict=False):
        axes.set_title(panel, fontsize=8, parse_math=False)
        has = draw(axes, found, names)
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
    """A line, and a bar at each point that has an interval."""
    xs = [x for x, _ in points]
    axes.plot(xs, [scale * each["value"] for _, each in points], marker="o", ms=4, label=name)
    color = axes.lines[-1].get_color()
    for x, each in points:
        if each["low"] is not None and each["high"] is not None:
            axes.vlines(x, scale * each["low"], scale * each["high"], color=color, lw=1)


def _over_m(axes: Axes, found: list[Result], ylabel: str, neutral: float) -> None:
    axes.axhline(neutral, color="grey", lw=0.8, ls="--")
    axes.set_xscale("log", base=2)
    xs = sorted({_x(each) for each in found})
    labels = [str(x) if found[0]["shape"] else byte_size(x) for x in xs]
    axes.set_xticks(xs, labels=labels, fontsize=8)
    axes.set_xlabel("M" if found[0]["shape"] else "bytes", fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(fontsize=7)


def _speedup(axes: Axes, found: list[Result], names: list[str]) -> bool:
    for name, other in _pairs(names):
        points = [
            (_x(each), each["algorithms"][name]["speedup"][other])
            for each in found
            if other in each["algorithms"][name]["speedup"]
        ]
        if points:
            _intervals(axes, points, f"{name} over {other}")
    if not axes.lines:
        return False
    _over_m(axes, found, "times as fast", 1.0)
    return True


def _pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        for other in ("unfused", "torch"):
            if name != other:
                yield name, other


def _overlap(axes: Axes, found: list[Result], names: list[str]) -> bool:
    for name in names:
        hidden = [(_x(each), each["algorithms"][name]["e_overlap"]) for each in found]
        points = [(x, each) for x, each in hidden if each is not None]
        if points:
            _intervals(axes, points, name, 100.0)
    if not axes.lines:
        return False
    _over_m(axes, found, "E_overlap, %", 0.0)
    return True


def _split(axes: Axes, found: list[Result], names: list[str]) -> bool:
    """Bars relative to the local product alone, so that all M are seen."""
    labels, exposed = [], []
    for each in found:
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
    axes.set_xlabel("% of the local product's time; M and algorithm to the left", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=7, loc="lower left")
    return True
