"""Run the tests that depend on the processor under the limits of several machines.

The limits apply to oneDNN, torch and the vector units of the extension. The heap is trimmed
immediately and huge pages are off.

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
    "tests/native/test_attention.py",
    "tests/native/test_sum_tree.py",
    "tests/native/test_vectors.py",
    "tests/ops/test_bits.py",
    "tests/ops/test_weights.py",
    "tests/ops/test_scaled.py",
)
_ONEDNN, _TORCH = "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"
# The oneDNN variable is a limit. torch obeys its variable even if the processor lacks the
# instructions. So no machine sets "avx512", the default of torch on processors with AVX-512.
MACHINES = (
    {_ONEDNN: "AVX2", _TORCH: "avx2", "OMP_NUM_THREADS": "2"},
    {_ONEDNN: "AVX512_CORE", _TORCH: "default", "OMP_NUM_THREADS": "1"},
    # On a processor without AVX-512 the last two repeat the first two.
    {_ONEDNN: "AVX512_CORE_BF16", "OMP_NUM_THREADS": "2"},
    {_ONEDNN: "DEFAULT", _TORCH: "avx2", "OMP_NUM_THREADS": "1"},
)
_SET_THP_DISABLE = 41  # prctl option; children inherit it


def main(arguments: list[str]) -> int:
    """Run the tests on each machine. Return the number of failed machines."""
    ctypes.CDLL(None).prctl(_SET_THP_DISABLE, 1, 0, 0, 0)
    failed = 0
    for machine in MACHINES if "avx512" in _C.host.vector_units() else MACHINES[:2]:
        print("====", *(f"{name}={value}" for name, value in machine.items()), flush=True)
        begin = time.monotonic()
        env = {**os.environ, **machine, "MALLOC_TRIM_THRESHOLD_": "0"}
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, *arguments]
        completed = subprocess.run(command, env=env, check=False)
        print(
            f"==== exit status {completed.returncode} after {time.monotonic() - begin:.0f} s",
            flush=True,
        )
        failed += completed.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
