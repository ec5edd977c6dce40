"""Output of a benchmark run: the table, the JSON lines that `tpkernels compare` reads, and the HTML
report."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import Result

from tests.bench.test_measuring import RATES
from tests.cli.test_cli import invoke
from tests.support.processes import run_and_interrupt
from tpkernels.bench import cases, charts, probes
from tpkernels.bench.measuring import CaseReport, Choice
from tpkernels.bench.report import LEGEND, WIDTH, show
from tpkernels.bench.results import Row, create_run, line, load, make_rows, overlap, quartiles
from tpkernels.bench.specs import Spec
from tpkernels.bench.sweep import Item, Method
from tpkernels.cli import bench as command
from tpkernels.planning.cost import Rates
from tpkernels.timing import Samples

RUN = create_run(Method(algorithms=["auto", "direct"]))
ESCAPES = "[bold]x[/no]\x1b[2J\x07\x9b\u202e<script>$\\nope$"
SHOWN = r"[bold]x[/no]\x1b[2J\x07\x9b\u202e<script>$\nope$"
MS = {"auto": 3.0, "direct": 1.0, "unfused": 2.0, "torch": 4.0, "local_matmul": 0.5}


def rows(
    ms: dict[str, float] = MS, wrong: tuple[str, ...] = (), label: str = "llama3-8b qkv"
) -> Any:
    """Return the rows of two cases in which `auto` is slower than `unfused`."""
    results: list[Row] = []
    for spec in (
        Spec("scaled_matmul_reduce_scatter", (1024, 28672, 4096), torch.bfloat16),
        Spec("all_reduce", (1024,), torch.float32),
    ):
        samples = {
            name: Samples(tuple(1e-3 * value * (1 + j / 50) for j in range(6)), calls=2, warmup=1)
            for name, value in ms.items()
            if name not in wrong and (spec.op_spec.has_matmul or name != "local_matmul")
        }
        choices = {
            name: Choice("direct", "4 rows per rank", math.inf if name in wrong else 0.5)
            for name in ("auto", "direct", "unfused")
        }
        report = CaseReport(choices, samples, {"symm_mem": "no [GPU]"}, inputs_over_cache=2.5)
        results += make_rows(Item(spec, 2, ("llama3-8b qkv",)), RATES, [report] * 2)
    return results


def table(results: list[Row], width: int = WIDTH) -> str:
    console = Console(width=width, file=io.StringIO())
    show(RUN, results, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# Statistics.


def test_the_slowest_rank_counts_in_each_repetition() -> None:
    seconds = (0.001, 0.005, 0.003), (0.002, 0.001, 0.004)
    reports = [
        CaseReport(
            {}, {"torch": Samples(rank_seconds, calls=2, warmup=1)}, {}, inputs_over_cache=1 + i
        )
        for i, rank_seconds in enumerate(seconds)
    ]
    (row,) = make_rows(Item(Spec("all_reduce", (64,), torch.float32), 2), RATES, reports)
    assert (row.ms, row.median, row.calls) == ([2.0, 5.0, 4.0], 4.0, 2)
    assert (row.q1, row.q3, row.inputs_over_cache) == (3.0, 4.5, 1)


@pytest.mark.parametrize(("op", "share"), [(10.0, 1.0), (12.5, 0.5), (25.0, -2.0)])
def test_overlap_is_the_hidden_share(op: float, share: float) -> None:
    spread = [0.99, 1.0, 1.02]
    hidden = overlap(*([center * factor for factor in spread] for center in (op, 15.0, 10.0)))
    assert hidden == pytest.approx(share)
    # no communication time to hide
    assert overlap([9.0] * 3, [10.0, 10.0, 11.0], [10.0, 10.0, 10.0]) is None


def test_machine_load_cancels_in_speedups() -> None:
    """Speed-ups are computed per repetition, from pairs of times."""
    machine_load = [1.0, 3.0, 2.0, 9.0]
    samples = {
        "unfused": Samples(tuple(1.5 * load for load in machine_load), 1, 1),
        "torch": Samples(tuple(machine_load), 1, 1),
    }
    report = CaseReport({}, samples, {}, inputs_over_cache=1)
    results = make_rows(Item(Spec("all_reduce", (64,), torch.float32), 2), RATES, [report])
    assert results[1].speedup["unfused"] == pytest.approx([1.5] * 3)


# The table.


def test_the_table_fits_and_shows_losses() -> None:
    output = table(rows())
    assert max(map(len, output.splitlines())) <= WIDTH == 100
    assert len(LEGEND.splitlines()) <= 3 and LEGEND in output
    lines = output.splitlines()
    first = next(i for i, content in enumerate(lines) if "scaled_matmul_reduce_scatter" in content)
    # The median of the six samples is 5 % above the smallest. auto is 1.5 times as slow as unfused.
    assert lines[first].split()[1:] == ["auto:", "3.15", "16%", "2.10", "4.20", "0.525", "-67%"]
    assert "0.67x" in lines[first + 1] and "1.33x" in lines[first + 1]
    assert "llama3-8b qkv" in output and "4 KiB float32 x2" in output
    assert "Skipped because no [GPU]: scaled_matmul_reduce_scatter 1024x28672x4096" in output
    assert "\n6 repetitions; inputs are not in the cache." in output
    assert "~1.00x" in table(rows(dict(MS, auto=2.0)))
    assert "WRONG" in table(rows(wrong=("auto",)))
    assert table([]) == ""


def test_inputs_that_may_be_in_the_cache_are_listed() -> None:
    assert "may be cached" not in table(rows())
    warm = [replace(row, inputs_over_cache=0.125) for row in rows() if row.op == "all_reduce"]
    output = " ".join(table(warm).split())
    assert (
        "smaller than 2x the cache (may be cached): all_reduce 1024 float32 tp2 (0.12x)" in output
    )


# Files.


def write_results(folder: Path, results: list[Row], run: Any = RUN) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "bench.jsonl"
    path.write_text("".join(map(line, [run, *results])))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = rows(wrong=("direct",))
    path = write_results(tmp_path, results)
    assert load(path) == (RUN, results)
    records = [json.loads(content) for content in path.read_text().splitlines()]
    assert records[0]["environment"]["cpu"] and records[1]["median"] == pytest.approx(3.15)


DAMAGE: dict[str, Callable[[list[str]], list[str]]] = {
    "is empty": lambda _: [],
    "has another format": lambda lines: [lines[0].replace("bench/5", "bench/4"), *lines[1:]],
    "is a report of before": lambda _: ['{"format": "tpkernels-bench/4", "results": []}'],
    "ends within a line": lambda lines: [*lines[:-1], lines[-1][:40]],
    "lacks a field": lambda lines: [lines[0], lines[1].replace('"q1"', '"q9"')],
    "has a text for a number": lambda lines: [lines[0], lines[1].replace('"tp": 2', '"tp": "2"')],
    "has no number": lambda lines: [lines[0], lines[1].replace('"tp": 2', '"tp": NaN')],
    "has a huge number": lambda lines: [
        lines[0],
        lines[1].replace('"tp": 2', '"tp": ' + "9" * 5000),
    ],
    "has a time of 0": lambda lines: [lines[0], lines[1].replace('"ms": [3.0', '"ms": [0')],
    "has a time of what was wrong": lambda lines: [lines[0], lines[1].replace("timed", "wrong")],
    "is nested deeply": lambda lines: [lines[0], "[" * 100_000],
    "is not UTF-8": lambda lines: [lines[0], "\udcff"],
    "names itself oddly": lambda lines: [lines[0], '{"\\u001b[2J": 1}'],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    good = write_results(tmp_path / "good", rows())
    bad = tmp_path / "bad.jsonl"
    lines = DAMAGE[damage](good.read_text().splitlines())
    bad.write_text("\n".join(lines), errors="surrogateescape")
    for args in ([good, bad], [bad, good]):
        result = invoke("compare", *args)
        assert result.exit_code == 2, result.output
        assert result.output.startswith(f"Error: '{bad}' line ")
        assert result.output.count("\n") == 1 and len(result.output) < 1100
        assert all(char == "\n" or char.isprintable() for char in result.output)


def test_control_characters_and_markup_are_escaped(tmp_path: Path) -> None:
    """Neither the terminal, nor rich, nor a browser interprets the strings of a file."""
    results = [replace(row, labels=[ESCAPES], reason=ESCAPES, case=ESCAPES) for row in rows()]
    path = write_results(tmp_path, results, replace(RUN, command=ESCAPES))
    run, read = load(path)
    assert SHOWN in table(read, 300)
    charts.write(run, read, path.with_name("report.html"))
    page = path.with_name("report.html").read_text()
    assert "<script" not in page and SHOWN.replace("<", "&lt;").replace(">", "&gt;") in page
    result = invoke("compare", path, path)
    assert result.exit_code == 0 and SHOWN in result.output
    assert all(char == "\n" or char.isprintable() for char in result.output)


# Comparing.


@pytest.mark.parametrize(
    ("change", "options", "exit_code", "shown"),
    [
        (1.0, [], 0, "no difference: the quartiles overlap"),
        (1.3, [], 1, "REGRESSION"),
        (1.3, ["--threshold", "0.4"], 0, "slower, within the threshold"),
        (
            1.04,
            ["--threshold", "0.01"],
            0,
            "no difference: the quartiles overlap",
        ),  # the quartiles of a result span 5 %
        (0.7, [], 0, "faster"),
    ],
)
def test_compare(
    tmp_path: Path, change: float, options: list[str], exit_code: int, shown: str
) -> None:
    first = write_results(tmp_path / "a", rows())
    write_results(tmp_path / "b", rows({name: ms * change for name, ms in MS.items()}))
    result = invoke("compare", first, tmp_path / "b", *options)
    assert result.exit_code == exit_code, result.output
    assert result.output.count(shown) == 4, result.output  # two algorithms in two cases
    assert f"4 results compared: {4 * exit_code} slower" in result.output
    assert f"{change:.3f}" in result.output and "differs" not in result.output


def test_compare_reports_results_that_became_wrong(tmp_path: Path) -> None:
    right = write_results(tmp_path / "a", rows())
    environment = RUN.environment | {"torch": "9.9"}
    wrong = write_results(
        tmp_path / "b", rows(wrong=("auto",)), replace(RUN, environment=environment)
    )
    result = invoke("compare", right, wrong)
    assert result.exit_code == 1 and result.output.count("REGRESSION") == 2
    assert "WRONG" in result.output and "torch differs" in result.output
    reverse = invoke("compare", wrong, right)
    assert reverse.exit_code == 0 and reverse.output.count("not timed in both runs") == 2


def test_compare_refuses(tmp_path: Path) -> None:
    path = write_results(tmp_path, rows())
    other = write_results(
        tmp_path / "b", [replace(row, case=f"{row.case} there") for row in rows()]
    )
    for args, message in (
        ((path, "/nowhere/a.jsonl"), "cannot read '/nowhere/a.jsonl': No such file"),
        ((path, path, "--threshold", "-1"), "--threshold is -1; it must be at least 0"),
        ((path, other), "have no case with a common algorithm"),
    ):
        result = invoke("compare", *args)
        assert result.exit_code == 2 and result.output.count("\n") == 1
        assert message in result.output


# The HTML report.


class _Page(HTMLParser):
    """Count the tags and collect the URLs that a browser would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "xlink:href")
        self.loads += [value or "" for name, value in attrs if name in names]


