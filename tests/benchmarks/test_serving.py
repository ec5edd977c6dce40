"""``benchmarks/serving.py`` for a few seconds: no errors, right answers, and stable memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import served
from tests.support.processes import python_output

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

SECONDS = 20


@pytest.mark.slow
def test_a_short_load(tmp_path: Path) -> None:
    path = served.folder(tmp_path, length=1024)
    options = ["--clients", "12", "--seconds", SECONDS, "--variants", "1", "--model", path]
    shown = python_output("-m", "benchmarks.serving", *options, seconds=250)
    counts = dict(re.findall(r"^([a-z ]+): (\d+)$", shown, re.MULTILINE))
    assert int(counts["same answer as alone"]) > 0 and int(counts["client disconnected"]) > 0
    assert "different answer than alone" not in counts, shown
    assert counts["exit code of the server"] == "0"
    sizes = re.findall(r"MiB: \[([\d.]+), ([\d.]+)\]", shown)
    assert len(sizes) == SECONDS // 10 + 1
    for first, last in zip(sizes[0], sizes[-1], strict=True):
        assert float(last) < 1.1 * float(first)
