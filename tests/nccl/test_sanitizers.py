"""Threads on one communicator under the sanitizers, which find every missing lock."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.test_sanitizers import REPORT, _find_toolchain
from tests.support.paths import NATIVE, ROOT

pytestmark = pytest.mark.slow
NCCL, PROGRAMS = ROOT / "csrc" / "nccl", NATIVE / "nccl"
# ThreadSanitizer of GCC 12 does not know the function that std::timed_mutex calls; without it,
# libstdc++ calls an older one.
OLDER_MUTEX = """#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#define _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK 0
"""
HANDLE_LOCK = "const std::lock_guard lock(handle_mutex_);"
TURN = "const std::unique_lock turn(calls_, Seconds(timeout_));"


def run(sanitizer: str, scratch: Path, weaker: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Builds the program, with parts of communicator.cpp replaced, and runs it."""
    toolchain = _find_toolchain(sanitizer, scratch)
    source = (NCCL / "communicator.cpp").read_text()
    for old, new in weaker.items():
        assert old in source
        source = source.replace(old, new)
    (scratch / "communicator.cpp").write_text(source)
    (scratch / "older_mutex.h").write_text(OLDER_MUTEX)
    command = [*toolchain.compiler, "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-pthread"]
    command += [f"-I{ROOT / 'csrc'}", "-include", str(scratch / "older_mutex.h")]
    fake, program = scratch / "libnccl.so.2", scratch / "threads"
    # Without the sanitizer: ThreadSanitizer may fail to load such a library late.
    subprocess.run(
        [*command, "-shared", "-fPIC", str(PROGRAMS / "fake_nccl.cpp"), "-o", str(fake)], check=True
    )
    command += toolchain.flags
    sources = [PROGRAMS / "threads.cpp", NCCL / "library.cpp", scratch / "communicator.cpp"]
    subprocess.run([*command, *map(str, sources), "-ldl", "-o", str(program)], check=True)
    toolchain.environ["ASAN_OPTIONS"] = "detect_leaks=0"  # the fake keeps what was aborted
    return toolchain.run(program, str(fake))


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_threads_on_one_communicator(sanitizer: str, tmp_path: Path) -> None:
    ended = run(sanitizer, tmp_path, {})
    assert ended.returncode == 0 and not REPORT.search(ended.stdout), ended.stdout
    assert "misuse 0, alive 0" in ended.stdout


@pytest.mark.parametrize(
    "weaker",
    [
        {HANDLE_LOCK: ""},
        {TURN: "", "if (!turn.owns_lock()) {": "if (false) {"},
    ],
    ids=["no handle lock", "no turns"],
)
def test_a_missing_lock_is_found(weaker: dict[str, str], tmp_path: Path) -> None:
    ended = run("address", tmp_path, weaker)
    assert ended.returncode != 0, ended.stdout
