"""``benchmarks/serving.py`` for a few seconds: no errors, right answers, and memory that stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import served
from tests.support.paths import ROOT

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

SECONDS = 20


@pytest.mark.slow
def test_a_short_load(tmp_path: Path) -> None:
    path = served.folder(tmp_path, length=1024)
    options = ["--clients", "12", "--seconds", SECONDS, "--variants", "1", "--model", path]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", *map(str, options)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counts = dict(re.findall(r"^([a-z ]+): (\d+)$", ended.stdout, re.MULTILINE))
    assert int(counts["as alone"]) > 0 and int(counts["hung up"]) > 0
    assert "not as alone" not in counts, ended.stdout
    assert counts["exit code of the server"] == "0"
    sizes = re.findall(r"MiB: \[([\d.]+), ([\d.]+)\]", ended.stdout)
    assert len(sizes) == SECONDS // 10 + 1
    for first, last in zip(sizes[0], sizes[-1], strict=True):
        assert float(last) < 1.1 * float(first)
