"""The C++ sources on aarch64: built by a cross compiler, run under QEMU's user-mode emulation.

On x86 machines the emulator keeps x86's memory order, so this finds what does not compile and what
computes something else, but no missing fence. ThreadSanitizer finds those (test_sanitizers.py).
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC, NATIVE = ROOT / "csrc", ROOT / "tests" / "native"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
COMPILE_JOBS = 2
RUN_SECONDS = 100  # an idle machine takes less than a tenth

# Those that compute and synchronise. Left out are those that measure time or memory: QEMU 7.2
# accepts MADV_POPULATE_WRITE and commits nothing, and translating code takes processor time.
CASES = [
    "the_arena_is_sealed_and_private",
    "words_order_data_under_delays",
    "epochs_wrap",
    "buffers_grow_between_calls",
    "a_mismatch_is_found_by_all",
    "all_gathers_are_exact",
    "reduce_scatters_are_exact",
    "all_reduces_are_exact",
    "symmetric_inputs_are_read_in_place",
    "every_vector_unit_agrees",
    "random_collectives_under_delays",
    "random_collectives_between_processes",
    "processes_wake_each_other",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER}"),
]


def compile_all(sources: list[Path], folder: Path) -> list[Path]:
    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        command = [COMPILER, *FLAGS, f"-I{CSRC}", f"-I{NATIVE}", "-c", str(source), "-o"]
        built = subprocess.run([*command, str(target)], capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
        return target

    with ThreadPoolExecutor(COMPILE_JOBS) as pool:
        return list(pool.map(compile_one, sources))


def test_cuda_and_nccl_compile(tmp_path: Path) -> None:
    """All but the bindings, which need the target's Python headers and hold no code of their own
    for a processor."""
    sources = [
        source
        for folder in ("cuda", "nccl")
        for source in sorted((CSRC / folder).glob("*.cpp"))
        if source.stem != "bindings"
    ]
    assert len(sources) > 4
    compile_all(sources, tmp_path)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {EMULATOR}")
    folder = tmp_path_factory.mktemp("aarch64")
    sources = sorted([*(CSRC / "host").glob("*.cpp"), *NATIVE.glob("*.cpp")])
    objects = map(str, compile_all(sources, folder))
    target = folder / "test_host"
    subprocess.run([COMPILER, "-static", "-pthread", *objects, "-o", str(target)], check=True)
    return target


@pytest.mark.parametrize("case", CASES)
def test_host_code_passes_its_tests(program: Path, case: str) -> None:
    run = subprocess.run(
        [EMULATOR, str(program), f"--only={case}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert run.returncode == 0 and "1 cases, 0 failed" in run.stdout, run.stdout
