"""The HTML report of `tpkernels bench`: charts as inline SVG, then the table of the terminal.

The page is a single self-contained file. It follows the light or dark scheme of the browser:
matplotlib draws text and lines in the colours of `_THEME`, and CSS variables then replace these
colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from tpkernels.bench.report import WIDTH, show
from tpkernels.bench.results import Row, Run, group_by_case
from tpkernels.common.text import pluralize
from tpkernels.launch.terminal import byte_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "report.html has no charts: matplotlib is not installed; pip install 'tpkernels[plots]'"
_THEME = {"#010101": "var(--text)", "#020202": "var(--line)", "#030303": "var(--muted)"}
_TEXT, _LINE, _MUTED = _THEME
_COLORS = ("#2f7ed8", "#e07b1a", "#2ca067", "#d1495b", "#8e6fd0", "#1aa3b8", "#a07850", "#7f8c3b")
_MARKERS = "osD^vP*X"
_STYLE = {
    **{"svg.fonttype": "none", "svg.hashsalt": "tpkernels", "font.size": 9.5},
    **{
        "figure.constrained_layout.h_pad": 0.1,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
    },
    **{"axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8.5},
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _LINE),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), _TEXT),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), _MUTED),
}
_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 100)
_OVERLAPS = (-1.0, 1.5)  # axis limits; values outside are clipped
# Red, green, and gray for dim text, with contrast on white and on black.
_ANSI = [(0, 0, 0), (214, 69, 65), (34, 153, 84)]
_TERMINAL = TerminalTheme((128, 128, 128), (128, 128, 128), _ANSI + [(128, 128, 128)] * 5)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tpkernels bench</title>
<style>
:root {{ color-scheme: light dark; --text: #1b1f24; --muted: #5b6470; --line: #d7dce2;
  --page: #fff; --card: #f6f7f9; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #e6e9ee; --muted: #9aa4b1; --line: #3a424d;
  --page: #14171b; --card: #1c2026; }} }}
body {{ margin: 0 auto; padding: 1.5rem clamp(0.9rem, 3vw, 2.5rem); max-width: 1320px;
  background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; margin: 0; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 0.2rem; }}
p {{ margin: 0.3rem 0; max-width: 80ch; color: var(--muted); overflow-wrap: anywhere; }}
.charts {{ display: grid; gap: 1rem; margin-top: 0.8rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }}
svg {{ width: 100%; height: auto; background: var(--card); border-radius: 8px; }}
svg text {{ font-family: system-ui, sans-serif; }}
pre {{ overflow-x: auto; padding: 0.8rem; background: var(--card); border-radius: 8px;
  font: 12.5px/1.35 ui-monospace, monospace; }}
</style></head><body>
<h1>tpkernels bench</h1>
{}
</body></html>
"""


def write(run: Run, rows: list[Row], path: Path) -> list[str]:
    """Write the report. Return messages about missing sections, with the remedy."""
    missing, facts = list[str](), run.environment
    machine = [str(facts.get("cpu", "")), *map(str, facts.get("gpus") or [])]  # type: ignore[arg-type]
    lines = [f"{', '.join(machine)}; {run.date}", run.command]
    sections = [f"<p>{escape(line)}</p>" for line in lines]
    try:
        sections += _sections([row for row in rows if row.status == "timed"])
    except ImportError:
        missing = [MISSING]
        sections.append(f"<p>{escape(MISSING)}</p>")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    show(run, rows, console)
    table = console.export_html(theme=_TERMINAL, inline_styles=True, code_format="{code}")
    sections.append(f"<h2>Results</h2>\n<pre>{table}</pre>")
    page = _PAGE.format("\n".join(sections))
    path.write_text(page, encoding="utf-8")
    return missing


