"""What a run leaves behind: the table, and a folder with CSV, pictures and a page."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from tpkernels.bench import page, plots, table
from tpkernels.bench.options import writing
from tpkernels.bench.results import Report

_NO_PLOTS = "No plots: matplotlib is missing (pip install 'tpkernels[plots]')."


def show(report: Report, console: Console) -> None:
    """Prints what has been measured, if anything has."""
    if report["results"]:
        table.show(report, console)


def write(report: Report, folder: Path, console: Console) -> None:
    """bench.csv, report.html and, where there is matplotlib, the plots as PNG. ``UsageError`` where
    they cannot be written."""
    figures = plots.figures(report) if plots.available() else []
    with writing(folder):
        (folder / "bench.csv").write_text(as_csv(report), encoding="utf-8")
        for figure in figures:
            (folder / f"{figure.name}.png").write_bytes(figure.png)
        (folder / "report.html").write_text(page.render(report, figures), encoding="utf-8")
    if not plots.available():
        console.print(_NO_PLOTS, markup=False)
    console.print(f"Written: {folder}/report.html", markup=False, soft_wrap=True)


def as_csv(report: Report) -> str:
    """A line for every variant of every case; the environment is repeated on each."""
    rows = [row for found in report["results"] for row in _rows(found)]
    around = {f"environment.{name}": value for name, value in report["environment"].items()}
    around |= {f"sweep.{name}": value for name, value in report["sweep"].items()}
    last = report["runs"][-1]
    around |= {f"run.{name}": value for name, value in last.items()}
    file = io.StringIO()
    writer = csv.DictWriter(file, [*(rows[0] if rows else []), *around], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | around)
    return file.getvalue()


def _rows(found: Any) -> list[dict[str, Any]]:
    """The variants of a case, wrong and left out ones too."""
    names = dict.fromkeys([*found["algorithms"], *found["times"], *found["left_out"]])
    shape = found["shape"] or [None, None, None]
    result = []
    for name in names:
        time, own = found["times"].get(name), found["algorithms"].get(name)
        row = {"op": found["op"], **dict(zip("MNK", shape, strict=True))}
        row |= {each: found[each] for each in ("bytes", "dtype", "tp", "inputs_over_cache")}
        row |= {"labels": "; ".join(found["labels"]), "variant": name}
        row["algorithm"] = own and own["algorithm"]
        row["right"] = own and own["right"]
        row["left_out"] = found["left_out"].get(name)
        for field in ("median", "p95", "min", "max", "mean", "stdev", "skew", "iterations"):
            row[field] = time and time[field]
        for field in ("calls", "tflops", "gb_per_s", "roofline"):
            row[field] = time and time[field]
        row["ect"] = own and own["ect"]
        row |= _interval("e_overlap", own and own["e_overlap"])
        for other in ("unfused", "torch", "local_matmul"):
            row |= _interval(f"over_{other}", own and own["speedup"].get(other))
        result.append(row)
    return result


def _interval(name: str, found: Any) -> dict[str, Any]:
    values = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    return {column: found and found[field] for column, field in values.items()}
