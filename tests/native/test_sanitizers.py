"""The C++ of csrc/host under ThreadSanitizer (threads) and AddressSanitizer with
UndefinedBehaviorSanitizer (threads and processes), driven by the program in tests/native.

ThreadSanitizer knows the memory orderings: that it is silent about the real protocol says something
only because it is not about broken ones, which the negative controls show.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import NATIVE, ROOT

HOST = ROOT / "csrc" / "host"
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
REPORT = re.compile(r"(WARNING|ERROR): \w+Sanitizer|runtime error:|Sanitizer CHECK failed")
RUN_SECONDS = 100  # a hang ends here; an idle machine takes less than a tenth
COMPILE_JOBS = 2


@dataclass(frozen=True)
class Toolchain:
    """A compiler that has the sanitizer, and what it takes to run a program made with it."""

    compiler: list[str]
    flags: list[str]
    prefix: list[str]
    environ: dict[str, str]

    def run(self, program: Path, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, str(program), *args],
            env={**os.environ, **self.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )


def _find_toolchain(sanitizer: str, scratch: Path) -> Toolchain:
    """Skips, with the reason, where a sanitized program cannot be built or run."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler[0]}")
    if not HOST.is_dir():
        pytest.skip(f"no sources: {HOST}")
    flags = SANITIZERS[sanitizer]
    source, program = scratch / f"{sanitizer}.cpp", scratch / sanitizer
    source.write_text("int main() { return 0; }\n")
    built = subprocess.run(
        [*compiler, *flags, str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        pytest.skip(f"{compiler[0]} has no {sanitizer} sanitizer: {built.stderr.strip()[-200:]}")
    # Kernels that randomise more address bits than the sanitizer knows of, and containers that
    # forbid the leak check to look at other threads.
    prefixes: list[list[str]] = [[], ["setarch", platform.machine(), "-R"]]
    failure = ""
    for leaks in ("1", "0"):
        for prefix in prefixes:
            environ = {"ASAN_OPTIONS": f"detect_leaks={leaks}", "TSAN_OPTIONS": "exitcode=66"}
            toolchain = Toolchain(compiler, flags, prefix, environ)
            try:
                probe = toolchain.run(program)
            except OSError as error:
                failure = str(error)
                continue
            if probe.returncode == 0 and not probe.stdout:
                return toolchain
            failure = probe.stdout
    pytest.skip(f"programs under the {sanitizer} sanitizer do not run here: {failure[-200:]}")


def _fingerprint(toolchain: Toolchain, source: Path, options: list[str]) -> str:
    version = subprocess.run(
        [*toolchain.compiler, "--version"], capture_output=True, text=True, check=True
    )
    headers = sorted(p for d in (HOST, NATIVE) for p in d.iterdir() if p.suffix in (".h", ".inc"))
    state = hashlib.sha256(f"{version.stdout} {toolchain} {options}".encode())
    for path in (source, *headers):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def _compile(toolchain: Toolchain, source: Path, folder: Path, options: list[str]) -> Path:
    """The object of ``source``, made only where the cache lacks it."""
    name = "-".join([source.stem, *(option.lstrip("-") for option in options[:1])])
    target = folder / f"{name}-{_fingerprint(toolchain, source, options)}.o"
    if target.exists():
        return target
    for stale in folder.glob(f"{name}-{'?' * 16}.o"):
        stale.unlink()
    unfinished = target.with_suffix(f".{os.getpid()}")
    command = [*toolchain.compiler, "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{NATIVE}", *toolchain.flags, *options]
    subprocess.run([*command, "-c", str(source), "-o", str(unfinished)], check=True)
    unfinished.rename(target)
    return target


Build = Callable[..., tuple[Toolchain, Path]]


@pytest.fixture(scope="module")
def build(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``build(sanitizer)``: the toolchain and the test program. Objects stay in pytest's cache."""
    scratch = tmp_path_factory.mktemp("native")
    cache = getattr(pytestconfig, "cache", None)
    built: dict[tuple[str, str], tuple[Toolchain, Path]] = {}

    def make(sanitizer: str, without: str = "") -> tuple[Toolchain, Path]:
        if (sanitizer, without) in built:
            return built[sanitizer, without]
        toolchain = _find_toolchain(sanitizer, scratch)
        folder = scratch if cache is None else Path(cache.mkdir(f"native-{sanitizer}"))
        files = [*HOST.glob("*.cpp"), *NATIVE.glob("*.cpp")]
        sources = sorted(file for file in files if not file.stem.endswith("bindings"))
        weaker = [f"-DWITHOUT_{without}", "-include", str(NATIVE / "relaxed.h")]

        def compile_one(source: Path) -> Path:
            protocol = source.stem in ("channel", "mailbox")
            options = weaker if without and protocol else []
            return _compile(toolchain, source, folder, options)

        with ThreadPoolExecutor(COMPILE_JOBS) as pool:
            objects = [str(path) for path in pool.map(compile_one, sources)]
        program = scratch / f"test_host-{sanitizer}-{without or 'whole'}"
        link = [*toolchain.compiler, *toolchain.flags, *objects, "-pthread", "-o", str(program)]
        subprocess.run(link, check=True)
        built[sanitizer, without] = toolchain, program
        return built[sanitizer, without]

    return make


def _require_success(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout
    assert not REPORT.search(run.stdout), run.stdout
    cases = re.search(r"(\d+) cases, 0 failed", run.stdout)
    assert cases is not None and int(cases[1]) >= 15, run.stdout


@pytest.mark.slow
def test_threads_under_thread_sanitizer(build: Build) -> None:
    toolchain, program = build("thread")
    _require_success(toolchain.run(program, "--threads-only"))


@pytest.mark.slow
def test_threads_and_processes_under_address_sanitizer(build: Build) -> None:
    toolchain, program = build("address")
    _require_success(toolchain.run(program))


@pytest.mark.slow
@pytest.mark.parametrize("ordering", ["ACQUIRE", "RELEASE"])
@pytest.mark.parametrize(
    "case", ["words_order_data_under_delays", "mailbox_orders_bytes_under_delays"]
)
def test_a_missing_ordering_is_reported(build: Build, case: str, ordering: str) -> None:
    """The values are right all the same, on x86: only the sanitizer can tell."""
    toolchain, program = build("thread", ordering)
    run = toolchain.run(program, "--threads-only", f"--only={case}")
    assert run.returncode != 0, run.stdout
    assert "WARNING: ThreadSanitizer: data race" in run.stdout, run.stdout


@pytest.mark.slow
def test_a_single_buffer_is_reported(build: Build) -> None:
    toolchain, program = build("thread")
    only = "--only=random_collectives_under_delays"
    run = toolchain.run(program, "--threads-only", only, "--single-buffer")
    assert run.returncode != 0, run.stdout
    assert "WARNING: ThreadSanitizer: data race" in run.stdout, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("breakage", ["single-buffer", "skip-waits"])
@pytest.mark.parametrize("between", ["threads", "processes"])
def test_broken_protocols_give_wrong_results(build: Build, breakage: str, between: str) -> None:
    """Without a sanitizer's help: the calls of the C++ tests are enough to see it."""
    toolchain, program = build("address")
    case = "under_delays" if between == "threads" else "between_processes"
    run = toolchain.run(program, f"--only=random_collectives_{case}", f"--{breakage}")
    assert run.returncode == 1, run.stdout
    assert "CHECK(got == exact) failed" in run.stdout, run.stdout
