"""Time calls of the ops on tensors so small that the call overhead dominates.

    python -m benchmarks.calls --world 1
    python -m benchmarks.calls --world 2 --repeat 60

Interleaves the variants, 100 calls each, under ``torch.no_grad``. Prints the lower decile of the
time per call on rank 0 in us. `function` is the public function, `X` and `_X` are the overloads of
``torch.ops.tpkernels``, and `empty` is an op with the same schema and no work. A single rank does
not communicate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import tpkernels
from tpkernels.launch import Ranks

CALLS = 100


def make_variants() -> dict[str, Callable[[], object]]:
    group, ops = dist.group.WORLD, torch.ops.tpkernels
    assert group is not None
    name = group.group_name
    x, row, w = torch.ones(1, 1024), torch.ones(1, 64), torch.ones(64, 64)
    packed = tpkernels.pack(w)
    library = torch.library.Library("calls", "DEF")
    library.define("empty(Tensor x, str group, *, str algorithm='auto') -> ()")
    library.impl("empty", lambda *_: None, "CPU")
    library.impl("empty", torch.library.fallthrough_kernel, "Autograd")
    empty = torch.ops.calls.empty.default
    variants: dict[str, Callable[[], object]] = {
        "empty": lambda: library and empty(x, name),  # keeps the library alive
        "all_reduce_ function": lambda: tpkernels.all_reduce_(x, group),
        "all_reduce_ X": lambda: ops.all_reduce_.default(x, name),
        "all_reduce_ _X": lambda: ops._all_reduce_.default(x, name),
        "all_reduce function": lambda: tpkernels.all_reduce(x, group),
        "matmul_all_reduce function": lambda: tpkernels.matmul_all_reduce(row, w, group),
        "matmul_all_reduce packed": lambda: tpkernels.matmul_all_reduce(row, packed, group),
        "matmul_all_reduce X": lambda: ops.matmul_all_reduce.default(row, w, name),
        "all_gather_matmul function": lambda: tpkernels.all_gather_matmul(row, [w, w], group),
        "all_gather_matmul X": lambda: ops.all_gather_matmul.default(row, [w, w], name),
        "torch.mm": lambda: torch.mm(row, w),
    }
    return variants


def measure(repeat: int) -> dict[str, float]:
    torch.set_num_threads(1)
    calls = make_variants()
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(repeat):
            for name, call in calls.items():
                for _ in range(5):
                    call()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.quantiles(samples, n=10)[0] for name, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=1, help="ranks")
    parser.add_argument("--repeat", type=int, default=60, help="turns of all variants")
    options = parser.parse_args()
    with Ranks(options.world) as ranks:
        for name, us in ranks.run(measure, options.repeat)[0].items():
            print(f"{name:28s} {us:7.2f} us")


if __name__ == "__main__":
    main()