def test_the_report_has_charts_and_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    assert charts.write(RUN, rows(), path) == []
    source = path.read_text()
    page = _Page(source)
    assert page.tags.count("svg") == 4  # speed-ups of two ops; overlap and roofline of one op
    assert all(url.startswith("#") for url in page.loads) and "@import" not in source
    for expected in ("E_overlap", "scaled_matmul_reduce_scatter", ">auto<", "var(--text)", "0.67x"):
        assert expected in source
    assert not any(color in source for color in charts._THEME)
    assert charts.write(RUN, rows(wrong=("auto", "direct", "unfused")), path) == []
    assert charts.write(RUN, [], path) == []


def test_the_report_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "report.html"
    assert charts.write(RUN, rows(), path) == [charts.MISSING]
    assert "pip install 'tpkernels[plots]'" in charts.MISSING
    assert "svg" not in _Page(path.read_text()).tags and "no charts" in path.read_text()
    assert "0.67x" in path.read_text()


# Runs.


def quick_rates(dtype: torch.dtype, device: str) -> Rates:
    """Measure rates quickly but inaccurately: with small operands and a small simulated cache."""
    for module in (probes, cases):
        module.last_level_cache_bytes = lambda _: 1 << 20
    with mock.patch.dict(probes._SIZE, {device: 64}):
        return probes.measure_rates(dtype, device)


