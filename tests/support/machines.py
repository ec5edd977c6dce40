"""The tests that depend on the processor, as several machines would run them: capped are oneDNN,
torch and our own vector units; the heap is trimmed at once, and there are no huge pages.

    python -m tests.support.machines [arguments of pytest]
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

from tpkernels import _C

TESTS = (
    "tests/local",
    "tests/calls/test_warm.py",
    "tests/native/test_vectors.py",
    "tests/ops/test_bits.py",
    "tests/ops/test_weights.py",
    "tests/ops/test_scaled.py",
)
_ONEDNN, _TORCH = "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"
# oneDNN takes its variable as a limit. torch obeys its own even where the processor cannot: no
# machine names "avx512", which is what torch uses without the variable where there is AVX-512.
MACHINES = (
    {_ONEDNN: "AVX2", _TORCH: "avx2", "OMP_NUM_THREADS": "2"},
    {_ONEDNN: "AVX512_CORE", _TORCH: "default", "OMP_NUM_THREADS": "1"},
    # On a processor without AVX-512 the last two repeat the first two.
    {_ONEDNN: "AVX512_CORE_BF16", "OMP_NUM_THREADS": "2"},
    {_ONEDNN: "DEFAULT", _TORCH: "avx2", "OMP_NUM_THREADS": "1"},
)
_SET_THP_DISABLE = 41  # of prctl; children inherit it


def main(arguments: list[str]) -> int:
    """Run the tests on each machine; return how many failed."""
    ctypes.CDLL(None).prctl(_SET_THP_DISABLE, 1, 0, 0, 0)
    failed = 0
    for machine in MACHINES if "avx512" in _C.host.vector_units() else MACHINES[:2]:
        print("====", *(f"{name}={value}" for name, value in machine.items()), flush=True)
        begin = time.monotonic()
        env = {**os.environ, **machine, "MALLOC_TRIM_THRESHOLD_": "0"}
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, *arguments]
        ended = subprocess.run(command, env=env, check=False)
        print(
            f"==== exit status {ended.returncode} after {time.monotonic() - begin:.0f} s",
            flush=True,
        )
        failed += ended.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
