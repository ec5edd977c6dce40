"""Where nvcc was missing: the same sources compiled by NVRTC through CuPy, and the cache of what it
made."""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.test_compile import ARCHITECTURES, SINCE_90, entries
from tests.support import cuda_builds
from tpkernels import _C
from tpkernels.cuda import image


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tpkernels"


class Compiler:
    """In NVRTC's place: counts what it compiles."""

    NVRTCError = ValueError

    def __init__(self) -> None:
        self.version, self.compiled, self.destroyed = (13, 0), [], 0
        self.error: Exception | None = None

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def createProgram(self, source: str, main: str, texts: Any, names: Any) -> int:
        assert main == "cuda/kernels.cu" and b"cuda/sync.cuh" in names and len(texts) == len(names)
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
    made = Compiler()
    monkeypatch.setattr(image, "_nvrtc", lambda: (made, "14.0"))
    return made


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
def test_a_file_that_is_damaged_or_may_be_anothers_is_not_used(
    cache: Path, compiler: Compiler, how: str
) -> None:
    """Whoever writes the image writes its checksum too. tests/common/test_cache.py has the files
    that are not trusted."""
    image.nvrtc_image(90)
    (file,) = cache.iterdir()
    DISTRUST[how](file)
    for _ in range(2):
        assert image.nvrtc_image(90) == b"cubin 2\0"  # it was put right
    assert len(list(cache.iterdir())) == 1


def test_no_cache_is_no_error(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home folder is the default."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert image.nvrtc_image(90) == b"cubin 1\0"
    assert image.nvrtc_image(90) == b"cubin 2\0"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert image.cache_folder() == Path.home() / ".cache" / "tpkernels"


def test_an_unfinished_file_is_taken_away(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert image.nvrtc_image(90) == b"cubin 1\0"
    assert list(cache.iterdir()) == []


def test_what_nvrtc_says_is_passed_on(cache: Path, compiler: Compiler) -> None:
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
    """The real one."""
    try:
        return image._nvrtc()[0]
    except NotImplementedError as error:
        pytest.skip(str(error))


def test_nvrtc_gets_every_header_and_takes_them(
    nvrtc: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without code for a GPU, which takes NVRTC 20 s."""
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
    assert set(kernels) == entries() - (set(SINCE_90) if arch == "sm_80" else set())
    for kernel, used in kernels.items():
        assert used.stack == 0 and used.local == 0, f"{kernel}: {used}"


def test_the_status_says_which_nvrtc(nvrtc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C.cuda, "architectures", lambda: "")
    version = ".".join(map(str, nvrtc.getVersion()))
    assert image.image_status().startswith(f"NVRTC {version} through CuPy ")