def test_output_files_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    options = (
        *("--op", "all_gather_matmul,matmul_reduce_scatter,all_reduce,moe_combine", "--tp", "2"),
        *("--model", "smollm2-135m", "--projection", "qkv,down", "--m", "2,64", "--bytes", "4K"),
        *("--algorithm", "auto,unfused", "--repeat", "6", "--dtype", "fp32", "--out", out),
    )
    with mock.patch.object(command, "measure_rates", quick_rates):
        result = invoke("bench", *options)
    assert result.exit_code == 0, result.output
    for expected in ("64, 576, 1536", "smollm2-135m down", "4 KiB", "Roofline", f"Saved to {out}/"):
        assert expected in result.output
    run, results = load(out / "bench.jsonl")
    assert run.method.algorithms == ["auto", "unfused"]
    by_case: dict[str, set[str]] = {}
    for row in results:
        by_case.setdefault(row.case, set()).add(row.variant)
        assert row.status == "timed" and len(row.ms) == 6
        assert [row.q1, row.median, row.q3] == quartiles(row.ms)
    everything = {"auto", "unfused", "torch", "local_matmul"}
    assert [len(variants) for variants in by_case.values()] == [4, 4, 4, 4, 3, 2]
    first = results[0]
    assert (first.op, first.shape, first.tp) == ("all_gather_matmul", [2, 960, 576], 2)
    assert first.labels == ["smollm2-135m qkv"] and by_case[first.case] == everything
    assert "smollm2-135m down" in (out / "report.html").read_text()


