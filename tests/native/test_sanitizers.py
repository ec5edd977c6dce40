"""The C++ code under ThreadSanitizer and AddressSanitizer with UndefinedBehaviorSanitizer.

csrc/host is tested by the program in tests/native, with threads and processes. The CUDA kernels are
tested on CPU threads by tests/native/emulated.

ThreadSanitizer models memory orderings. Its silence about the real protocol is meaningful because
it reports broken protocols; the negative controls show that. For the CUDA kernels it checks the C++
code, with acquire and release in place of PTX: signals must order all data across blocks, ranks and
calls. cuda/test_compile.py checks the orderings in the PTX.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import emulated
from tests.support.cxx import compile_cached, compiler
from tests.support.paths import NATIVE, ROOT

CSRC = ROOT / "csrc"
HOST = CSRC / "host"
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
WARNINGS = ["-O1", "-g1", "-Wall", "-Wextra", "-pthread", f"-I{CSRC}"]
REPORT = re.compile(r"(WARNING|ERROR): \w+Sanitizer|runtime error:|Sanitizer CHECK failed")
RACE = "WARNING: ThreadSanitizer: data race"
RUN_SECONDS = 100  # limit for a hang; an idle machine needs less than a tenth
COMPILE_JOBS = 2

Ended = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Toolchain:
    """The flags of a sanitizer, and the command prefix and environment for its programs."""

    flags: list[str]
    prefix: list[str]
    environ: dict[str, str]

    def run(self, program: Path, *args: str, **environ: str) -> Ended:
        return subprocess.run(
            [*self.prefix, str(program), *args],
            env={**os.environ, **self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )


def _find_toolchain(sanitizer: str, scratch: Path) -> Toolchain:
    """Return a working toolchain. Skip with the reason if sanitized programs cannot be built or
    run."""
    if not HOST.is_dir():
        pytest.skip(f"no sources: {HOST}")
    flags = SANITIZERS[sanitizer]
    source, program = scratch / f"{sanitizer}.cpp", scratch / sanitizer
    source.write_text("int main() { return 0; }\n")
    command = [*compiler(), *flags, str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        pytest.skip(f"{command[0]} has no {sanitizer} sanitizer: {built.stderr.strip()[-200:]}")
    # Workarounds: some kernels randomize more address bits than the sanitizer supports, and some
    # containers forbid the leak check to inspect threads.
    failure = ""
    for leaks in ("1", "0"):
        for prefix in ([], ["setarch", platform.machine(), "-R"]):
            environ = {"ASAN_OPTIONS": f"detect_leaks={leaks}", "TSAN_OPTIONS": "exitcode=66"}
            toolchain = Toolchain(flags, prefix, environ)
            try:
                probe = toolchain.run(program)
            except OSError as error:
                failure = str(error)
                continue
            if probe.returncode == 0 and not probe.stdout:
                return toolchain
            failure = probe.stdout
    pytest.skip(f"programs under the {sanitizer} sanitizer do not run here: {failure[-200:]}")


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Toolchain]:
    scratch, cache = tmp_path_factory.mktemp("native"), dict[str, Toolchain]()

    def find(sanitizer: str) -> Toolchain:
        if sanitizer not in cache:
            cache[sanitizer] = _find_toolchain(sanitizer, scratch)
        return cache[sanitizer]

    return find


Run = Callable[..., Ended]

# csrc/host.


@pytest.fixture
def run_host(toolchain: Callable[[str], Toolchain], cxx_cache: Path) -> Run:
    """Return ``run_host(sanitizer, *switches)``; ``without`` removes one memory ordering."""

    def run(sanitizer: str, *switches: str, without: str = "") -> Ended:
        tools = toolchain(sanitizer)
        files = [*HOST.glob("*.cpp"), *NATIVE.glob("*.cpp")]
        sources = sorted(file for file in files if not file.stem.endswith("bindings"))
        headers = [p for d in (HOST, NATIVE) for p in d.iterdir() if p.suffix in (".h", ".inc")]
        weaker = [f"-DWITHOUT_{without}", "-include", NATIVE / "relaxed.h"]
        options = ["-std=c++20", *WARNINGS, f"-I{NATIVE}", *tools.flags]

        def compile_one(source: Path) -> Path:
            protocol = without and source.stem == "channel"
            arguments = [*options, *(weaker if protocol else []), "-c", source]
            return compile_cached(cxx_cache, f"{source.stem}.o", arguments, headers)

        with ThreadPoolExecutor(COMPILE_JOBS) as pool:
            objects = list(pool.map(compile_one, sources))
        program = compile_cached(cxx_cache, "test_host", [*tools.flags, *objects, "-pthread"])
        return tools.run(program, *switches)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_the_host(run_host: Run, sanitizer: str) -> None:
    """Run the C++ tests with threads and, under AddressSanitizer, with processes."""
    ended = run_host(sanitizer, *(["--threads-only"] if sanitizer == "thread" else []))
    assert ended.returncode == 0 and not REPORT.search(ended.stdout), ended.stdout
    cases = re.search(r"(\d+) cases, 0 failed", ended.stdout)
    assert cases is not None and int(cases[1]) >= 15, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "without", "switches"),
    [
        ("words_order_data_under_delays", "ACQUIRE", []),
        ("words_order_data_under_delays", "RELEASE", []),
        ("random_collectives_under_delays", "", ["--single-buffer"]),
    ],
)
def test_a_race_is_reported(run_host: Run, case: str, without: str, switches: list[str]) -> None:
    """On x86 the values are still correct, so only the sanitizer detects the race."""
    case_option = f"--only={case}"
    ended = run_host("thread", "--threads-only", case_option, *switches, without=without)
    assert ended.returncode != 0 and RACE in ended.stdout, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("breakage", ["single-buffer", "skip-waits"])
@pytest.mark.parametrize("case", ["under_delays", "between_processes"])
def test_broken_protocols_give_wrong_results(run_host: Run, breakage: str, case: str) -> None:
    """The calls of the C++ tests detect the error without a sanitizer report."""
    ended = run_host("address", f"--only=random_collectives_{case}", f"--{breakage}")
    assert ended.returncode == 1, ended.stdout
    assert "CHECK(got == exact) failed" in ended.stdout, ended.stdout


# csrc/cuda.


@pytest.fixture
def run_cuda(toolchain: Callable[[str], Toolchain], cxx_cache: Path) -> Run:
    """Return ``run_cuda(sanitizer, *switches)``; ``without`` removes one memory ordering."""

    def run(
        sanitizer: str, *switches: str, without: str = "", source: str = "threads.cpp"
    ) -> Ended:
        tools = toolchain(sanitizer)
        flags = [*tools.flags, "-g1", *([f"-DWITHOUT_{without}"] if without else [])]
        return tools.run(emulated.build(cxx_cache, source, *flags), *switches)

    return run


SOURCES = ("threads.cpp", "routed.cpp")


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_the_cuda_kernels(run_cuda: Run, sanitizer: str, source: str) -> None:
    ended = run_cuda(sanitizer, source=source)
    assert (ended.returncode, ended.stdout) == (0, "24 calls, 0 wrong\n"), ended.stdout


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("switch", "without"),
    [
        pytest.param("", "ACQUIRE", marks=pytest.mark.slow),
        pytest.param("", "RELEASE", marks=pytest.mark.slow),
        pytest.param("--single-buffer", "", marks=pytest.mark.slow),
        pytest.param("--skip-waits", "", marks=pytest.mark.thorough),
    ],
)
def test_a_race_of_the_cuda_kernels_is_reported(
    run_cuda: Run, switch: str, without: str, source: str
) -> None:
    ended = run_cuda("thread", switch, without=without, source=source)
    assert ended.returncode != 0 and RACE in ended.stdout, ended.stdout
