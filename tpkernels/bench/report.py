"""The folder that `tpkernels bench --out` writes: CSV, plots, and one self-contained HTML page."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tpkernels.bench import plots
from tpkernels.bench.results import Interval, Report, Result
from tpkernels.bench.table import COLUMNS, LEGEND, notes, rows, size_of
from tpkernels.terminal import milliseconds, writing


def write(report: Report, folder: Path) -> None:
    """Writes bench.csv, report.html and, with matplotlib, the plots as PNG. ``UsageError`` if that
    fails."""
    figures = plots.figures(report) if plots.unsupported() is None else []
    with writing(folder):
        (folder / "bench.csv").write_text(as_csv(report), encoding="utf-8")
        for figure in figures:
            (folder / f"{figure.name}.png").write_bytes(figure.png)
        (folder / "report.html").write_text(as_html(report, figures), encoding="utf-8")


def as_csv(report: Report) -> str:
    """One line per variant of every case, each with the environment."""
    lines = [line for result in report["results"] for line in _lines(result)]
    constants = {f"environment.{name}": value for name, value in report["environment"].items()}
    constants |= {f"sweep.{name}": value for name, value in report["sweep"].items()}
    constants |= {f"run.{name}": value for name, value in report["runs"][-1].items()}
    file = io.StringIO()
    writer = csv.DictWriter(file, [*(lines[0] if lines else []), *constants], lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow(line | constants)
    return file.getvalue()


def as_html(report: Report, figures: Sequence[plots.Figure]) -> str:
    """The page, with the plots embedded; it loads nothing."""
    templates = Environment(
        loader=PackageLoader("tpkernels.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"milliseconds": milliseconds, "size": size_of, "svg": _svg}
    return templates.get_template("report.html.j2").render(
        report=report,
        rows=rows(report),
        baselines=COLUMNS,
        notes=notes(report),
        legend=LEGEND,
        figures=figures,
    )


def _svg(figure: plots.Figure) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(figure.svg).decode()}"


def _lines(result: Result) -> list[dict[str, Any]]:
    """All variants of a case, including wrong ones and those that were left out."""
    variants = dict.fromkeys([*result["algorithms"], *result["times"], *result["left_out"]])
    shape: Sequence[int | None] = result["shape"] or [None] * 3
    lines: list[dict[str, Any]] = []
    for name in variants:
        time: Any = result["times"].get(name)
        own = result["algorithms"].get(name)
        line: dict[str, Any] = {"op": result["op"], **dict(zip("MNK", shape, strict=True))}
        line |= {each: result[each] for each in ("bytes", "dtype", "tp", "inputs_over_cache")}
        line |= {"labels": "; ".join(result["labels"]), "variant": name}
        line["algorithm"] = own and own["algorithm"]
        line["right"] = own and own["right"]
        line["left_out"] = result["left_out"].get(name)
        for field in ("median", "p95", "min", "max", "mean", "stdev", "skew", "iterations"):
            line[field] = time and time[field]
        for field in ("calls", "tflops", "gb_per_s", "roofline"):
            line[field] = time and time[field]
        line["ect"] = own and own["ect"]
        line |= _interval("e_overlap", own and own["e_overlap"])
        for other in ("unfused", "torch", "local_matmul"):
            line |= _interval(f"over_{other}", own and own["speedup"].get(other))
        lines.append(line)
    return lines


def _interval(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {
        name: interval and interval["value"],
        f"{name}_low": interval and interval["low"],
        f"{name}_high": interval and interval["high"],
    }
