"""Damaged files end `compare` and `bench --resume` with exit code 2 and one line."""

from __future__ import annotations

import copy
import html
import itertools
import json
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.main import get_command

from tests.support.damage import (
    ESCAPES,
    altered,
    faults,
    good_report,
    invoke,
    options,
    unusable,
)
from tpkernels.cli import bench as command
from tpkernels.launch import session

SEED = 20261122


@pytest.fixture(scope="module")
def report() -> Any:
    return json.loads(json.dumps(good_report()))


@pytest.fixture
def good(tmp_path: Path, report: Any) -> Path:
    file = tmp_path / "good.json"
    file.write_text(json.dumps(report))
    return file


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks run. The command line is built once: that takes longer than the commands."""
    monkeypatch.setattr(typer.testing, "_get_command", cache(get_command), raising=False)
    monkeypatch.delattr(session, "Ranks")
    monkeypatch.setattr(command, "run_sweep", lambda *_, **__: None)


def each_way(good: Path, bad: Path) -> list[list[str]]:
    """The commands that read a report."""
    return [
        ["compare", str(good), str(bad)],
        ["compare", str(bad), str(good), "--relative-to", "unfused"],
        ["bench", *options(), "--json", str(bad), "--resume"],
    ]


def test_the_good_report_is_good(good: Path, nothing_runs: None) -> None:
    for args in each_way(good, good):
        assert not faults(invoke(*args), (0,))


def test_what_is_unusable_is_refused(good: Path, report: Any, nothing_runs: None) -> None:
    bad, failures = good.with_name("bad.json"), []
    kinds = list(unusable(report, random.Random(SEED)))[::2]
    assert len(kinds) > 40
    for (what, content), args in zip(kinds, itertools.cycle(each_way(good, bad))):
        bad.write_bytes(content)
        fault = faults(invoke(*args), (2,))
        failures += [f"{what}, {args[0]}: {fault}"] if fault else []
        assert bad.read_bytes() == content
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_no_damage_ends_in_a_traceback(good: Path, report: Any, nothing_runs: None) -> None:
    bad, failures, codes = good.with_name("bad.json"), [], set()
    kinds = list(altered(report, random.Random(SEED)))[::3]
    assert len(kinds) > 80
    for (what, content), args in zip(kinds, itertools.cycle(each_way(good, bad))):
        bad.write_bytes(content)
        ended = invoke(*args)
        codes.add(ended.exit_code)
        fault = faults(ended, (0, 1, 2))
        failures += [f"{what}, {args[0]}: {fault}"] if fault else []
    assert not failures, "\n".join(failures)
    assert {0, 2} <= codes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["sweep"]["algorithms"].append("ring"), "has no entry for algorithm ring"),
        (lambda r: r["results"][0]["times"].pop("direct"), "has no time for direct"),
        (
            lambda r: r["results"][0]["algorithms"]["direct"].update(right=False),
            "has a time for direct",
        ),
        (
            lambda r: times(r)["torch"]["samples"].pop(),
            "has unequal numbers of samples: {'auto': 6",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    good: Path, report: Any, nothing_runs: None, change: Any, message: str
) -> None:
    report = copy.deepcopy(report)
    change(report)
    bad = good.with_name("bad.json")
    bad.write_text(json.dumps(report))
    for args in each_way(good, bad):
        ended = invoke(*args)
        assert not faults(ended, (2,))
        assert f"'{bad}' is damaged: case '" in ended.output and message in ended.output


def times(report: Any) -> Any:
    return report["results"][0]["times"]


@pytest.mark.slow
def test_output_may_be_ascii(good: Path, report: Any) -> None:
    """As in a script that sets LC_ALL=C."""
    report = copy.deepcopy(report)
    report["environment"]["cpu"] = "Prozeßor"
    bad = good.with_name("bad.json")
    bad.write_text(json.dumps(report))
    ended = subprocess.run(
        [sys.executable, "-m", "tpkernels", "compare", str(good), str(bad)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert ended.returncode == 0, ended.stderr
    assert r" and Proze\xdfor" in ended.stdout


@pytest.mark.thorough
def test_texts_of_a_file_are_shown_as_they_are(good: Path, report: Any, nothing_runs: None) -> None:
    """Neither the terminal, nor rich, nor matplotlib interprets them."""
    report = copy.deepcopy(report)
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
    for text in (f"\n  {written[:16]}", f"Left out, {written}: all_gather"):
        assert text in ended.output
    for file in ("bench.csv", "report.html"):
        texts = (out / file).read_text()
        assert written in html.unescape(texts)
        assert all(char == "\n" or char.isprintable() for char in texts)

    report["environment"]["cpu"] = ESCAPES
    good.write_text(json.dumps(report))
    ended = invoke("compare", str(out), str(good))
    assert not faults(ended, (0,)) and f" and {written}\n" in ended.output
    for part in (report["cases"], *report["results"]):
        key = "case" if isinstance(part, dict) else 0
        part[key] = ESCAPES if part is not report["results"][1] else part[key]
    good.write_text(json.dumps(report))
    ended = invoke("compare", str(good), str(good))
    assert not faults(ended, (0,)) and f"  {written}  " in ended.output
