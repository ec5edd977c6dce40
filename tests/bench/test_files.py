"""The files of a run: JSON and the table; resuming and comparing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import subprocess
import time
from collections.abc import Callable
from functools import cache as cached
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer.testing
from typer.main import get_command
from typer.testing import Result

from tests.planning.test_store import cache
from tests.support.damage import ESCAPES, SEED, faults, good_report, invoke, options, unusable
from tests.support.processes import interrupted
from tpkernels.bench import cases, probes
from tpkernels.bench.results import load, new_report, resumed, save
from tpkernels.bench.sweep import Settings, plan_sweep
from tpkernels.cli import bench as command
from tpkernels.launch import session
from tpkernels.planning.cost import Rates
from tpkernels.terminal import UsageError

SWEEP = {"op": ("reduce_scatter,all_reduce",), "bytes": ("4K,8K",), "repeat": 6, "tp": ("2",)}
BENCH = ["bench", *options(SWEEP)]
WHOLE = (
    *("bench", "--op", "all_gather_matmul,matmul_reduce_scatter,all_reduce", "--tp", "2"),
    *("--model", "smollm2-135m", "--projection", "qkv,down", "--m", "2,64", "--bytes", "4K"),
    *("--algorithm", "auto,unfused", "--repeat", "6", "--dtype", "fp32"),
)


def valid(path: Path) -> dict[str, Any]:
    """The JSON in a file, which must be valid."""
    load(path)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


# Of a run.


def quick_rates(dtype: torch.dtype, device: str) -> Rates:
    """On a rank: rates of small operands, which say little. It has a small cache."""
    for module in (probes, cases):
        module.last_level_cache_bytes = lambda _: 1 << 20
    with mock.patch.dict(probes._SIZE, {device: 64}):
        return probes.measure_rates(dtype, device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that writes everything."""
    out = tmp_path_factory.mktemp("bench") / "new" / "folder"
    with mock.patch.object(command, "measure_rates", quick_rates):
        result = invoke(*WHOLE, "--out", str(out))
    assert result.exit_code == 0, result.output
    for shown in ("64, 576, 1536", "smollm2-135m down", "4 KiB", "Roofline, measured in this run"):
        assert shown in result.output
    return out


def test_what_a_run_writes(folder: Path) -> None:
    report = valid(folder / "bench.json")
    assert report["complete"] and len(report["results"]) == 5
    assert [each["case"] for each in report["results"]] == report["cases"]
    first = report["results"][0]
    assert (first["op"], first["shape"], first["tp"]) == ("all_gather_matmul", [2, 960, 576], 2)
    assert first["labels"] == ["smollm2-135m qkv"]
    assert set(first["times"]) == {"auto", "unfused", "torch", "matmul", "local_matmul"}
    for timed in first["times"].values():
        assert len(timed["samples"]) == timed["iterations"] == 6
        assert 0 < timed["min"] <= timed["median"] <= timed["p95"] <= timed["max"]
    assert first["times"]["local_matmul"]["gb_per_s"] is None
    assert report["results"][-1]["times"]["auto"]["tflops"] is None
    text = (folder / "report.txt").read_text()
    for shown in (
        f"run {report['runs'][0]['date']}",
        report["environment"]["cpu"],
        "qkv",
        "TFLOP/s",
    ):
        assert shown in text


# Interrupted, resumed, compared.


