"""The examples of layers and of a model of transformers run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, temporary: Path) -> str:
    text = (EXAMPLES / name).read_text()
    command = re.search(r"^    torchrun (.*)$", text, re.MULTILINE)
    assert command is not None and command[1].endswith(f"examples/{name}")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1].split()],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_layers(tmp_path: Path) -> None:
    told = run_example("layers.py", tmp_path)
    losses = re.search(r"loss ([\d.]+) -> ([\d.]+)", told)
    assert losses is not None and float(losses[2]) < float(losses[1]) - 1, told


def test_huggingface(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = run_example("huggingface.py", tmp_path)
    assert "generated the same tokens: True" in told
    difference = re.search(r"differ by ([\d.e-]+);", told)
    assert difference is not None and float(difference[1]) < 1e-5, told
