"""Builds the extension ``tpkernels._C``; everything else about the package is in pyproject.toml.

The extension holds no torch headers, so one build serves every torch version, and no
``-march`` flag, so one build serves every x86-64 machine: vector units are chosen at run time.

Where there is nvcc (CUDA_HOME, PATH, /usr/local/cuda) the CUDA kernels are compiled into it; where
there is none, or with TPKERNELS_CUDA=0 in the environment, NVRTC compiles them at first use.

What has been compiled is kept in build/, or in the folder TPKERNELS_BUILD, which several trees of
the same sources, as a checkout and what was unpacked from its source archive, may share.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

# Files that include pybind11 are compiled together: its headers take 8 s in each translation unit.
UNITS = {
    "unit_calls": sorted(Path("csrc/calls").glob("*.cpp")),
    "unit_bindings": [Path("csrc", name, "bindings.cpp") for name in ("", "cuda", "host", "nccl")],
}
SOURCES = sorted(
    str(path)
    for folder in ("cuda", "host", "nccl")
    for path in Path("csrc", folder).glob("*.cpp")
    if path.name != "bindings.cpp"
)
HEADERS = sorted(str(path) for glob in ("*.h", "*.inc") for path in Path("csrc").rglob(glob))

# What NVRTC needs of csrc/; what includes the others comes last.
DEVICE_CODE = ["arguments.h", "device.cuh", "sync.cuh", "reduce.cuh", "all_reduce.cuh"]
DEVICE_CODE += [
    "shards.cuh",
    "ll.cuh",
    "litmus.cuh",
    "rms_norm.cuh",
    "normed.cuh",
    "routed.cuh",
    "kernels.cu",
]
BUILD = Path(os.environ.get("TPKERNELS_BUILD", "build")).absolute()
ARCHITECTURES = (80, 90, 100)
NVCC_FLAGS = ["-std=c++17", "-O3", "-Icsrc", "-Werror", "all-warnings"]
NVCC_FLAGS += ["-Xcompiler", "-Wall,-Wextra", "-Xfatbin", "-compress-all", "--threads=0"]


def find_nvcc() -> str | None:
    if os.environ.get("TPKERNELS_CUDA") == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [str(Path(home, "bin", "nvcc")) for home in homes if home]
    places += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, places)), None)


def compile_kernels(folder: Path) -> tuple[bytes, str]:
    """(fat binary, what it holds) of the CUDA kernels; nothing where there is no nvcc."""
    nvcc = find_nvcc()
    if nvcc is None:
        return b"", ""
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    found = [arch for arch in ARCHITECTURES if f"compute_{arch}" in known.stdout.split()]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in found[:-1]]
    # The last one's PTX too, for newer GPUs.
    targets.append(f"-gencode=arch=compute_{found[-1]},code=[sm_{found[-1]},compute_{found[-1]}]")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    state = hashlib.sha256(f"{version} {NVCC_FLAGS} {targets}".encode())
    for name in DEVICE_CODE:
        state.update(Path("csrc/cuda", name).read_bytes())
    target = folder / f"kernels-{state.hexdigest()[:16]}.fatbin"
    if not target.exists():
        command = [nvcc, *NVCC_FLAGS, *targets, "--fatbin", "csrc/cuda/kernels.cu", "-o"]
        unfinished = target.with_suffix(".unfinished")
        subprocess.run([*command, str(unfinished)], check=True)
        unfinished.rename(target)
    release = re.search(r"release ([\d.]+)", version)
    names = [f"sm_{arch}" for arch in found] + [f"compute_{found[-1]}"]
    return target.read_bytes(), f"{' '.join(names)}, nvcc {release[1] if release else '?'}"


def write_image(folder: Path) -> str:
    """Writes csrc/cuda/kernels.h's embedded_image(): the fat binary and the sources."""
    folder.mkdir(parents=True, exist_ok=True)
    fatbin, holds = compile_kernels(folder)
    numbers = ",".join(map(str, fatbin or b"\0"))
    sources = ",\n".join(
        f'{{"cuda/{name}", R"cuda({Path("csrc/cuda", name).read_text()})cuda"}}'
        for name in DEVICE_CODE
    )
    text = (
        '// Written by setup.py.\n#include "cuda/kernels.h"\n\n'
        f"alignas(16) static const unsigned char kBytes[] = {{{numbers}}};\n\n"
        "const tpkernels::cuda::Image& tpkernels::cuda::embedded_image() {\n"
        f'  static const Image image{{kBytes, {len(fatbin)}, "{holds}", {{{sources}}}}};\n'
        "  return image;\n}\n"
    )
    return write(folder / "image.cpp", text)


def write(target: Path, text: str) -> str:
    """Write a source file, unless it has this text already; return its path."""
    if not target.exists() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return str(target)


def write_unit(name: str) -> str:
    """Write the translation unit that includes the files of `UNITS`."""
    paths = (path.relative_to("csrc") for path in UNITS[name])
    return write(BUILD / f"{name}.cpp", "".join(f'#include "{path}"\n' for path in paths))


class BuildExt(build_ext):
    """Keeps object files in one place, so that every kind of build (editable, in place, wheel)
    compiles only what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        tag = f"{sys.implementation.cache_tag}-pybind11-{pybind11.__version__}"
        self.build_temp = str(BUILD / f"objects-{tag}")

    def build_extension(self, ext: Pybind11Extension) -> None:
        ext.sources = [*map(write_unit, UNITS), *ext.sources, write_image(BUILD / "cuda")]
        super().build_extension(ext)


def needs_recompile(obj: str, src: str) -> bool:
    built, parts = Path(obj).stat().st_mtime, UNITS.get(Path(src).stem, [])
    return any(Path(path).stat().st_mtime > built for path in (src, *parts, __file__, *HEADERS))


extension = Pybind11Extension(
    "tpkernels._C",
    sources=SOURCES,
    depends=[*(str(path) for path in Path("csrc").rglob("*.*")), "setup.py"],
    include_dirs=["csrc"],
    cxx_std=17,
    # And -fvisibility=hidden -g0. All vector units round products and sums alike.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread", "-ffp-contract=off"],
    extra_link_args=["-pthread", "-ldl"],  # dlopen is in libc from glibc 2.34 on
)

if __name__ == "__main__":
    with ParallelCompile(needs_recompile=needs_recompile):
        setup(ext_modules=[extension], cmdclass={"build_ext": BuildExt})