@pytest.mark.slow
def test_an_interrupt_keeps_the_results_and_leaves_no_process(tmp_path: Path) -> None:
    sizes = ",".join(f"{kib}K" for kib in range(4, 44, 4))
    bench = ["bench", "--op", "all_gather", "--bytes", sizes, "--repeat", "6", "--tp", "2"]
    file = tmp_path / "bench.jsonl"

    def a_case_is_measured(process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 60
        while process.poll() is None and (not file.exists() or file.read_text().count("\n") < 2):
            assert time.monotonic() < deadline, "no case was measured"
            time.sleep(0.02)

    options = ("--warm", "--no-baselines", "--out", tmp_path)
    code, *output = run_and_interrupt("-m", "tpkernels", *bench, *options, when=a_case_is_measured)
    assert code == 130, output[1]
    count = len({row.case for row in load(file)[1]})
    assert 1 <= count < 10 and f"{count} of 10 cases are measured." in output[1]
    assert (tmp_path / "report.html").exists() and "all_gather" in output[0]


def test_a_wrong_result_is_an_exit_code(tmp_path: Path) -> None:
    options = ("--op", "all_reduce", "--algorithm", "auto,direct", "--out", tmp_path)
    with mock.patch.object(command, "measure_all", lambda *_: [rows(wrong=("auto",))]):
        result = invoke("bench", *options)
    assert result.exit_code == 1 and "WRONG" in result.output
    statuses = {row.variant: row.status for row in load(tmp_path / "bench.jsonl")[1]}
    assert statuses["auto"] == "wrong" and statuses["direct"] == "timed"
    assert "WRONG" in (tmp_path / "report.html").read_text()


def test_a_folder_that_cannot_be_written_is_no_regression(tmp_path: Path) -> None:
    def write_to(out: Path) -> Result:
        with mock.patch.object(command, "measure_all", lambda *_: []):
            return invoke("bench", "--op", "all_gather", "--out", out)

    (tmp_path / "report.html").mkdir()
    result = write_to(tmp_path)
    assert result.exit_code == 2, result.output
    assert f"Error: cannot write '{tmp_path}/report.html': Is a directory\n" in result.output
    assert "cannot create folder '/proc/here': No such file" in write_to(Path("/proc/here")).output
