"""The table of a report, for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from tpkernels.bench.inputs import warm_cases
from tpkernels.bench.output import byte_size, milliseconds, table
from tpkernels.bench.results import Algorithm, Interval, Report, Result, Speedup, Time

_NUMBERS = (
    *("ms", "p95", "skew", "times", "inputs/\ncache", "TFLOP/s", "GB/s", "% of\nroofline"),
    *("unfused\nms", "torch\nms", "matmul\nms", "product\nms"),
    *("ECT\nms", "E_over-\nlap", "over\nunfused", "over\ntorch"),
)
COLUMNS = ("unfused", "torch", "matmul", "local_matmul")

LEGEND = """\
ms: of each repetition the slowest rank's time, the median; p95: the 95th percentile; skew: the
median difference between slowest and fastest rank; times: repetitions x calls in each;
inputs/cache: all copies of the inputs, which calls take by turns, over the last-level cache.
unfused: the op with nothing overlapped; torch: a collective of torch.distributed and torch.matmul;
matmul: torch.matmul of the local sizes alone; product: the local product of tpkernels alone. All
ran by turns with the op. TFLOP/s and GB/s (what must come from the peers) are a rank's.
ECT: ms less the faster of matmul and product. E_overlap: the share of the unfused ECT that is
gone; 100 % is perfect, below 0 slower than unfused, - where unfused is as fast as the product.
over: how many times as fast, and its 95 % interval (bootstrap); ~: no difference, the interval
holds 1; ?: too few repetitions for an interval, fewer than 6."""


def size_of(found: Result) -> str:
    """M, N, K of a matmul op, or the bytes of a collective alone."""
    if found["shape"] is None:
        return byte_size(found["bytes"])
    return ", ".join(map(str, found["shape"]))


def rows(report: Report) -> list[tuple[Result, str]]:
    """What has a row: each case with each algorithm that was asked for."""
    names = report["sweep"]["algorithms"]
    return [(found, name) for found in report["results"] for name in names]


def show(report: Report, console: Console) -> None:
    """Prints the table, what the columns mean, and what was not measured."""
    shown = table("op\nM, N, K", _NUMBERS, "algorithm: reason")
    for found, name in rows(report):
        shown.add_row(*_cells(found, name))
    console.print(shown)
    for line in (LEGEND, *notes(report)):
        console.print(line, markup=False)


def notes(report: Report) -> list[str]:
    """The conditions of the run, in sentences."""
    sweep = report["sweep"]
    said = []
    for rates in report["rooflines"]:
        said.append(
            f"Roofline, measured in this run on all {rates['tp']} ranks at once, {rates['dtype']}: "
            f"a local matmul at {rates['tflops']:.3g} TFLOP/s (torch.matmul "
            f"{rates['torch_tflops']:.3g}), a copy of {rates['copy_over_cache']:.2g}x the "
            f"last-level cache at {rates['copy_gb_per_s']:.3g} GB/s."
        )
    limit = "" if sweep["seconds"] is None else f", fewer after {sweep['seconds']:g} s of a case"
    over_cache = {found["case"]: found["inputs_over_cache"] for found in report["results"]}
    warm = warm_cases(over_cache) if sweep["cold"] else ""
    cache = "not in the cache" if sweep["cold"] else "the same in each call, maybe in the cache"
    but = " but for those below" if warm else ""
    said.append(f"{sweep['repeat']} repetitions{limit}; inputs {cache}{but}.")
    if warm:
        said.append(warm)
    left_out: dict[str, list[str]] = {}
    for found in report["results"]:
        for reason in dict.fromkeys(found["left_out"].values()):
            names = [name for name, why in found["left_out"].items() if why == reason]
            left_out.setdefault(reason, []).append(f"{found['case']} ({', '.join(names)})")
    for reason, cases in left_out.items():
        said.append(f"Left out, {reason}: {'; '.join(cases)}")
    if not report["complete"]:
        said.append(
            f"Not complete: {len(report['results'])} of {len(report['cases'])} cases are measured."
        )
    return said


def _cells(found: Result, name: str) -> list[str]:
    size = f"{size_of(found)} {found['dtype']} x{found['tp']}"
    lines = [
        found["op"],
        f"[dim]{size}[/]",
        *(f"[dim]{escape(label)}[/]" for label in found["labels"]),
    ]
    algorithm, times = found["algorithms"][name], found["times"]
    others = [milliseconds(times[each]["median"]) if each in times else "" for each in COLUMNS]
    chosen = escape(f"{algorithm['algorithm']}: {algorithm['reason']}")
    own = times.get(name)
    if own is None:
        wrong = ["[bold red]WRONG[/]", *[""] * 7]
        return ["\n".join(lines), *wrong, *others, "", "", "", "", chosen]
    measured = _measured(own, found["inputs_over_cache"])
    return ["\n".join(lines), *measured, *others, *_judged(algorithm), chosen]


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


def _judged(algorithm: Algorithm) -> list[str]:
    ect, hidden, speedup = algorithm["ect"], algorithm["e_overlap"], algorithm["speedup"]
    return [
        "" if ect is None else f"{ect:.3g}",
        ("" if ect is None else "-") if hidden is None else _percent(hidden),
        *(_speedup(speedup.get(name)) for name in ("unfused", "torch")),
    ]


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _percent(found: Interval) -> str:
    text = f"{100 * found['value']:.0f} %"
    if found["low"] is None or found["high"] is None:
        return f"{text} ?"
    return f"{text}\n[dim]{100 * found['low']:.0f}..{100 * found['high']:.0f}[/]"


def _speedup(found: Speedup | None) -> str:
    if found is None:
        return ""
    mark = {"no difference": " ~", "too few repetitions": " ?"}.get(found["verdict"], "")
    text = f"{found['value']:.2f}x{mark}"
    if found["low"] is None or found["high"] is None:
        return text
    return f"{text}\n[dim]{found['low']:.2f}..{found['high']:.2f}[/]"
