"""The ops on fp8 operands compared with torch's own calls: a collective of the process group and
``torch._scaled_mm``.

    python -m benchmarks.scaled

Row-wise scales, float8_e4m3fn to bfloat16; M, K and N are over all ranks. The variants are
interleaved in a random order; before each call the ranks meet in a small all-reduce. Prints the
slowest rank's median milliseconds, and torch's over that of ``auto``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.interleaved import interleaved
from tpkernels.launch import Ranks

ROWS = (32, 64, 128, 256, 512)
ALGORITHMS = ("auto", "unfused", "pipelined")
FP8 = torch.float8_e4m3fn
WARMUP = 2


def operands(m: int, k: int, n: int) -> list[torch.Tensor]:
    """x [m, k], w [k, n] and their scales."""
    x, w = torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8).t()
    return [x, w, torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5]


def product(x: torch.Tensor, w: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(x, w, *scales, out_dtype=torch.bfloat16)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """By gloo, which moves fp8 as bytes only."""
    sent = x.view(torch.uint8) if x.dtype == FP8 else x
    whole = sent.new_empty(sent.shape[0] * dist.get_world_size(), sent.shape[1])
    dist.all_gather_into_tensor(whole, sent)
    return whole.view(x.dtype)


def torch_gather(x: torch.Tensor, w: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    return product(gathered(x), w, gathered(scales[0]), scales[1])


def torch_scatter(*given: torch.Tensor) -> torch.Tensor:
    partial = product(*given)
    out = partial.new_empty(partial.shape[0] // dist.get_world_size(), partial.shape[1])
    dist.reduce_scatter_tensor(out, partial)
    return out


def torch_reduce(*given: torch.Tensor) -> torch.Tensor:
    partial = product(*given)
    dist.all_reduce(partial)
    return partial


TORCH = {
    "all_gather_scaled_matmul": torch_gather,
    "scaled_matmul_reduce_scatter": torch_scatter,
    "scaled_matmul_all_reduce": torch_reduce,
}


def measure(op: str, m: int, k: int, n: int, repeat: int) -> dict[str, float]:
    """This rank's median milliseconds, by variant."""
    group, world = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    gathers = op.startswith("all_gather")
    torch.manual_seed(dist.get_rank())
    given = operands(m // world, k, n // world) if gathers else operands(m, k // world, n)
    run = getattr(tpkernels, op)
    variants: dict[str, Callable[[], object]] = {"torch": lambda: TORCH[op](*given)}
    for name in ALGORITHMS:
        variants[name] = lambda name=name: run(*given, group, algorithm=name)
    times = interleaved(variants, range(WARMUP + repeat), group)
    return {name: 1e3 * statistics.median(each[WARMUP:]) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()
    print(f"| op | M | {' | '.join(['torch', *ALGORITHMS])} | torch / auto |")
    print("|" + "---|" * (4 + len(ALGORITHMS)))
    with Ranks(given.nproc) as ranks:
        for op in TORCH:
            for m in ROWS:
                found = ranks.run(measure, op, m, given.k, given.n, given.repeat, timeout=600)
                slowest = {name: max(each[name] for each in found) for name in found[0]}
                cells = [f"{slowest[name]:.1f}" for name in ("torch", *ALGORITHMS)]
                ratio = f"{slowest['torch'] / slowest['auto']:.2f}"
                print(f"| `{op}` | {m} | {' | '.join([*cells, ratio])} |", flush=True)


if __name__ == "__main__":
    main()
