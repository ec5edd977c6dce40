"""Contents of the wheel, and the shared libraries that it needs. Only libraries of every Linux
system are needed: torch, CUDA and NCCL are found at run time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import tpkernels
from tpkernels import _C

ROOT = Path(__file__).resolve().parent.parent

# Libraries of the manylinux list that C++ and threads need.
SYSTEM_LIBRARIES = re.compile(
    r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
)

needs_readelf = pytest.mark.skipif(
    shutil.which("readelf") is None, reason="needs readelf (binutils)"
)


def needed_libraries(library: str | Path) -> list[str]:
    listed = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(library)],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", listed.stdout)


def require_system_libraries(library: str | Path) -> None:
    needed = needed_libraries(library)
    assert "libc.so.6" in needed, needed
    assert not [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)], needed


def test_versions_are_equal() -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project is not None
    assert project[1] == citation["version"] == tpkernels.__version__


@needs_readelf
def test_the_extension_needs_no_library_beyond_the_system() -> None:
    require_system_libraries(_C.__file__)


@pytest.mark.slow
@needs_readelf
@pytest.mark.timeout(900)  # compiles everything
def test_the_wheel_contains_only_the_package(tmp_path: Path) -> None:
    """The wheel is built from the source archive, so a file that is missing there is missing in the
    wheel."""
    pytest.importorskip("build")
    tree, out = tmp_path / "tree", tmp_path / "out"
    ignored = ["build", "dist", ".git*", ".venv*", "*.so", "*.egg-info", "__pycache__", ".*_cache"]
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*ignored))
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)],
        env={**os.environ, "TPKERNELS_CUDA": "0"},  # nvcc would need minutes
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (extension,) = [name for name in names if name.endswith(".so")]
        require_system_libraries(archive.extract(extension, tmp_path))
    sources = {
        str(path.relative_to(tree)) for path in (tree / "tpkernels").rglob("*") if path.is_file()
    }
    assert re.fullmatch(r"tpkernels/_C\.\S+\.so", extension)
    assert names - {extension} == sources
