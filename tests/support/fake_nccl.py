"""A libnccl that tests control. Compiled once from fake_nccl.cpp. Each copy has separate state."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.cxx import compile_cached, compiler
from tests.support.paths import NATIVE

SOURCE = NATIVE / "nccl" / "fake_nccl.cpp"
SUCCESS, INVALID_ARGUMENT, REMOTE_ERROR, IN_PROGRESS, TIMEOUT = 0, 4, 6, 7, 8


class Fake:
    """One loaded copy. ``fake.X(...)`` calls ``fake_X`` (tests/native/nccl/fake_nccl.cpp)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, f"fake_{name}")
        if name in ("log", "init"):
            function.restype = ctypes.c_char_p
            return lambda: function().decode().splitlines()
        return lambda *args: function(*(x.encode() if isinstance(x, str) else x for x in args))


Build = Callable[..., Fake]


def make_build(folder: Path, cache: Path) -> Build:
    """Return ``build(without=[...])``: create a copy in which these symbols are hidden."""
    options = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-c"]
    object_file = compile_cached(cache, "fake_nccl.o", [*options, SOURCE])
    full_library = folder / "whole.so"

    def link(target: Path, without: Sequence[str]) -> None:
        script = target.with_suffix(".map")
        hidden = f"local: {'; '.join(without)};" if without else ""
        script.write_text(f"{{ global: *; {hidden} }};")
        shared = ["-shared", "-pthread", f"-Wl,--version-script={script}"]
        command = [*compiler(), *shared, str(object_file), "-o", str(target)]
        subprocess.run(command, check=True)

    link(full_library, [])
    copies = itertools.count()

    def build(without: Sequence[str] = ()) -> Fake:
        target = folder / f"{next(copies)}-libnccl.so.2"
        if without:
            link(target, without)
        else:
            shutil.copy(full_library, target)
        return Fake(str(target))

    return build
