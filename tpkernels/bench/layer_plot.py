"""A picture of a layer's predicted times over the number of ranks (matplotlib, extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpkernels.bench.layer_plan import PHASES, LayerTime
from tpkernels.bench.plots import unsupported
from tpkernels.terminal import UsageError, writing

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """``UsageError`` if no picture can be drawn, or not in this format."""
    missing = unsupported()
    if missing is not None:
        raise UsageError(f"--plot: {missing}")
    if path.suffix not in FORMATS:
        raise UsageError(f"--plot is '{path}'; it must end in {', '.join(FORMATS)}")


def plot(times: Sequence[LayerTime], path: Path, title: str) -> None:
    """Draws a panel for each phase: lines of the products, the communication, and both with and
    without overlap."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(10, 3.6), layout="constrained")
    canvas.suptitle(title, fontsize="medium", parse_math=False)
    for axes, phase in zip(canvas.subplots(1, len(PHASES)), PHASES, strict=True):
        of_phase = [each for each in times if each.phase == phase]
        tps = [each.tp for each in of_phase]
        for label, style, seconds in (
            ("products", "b:", [each.product for each in of_phase]),
            ("communication", "r:", [each.communication for each in of_phase]),
            ("without overlap", "k--o", [each.unfused for each in of_phase]),
            ("with overlap", "g-o", [each.overlapped for each in of_phase]),
        ):
            ms = [1e3 * each or float("nan") for each in seconds]  # a log scale has no 0
            axes.plot(tps, ms, style, label=label, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(tps, labels=list(map(str, tps)))
        axes.set_xlabel("ranks")
        axes.set_ylabel("ms per layer")
        axes.set_title(phase, fontsize="medium")
        axes.legend(fontsize="small")
    with writing(path):
        canvas.savefig(path, dpi=150)