@pytest.mark.slow
def test_an_interrupt_leaves_what_was_measured_and_no_process(tmp_path: Path) -> None:
    """Then --resume measures exactly the rest."""
    sizes = ",".join(f"{kib}K" for kib in range(4, 44, 4))
    bench = ["bench", "--op", "all_gather", "--bytes", sizes, "--repeat", "6", "--tp", "2"]
    bench += ["--warm", "--no-baselines"]
    file = tmp_path / "bench.json"

    def a_case_is_measured(process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 60
        while not file.exists() and process.poll() is None:
            assert time.monotonic() < deadline, "no case was measured"
            time.sleep(0.02)

    code, *output = interrupted(
        "-m", "tpkernels", *bench, "--out", tmp_path, when=a_case_is_measured
    )
    assert code == 130, output[1]
    partial = valid(file)
    count = len(partial["results"])
    assert not partial["complete"] and 1 <= count < len(partial["cases"]) == 10
    assert f"Interrupted: {count} of 10 cases are measured; use --resume to continue." in output[1]
    assert f"Incomplete: {count} of 10" in output[0]
    assert {path.name for path in tmp_path.iterdir()} >= {"bench.json", "report.txt"}
    assert not list(tmp_path.glob(".bench*"))

    again = invoke(*bench, "--out", str(tmp_path), "--resume")
    assert again.exit_code == 0, again.output
    whole = valid(file)
    assert whole["complete"] and [each["case"] for each in whole["results"]] == whole["cases"]
    assert whole["results"][:count] == partial["results"]
    assert len(whole["runs"]) == 2 and len(whole["rooflines"]) == 1


def test_resuming_what_is_complete_measures_nothing(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench.json").write_text(written.read_text())
    before = valid(written)["results"]
    assert len(before) == 4
    monkeypatch.delattr(session, "Ranks")
    assert invoke(*BENCH, "--out", str(tmp_path), "--resume").exit_code == 0
    assert valid(tmp_path / "bench.json")["results"] == before


def test_two_runs_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would overwrite what the other has measured since the first read the file."""
    file, again = tmp_path / "bench.json", [*BENCH, "--json", str(tmp_path / "bench.json")]
    turns, second = iter([True, False]), list[Result]()

    def meanwhile(*_: object, **__: object) -> None:
        if next(turns):
            second.append(invoke(*again, "--resume"))

    monkeypatch.setattr(command, "run_sweep", meanwhile)
    assert invoke(*again).exit_code == 0
    assert second[0].exit_code == 2
    assert f"cannot write '{file}': another process has held " in second[0].output
    assert not list(tmp_path.iterdir())


def test_results_that_cannot_be_written_are_no_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_sweep", lambda *_, **__: None)
    (tmp_path / "report.txt").mkdir()
    result = invoke(*BENCH, "--out", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert f"Error: cannot write '{tmp_path}/report.txt': Is a directory\n" in result.output
    (tmp_path / "report.txt").rmdir()
    report = new_report(plan_sweep(Settings(), ranks=None, device="cpu"))
    with pytest.raises(UsageError, match=r"cannot write '/nowhere/bench\.json': No such file"):
        save(report, Path("/nowhere/bench.json"))
    assert not list(tmp_path.iterdir())


def test_a_machine_with_an_odd_name_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are stored in printable form, and compare equal when resuming."""
    monkeypatch.setattr("tpkernels.bench.results.processor", lambda: "A\xa0CPU\x1b[2J")
    file, sweep = tmp_path / "bench.json", plan_sweep(Settings(), ranks=None, device="cpu")
    save(new_report(sweep), file)
    assert resumed(file, new_report(sweep)).environment["cpu"] == r"A\xa0CPU\x1b[2J"


def environment_with(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda report: report["environment"].update({name: value})


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (environment_with("torch", "1.0"), [], "its torch is '1.0', here it is"),
        (None, ["--repeat", "7"], "its repeat is 6, here it is 7"),
        (None, ["--algorithm", "direct"], "its algorithms is ['auto'], here it is ['direct']"),
        (None, ["--bytes", "16K"], "6 cases differ, such as all_reduce 2048"),
        (lambda report: report.update(format="x/1"), [], "format 'x/1', not 'tpkernels-bench/4'"),
    ],
)
def test_what_cannot_be_resumed(
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    more: Any,
    message: str,
) -> None:
    report = json.loads(written.read_text())
    if change is not None:
        change(report)
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(report))
    monkeypatch.delattr(session, "Ranks")
    changed = {name: SWEEP[name] for name in SWEEP if f"--{name}" not in more}
    result = invoke("bench", *options(changed), *more, "--json", str(file), "--resume")
    assert result.exit_code == 2, result.output
    assert message in result.output and result.output.count("\n") == 1
    assert json.loads(file.read_text()) == report


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON that a run might write."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    save(good_report(SWEEP), file)
    return file


