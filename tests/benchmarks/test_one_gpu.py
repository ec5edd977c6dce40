"""`benchmarks.one_gpu`: the cost of a fault in a stage, and the output files of the campaign. The
dry run and the stages with faults are slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.one_gpu import __main__ as campaign
from benchmarks.one_gpu import cache, report, tiles, virtual
from benchmarks.one_gpu.stages import Result, Stage
from tests.support.paths import ROOT
from tests.support.tiers import thorough
from tpkernels.kernels.configs import assume_device, config_for
from tpkernels.qualification.schedule import VIRTUAL, Topology, schedule

BROKEN = "tests.support.broken_stage"


def broken(
    faults: str, name: str = "broken", limit: float = 30.0, case_limit: float = 1.5
) -> Stage:
    env = {"BROKEN": faults}
    return Stage(name, 1, limit, case_limit, env, BROKEN, BROKEN)


def run(*stages: Stage, out: Path, total: float = 60.0) -> list[Result]:
    return campaign.run(stages, "rehearsal", out, total)


@pytest.mark.parametrize(
    "fault, error",
    [
        ("crash", "crash: SIGSEGV"),
        ("hang", "hang: no end after 2 s"),
        ("wrong", "3 of 4 elements wrong"),
        ("out_of_memory", "MemoryError"),
        ("killed_for_memory", "crash: SIGKILL"),
        ("poisoned", "illegal memory access"),
    ],
)
def test_a_fault_costs_one_case(fault: str, error: str, tmp_path: Path) -> None:
    first, second = run(broken(f"right,{fault},two_rows"), broken("right", "next"), out=tmp_path)
    assert first.ended == second.ended == "done"
    (bad,) = first.bad
    assert bad["case"] == fault and error in bad["error"], bad
    rows = [row for row in first.rows if not row["bad"]]
    assert [row["value"] for row in rows if row["case"] != fault] == [1, 1, 2]
    assert (fault != "crash") or rows[1]["value"] == "before the crash"
    files = tmp_path.with_name(f"{tmp_path.name}-stages")
    assert json.loads((files / "broken.json").read_text()) == first.rows
    assert [row["value"] for row in second.rows] == [1]


def test_the_stack_of_a_hang_is_reported(tmp_path: Path) -> None:
    (result,) = run(broken("hang"), out=tmp_path)
    assert "broken_stage.py" in result.bad[0]["where"]


def test_a_stage_that_cannot_start_ends(tmp_path: Path) -> None:
    first, second = run(Stage("missing", 1, 30.0, machine=BROKEN), broken("right"), out=tmp_path)
    assert "crash: exit code 1" in first.bad[0]["error"]
    assert "No module named" in first.bad[0]["where"]
    assert second.ended == "done"


@pytest.mark.slow
def test_time_runs_out(tmp_path: Path) -> None:
    """A stage that reaches its limit ends without a failure. Stages after it do not start without
    time."""
    stages = broken("right,hang,right", limit=6.0, case_limit=60.0), broken("right", "next")
    first, second = run(*stages, out=tmp_path, total=9.0)
    assert (first.ended, first.bad, len(first.rows)) == ("out of time in hang", [], 1)
    assert (second.ended, second.rows) == ("out of time", [])


@pytest.mark.parametrize("faults, code", [("right", 0), ("wrong,right", 1)])
def test_exit_code_and_summary(
    faults: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(campaign, "STAGES", (broken(faults),))
    assert campaign.main(["--rehearse"]) == code
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("broken: done")
    assert ("BAD broken, wrong: 3 of 4 elements wrong" in printed) == (code == 1)
    content = json.loads((tmp_path / "gpu-unknown.json").read_text())
    assert [stage["stage"] for stage in content["stages"]] == ["broken"]


def test_the_campaign_contains_every_variant_of_virtual_ranks() -> None:
    stages = schedule(Topology(("a GPU",), 90))
    checked = {stage.name.removeprefix(VIRTUAL) for stage in stages if stage.is_virtual}
    assert {*virtual.VARIANTS} == checked


def test_unknown_stages_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        campaign.main(["--only", "tiles,tile"])
    assert "--only has unknown stages: tile; expected facts, virtual" in capsys.readouterr().err


def test_the_tile_stage_times_several_configs() -> None:
    device = torch.device("cuda")
    with assume_device(90, 132):
        for m in (64, 4096):
            tried = tiles._configs(device, m, 4096)
            assert tried["table"] == config_for(device, torch.bfloat16, m, 4096)
            assert len(set(tried.values())) >= 6


def rows(stage: str, *results: dict[str, Any], ended: str = "done") -> Result:
    defaults = {"bad": False, "seconds": 1.0}
    return Result(stage, ended, 12.0, 0, [{**defaults, **row} for row in results])


SAMPLE = [
    rows("facts", {"case": "machine", "card": "NVIDIA H100 80GB HBM3", "torch": "2.11.0"}),
    rows(
        "virtual",
        {"case": "direct/ll", "calls": 29},
        {"case": "fused/all_gather", "calls": 3, "bad": True, "error": "hang | x"},
    ),
    rows(
        "tiles",
        {"case": "AG 1x2x3", "config": "torch.mm", "us": 10.0, "tflops": 600.0, "error": 0.0},
        {"case": "AG 1x2x3", "config": "table", "us": 12.0, "tflops": 500.0, "error": 0.0},
        {"case": "AG 1x2x3", "config": "no TMA", "us": 9.0, "tflops": 660.0, "error": 0.0},
        {"case": "AG 1x2x3", "config": "group 4", "bad": True, "error": "out of resource"},
    ),
    rows(
        "overlap",
        {"case": "all_gather_matmul 8x8x8", "us": {"link": 3.0, "fused": 9.0}, "E_overlap": 0.9},
        {"case": "matmul_all_reduce 8x8x8", "us": {"fused": 9.0}, "fused / GEMM": 1.1},
    ),
    rows(
        "latency",
        {"case": "empty launch", "us": 2.5},
        {"case": "ll W=2 8 KiB", "variant": "ll", "world": 2, "kib": 8, "us": 4.5},
        {"case": "ll W=2 32 KiB", "variant": "ll", "world": 2, "kib": 32, "us": 5.5},
    ),
    rows(
        "pair", {"case": "qualify", "line": "direct/ll on 2 ranks: qualified"}, ended="out of time"
    ),
]


def test_page_and_summary_of_sample_rows(tmp_path: Path) -> None:
    report.write(SAMPLE, "gpu", tmp_path)
    page = (tmp_path / "gpu-h100-80gb-hbm3.md").read_text()
    lines = page.splitlines()
    assert lines[0] == "# One GPU: NVIDIA H100 80GB HBM3"
    assert "| virtual | done | 12 | 2 | 1 | 0 |" in lines
    assert "| AG 1x2x3 | 600.0 | 500.0 | 660.0 | no TMA | 1.10 |" in lines
    assert "| ll W=2 | 4.5 | 5.5 |" in lines and "| empty launch | 2.5 |  |" in lines
    assert "- virtual, fused/all_gather: hang | x" in lines
    content = json.loads((tmp_path / "gpu-h100-80gb-hbm3.json").read_text())
    assert content["stages"][2]["rows"] == SAMPLE[2].rows
    summary = report.summary(SAMPLE)
    positions = summary.index("BAD virtual, fused/all_gather"), summary.index("pair: out of time")
    assert positions[0] < positions[1] < summary.index("all_gather_matmul 8x8x8")


def test_a_long_summary_is_cut(tmp_path: Path) -> None:
    many = rows("tiles", *({"case": f"{i}", "bad": True, "error": "x" * 500} for i in range(300)))
    summary = report.summary([many] * 4)
    assert len(summary) <= 9000 and "288 more" in summary


def test_entries_of_a_moved_cache_are_relocated(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    entry = {"child_paths": {"a.cubin": str(old / "ABC" / "a.cubin")}}
    (old / "ABC").mkdir(parents=True)
    (old / "ABC" / "a.cubin").touch()
    (old / "ABC" / "__grp__a.json").write_text(json.dumps(entry))
    assert (cache.kernels(old), cache.relocate(old)) == (1, 0)
    old.rename(new)
    assert (cache.relocate(new), cache.relocate(new)) == (1, 0)
    moved = json.loads((new / "ABC" / "__grp__a.json").read_text())
    assert moved == {"child_paths": {"a.cubin": str(new / "ABC" / "a.cubin")}}


def command(out: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.one_gpu", *arguments],
        env={**os.environ, "OUT": str(out), **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "only", [thorough("overlap,latency"), pytest.param("", marks=pytest.mark.slow)]
)
def test_a_dry_run(only: str, tmp_path: Path) -> None:
    result = command(tmp_path, "--rehearse", "--only", only)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [stage.name for stage in campaign.STAGES if stage.name != "facts"])
def test_each_stage_survives_faults(name: str, tmp_path: Path) -> None:
    """Cases that crash, hang, give wrong results and run out of memory precede the cases of the
    stage."""
    faults = "crash,hang,wrong,out_of_memory"
    limit = {"virtual": 200.0, "pair": 90.0, "sanitize": 90.0}.get(name, 30.0)
    env = {"BROKEN": faults, "REAL": name}
    (result,) = run(Stage(name, 1, 1500.0, limit, env, BROKEN), out=tmp_path, total=1500.0)
    assert result.ended == "done"
    assert [row["case"] for row in result.bad] == faults.split(",")
    assert len(result.rows) > len(faults.split(","))
