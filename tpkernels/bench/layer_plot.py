"""A picture of a layer's predicted times over the number of ranks (matplotlib, extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpkernels.bench.layer_plan import PHASES, LayerTime
from tpkernels.bench.options import UsageError, writing
from tpkernels.bench.plots import unsupported

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """``UsageError`` if no picture can be drawn, or not in this format."""
    missing = unsupported()
    if missing is not None:
        raise UsageError(f"--plot: {missing}")
    if path.suffix not in FORMATS:
        raise UsageError(f"--plot is '{path}'; it must end in {', '.join(FORMATS)}")


def plot(times: Sequence[LayerTime], path: Path, title: str) -> None:
    """Draws a panel for each phase: bars of the products and of what overlap leaves of the
    communication, and a mark at the time without overlap."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(10, 3.6), layout="constrained")
    canvas.suptitle(title, fontsize="medium", parse_math=False)
    for axes, phase in zip(canvas.subplots(1, len(PHASES)), PHASES, strict=True):
        of_phase = [each for each in times if each.phase == phase]
        at = range(len(of_phase))
        product = [1e3 * each.product for each in of_phase]
        exposed = [1e3 * each.exposed for each in of_phase]
        axes.bar(at, product, color="tab:blue", label="products")
        axes.bar(at, exposed, bottom=product, color="tab:orange", label="exposed communication")
        unfused = [1e3 * each.unfused for each in of_phase]
        axes.plot(at, unfused, "k_", markersize=18, label="without overlap")
        axes.set_xticks(at, labels=[str(each.tp) for each in of_phase])
        axes.set_xlabel("ranks")
        axes.set_ylabel("ms per layer")
        axes.set_yscale("log")
        axes.set_title(phase, fontsize="medium")
        axes.legend(fontsize="small")
    with writing(path):
        canvas.savefig(path, dpi=150)