def slowed(written: Path, target: Path, factor: float, only: str = "auto", keep: int = 6) -> Path:
    """A copy of the run with the times of ``only`` scaled, and ``keep`` repetitions."""
    report = json.loads(written.read_text())
    for case in report["results"]:
        for name, timed in case["times"].items():
            samples = [1 + i / 100 for i in range(timed["iterations"])]
            scale = factor if only in (name, "all") else 1.0
            timed["samples"] = [scale * each for each in samples][:keep]
            timed["iterations"] = keep
    target.write_text(json.dumps(report))
    return target


@pytest.mark.parametrize(
    ("change", "more", "exit_code", "shown"),
    [
        ((1.0,), [], 0, "no difference"),
        ((1.3,), [], 1, "REGRESSION"),
        ((1.3,), ["--threshold", "0.4"], 0, "slower, within the threshold"),
        ((1.06,), [], 0, "slower, within the threshold"),  # the interval begins below 1.05
        ((9.0, "auto", 5), [], 0, "too few repetitions"),
        ((1.3, "all"), ["--relative-to", "unfused"], 0, "no difference"),
        ((1.3,), ["--relative-to", "unfused"], 1, "REGRESSION"),
    ],
)
def test_compare(
    written: Path, tmp_path: Path, change: Any, more: list[str], exit_code: int, shown: str
) -> None:
    first = slowed(written, tmp_path / "a.json", 1.0)
    second = slowed(written, tmp_path / "b.json", *change)
    result = invoke("compare", str(first), str(second), *more)
    assert result.exit_code == exit_code, result.output
    assert result.output.partition("4 compared")[0].count(shown) == 4, result.output
    assert f"4 compared, {4 * exit_code} slower" in result.output
    assert "differs" not in result.output


def test_compare_finds_what_has_become_wrong(written: Path, tmp_path: Path) -> None:
    report = json.loads(written.read_text())
    report["results"][0]["algorithms"]["auto"]["right"] = False
    del report["results"][0]["times"]["auto"]
    report["environment"]["torch"] = "9.9"
    other = tmp_path / "bench.json"
    other.write_text(json.dumps(report))
    result = invoke("compare", str(written), str(tmp_path))
    assert result.exit_code == 1
    assert result.output.count("REGRESSION") == 1 and "WRONG" in result.output
    assert "torch differs" in result.output
    assert invoke("compare", str(tmp_path), str(written)).exit_code == 0
    for case in report["results"]:
        case["algorithms"]["auto"]["right"] = False
        case["times"].pop("auto", None)
    other.write_text(json.dumps(report))
    mended = invoke("compare", str(tmp_path), str(written))
    assert mended.exit_code == 0 and mended.output.count("not timed in both") == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["/nowhere/a.json"], "cannot read '/nowhere/a.json': No such file"),
        (["{written}", "--threshold", "-1"], "--threshold is -1; it must be at least 0"),
        (["{written}", "--relative-to", "gloo"], "unknown baseline 'gloo'; choose from unfused,"),
        (["{written}", "--relative-to", "local_matmul"], "in common with baseline 'local_matmul'"),
    ],
)
def test_compare_refuses(written: Path, args: list[str], message: str) -> None:
    result = invoke("compare", str(written), *(arg.format(written=written) for arg in args))
    assert result.exit_code == 2, result.output
    assert message in result.output and result.output.count("\n") == 1


