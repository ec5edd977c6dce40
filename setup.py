"""Build the extension ``tpkernels._C``. The package metadata is in pyproject.toml.

The extension includes no torch headers, so one build works with every torch version. It is compiled
without ``-march``, so one build works on every x86-64 machine. It selects vector instructions at
run time.

If nvcc is available (CUDA_HOME, PATH, /usr/local/cuda), the extension contains the compiled CUDA
kernels. Otherwise, or with TPKERNELS_CUDA=0 in the environment, NVRTC compiles them at first use.

Build outputs are cached in build/ or in the folder TPKERNELS_BUILD. Several trees with the same
sources, such as a checkout and an unpacked sdist, can share that folder.
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

# Files that include pybind11 are compiled together: its headers cost 8 s per translation unit.
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

# Sources for NVRTC. A file precedes the files that include it.
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
    candidates = [str(Path(home, "bin", "nvcc")) for home in homes if home]
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, candidates)), None)


def compile_kernels(folder: Path) -> tuple[bytes, str]:
    """Compile the CUDA kernels. Returns the fat binary and its description, or empty values
    without nvcc."""
    nvcc = find_nvcc()
    if nvcc is None:
        return b"", ""
    supported = subprocess.run(
        [nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True
    )
    archs = [arch for arch in ARCHITECTURES if f"compute_{arch}" in supported.stdout.split()]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs[:-1]]
    # The last architecture also gets PTX, for newer GPUs.
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=[sm_{archs[-1]},compute_{archs[-1]}]")
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
    names = [f"sm_{arch}" for arch in archs] + [f"compute_{archs[-1]}"]
    return target.read_bytes(), f"{' '.join(names)}, nvcc {release[1] if release else '?'}"


def write_image(folder: Path) -> str:
    """Write the definition of embedded_image() (csrc/cuda/kernels.h): fat binary and sources."""
    folder.mkdir(parents=True, exist_ok=True)
    fatbin, description = compile_kernels(folder)
    numbers = ",".join(map(str, fatbin or b"\0"))
    sources = ",\n".join(
        f'{{"cuda/{name}", R"cuda({Path("csrc/cuda", name).read_text()})cuda"}}'
        for name in DEVICE_CODE
    )
    source = (
        '// Written by setup.py.\n#include "cuda/kernels.h"\n\n'
        f"alignas(16) static const unsigned char kBytes[] = {{{numbers}}};\n\n"
        "const tpkernels::cuda::Image& tpkernels::cuda::embedded_image() {\n"
        f'  static const Image image{{kBytes, {len(fatbin)}, "{description}", {{{sources}}}}};\n'
        "  return image;\n}\n"
    )
    return write(folder / "image.cpp", source)


def write(target: Path, source: str) -> str:
    """Write a source file, unless it is up to date. Returns its path."""
    if not target.exists() or target.read_text() != source:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source)
    return str(target)


def write_unit(name: str) -> str:
    """Write the translation unit that includes the files of `UNITS`."""
    paths = (path.relative_to("csrc") for path in UNITS[name])
    return write(BUILD / f"{name}.cpp", "".join(f'#include "{path}"\n' for path in paths))


class BuildExt(build_ext):
    """Share the object files between all kinds of builds (editable, in place, wheel), so that a
    build recompiles only changed files."""

    def finalize_options(self) -> None:
        super().finalize_options()
        tag = f"{sys.implementation.cache_tag}-pybind11-{pybind11.__version__}"
        self.build_temp = str(BUILD / f"objects-{tag}")

    def build_extension(self, ext: Pybind11Extension) -> None:
        ext.sources = [*map(write_unit, UNITS), *ext.sources, write_image(BUILD / "cuda")]
        super().build_extension(ext)


def needs_recompile(obj: str, src: str) -> bool:
    built, included = Path(obj).stat().st_mtime, UNITS.get(Path(src).stem, [])
    return any(Path(path).stat().st_mtime > built for path in (src, *included, __file__, *HEADERS))


extension = Pybind11Extension(
    "tpkernels._C",
    sources=SOURCES,
    depends=[*(str(path) for path in Path("csrc").rglob("*.*")), "setup.py"],
    include_dirs=["csrc"],
    cxx_std=17,
    # pybind11 adds -fvisibility=hidden -g0. Without FMA contraction all vector instruction sets
    # round identically.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread", "-ffp-contract=off"],
    extra_link_args=["-pthread", "-ldl"],  # dlopen is in libc from glibc 2.34 on
)

if __name__ == "__main__":
    with ParallelCompile(needs_recompile=needs_recompile):
        setup(ext_modules=[extension], cmdclass={"build_ext": BuildExt})
