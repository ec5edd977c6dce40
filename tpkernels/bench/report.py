"""The table of `tpkernels bench`: at most 100 columns, with three lines of legend."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.cases import COLD
from tpkernels.bench.results import Row, Run, group_by_case
from tpkernels.common.text import pluralize
from tpkernels.launch.terminal import byte_size, milliseconds

WIDTH = 100
LEGEND = """\
ms: median and quartiles of the slowest rank. roof: roofline time / ms. unfused: no overlap. torch:
torch.distributed and torch.matmul. Below their ms: speed-up over them (~: the quartiles include 1).
E_overlap: fraction of the exposed communication time of unfused that the op hides."""


def show(run: Run, rows: list[Row], console: Console) -> None:
    """Print the table, its legend and notes. Without rows, print nothing."""
    if not rows:
        return
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("op\nM, N, K", "algorithm"):
        grid.add_column(name, no_wrap=True)
    for name in (
        "tpkernels\nms",
        "roof",
        "unfused\nms",
        "torch\nms",
        "local\nmatmul\nms",
        "E_over-\nlap",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    for variants in group_by_case(rows).values():
        for name in run.method.algorithms:
            grid.add_row(*_cells(variants, name))
    console.print(grid)
    for note in (LEGEND, *_notes(run, rows)):
        console.print(note, markup=False)


def _cells(variants: dict[str, Row], name: str) -> Iterator[str]:
    row = variants[name]
    size = byte_size(row.bytes) if row.shape is None else ", ".join(map(str, row.shape))
    case = [f"{size} {row.dtype} x{row.tp}", *row.labels]
    yield "\n".join([escape(row.op), *(f"[dim]{escape(line)}[/]" for line in case)])
    yield escape(name if row.algorithm == name else f"{name}:\n{row.algorithm}")
    if row.median is None or row.q1 is None or row.q3 is None or row.roofline is None:
        yield from ("[bold red]WRONG[/]", "")
    else:
        quartiles = f"{milliseconds(row.q1)}..{milliseconds(row.q3)}"
        yield from (
            f"[bold]{milliseconds(row.median)}[/]\n[dim]{quartiles}[/]",
            f"{row.roofline:.0%}",
        )
    for baseline in ("unfused", "torch", "local_matmul"):
        base = variants.get(baseline)
        lines = [milliseconds(base.median)] if base and base.median else []
        if baseline in row.speedup and baseline != "local_matmul":
            lines.append(_speedup(*row.speedup[baseline]))
        yield "\n".join(lines)
    hidden = row.e_overlap
    yield "" if hidden is None else f"[bold red]{hidden:.0%}[/]" if hidden < 0 else f"{hidden:.0%}"


def _speedup(q1: float, median: float, q3: float) -> str:
    if q1 <= 1 <= q3:
        return f"~{median:.2f}x"
    return f"[{'green' if median > 1 else 'bold red'}]{median:.2f}x[/]"


def _notes(run: Run, rows: list[Row]) -> Iterator[str]:
    """Yield sentences about the conditions of the run."""
    rates = {(row.tp, row.dtype): (row.peak_flops / 1e12, row.copy_bytes / 1e9) for row in rows}
    for (tp, dtype), (tflops, rate) in rates.items():
        ranks = f"each of {pluralize(tp, 'rank')}"
        yield f"Roofline, {dtype}: {ranks} reaches {tflops:.3g} TFLOP/s and copies {rate:.3g} GB/s."
    counts = [len(row.ms) for row in rows if row.ms] or [0]
    inputs = "are not in the cache" if run.method.cold else "are reused and may be in the cache"
    yield f"{'-'.join(map(str, sorted({min(counts), max(counts)})))} repetitions; inputs {inputs}."
    warm = {row.case: row.inputs_over_cache for row in rows if row.inputs_over_cache < COLD}
    if run.method.cold and warm:
        cases = "; ".join(f"{case} ({ratio:.2g}x)" for case, ratio in warm.items())
        yield f"Inputs smaller than {COLD:g}x the cache (may be cached): {cases}."
    skipped: dict[str, list[str]] = {}
    for row in rows:
        if row.status == "left out":
            skipped.setdefault(row.reason, []).append(f"{row.case} ({row.variant})")
    for reason, names in skipped.items():
        yield f"Skipped because {reason}: {'; '.join(names)}"
