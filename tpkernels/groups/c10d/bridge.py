"""The C++ class that passes the calls of torch to a `Backend`: bridge.cpp, compiled at first use.

``c10d::Backend`` has no constructor in Python. Its layout changes with torch, so bridge.cpp is
compiled against the installed torch, and the result is kept in the cache folder. Where that is not
possible, `PythonGroup` (python_group.py) replaces it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.futures import Future

from tpkernels.common.cache import cache_folder, check_folder, locked, make_folder, replace_file
from tpkernels.torch_private import pybind11_abi

_logger = logging.getLogger("tpkernels")
_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILE_SECONDS = 300.0


class CompileError(RuntimeError):
    """bridge.cpp cannot be compiled on this machine."""


def load() -> ModuleType:
    """Return the compiled module. The first process compiles it, in about 30 s.

    Raises:
        CompileError: there is no C++ compiler, it failed, or its result cannot be loaded.
    """
    module = _load_once()
    if isinstance(module, CompileError):
        raise module
    return module


@functools.cache
def _load_once() -> ModuleType | CompileError:
    try:
        return _load()
    except CompileError as error:
        return error


def _load() -> ModuleType:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise CompileError("no C++ compiler was found (c++, g++, or the variable CXX)")
    torch_folder = Path(torch.__file__).parent
    includes = [torch_folder / "include", Path(sysconfig.get_path("include"))]
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [f"-I{include}" for include in includes] + pybind11_abi()
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    key = " ".join([*command, torch.__version__, sysconfig.get_config_var("SOABI")])
    key += " ".join(platform.libc_ver())
    digest = hashlib.sha256(key.encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    folder = cache_folder() / "c10d"
    path = folder / f"bridge-{digest}.so"
    try:
        make_folder(folder)
        check_folder(folder)
        with locked(folder / f".{path.name}.lock", seconds=_COMPILE_SECONDS):
            if not path.exists():
                _logger.warning(
                    "compiling the bridge to torch %s once, into %s", torch.__version__, path
                )
                _compile([*command, str(_SOURCE)], libraries, path)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CompileError(f"{_SOURCE.name} cannot be compiled: {error}") from error
    spec = importlib.util.spec_from_file_location("_tpkernels_c10d_bridge", path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # it was compiled on a different machine, or is damaged
        raise CompileError(f"{path} cannot be loaded, and has been removed: {error}") from error
    return module


def _compile(command: list[str], libraries: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, path.name)
        result = subprocess.run(
            [*command, "-o", str(output), *libraries],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
        if result.returncode != 0:
            raise CompileError(
                f"{command[0]} failed with exit code {result.returncode}: {result.stderr[-2000:]}"
            )
        replace_file(path, output.read_bytes())


def fail_future(future: Future[Any], error: BaseException) -> None:
    """Complete a future with an error that C++ and Python raise when they wait for it."""
    module = _load_once()
    if isinstance(module, CompileError):
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
    else:
        module.fail_future(future, f"{type(error).__name__}: {error}")
