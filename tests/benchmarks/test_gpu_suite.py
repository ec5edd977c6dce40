"""The GPU suite, rehearsed under Triton's interpreter: what it says, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_stages, gpu_suite
from tests.support.paths import ROOT


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_suite", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.thorough
def test_a_rehearsal_of_one_stage(tmp_path: Path) -> None:
    ended = _run("--device", "cpu", "--only", "matmul_check", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert found["stages"] == ["matmul_check"] and all(row["ok"] for row in found["results"])


@pytest.mark.slow
def test_a_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    ended = _run("--device", "cpu", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert {row["stage"] for row in found["results"]} == set(found["stages"])
    assert set(gpu_suite.STAGES) - set(found["stages"]) == {"sanitize"}
    checked = [row for row in found["results"] if row["ok"]]
    assert len(checked) == 12 + 2 * 2 * 4
    report = (tmp_path / "gpu_suite.md").read_text()
    assert report.count("needs a GPU") >= 2  # csrc/cuda has no interpreter
    assert "no figure here is a measurement" in report and "Not run: sanitize." in report


@pytest.mark.thorough
def test_a_budget_ends_a_stage() -> None:
    ended = _run("--device", "cpu", "--only", "matmul_check", "--budget-s", "0")
    assert ended.returncode == 0 and "budget exhausted" in ended.stdout
    assert (
        f"Not run: {', '.join(name for name in gpu_suite.STAGES if name != 'matmul_check')}."
        in ended.stdout
    )


WRONG = [("--only", "speed"), ("--device", "tpu")]


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", WRONG)
def test_what_it_does_not_know(arguments: tuple[str, ...]) -> None:
    ended = _run(*arguments)
    assert ended.returncode == 2 and arguments[1] in ended.stderr.splitlines()[-1]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "stage", ["matmul_check", "fused_check", "graph", "cuda_check", "queued_check", "paced_copy"]
)
def test_the_kernels_are_right_on_a_gpu(stage: str) -> None:
    ended = _run("--only", stage)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    ended = _run()
    assert ended.returncode == 2 and "torch sees no GPU" in ended.stderr


def test_a_wrong_result_fails_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(setting: gpu_stages.Setting):  # type: ignore[no-untyped-def]
        yield gpu_stages.Result("wrong", "2 + 2", "5", ok=False)

    monkeypatch.setattr(gpu_suite, "STAGES", {"wrong": wrong})
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert gpu_suite.main(["--device", "cpu"]) == 1
