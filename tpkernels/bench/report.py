"""What `tpkernels bench` shows: the table, in the terminal and as a text file."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.cases import COLD
from tpkernels.bench.results import Report, Result
from tpkernels.bench.statistics import Estimate
from tpkernels.terminal import byte_size, milliseconds, table, writing
from tpkernels.text import counted

_PAGE_COLUMNS = 260
_COLUMNS = (
    *("tpkernels\nms", "p95", "skew", "runs", "inputs/\ncache", "TFLOP/s", "GB/s"),
    *("% of\nroofline", "unfused\nms", "torch\nms", "matmul\nms", "local_\nmatmul\nms"),
    *("ECT\nms", "E_over-\nlap", "speed-up\nover\nunfused", "speed-up\nover\ntorch"),
)
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
_MARKS = {"no difference": " ~", "too few repetitions": " ?"}


def show(report: Report, console: Console) -> None:
    """Print the table, the meaning of its columns, and notes; nothing without results."""
    if not report.results:
        return
    grid = table("op\nM, N, K", _COLUMNS, "algorithm: reason")
    for result in report.results:
        for name in report.sweep.algorithms:
            grid.add_row(*_cells(result, name))
    console.print(grid)
    for line in (LEGEND, *_notes(report)):
        console.print(line, markup=False)


def _notes(report: Report) -> list[str]:
    """Describe the conditions of the run in sentences."""
    sweep = report.sweep
    lines = [
        f"Roofline, measured in this run on {counted(entry.tp, 'rank')} at once, {entry.dtype}: a "
        f"local matmul at {entry.rates.flops / 1e12:.3g} TFLOP/s (torch.matmul "
        f"{entry.rates.torch_flops / 1e12:.3g}), a copy of {entry.rates.copy_over_cache:.2g}x the "
        f"last-level cache at {entry.rates.copy_bytes / 1e9:.3g} GB/s."
        for entry in report.rooflines
    ]
    limit = "" if sweep.seconds is None else f", fewer after {sweep.seconds:g} s per case"
    cache = "not in the cache" if sweep.cold else "the same in each call, possibly in the cache"
    warm = [
        f"{result.case} ({result.inputs_over_cache:.2g}x)"
        for result in report.results
        if sweep.cold and result.inputs_over_cache < COLD
    ]
    exceptions = " except as listed below" if warm else ""
    lines.append(f"{sweep.repeat} repetitions{limit}; inputs {cache}{exceptions}.")
    if warm:
        lines.append(
            "Inputs that may be partly or fully in the cache, with the size of all copies relative "
            f"to the cache (cold from {COLD:g}x): {'; '.join(warm)}."
        )
    left_out: dict[str, list[str]] = {}
    for result in report.results:
        for reason in dict.fromkeys(result.left_out.values()):
            names = [name for name, why in result.left_out.items() if why == reason]
            left_out.setdefault(reason, []).append(f"{result.case} ({', '.join(names)})")
    lines += [f"Left out, {reason}: {'; '.join(cases)}" for reason, cases in left_out.items()]
    if not report.complete:
        measured = f"{len(report.results)} of {len(report.cases)} cases"
        lines.append(f"Incomplete: {measured} are measured.")
    return lines


def _cells(result: Result, name: str) -> list[str]:
    size = byte_size(result.bytes) if result.shape is None else ", ".join(map(str, result.shape))
    case = [f"{size} {result.dtype} x{result.tp}", *result.labels]
    first = "\n".join([escape(result.op), *(f"[dim]{escape(line)}[/]" for line in case)])
    algorithm, times = result.algorithms[name], result.times
    others = [
        milliseconds(times[one].median) if one in times else ""
        for one in ("unfused", "torch", "matmul", "local_matmul")
    ]
    chosen = escape(f"{algorithm.algorithm}: {algorithm.reason}")
    if name not in times:
        return [first, "[bold red]WRONG[/]", *[""] * 7, *others, "", "", "", "", chosen]
    time, hidden = times[name], algorithm.e_overlap
    overlap = "" if algorithm.ect is None else "-"
    if hidden is not None:
        overlap = _with_interval(hidden, ".0f", " %" if hidden.low is not None else " % ?", 100)
    speedups = [algorithm.speedup.get(other) for other in ("unfused", "torch")]
    return [
        first,
        f"[bold]{milliseconds(time.median)}[/]",
        milliseconds(time.p95),
        milliseconds(time.skew),
        f"{time.iterations}" if time.calls == 1 else f"{time.iterations}x{time.calls}",
        f"{result.inputs_over_cache:.2g}x",
        "" if time.tflops is None else f"{time.tflops:.3g}",
        "" if time.gb_per_s is None else f"{time.gb_per_s:.3g}",
        f"{100 * time.roofline:.0f}",
        *others,
        "" if algorithm.ect is None else f"{algorithm.ect:.3g}",
        overlap,
        *(
            "" if one is None else _with_interval(one, ".2f", f"x{_MARKS.get(one.verdict, '')}")
            for one in speedups
        ),
        chosen,
    ]


def _with_interval(estimate: Estimate, form: str, unit: str, scale: float = 1.0) -> str:
    value = f"{scale * estimate.value:{form}}{unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value}\n[dim]{scale * estimate.low:{form}}..{scale * estimate.high:{form}}[/]"


def write(report: Report, path: Path) -> None:
    """Write what `show` prints, and the conditions of the run, as text. ``UsageError`` if that
    fails."""
    page = Console(width=_PAGE_COLUMNS, file=io.StringIO(), highlight=False)
    show(report, page)
    facts = Table.grid(padding=(0, 2))
    for name, value in (report.environment | asdict(report.sweep)).items():
        facts.add_row(escape(name), escape(str(value)))
    for run in report.runs:
        facts.add_row(f"run {escape(run.date)}", escape(f"{run.command}, load {run.load}"))
    page.print(facts)
    with writing(path):
        path.write_text(page.file.getvalue(), encoding="utf-8")  # type: ignore[attr-defined]
