"""Builds the extension ``tpkernels._C``; everything else about the package is in pyproject.toml.

The extension holds no torch headers, so one build serves every torch version, and no
``-march`` flag, so one build serves every x86-64 machine: vector units are chosen at run time.
"""

import sys
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

FOLDERS = ("host", "nccl")
SOURCES = [
    "csrc/bindings.cpp",
    *sorted(str(path) for folder in FOLDERS for path in Path("csrc", folder).glob("*.cpp")),
]
HEADERS = sorted(str(path) for glob in ("*.h", "*.inc") for path in Path("csrc").rglob(glob))


class BuildExt(build_ext):
    """Keeps object files in one place, so that every kind of build (editable, in place, wheel)
    compiles only what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        tag = f"{sys.implementation.cache_tag}-pybind11-{pybind11.__version__}"
        self.build_temp = str(Path("build", f"objects-{tag}"))


def needs_recompile(obj: str, src: str) -> bool:
    built = Path(obj).stat().st_mtime
    return any(Path(path).stat().st_mtime > built for path in (src, __file__, *HEADERS))


extension = Pybind11Extension(
    "tpkernels._C",
    sources=SOURCES,
    depends=[*HEADERS, "setup.py"],
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread"],  # and -fvisibility=hidden -g0
    extra_link_args=["-pthread", "-ldl"],  # dlopen is in libc from glibc 2.34 on
)

with ParallelCompile(needs_recompile=needs_recompile):
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildExt})
