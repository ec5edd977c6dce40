"""The examples of ops, compiler pass and FSDP2 x TP run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def said_by(name: str) -> str:
    text = (EXAMPLES / name).read_text()
    command = re.search(r"^    torchrun (.*)$", text, re.MULTILINE)
    assert command is not None and command[1].endswith(f"examples/{name}")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1].split()],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_eager_ops() -> None:
    said = said_by("eager_ops.py")
    differences = re.findall(r"differ by ([\d.e-]+) at most", said)
    assert len(differences) == 2 and all(float(each) < 1e-4 for each in differences), said


@pytest.mark.slow
def test_compile_pass() -> None:
    """Inductor generates code: the quick tier has the same model in test_compile_models.py."""
    said = said_by("compile_pass.py")
    assert "4 rewritten, 0 left alone" in said
    difference = re.search(r"differs from one process by ([\d.e-]+)", said)
    assert difference is not None and float(difference[1]) < 1e-4, said


def test_training_with_fsdp_and_tensor_parallelism() -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said_by("train_fsdp_tp.py"))]
    assert len(losses) >= 3 and losses[-1] < losses[0] - 2, losses
