"""The README's example is pasted into a file and run as the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

README = ROOT / "README.md"


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    example = tmp_path / "example.py"
    example.write_text(
        blocks[0] + "\nassert y.shape == x.shape and y.isfinite().all()\nprint('ran')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(example)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ran") == 2
