"""``tpkernels qualify``: its output, refusals and saved report. tests/qualification covers the
stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import invoke
from tpkernels.cli import qualify as command
from tpkernels.planning import qualification
from tpkernels.planning.qualification import DISQUALIFIED, NOT_RUN, QUALIFIED, Failure, StageOutcome
from tpkernels.qualification import run as stages
from tpkernels.qualification.schedule import Stage, Topology

PAIR = Topology(("NVIDIA H100",) * 2, 90)


def test_a_dry_run_on_cpu_tensors(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = invoke("qualify", "--device", "cpu", "--only", "pipelined/all_r", "--out", str(out))
    assert result.exit_code == 0 and "pipelined/all_reduce on 2 ranks: qualified" in result.output
    assert "it qualifies no variant" in result.output and qualification.load("cuda")[0] is None
    assert (
        json.loads(out.read_text())["report"]["variants"]["2"]["pipelined/all_reduce"]["checks"]
        >= 12
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Simulate two GPUs and return the names of the stages that ran. `direct/ll` is wrong, and the
    first stage of `ring` raises KeyboardInterrupt."""
    ran: list[str] = []

    def outcome(stage: Stage, *_: object) -> StageOutcome:
        if stage.name == "ring/all_gather":
            raise KeyboardInterrupt
        if stage.skip_reason:
            return StageOutcome(NOT_RUN, why=stage.skip_reason)
        ran.append(stage.name)
        wrong = Failure("wrong", "all_reduce", 0, elements=4, wrong=2, first=((1, "0", "3"),))
        bad = stage.name == "direct/ll"
        return StageOutcome(DISQUALIFIED if bad else QUALIFIED, 9, failure=wrong if bad else None)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command.sessions, "resolve_device", lambda _: "cuda")
    monkeypatch.setattr(command, "get_topology", lambda: PAIR)
    monkeypatch.setattr(stages, "_run_stage", outcome)
    monkeypatch.setattr(
        qualification, "machine_key", lambda device: {"format": "a test", "device": device}
    )
    return ran


def test_the_report_is_saved_and_resumed(gpus: list[str]) -> None:
    first = invoke("qualify", "--only", "direct/")
    assert first.exit_code == 1 and len(gpus) == 5 + 2  # includes the stages that they rely on
    assert "direct/ll on 2 ranks: disqualified: 2 of 4 elements are wrong" in first.output
    report, _ = qualification.load("cuda")
    assert report is not None and "direct/ll" not in report.qualification(2).variants
    assert report.qualification(2).variants_for("direct") == {
        "ll_two_shot",
        "two_shot",
        "one_shot",
        "routed",
    }
    gpus.clear()
    invoke("qualify")
    assert "direct/ll" not in gpus and "pipelined/all_gather" in gpus
    gpus.clear()
    invoke("qualify", "--rerun", "--only", "direct/two_shot")
    assert gpus == ["messages", "direct/two_shot"]
    report, _ = qualification.load(
        "cuda"
    )  # keeps the results of earlier commands and of the interrupted command
    assert (
        report is not None
        and {"direct/two_shot", "fused/all_reduce"} < report.qualification(2).variants
    )


def test_the_plan_runs_nothing(gpus: list[str]) -> None:
    shown = invoke("qualify", "--plan")
    assert shown.exit_code == 0 and not gpus and "pipelined/all_gather" in shown.output
    assert "Estimated time: " in shown.output and " minutes" in shown.output


def test_stages_beyond_the_budget_are_listed(gpus: list[str]) -> None:
    result = invoke("qualify", "--only", "pipelined/", "--budget", "5.5")
    assert result.exit_code == 0 and not gpus
    assert "Not run, because the budget is 6 s: copies, pipelined/" in " ".join(
        result.output.split()
    )


def test_a_stage_without_a_dry_run_is_not_disqualified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "unsupported", lambda device: None)  # simulates the interpreter
    result = invoke("qualify", "--device", "cpu", "--only", "fused/copy_engines")
    assert result.exit_code == 0 and "copy_engines on 2 ranks: not run" in result.output


def test_a_dry_run_skips_fused() -> None:
    """On CPUs, `fused` runs only under the Triton interpreter."""
    shown = invoke("qualify", "--device", "cpu", "--plan")
    assert shown.exit_code == 0 and "The fused stages are skipped: fused" in shown.output
    assert "fused/" not in shown.output and "ring/all_gather" in shown.output


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ("--device cpu --only ring2", "--only is 'ring2', which is not the start of a stage name"),
        ("--device cpu --budget -1", "--budget is -1"),
        ("--device cpu --tp 1", "--nproc is 1"),
        ("--device tpu", "unknown device 'tpu'"),
    ):
        result = invoke("qualify", *options.split())
        assert result.exit_code == 2 and message in result.output, result.output
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke("qualify", "--device", "cpu")
    assert result.exit_code == 2 and "without torchrun" in result.output
