"""Report of a campaign: a summary for the terminal, a JSON file and a Markdown page. The card gives
the files their names; they are ready for benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from benchmarks.one_gpu.stages import Result, Row

_MAX_SUMMARY = 9000  # characters
_MAX_BAD = 12  # failed rows per stage in the summary
_COMMON_KEYS = {"case", "bad", "seconds", "error", "where"}


def write(results: Sequence[Result], kind: str, out: Path) -> None:
    """Write the JSON file and the Markdown page."""
    card = find_card(results)
    name = re.sub(r"[^a-z0-9]+", "-", card.lower().replace("nvidia", "")).strip("-")
    stages = [asdict(result) for result in results]
    content = {"format": "tpkernels-one-gpu/1", "date": date.today().isoformat(), "kind": kind}
    document = json.dumps({**content, "stages": stages}, indent=1, default=str)
    (out / f"gpu-{name}.json").write_text(document + "\n")
    (out / f"gpu-{name}.md").write_text(markdown(results))


def find_card(results: Sequence[Result]) -> str:
    """Return the name of the GPU."""
    return next((row["card"] for row in _rows(results, "facts") if "card" in row), "unknown")


def summary(results: Sequence[Result]) -> str:
    """Return failed cases, endings of the stages and the main numbers, in at most 9,000
    characters."""
    lines = ["", "# Summary"]
    for result in results:
        lines += [
            f"BAD {result.stage}, {row['case']}: {_short(row.get('error') or _values(row), 400)}"
            for row in result.bad[:_MAX_BAD]
        ]
        if (more := len(result.bad) - _MAX_BAD) > 0:
            lines.append(f"BAD {result.stage}: {more} more")
    lines += [f"{_ending(result)}" for result in results]
    for title, table in _tables(results):
        lines += ["", title, *(" | ".join(row) for row in table)]
    summary = "\n".join(lines)
    return summary if len(summary) <= _MAX_SUMMARY else summary[: _MAX_SUMMARY - 4] + "\n..."


def markdown(results: Sequence[Result]) -> str:
    """Return the page for benchmarks/results."""
    facts = {key: value for row in _rows(results, "facts")[:1] for key, value in row.items()}
    shown = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in _COMMON_KEYS)
    lines = [
        f"# One GPU: {find_card(results)}",
        "",
        f"`python -m benchmarks.one_gpu`, {date.today().isoformat()}. {shown}.",
        "",
        "Times are medians. Virtual ranks share one GPU, so their times include no link.",
        "",
        "## Stages",
        "",
        *_markdown_table(
            [
                ("stage", "status", "seconds", "rows", "failed rows", "kernels compiled"),
                *map(_stage_row, results),
            ]
        ),
    ]
    for title, table in _tables(results):
        lines += ["", f"## {title}", "", *_markdown_table(table)]
    bad = [(result.stage, row) for result in results for row in result.bad]
    if bad:
        lines += ["", "## Failures", ""]
        lines += [
            f"- {stage}, {row['case']}: {_short(row.get('error') or _values(row), 600)}"
            for stage, row in bad
        ]
    return "\n".join(lines) + "\n"


def _stage_row(result: Result) -> tuple[str, ...]:
    counts = len(result.rows), len(result.bad), result.compiled
    return result.stage, result.ended, f"{result.seconds:.0f}", *map(str, counts)


def _ending(result: Result) -> str:
    rows, bad, compiled = len(result.rows), len(result.bad), result.compiled
    end = f"{result.stage}: {result.ended}, {result.seconds:.0f} s, {rows} rows, {bad} bad"
    return f"{end}, {compiled} kernels compiled" if compiled else end


Table = list[tuple[str, ...]]


def _tables(results: Sequence[Result]) -> Iterable[tuple[str, Table]]:
    """Yield a title and a table for each stage with rows. The first table row is the header."""
    if rows := _rows(results, "overlap"):
        yield "Overlap", _overlap(rows)
    if rows := _rows(results, "tiles"):
        yield "Tile loop: TFLOP/s and fastest config", _tiles(rows)
    if rows := _rows(results, "latency"):
        yield "All-reduce in a CUDA graph, us", _latency(rows)
    if rows := [row for row in _rows(results, "host") if "host us" in row]:
        columns = "host us", "graph us"
        yield "Warm calls of one rank", _columns(rows, columns)
    if rows := _rows(results, "virtual"):
        yield "Virtual ranks", _columns(rows, ("calls", "bad", "seconds"))
    if rows := _rows(results, "pair"):
        yield "Two processes", [("line",), *((_short(row.get("line", ""), 120),) for row in rows)]
    if rows := _rows(results, "sanitize"):
        yield "compute-sanitizer", _columns(rows, ("bad", "code"))


def _overlap(rows: Sequence[Row]) -> Table:
    return [
        ("case", "us", "hidden", "fused / GEMM"),
        *(
            (
                row["case"],
                ", ".join(f"{name} {value}" for name, value in row.get("us", {}).items()),
                str(row.get("E_overlap", "")),
                str(row.get("fused / GEMM", "")),
            )
            for row in rows
        ),
    ]


def _tiles(rows: Sequence[Row]) -> Table:
    table: Table = [("case", "torch.mm", "table", "best", "best config", "best / torch.mm")]
    for case in dict.fromkeys(row["case"] for row in rows):
        rates = {
            row["config"]: row["tflops"]
            for row in rows
            if row["case"] == case and "tflops" in row and not row["bad"]
        }
        baseline = rates.pop("torch.mm", None)
        best = max(rates, key=rates.__getitem__, default="")
        ratio = f"{rates[best] / baseline:.2f}" if best and baseline else ""
        values = baseline, rates.get("table"), rates.get(best)
        table.append((case, *("" if v is None else f"{v}" for v in values), best, ratio))
    return table


def _latency(rows: Sequence[Row]) -> Table:
    timed = [row for row in rows if "us" in row]
    sizes = sorted({row["kib"] for row in timed if "kib" in row})
    table: Table = [("variant", *(f"{size} KiB" for size in sizes))]
    table += [("empty launch", str(row["us"])) for row in timed if "kib" not in row]
    times = {(row["variant"], row["world"], row["kib"]): row["us"] for row in timed if "kib" in row}
    for variant, world in dict.fromkeys(key[:2] for key in times):
        cells = (str(times.get((variant, world, size), "")) for size in sizes)
        table.append((f"{variant} W={world}", *cells))
    return table


def _columns(rows: Sequence[Row], names: Sequence[str]) -> Table:
    return [
        ("case", *names),
        *((row["case"], *(str(row.get(n, "")) for n in names)) for row in rows),
    ]


def _markdown_table(table: Sequence[tuple[str, ...]]) -> list[str]:
    width = len(table[0])
    cells = [
        [cell.replace("|", "\\|") for cell in row] + [""] * (width - len(row)) for row in table
    ]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + " --- |" * width, *lines[1:]]


def _rows(results: Sequence[Result], stage: str) -> list[Row]:
    return [row for result in results if result.stage == stage for row in result.rows]


def _values(row: Row) -> str:
    return json.dumps(
        {key: value for key, value in row.items() if key not in _COMMON_KEYS}, default=str
    )


def _short(message: str, characters: int) -> str:
    line = " ".join(message.split())
    return line if len(line) <= characters else line[: characters - 3] + "..."
