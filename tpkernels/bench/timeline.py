"""The picture of a profile: a lane for each rank and thread or stream, kinds of time in colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpkernels.bench.trace import COMPUTE, COPY, MOVE, WAIT, lanes

# Drawn in this order: a wait lies on the copy that it is part of.
COLOURS = {COMPUTE: "tab:blue", COPY: "tab:orange", WAIT: "tab:red", MOVE: "tab:green"}
_HEIGHTS = {COMPUTE: (-0.4, 0.8), COPY: (-0.4, 0.3), WAIT: (-0.4, 0.8), MOVE: (0.1, 0.3)}
_MOST_INCHES = 30.0


def unsupported() -> str | None:
    """Why no picture can be drawn; None: it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "no picture without matplotlib: pip install 'tpkernels[plots]'"
    return None


def draw(trace: dict[str, Any], path: Path, title: str) -> None:
    """Draws a merged trace, in the format that the suffix of ``path`` says.

    Compute fills its lane; copies are the upper part of it, and transfers, which go on meanwhile,
    the lower; a wait is drawn over compute and copies. Time counts from the first of them.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = lanes(trace)
    drawn = [span for found in rows.values() for spans in found.values() for span in spans]
    start = min((begin for begin, _ in drawn), default=0.0)
    figure = Figure(figsize=(10, min(1.5 + 0.5 * len(rows), _MOST_INCHES)), layout="constrained")
    axes = figure.subplots()
    for row, found in enumerate(rows.values()):
        for kind, colour in COLOURS.items():
            bottom, height = _HEIGHTS[kind]
            spans = [
                ((begin - start) / 1e3, (end - begin) / 1e3) for begin, end in found.get(kind, [])
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
    figure.savefig(path, dpi=150)
