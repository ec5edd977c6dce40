"""Kernels compiled by NVRTC through CuPy, for builds without nvcc.

Also covers the cache of compiled kernels.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.test_compile import ARCHITECTURES, SINCE_90, kernel_names
from tests.support import cuda_builds
from tpkernels import _C
from tpkernels.cuda import image


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a cache folder that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tpkernels"


class Compiler:
    """Replaces NVRTC and counts compilations."""

    NVRTCError = ValueError

    def __init__(self) -> None:
        self.version, self.compiled, self.destroyed = (13, 0), [], 0
        self.error: Exception | None = None

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def createProgram(self, source: str, main: str, headers: Any, names: Any) -> int:
        assert (
            main == "cuda/kernels.cu" and b"cuda/sync.cuh" in names and len(headers) == len(names)
        )
        return 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        if self.error is not None:
            raise self.error
        self.compiled.append(options[-1])

    def getCUBIN(self, program: int) -> bytes:
        return f"cubin {len(self.compiled)}".encode()

    def getProgramLog(self, program: int) -> str:
        return "kernels.cu(1): error: no\n"

    def destroyProgram(self, program: int) -> None:
        self.destroyed += 1


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    fake = Compiler()
    monkeypatch.setattr(image, "_nvrtc", lambda: (fake, "14.0"))
    return fake


def test_one_compilation_per_architecture_compiler_and_source(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert image.nvrtc_image(90) == image.nvrtc_image(90) == b"cubin 1\0"
    assert image.nvrtc_image(80) == b"cubin 2\0"
    assert compiler.compiled == ["--gpu-architecture=sm_90", "--gpu-architecture=sm_80"]
    assert compiler.destroyed == len(list(cache.iterdir())) == 2
    compiler.version = (13, 1)
    assert image.nvrtc_image(90) == b"cubin 3\0"
    sources = _C.cuda.sources()
    changed = [*sources[:-1], (sources[-1][0], sources[-1][1] + "\n")]
    monkeypatch.setattr(_C.cuda, "sources", lambda: changed)
    assert image.nvrtc_image(90) == b"cubin 4\0"


DISTRUST: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "short": lambda file: file.write_bytes(b"short"),
    "no checksum": lambda file: file.write_bytes(b"x" * 100),
    "another byte": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"!"),
    "others can write it": lambda file: file.chmod(0o666),
}


@pytest.mark.parametrize("how", DISTRUST)
def test_a_damaged_or_untrusted_file_is_not_used(cache: Path, compiler: Compiler, how: str) -> None:
    """Damage a cached file or let other users write to it.

    The checksum does not protect against users who can write the file. tests/common/test_cache.py
    covers further untrusted files.
    """
    image.nvrtc_image(90)
    (file,) = cache.iterdir()
    DISTRUST[how](file)
    for _ in range(2):
        assert image.nvrtc_image(90) == b"cubin 2\0"  # recompiled once
    assert len(list(cache.iterdir())) == 1


def test_no_cache_is_no_error(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile without a cache folder. The default is in the home folder."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert image.nvrtc_image(90) == b"cubin 1\0"
    assert image.nvrtc_image(90) == b"cubin 2\0"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert image.cache_folder() == Path.home() / ".cache" / "tpkernels"


def test_an_unfinished_file_is_removed(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert image.nvrtc_image(90) == b"cubin 1\0"
    assert list(cache.iterdir()) == []


def test_nvrtc_errors_are_reported(cache: Path, compiler: Compiler) -> None:
    compiler.error = ValueError("NVRTC_ERROR_INVALID_OPTION (5)")
    with pytest.raises(NotImplementedError, match=r"sm_75: NVRTC_ERROR_INVALID.*error: no"):
        image.nvrtc_image(75)
    assert compiler.destroyed == 1 and not cache.exists()


def test_without_cupy_or_nvrtc_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(_C.cuda, "architectures", lambda: "")
    with pytest.raises(NotImplementedError, match=r"CuPy.*pip install 'tpkernels\[cu13\]'"):
        image.nvrtc_image(90)
    assert image.image_status().startswith("none: the CUDA kernels were not compiled")

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open")

    nvrtc = types.SimpleNamespace(getVersion=missing)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(nvrtc=nvrtc), __version__="14.0")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    assert "CuPy 14.0 is installed, but NVRTC" in image.image_status()
    assert "libnvrtc.so.13" in image.image_status()


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    """Return the real NVRTC, or skip."""
    try:
        return image._nvrtc()[0]
    except NotImplementedError as error:
        pytest.skip(str(error))


def test_nvrtc_accepts_every_header(
    nvrtc: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check only the syntax. Code generation by NVRTC would last 20 s."""
    sources = dict(_C.cuda.sources())
    included = re.findall(r'#include "(.+)"', "".join(sources.values()))
    assert set(included) == sources.keys() - {"cuda/kernels.cu"}
    monkeypatch.setattr(image, "_OPTIONS", (*image._OPTIONS, "--fdevice-syntax-only"))
    assert image.nvrtc_image(90)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvrtc_compiles_the_same_kernels(nvrtc: Any, cache: Path, arch: str) -> None:
    cubin = image.nvrtc_image(int(arch.removeprefix("sm_")))
    assert cubin.startswith(b"\x7fELF") and len(list(cache.iterdir())) == 1
    (kernels,) = cuda_builds.usage(cubin).values()
    assert f"code for {arch}" in cuda_builds.dump(cubin, "-sass", "-fun", "call_begin")
    assert set(kernels) == kernel_names() - (set(SINCE_90) if arch == "sm_80" else set())
    for kernel, used in kernels.items():
        assert used.stack == 0 and used.local == 0, f"{kernel}: {used}"


def test_the_status_names_the_nvrtc_version(nvrtc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C.cuda, "architectures", lambda: "")
    version = ".".join(map(str, nvrtc.getVersion()))
    assert image.image_status().startswith(f"NVRTC {version} through CuPy ")
