"""Compile the C++ programs and libraries of the tests once, cached in the pytest cache."""

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
    """Return the C++ compiler, or skip."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        pytest.skip(f"no C++ compiler: {command[0]}")
    return command


def compile_cached(
    folder: Path, name: str, arguments: Iterable[str | Path], headers: Iterable[Path] = ()
) -> Path:
    """Compile, or return the cached output.

    The cache key contains the compiler version, the arguments, and the contents of the source files
    and ``headers``.
    """
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