def test_compare_needs_something_in_common(written: Path, tmp_path: Path) -> None:
    report = json.loads(written.read_text())
    for case in report["results"]:
        case["case"] += " elsewhere"
    report["cases"] = [case["case"] for case in report["results"]]
    (tmp_path / "bench.json").write_text(json.dumps(report))
    result = invoke("compare", str(written), str(tmp_path))
    assert result.exit_code == 2 and "no case and algorithm in common" in result.output


# Damaged files: each is refused, or ignored, in one line.


__all__ = ["cache"]  # a fixture


@pytest.fixture(scope="module")
def text() -> str:
    """A report without faults."""
    return json.dumps(dataclasses.asdict(good_report()))


@pytest.fixture
def good(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "good.json"
    file.write_text(text)
    return file


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks run. The command line is built once: that takes longer than the commands."""
    monkeypatch.setattr(typer.testing, "_get_command", cached(get_command), raising=False)
    monkeypatch.delattr(session, "Ranks")
    monkeypatch.setattr(command, "run_sweep", lambda *_, **__: None)


def each_way(good: Path, bad: Path) -> list[list[str]]:
    """The commands that read a report."""
    return [
        ["compare", str(good), str(bad)],
        ["compare", str(bad), str(good), "--relative-to", "unfused"],
        ["bench", *options(), "--json", str(bad), "--resume"],
    ]


def test_no_damage_ends_in_a_traceback(good: Path, text: str, nothing_runs: None) -> None:
    """What is unusable is refused. Nor is a file changed."""
    for args in each_way(good, good):
        assert not faults(invoke(*args), (0,))
    bad, failures = good.with_name("bad.json"), []
    kinds = list(unusable(json.loads(text), random.Random(SEED)))
    assert len(kinds) > 40
    for (what, content), args in zip(kinds, itertools.cycle(each_way(good, bad))):
        bad.write_bytes(content)
        fault = faults(invoke(*args), (2,))
        failures += [f"{what}, {args[0]}: {fault}"] if fault else []
        assert bad.read_bytes() == content
    assert not failures, "\n".join(failures)


def first(report: Any) -> Any:
    return report["results"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("environment"), "$ has no 'environment'"),
        (lambda r: r["results"].append({}), "$.results[2] has no"),
        (lambda r: first(r).update(op=None), "$.results[0].op is None, not of type str"),
        (lambda r: first(r).update(other=1), "$.results[0] has an unknown 'other'"),
        (lambda r: first(r)["times"]["torch"].update(median="1"), "'1', not of type float"),
        (lambda r: r["sweep"]["algorithms"].append("ring"), "has no entry for algorithm ring"),
        (lambda r: first(r)["times"].pop("direct"), "has no time for direct"),
        (lambda r: first(r)["algorithms"]["direct"].update(right=False), "has a time for direct"),
        (
            lambda r: first(r)["times"]["torch"]["samples"].pop(),
            "has unequal numbers of samples: {'auto': 6",
        ),
    ],
)
def test_where_a_report_is_damaged(
    good: Path, text: str, nothing_runs: None, change: Callable[[Any], object], message: str
) -> None:
    report = json.loads(text)
    change(report)
    bad = good.with_name("bad.json")
    bad.write_text(json.dumps(report))
    for args in each_way(good, bad):
        ended = invoke(*args)
        assert not faults(ended, (2,))
        assert f"'{bad}' is damaged: " in ended.output and message in ended.output


@pytest.mark.thorough
def test_texts_of_a_file_are_shown_as_they_are(good: Path, text: str, nothing_runs: None) -> None:
    """Neither the terminal nor rich interprets them."""
    report = json.loads(text)
    written = r"[bold]x[/no]\x1b[2J\x07\x9b\u202e\ud800\n$\nope$"
    for result in report["results"]:
        result["labels"] = [ESCAPES]
        result["algorithms"]["auto"]["reason"] = ESCAPES
        result["left_out"]["nccl"] = ESCAPES
    report["runs"][0]["command"] = ESCAPES
    out = good.parent / "out"
    out.mkdir()
    (out / "bench.json").write_text(json.dumps(report))
    ended = invoke("bench", *options(), "--out", str(out), "--resume")
    assert not faults(ended, (0,))
    for shown in (f"\n  {written[:16]}", f"Left out, {written}: all_gather"):
        assert shown in ended.output
    texts = (out / "report.txt").read_text()
    assert written in texts and all(char == "\n" or char.isprintable() for char in texts)

    report["environment"]["cpu"] = ESCAPES
    first(report)["case"] = report["cases"][0] = ESCAPES
    good.write_text(json.dumps(report))
    ended = invoke("compare", str(out), str(good))
    assert not faults(ended, (0,)) and f" and {written}\n" in ended.output
    ended = invoke("compare", str(good), str(good))
    assert not faults(ended, (0,)) and f"  {written}  " in ended.output


# YAML.

YAML = {
    "op": ["all_gather_matmul", "all_reduce"],
    "shape": [[8, 16, 32], "16,32,64"],
    "bytes": "4K,1M",
    "tp": [2],
    "dtype": "fp32",
    "algorithm": ["auto"],
    "repeat": 6,
    "seconds": 1.5,
    "quick": True,
    "model": "llama3-8b",
    "m": [16],
}
_LAUGHS = "a0: &a0 [x]" + "".join(f"\na{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))
_MERGED = "a0: &a0 {x: 1}" + "".join(
    f"\na{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 18)
)
REFUSED = {
    "": "has no mapping", "- op": "has no mapping", "op: [": "is not YAML", "\0": "is not YAML",
    "op: \x1b[2J": "is not YAML", "? [op]\n: 1": "", "op: &a [*a]": "is not YAML",
    "op: !!python/object/apply:os.getcwd []": "is not YAML", "tp: !!int ''": "is not YAML",
    "tp: &ranks [2]\nm: *ranks": "is not YAML: aliases (*name) are not supported",
    "m: 2001-99-99": "", "tp: " + "9" * 5000: "", "shape: '" + "9" * 5000 + ",2,2'": "",
    "bytes: '" + "9" * 5000 + "'": "", "repeat: " + "9" * 5000: "", "seconds: .inf": "",
    "seconds: .nan": "", "{op: all_reduce, tp: 5000}": "", "tp: ²": "", "shape: 1_0,2,2": "",
    "tp: [[[2]]]": "is no value of it", "tp: {a: 1}": "tp: {'a': 1} is no value of it",
    "tp: true": "", "warm: yes please": "", "[" * 100_000: "is not YAML",
    "tp: " + "[" * 900 + "]" * 900: "", "op: " + "x" * 100_000: "unknown op",
    _LAUGHS: "aliases", _MERGED: "aliases", "\x1b[31m: 1": "is not YAML",
    "op: 'a\\x1b[31mb'": "unknown op", "? " + "x" * 5000 + "\n: 1": "unknown key",
    "shapes: [1]": "unknown key 'shapes'; choose from op, model, projection, m, shape,",
    "repeat: many": "Invalid value for '--repeat'", "repeat: true": "Invalid value for '--repeat'",
    "quick: maybe": "Invalid value for '--quick'", "seconds: [1, 2]": "takes one value, not 2",
}  # fmt: skip


@pytest.mark.timeout(60)
def test_yaml_that_cannot_be_used_is_refused(tmp_path: Path, nothing_runs: None) -> None:
    path = tmp_path / "sweep.yaml"
    for content, message in REFUSED.items():
        path.write_text(content, encoding="utf-8")
        ended = invoke("bench", "--config", str(path))
        assert not faults(ended, (2,)), ascii(content[:25])
        assert message in ended.output, ascii(content[:25])
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "nowhere"):
        assert not faults(invoke("bench", "--config", str(path)), (2,))


# Measured times.
