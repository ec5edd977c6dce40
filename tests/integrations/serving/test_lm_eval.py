"""lm-evaluation-harness on a served model gives the scores of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import served
from tests.support.paths import ROOT

TASKS = ["capitals", "capitals_text", "capitals_bits"]


@pytest.mark.slow
def test_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    lm_eval = pytest.importorskip("lm_eval")
    manager = pytest.importorskip("lm_eval.tasks").TaskManager(include_path="benchmarks/lm_eval")
    path = served.folder(tmp_path)

    def results(model: str, arguments: str) -> tuple[dict[str, Any], list[list[float]]]:
        """Return the scores, and the log-probability of every choice."""
        got = lm_eval.simple_evaluate(
            model, arguments, TASKS, task_manager=manager, batch_size=4, device="cpu"
        )
        choices = [
            [response[0] for response in sample["filtered_resps"]]
            for sample in got["samples"]["capitals"]
        ]
        scores = {
            (task, name): value
            for task in TASKS
            for name, value in got["results"][task].items()
            if isinstance(value, float)
        }
        return scores, choices

    want, want_choices = results(
        "hf", f"pretrained={path},dtype=float32,max_length={served.LENGTH}"
    )
    with served.server(path, "--dtype", "fp32") as running:
        url = f"{running.url}/v1/completions"
        arguments = f"model={running.name},tokenizer={path},base_url={url}"
        got, choices = results("local-completions", f"{arguments},max_length={served.LENGTH}")
    assert got == pytest.approx(want, rel=1e-4)
    assert choices == [pytest.approx(expected, rel=1e-4) for expected in want_choices]