def _sections(rows: list[Row]) -> Iterator[str]:
    """Yield a section per metric, with a chart for each op, dtype and number of ranks."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = dict.fromkeys(row.variant for row in rows)
    styles = dict(zip(names, zip(cycle(_COLORS), cycle(_MARKERS)), strict=False))
    charts: dict[str, tuple[str, Callable[[Row], bool], Draw]] = {
        "Speed-up over unfused": (
            "Medians with quartiles. Below 1 the op is slower than unfused, the same op without "
            "overlap.",
            lambda row: "unfused" in row.speedup and row.variant != "local_matmul",
            _draw_speedup,
        ),
        "E_overlap": (
            "Fraction of the exposed communication time of unfused that the op hides. At 100% the "
            "op is as fast as the local matmul. Values outside the axis are drawn at its end.",
            lambda row: row.e_overlap is not None and row.variant != "unfused",
            _draw_overlap,
        ),
        "Roofline": (
            "TFLOP/s per rank against flops per byte read or written, including bytes from peers. "
            "The line is the rate that probes measured on all ranks simultaneously.",
            lambda row: row.flops > 0,
            _draw_roofline,
        ),
    }
    with mpl.rc_context(_STYLE):
        for title, (description, includes, draw) in charts.items():
            drawn = []
            for name, cases in _groups(filter(includes, rows)).items():
                figure = Figure(figsize=(4.7, 3.6), layout="constrained", facecolor="none")
                axes = figure.subplots()
                axes.set_title(name)
                draw(axes, cases, styles)
                drawn.append(_svg(figure))
            if drawn:
                figures = "\n".join(drawn)
                yield (
                    f"<h2>{title}</h2>\n<p>{description}</p>\n<div class=charts>\n{figures}\n</div>"
                )


Cases = list[dict[str, Row]]  # cases of a chart by size, each a mapping from variant to row
Styles = dict[str, tuple[str, str]]  # color and marker of each variant
Draw = Callable[["Axes", Cases, Styles], None]


def _draw_speedup(axes: Axes, cases: Cases, styles: Styles) -> None:
    _draw_over_sizes(axes, cases, styles, lambda row: row.speedup["unfused"])
    axes.axhline(1, color=_TEXT, linewidth=0.9)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), max(high, 1.25))
    low, high = axes.get_ylim()
    ticks = [tick for tick in _RATIOS if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()


def _draw_overlap(axes: Axes, cases: Cases, styles: Styles) -> None:
    _draw_over_sizes(
        axes, cases, styles, lambda row: [np.clip(row.e_overlap or 0.0, *_OVERLAPS)] * 3
    )
    axes.axhline(0, color=_TEXT, linewidth=0.9)
    axes.axhline(1, color=_TEXT, linewidth=0.9, linestyle=":")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.1), max(high, 1.1))
    axes.yaxis.set_major_formatter("{x:.0%}")


def _draw_roofline(axes: Axes, cases: Cases, styles: Styles) -> None:
    first = next(iter(cases[0].values()))
    intensities = [row.flops / row.touched for case in cases for row in case.values()]
    x = np.geomspace(min(intensities) / 2, max(intensities) * 2, 50)
    roof = np.minimum(first.peak_flops, first.copy_bytes * x) / 1e12
    axes.plot(x, roof, color=_TEXT, linewidth=0.9)
    for name, (color, marker) in styles.items():
        rows = [case[name] for case in cases if name in case]
        intensity = [row.flops / row.touched for row in rows]
        tflops = [row.flops / (row.median or 1) / 1e9 for row in rows]
        axes.plot(intensity, tflops, marker, color=color, markersize=5, label=name)
    axes.loglog()
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="flops per byte", ylabel="TFLOP/s")


def _groups(rows: Iterable[Row]) -> dict[str, Cases]:
    """Group the cases by chart title."""
    groups: dict[str, Cases] = {}
    for case in group_by_case(sorted(rows, key=lambda row: row.shape or [row.bytes])).values():
        row = next(iter(case.values()))
        title = f"{row.op}\n{row.dtype}, {pluralize(row.tp, 'rank')}"
        groups.setdefault(title, []).append(case)
    return groups


def _draw_over_sizes(
    axes: Axes, cases: Cases, styles: Styles, value: Callable[[Row], list[float]]
) -> None:
    """Draw the quartiles of each variant against the size of the case."""
    names = [name for name in styles if any(name in case for case in cases)]
    for i, name in enumerate(names):
        color, marker = styles[name]
        positions = [
            x + 0.12 * (i - (len(names) - 1) / 2) for x, case in enumerate(cases) if name in case
        ]
        low, median, high = zip(*(value(case[name]) for case in cases if name in case), strict=True)
        axes.vlines(positions, low, high, color=color, linewidth=1.2)
        axes.plot(positions, median, marker, color=color, markersize=5, label=name)
    sizes = [row.shape or [row.bytes] for row in (next(iter(case.values())) for case in cases)]
    label = "size"
    if len(sizes[0]) == 1:
        ticks = [byte_size(nbytes) for (nbytes,) in sizes]
    elif len({tuple(size[1:]) for size in sizes}) == 1:
        ticks, label = [str(size[0]) for size in sizes], f"M; N, K = {sizes[0][1]}, {sizes[0][2]}"
    else:
        ticks, label = [", ".join(map(str, size)) for size in sizes], "M, N, K"
    axes.set_xticks(range(len(cases)), ticks)
    if len(" ".join(ticks)) > 45:
        axes.tick_params("x", labelrotation=90)
        axes.figure.set_figheight(4.6)  # type: ignore[union-attr]  # not a subfigure
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(label)


def _svg(figure: Figure) -> str:
    """Render a figure with its legend as an SVG element for the page."""
    figure.legend(loc="outside lower center", ncols=4, handlelength=1, columnspacing=1.2)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    svg = re.sub(r'width="[^"]*" height="[^"]*"', 'role="img"', svg[svg.index("<svg") :], count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z]+_[\d_]+"', "", svg)  # not unique in the page
    for color, variable in _THEME.items():
        svg = svg.replace(color, variable)
    return svg
