"""The GPU suite, rehearsed under Triton's interpreter: what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_suite
from benchmarks.gpu.stage import STAGES, Result, Setting, checks
from benchmarks.gpu_suite import ORDER, Ended, read_results, run_stage, write_results
from tests.support.paths import ROOT
from tests.support.processes import python
from tests.support.tiers import sweep


def _run(*arguments: str, limit: float = 200) -> subprocess.CompletedProcess[str]:
    return python("-m", "benchmarks.gpu_suite", *arguments, seconds=limit)


@pytest.mark.thorough
def test_a_rehearsal_of_one_stage(tmp_path: Path) -> None:
    ended = _run("--device", "cpu", "--only", "matmul_check", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert list(found["seconds"]) == ["matmul_check"] and all(row["ok"] for row in found["results"])


@pytest.mark.slow
def test_a_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    ended = _run("--device", "cpu", "--out", str(tmp_path), limit=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert {row["stage"] for row in found["results"]} == set(found["seconds"])
    assert set(STAGES) - set(found["seconds"]) == {"sanitize"}
    assert all(row["ok"] is not False for row in found["results"])
    report = (tmp_path / "gpu_suite.md").read_text()
    assert report.count("needs a GPU") >= 2  # csrc/cuda has no interpreter
    assert "no figure here is a measurement" in report and "Not run: sanitize." in report


NEW = ("grad_check", "layer_check", "streams_check", "path_check", "fault_check", "autotune_check")


@pytest.mark.parametrize("stage", sweep(NEW))
def test_a_stage_checks(stage: str) -> None:
    """In this process; stages of kernels are rehearsed in the slow tier."""
    setting = Setting("cpu", 120.0, small=True)
    results = list(STAGES[stage](setting))
    checked = [result for result in results if result.ok is not None]
    assert len(checked) >= 3 and all(result.ok for result in checked), results


def rank_0_is_right(device: str) -> list[tuple[str, bool]]:
    return [("sum", dist.get_rank() == 0)]


def test_a_check_is_of_all_ranks() -> None:
    (result,) = checks(Setting("cpu", 60.0), 2, rank_0_is_right)
    assert result.ok is False and result.what == "sum, 2 ranks"


@pytest.mark.slow
def test_a_budget_ends_a_stage() -> None:
    ended = _run("--device", "cpu", "--only", "matmul_check", "--budget-s", "0")
    assert ended.returncode == 0 and "budget exhausted" in ended.stdout
    missing = [*(name for name in ORDER if name != "matmul_check"), "sanitize"]
    assert f"Not run: {', '.join(missing)}." in ended.stdout


@pytest.mark.slow
def test_a_stage_that_is_killed_leaves_the_results_of_others(tmp_path: Path) -> None:
    """Then a second run goes on where the first ended."""
    arguments = ("--device", "cpu", "--only", "matmul_check,matmul_speed", "--out", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.gpu_suite", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            if "matmul 1x33x7" in line:  # the first result of the first stage
                (stage,) = _children(suite.pid)
                os.kill(stage, signal.SIGKILL)
                break
        suite.stdout.read()
    assert suite.returncode == 1
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    first = [row for row in found["results"] if row["stage"] == "matmul_check"]
    assert first[0]["ok"] and "the stage was lost: exit code -9" in first[-1]["what"]
    assert list(found["seconds"]) == ["matmul_speed"]
    again = _run(*arguments, "--resume")
    assert again.returncode == 0 and "== matmul_speed" not in again.stdout
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert set(found["seconds"]) == {"matmul_check", "matmul_speed"}
    assert all(row["ok"] is not False for row in found["results"])


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_stage_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "stage.jsonl"
    with mock.patch.object(gpu_suite, "_GRACE_S", 0.0):
        stage = run_stage("matmul_check", ["--device", "cpu"], file, 0.3)
    assert not stage.complete and "took more than 0 s" in stage.results[-1].what


def test_results_of_a_killed_stage(tmp_path: Path) -> None:
    def stage(setting: Setting):  # type: ignore[no-untyped-def]
        yield Result("2 + 2", "5", ok=False)
        raise ValueError("a fault")

    file = tmp_path / "stage.jsonl"
    write_results("wrong", stage, Setting("cpu", 9.0), file)
    with file.open("a") as out:
        out.write('{"stage": "wr')  # the process was killed here
    wrong, fault = read_results(file)
    assert wrong.value == "5" and fault.what == "ValueError: a fault" and fault.ok is False


def test_the_report(tmp_path: Path) -> None:
    facts = {"device": "a GPU", "torch": "2", "triton": "3", "date": "today", "sizes": "full"}
    report = gpu_suite.Report(facts, "the command", tmp_path)
    report.add("path_check", Ended([Result("one", "right", stage="path_check")], 2.0, True))
    assert not report.wrong
    report.add("graph", Ended([Result("two", "WRONG", False, "graph")], 1.0, False))
    assert report.wrong and "| graph | two | WRONG | NO |" in report.text()
    later = gpu_suite.Report(facts | {"date": "tomorrow"}, "the command", tmp_path)
    later.resume()
    assert later.has("path_check") and not later.has("graph")
    later.add("graph", Ended([Result("two", "right", stage="graph")], 1.0, True))
    assert not later.wrong and later.text().count("| graph |") == 1
    with pytest.raises(SystemExit, match="another device, version or size"):
        gpu_suite.Report(facts | {"torch": "3"}, "the command", tmp_path).resume()


WRONG = {
    "unknown stage speed": ["--only", "speed"],
    "invalid choice: 'tpu'": ["--device", "tpu"],
    "--resume needs --out": ["--device", "cpu", "--resume"],
}
if not torch.cuda.is_available():
    WRONG["torch sees no GPU"] = []


@pytest.mark.parametrize("message", WRONG)
def test_what_it_cannot_do(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main(WRONG[message])
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("stage", [name for name in ORDER if name.endswith("_check")] + ["graph"])
def test_the_kernels_are_right_on_a_gpu(stage: str) -> None:
    ended = _run("--only", stage)
    assert ended.returncode == 0, ended.stdout + ended.stderr
