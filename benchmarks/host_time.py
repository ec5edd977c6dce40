"""Host time of a call of `fused` on CUDA tensors, without a GPU.

    python -m benchmarks.host_time

CPU tensors take the code path of CUDA tensors. What is timed is this package's code and Triton's
search for the compiled kernel: from the call of an op to the launch of the last one, which does
nothing. Triton's launcher, torch.cuda's streams and events and the driver are not included. Two
ranks, x [32, 512], w [512, 512], bf16; medians, and the functions of Python that a call calls.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch

import tpkernels
from tests.support.cuda_rehearsal import FUSED_OPS, pretending
from tests.support.faults import new_group
from tpkernels.launch import Ranks

HOPPER = 90, 132  # compute capability, multiprocessors


def functions_called(call: Callable[[], object]) -> int:
    """How many functions of Python are called, the call itself included; a generator counts each
    time that it goes on."""
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def run(repeat: int) -> dict[str, tuple[float, int]]:
    """Median microseconds of a call, and Python functions called in it, by op."""
    from tests.support.fake_triton import launching
    from tpkernels.kernels import configs

    found = {}
    with pretending() as patch, launching():
        patch.setattr(configs, "_properties", lambda device: HOPPER)
        patch.setattr(configs, "INTERPRETED", False)
        group = new_group()
        x = torch.ones(32, 512, dtype=torch.bfloat16)
        w = torch.ones(512, 512, dtype=torch.bfloat16).t()
        for op in FUSED_OPS:
            call = functools.partial(getattr(tpkernels, op), x, w, group, algorithm="fused")
            samples = []
            for _ in range(repeat):
                begin = time.perf_counter()
                call()
                samples.append(time.perf_counter() - begin)
            found[op] = statistics.median(samples) * 1e6, functions_called(call)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=1000)
    with Ranks(2, threads=1) as ranks:
        found = ranks.run(run, parser.parse_args().repeat, timeout=300)[0]
    for op, (microseconds, functions) in found.items():
        print(f"{op}: {microseconds:.1f} us, {functions} functions of Python")


if __name__ == "__main__":
    main()
