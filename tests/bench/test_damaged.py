"""Damaged files: results for `compare` and `bench --resume`, YAML for `bench --config`, measured
times. Each is refused, or ignored, in one line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.main import get_command

from tests.planning.test_store import cache
from tests.support.damage import (
    ESCAPES,
    SEED,
    altered,
    faults,
    good_report,
    invoke,
    options,
    unusable,
)
from tpkernels.cli import bench as command
from tpkernels.launch import session

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


@pytest.mark.parametrize(
    ("damage", "allowed"),
    [(unusable, {2}), pytest.param(altered, {0, 1, 2}, marks=pytest.mark.slow)],
)
def test_no_damage_ends_in_a_traceback(
    good: Path, text: str, nothing_runs: None, damage: Any, allowed: set[int]
) -> None:
    """Nor is a file changed. What is unusable is refused."""
    for args in each_way(good, good):
        assert not faults(invoke(*args), (0,))
    bad, failures, codes = good.with_name("bad.json"), [], set()
    kinds = list(damage(json.loads(text), random.Random(SEED)))[:: len(allowed)]
    assert len(kinds) > 40
    for (what, content), args in zip(kinds, itertools.cycle(each_way(good, bad))):
        bad.write_bytes(content)
        ended = invoke(*args)
        codes.add(ended.exit_code)
        fault = faults(ended, tuple(allowed))
        failures += [f"{what}, {args[0]}: {fault}"] if fault else []
        assert len(allowed) > 1 or bad.read_bytes() == content
    assert not failures, "\n".join(failures)
    assert allowed - {1} <= codes


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
