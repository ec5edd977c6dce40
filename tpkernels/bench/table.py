"""The table of a report, for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from tpkernels.bench.inputs import warm_cases
from tpkernels.bench.results import Algorithm, Interval, Report, Result, Speedup, Time
from tpkernels.terminal import byte_size, milliseconds, table

_NUMBERS = (
    *(
        "tpkernels\nms",
        "p95",
        "skew",
        "runs",
        "inputs/\ncache",
        "TFLOP/s",
        "GB/s",
        "% of\nroofline",
    ),
    *("unfused\nms", "torch\nms", "matmul\nms", "local_\nmatmul\nms"),
    *("ECT\nms", "E_over-\nlap", "speed-up\nover\nunfused", "speed-up\nover\ntorch"),
)
COLUMNS = ("unfused", "torch", "matmul", "local_matmul")

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


def size_of(result: Result) -> str:
    """M, N, K of a matmul op, the bytes of a collective."""
    if result["shape"] is None:
        return byte_size(result["bytes"])
    return ", ".join(map(str, result["shape"]))


def rows(report: Report) -> list[tuple[Result, str]]:
    """The rows: every case with every requested algorithm."""
    names = report["sweep"]["algorithms"]
    return [(result, name) for result in report["results"] for name in names]


def show(report: Report, console: Console) -> None:
    """Prints the table, the meaning of its columns, and notes; nothing without results."""
    if not report["results"]:
        return
    grid = table("op\nM, N, K", _NUMBERS, "algorithm: reason")
    for result, name in rows(report):
        grid.add_row(*_cells(result, name))
    console.print(grid)
    for line in (LEGEND, *notes(report)):
        console.print(line, markup=False)


def notes(report: Report) -> list[str]:
    """The conditions of the run, in sentences."""
    sweep = report["sweep"]
    lines = []
    for rates in report["rooflines"]:
        lines.append(
            f"Roofline, measured in this run on all {rates['tp']} ranks at once, {rates['dtype']}: "
            f"a local matmul at {rates['tflops']:.3g} TFLOP/s (torch.matmul "
            f"{rates['torch_tflops']:.3g}), a copy of {rates['copy_over_cache']:.2g}x the "
            f"last-level cache at {rates['copy_gb_per_s']:.3g} GB/s."
        )
    limit = "" if sweep["seconds"] is None else f", fewer after {sweep['seconds']:g} s per case"
    over_cache = {result["case"]: result["inputs_over_cache"] for result in report["results"]}
    warm = warm_cases(over_cache) if sweep["cold"] else ""
    cache = "not in the cache" if sweep["cold"] else "the same in each call, possibly in the cache"
    exceptions = " except as listed below" if warm else ""
    lines.append(f"{sweep['repeat']} repetitions{limit}; inputs {cache}{exceptions}.")
    if warm:
        lines.append(warm)
    left_out: dict[str, list[str]] = {}
    for result in report["results"]:
        for reason in dict.fromkeys(result["left_out"].values()):
            names = [name for name, why in result["left_out"].items() if why == reason]
            left_out.setdefault(reason, []).append(f"{result['case']} ({', '.join(names)})")
    for reason, cases in left_out.items():
        lines.append(f"Left out, {reason}: {'; '.join(cases)}")
    if not report["complete"]:
        lines.append(
            f"Incomplete: {len(report['results'])} of {len(report['cases'])} cases are measured."
        )
    return lines


def _cells(result: Result, name: str) -> list[str]:
    size = f"{size_of(result)} {result['dtype']} x{result['tp']}"
    lines = [
        result["op"],
        f"[dim]{size}[/]",
        *(f"[dim]{escape(label)}[/]" for label in result["labels"]),
    ]
    algorithm, times = result["algorithms"][name], result["times"]
    others = [milliseconds(times[each]["median"]) if each in times else "" for each in COLUMNS]
    chosen = escape(f"{algorithm['algorithm']}: {algorithm['reason']}")
    own = times.get(name)
    if own is None:
        wrong = ["[bold red]WRONG[/]", *[""] * 7]
        return ["\n".join(lines), *wrong, *others, "", "", "", "", chosen]
    measured = _measured(own, result["inputs_over_cache"])
    return ["\n".join(lines), *measured, *others, *_derived(algorithm), chosen]


def _measured(own: Time, over_cache: float) -> list[str]:
    calls = "" if own["calls"] == 1 else f"x{own['calls']}"
    return [
        f"[bold]{milliseconds(own['median'])}[/]",
        milliseconds(own["p95"]),
        milliseconds(own["skew"]),
        f"{own['iterations']}{calls}",
        f"{over_cache:.2g}x",
        _digits(own["tflops"]),
        _digits(own["gb_per_s"]),
        f"{100 * own['roofline']:.0f}",
    ]


def _derived(algorithm: Algorithm) -> list[str]:
    ect, hidden, speedup = algorithm["ect"], algorithm["e_overlap"], algorithm["speedup"]
    return [
        "" if ect is None else f"{ect:.3g}",
        ("" if ect is None else "-") if hidden is None else _percent(hidden),
        *(_speedup(speedup.get(name)) for name in ("unfused", "torch")),
    ]


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _percent(interval: Interval) -> str:
    text = f"{100 * interval['value']:.0f} %"
    if interval["low"] is None or interval["high"] is None:
        return f"{text} ?"
    return f"{text}\n[dim]{100 * interval['low']:.0f}..{100 * interval['high']:.0f}[/]"


def _speedup(speedup: Speedup | None) -> str:
    if speedup is None:
        return ""
    mark = {"no difference": " ~", "too few repetitions": " ?"}.get(speedup["verdict"], "")
    text = f"{speedup['value']:.2f}x{mark}"
    if speedup["low"] is None or speedup["high"] is None:
        return text
    return f"{text}\n[dim]{speedup['low']:.2f}..{speedup['high']:.2f}[/]"
