"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT


def python(
    *arguments: object, seconds: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout, whatever its exit code."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def output_of(*arguments: object, seconds: float = 120, **env: str) -> str:
    """Run Python in the checkout; return its output."""
    ended = python(*arguments, seconds=seconds, **env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def torchrun(ranks: int, *arguments: object, seconds: float = 120, **env: str) -> str:
    """Run a script or module on ranks of torchrun; return what they print."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return output_of(*launcher, *arguments, seconds=seconds, **env)
