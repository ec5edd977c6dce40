"""Bar charts as SVG, legible on light and on dark pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from xml.sax.saxutils import escape

WIDTH, LABELS, BAR, GAP = 560, 150, 22, 6
TEXT, OURS, OTHERS = "#767676", "#e8590c", "#8a94a0"


def bars(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    names: Mapping[str, str],
    ours: Collection[str],
) -> str:
    """Return an SVG with a bar for each value of each group.

    Args:
        title: above the chart.
        groups: by group's name, speed-ups by key; the first of each is the baseline, 1.0.
        names: what to print for a key.
        ours: keys whose bars stand out.
    """
    longest = max(value for group in groups.values() for value in group.values())
    scale = (WIDTH - LABELS - 60) / longest
    lines, y = [_text(10, 24, title, "bold")], 48
    for group, values in groups.items():
        lines.append(_text(10, y + 14, group, "bold"))
        y += BAR
        for key, value in values.items():
            weight, colour = ("bold", OURS) if key in ours else ("normal", OTHERS)
            size = f'x="{LABELS}" y="{y}" width="{scale * value:.1f}" height="{BAR - 4}"'
            lines.append(_text(LABELS - 10, y + 14, names[key], weight, "end"))
            lines.append(f'<rect {size} rx="2" fill="{colour}"/>')
            lines.append(_text(LABELS + scale * value + 8, y + 14, f"{value:.2f}x", weight))
            y += BAR
        y += GAP * 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
    style = f'font-family="system-ui, sans-serif" font-size="14" fill="{TEXT}" role="img"'
    return "\n".join([f"{head} {style}>", f"<title>{escape(title)}</title>", *lines, "</svg>\n"])


def _text(x: float, y: float, text: str, weight: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y}" font-weight="{weight}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"
