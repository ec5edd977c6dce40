"""C++ of the tests: programs and libraries, compiled once and kept in pytest's cache."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest


def compiler() -> list[str]:
    """The C++ compiler; skips where there is none."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        pytest.skip(f"no C++ compiler: {command[0]}")
    return command


def compiled(
    folder: Path, name: str, arguments: Iterable[str | Path], headers: Iterable[Path] = ()
) -> Path:
    """The compiler's output, unless the folder has that of the same arguments, and of the same
    contents of the files among them and of the ``headers``."""
    arguments = [*arguments]
    command = [*compiler(), *map(str, arguments)]
    version = subprocess.run([*compiler(), "--version"], capture_output=True, check=True)
    state = hashlib.sha256(version.stdout + " ".join(command).encode())
    for path in sorted({*headers, *(path for path in arguments if isinstance(path, Path))}):
        state.update(path.read_bytes())
    target = folder / state.hexdigest()[:16] / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.rename(target)
    return target
