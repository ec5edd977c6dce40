"""The CUDA kernels between threads, under ThreadSanitizer and AddressSanitizer.

What ThreadSanitizer sees is the C++ that the kernels are, with acquire and release where PTX has
them: that the words order all data, over blocks, ranks and calls. cuda/test_compile.py looks
for those orders in the PTX.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native import test_sanitizers as sanitizers
from tests.native.test_sanitizers import Toolchain
from tests.support import emulated

RACE = "WARNING: ThreadSanitizer: data race"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    cache = getattr(pytestconfig, "cache", None)
    temporary = tmp_path_factory.mktemp("sanitized")
    return temporary if cache is None else Path(cache.mkdir("emulated"))


def run(
    scratch: Path, sanitizer: str, *switches: str, without: str = ""
) -> subprocess.CompletedProcess[str]:
    """The program under a sanitizer; ``without`` takes one memory order away."""
    toolchain: Toolchain = sanitizers._find_toolchain(sanitizer, scratch)
    flags = [*toolchain.flags, *([f"-DWITHOUT_{without}"] if without else [])]
    return toolchain.run(emulated.build(scratch, "threads.cpp", *flags), *switches)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", pytest.param("address", marks=pytest.mark.slow)])
def test_no_report(scratch: Path, sanitizer: str) -> None:
    ended = run(scratch, sanitizer)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout == "24 calls, 0 wrong\n", ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ACQUIRE", "RELEASE"])
def test_a_missing_order_is_reported(scratch: Path, order: str) -> None:
    ended = run(scratch, "thread", without=order)
    assert ended.returncode != 0 and RACE in ended.stdout, ended.stdout


@pytest.mark.thorough
def test_torn_lines_would_be_seen(scratch: Path) -> None:
    """Eight threads have a line; its flag comes before the rest."""
    ended = run(scratch, "thread", "--torn-lines")
    assert ended.returncode != 0 and "24 calls, 0 wrong" not in ended.stdout, ended.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("breakage", ["single-buffer", "skip-waits"])
def test_a_broken_protocol_is_reported(scratch: Path, breakage: str) -> None:
    ended = run(scratch, "thread", f"--{breakage}")
    assert ended.returncode != 0 and RACE in ended.stdout, ended.stdout
