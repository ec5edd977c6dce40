"""A libnccl that tests control. Built once from fake_nccl.cpp; each copy has its own state."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.cxx import compiled, compiler
from tests.support.paths import NATIVE

SOURCE = NATIVE / "nccl" / "fake_nccl.cpp"
SUCCESS, INVALID_ARGUMENT, REMOTE_ERROR, IN_PROGRESS, TIMEOUT = 0, 4, 6, 7, 8


class Fake:
    """One loaded copy: ``fake.X(...)`` calls its ``fake_X`` (tests/native/nccl/fake_nccl.cpp)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, f"fake_{name}")
        if name in ("log", "init"):
            function.restype = ctypes.c_char_p
            return lambda: function().decode().splitlines()
        return lambda *given: function(*(x.encode() if isinstance(x, str) else x for x in given))


Build = Callable[..., Fake]


def make_build(folder: Path, cache: Path) -> Build:
    """``build(without=[...])``: a new copy, some of whose symbols are hidden."""
    options = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-c"]
    whole_object = compiled(cache, "fake_nccl.o", [*options, SOURCE])
    whole = folder / "whole.so"

    def link(target: Path, without: Sequence[str]) -> None:
        script = target.with_suffix(".map")
        hidden = f"local: {'; '.join(without)};" if without else ""
        script.write_text(f"{{ global: *; {hidden} }};")
        shared = ["-shared", "-pthread", f"-Wl,--version-script={script}"]
        command = [*compiler(), *shared, str(whole_object), "-o", str(target)]
        subprocess.run(command, check=True)

    link(whole, [])
    numbers = itertools.count()

    def build(without: Sequence[str] = ()) -> Fake:
        target = folder / f"{next(numbers)}-libnccl.so.2"
        if without:
            link(target, without)
        else:
            shutil.copy(whole, target)
        return Fake(str(target))

    return build
