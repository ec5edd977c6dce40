"""`all_reduce_` and `all_reduce` in a hot loop, from 4 KiB to 32 MiB.

    python -m benchmarks.all_reduce
    python -m benchmarks.all_reduce --vllm PATH/vllm/_C_AVX512.abi3.so

The variants are interleaved in a random order; before each call the ranks meet in a small
all-reduce. Prints the median microseconds of rank 0. `--vllm` is that of `benchmarks.decode`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.decode import vllm_all_reduce
from benchmarks.interleaved import interleaved
from tpkernels.launch import Ranks

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 32 << 20]
WARMUP = 5


def measure(vllm: str, dtype: torch.dtype, seconds: float) -> dict[int, dict[str, float]]:
    """Median microseconds, by bytes and variant."""
    group = dist.group.WORLD
    assert group is not None
    variants: dict[str, Callable[[torch.Tensor], object]] = {
        "in place": lambda x: tpkernels.all_reduce_(x, group),
        "functional": lambda x: tpkernels.all_reduce(x, group),
    }
    if vllm:
        variants["vllm"] = vllm_all_reduce(vllm, group)
    medians = {}
    for size in SIZES:
        count = size // dtype.itemsize
        calls = {
            name: functools.partial(run, torch.zeros(count, dtype=dtype))
            for name, run in variants.items()
        }
        rounds = range(WARMUP + max(10, min(300, int(seconds * 2e9 / size))))
        times = interleaved(calls, rounds, group)
        medians[size] = {
            name: 1e6 * statistics.median(each[WARMUP:]) for name, each in times.items()
        }
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each size, roughly")
    parser.add_argument("--vllm", default="", help="the library of vLLM's CPU wheel")
    given = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        with Ranks(given.nproc) as ranks:
            medians = ranks.run(measure, given.vllm, dtype, given.seconds, timeout=600)[0]
        for size, times in medians.items():
            text = ", ".join(f"{name} {median:.1f} us" for name, median in times.items())
            print(f"{size >> 10} KiB {dtype}: {text}")


if __name__ == "__main__":
    main()
