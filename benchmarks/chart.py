"""Bar charts as SVG, legible on light and dark pages.

    python -m benchmarks.chart results/bench.jsonl docs/images/ops.svg

draws a result of `tpkernels bench`: the exposed communication of each op by size. Needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from tpkernels.bench.results import group_by_case, load

WIDTH, LABELS, BAR, GAP = 560, 150, 22, 6
TEXT, OURS, OTHERS = "#767676", "#e8590c", "#8a94a0"
OPS = {  # color and label of each variant in a result of `tpkernels bench`
    "torch": ("#c3c9d0", "gloo + torch.matmul"),
    "unfused": (OTHERS, "unfused: collective, then matmul"),
    "auto": (OURS, "tpkernels"),
}


def draw_bars(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    names: Mapping[str, str],
    ours: Collection[str],
) -> str:
    """Return an SVG with one bar per value, in groups.

    Args:
        title: heading of the chart.
        groups: maps a group name to its speed-ups by key. The first speed-up is the baseline, 1.0.
        names: maps a key to its label.
        ours: keys of the highlighted bars.
    """
    longest = max(value for group in groups.values() for value in group.values())
    scale = (WIDTH - LABELS - 60) / longest
    lines, y = [_draw_text(10, 24, title, "bold")], 48
    for group, values in groups.items():
        lines.append(_draw_text(10, y + 14, group, "bold"))
        y += BAR
        for key, value in values.items():
            weight, colour = ("bold", OURS) if key in ours else ("normal", OTHERS)
            size = f'x="{LABELS}" y="{y}" width="{scale * value:.1f}" height="{BAR - 4}"'
            lines.append(_draw_text(LABELS - 10, y + 14, names[key], weight, "end"))
            lines.append(f'<rect {size} rx="2" fill="{colour}"/>')
            lines.append(_draw_text(LABELS + scale * value + 8, y + 14, f"{value:.2f}x", weight))
            y += BAR
        y += GAP * 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
    style = f'font-family="system-ui, sans-serif" font-size="14" fill="{TEXT}" role="img"'
    return "\n".join([f"{head} {style}>", f"<title>{escape(title)}</title>", *lines, "</svg>\n"])


def _draw_text(x: float, y: float, label: str, weight: str, anchor: str = "start") -> str:
    attributes = f'x="{x:.1f}" y="{y}" font-weight="{weight}" text-anchor="{anchor}"'
    return f"<text {attributes}>{escape(label)}</text>"


def draw_exposed_communication(source: Path, target: Path) -> None:
    """Draw the exposed communication of each op in a `bench.jsonl`: the time of the op minus the
    time of the local matmul, in percent of the local matmul."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cases = [case for case in group_by_case(load(source)[1]).values() if "local_matmul" in case]
    ops = list(dict.fromkeys(next(iter(case.values())).op for case in cases))
    keys = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style = {"svg.fonttype": "none", "svg.hashsalt": "tpkernels", "font.size": 11}
    spines = {"axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none"}
    with mpl.rc_context({**style, **spines, **dict.fromkeys(keys, TEXT)}):
        figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="none")
        for axes, op in zip(
            figure.subplots(1, len(ops), sharey=True, squeeze=False)[0], ops, strict=True
        ):
            shown = [case for case in cases if case["auto"].op == op]
            for i, (name, (color, label)) in enumerate(OPS.items()):
                positions = [x + 0.27 * (i - 1) for x in range(len(shown))]
                exposed = [100 / case[name].speedup["local_matmul"][1] - 100 for case in shown]
                container = axes.bar(positions, exposed, 0.25, color=color, label=label)
                axes.bar_label(container, fmt="{:.0f}", fontsize=9, padding=1)
            shapes = [case["auto"].shape or [] for case in shown]
            axes.set_title(op, fontweight="bold", fontsize=11, color=TEXT)
            axes.set_xticks(range(len(shapes)), [str(m) for m, *_ in shapes])
            axes.set_xlabel(f"M; N, K = {shapes[0][1]}, {shapes[0][2]}")
        figure.axes[0].set_ylabel("exposed communication,\n% of the matmul")
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(target, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw_exposed_communication(*map(Path, sys.argv[1:]))
