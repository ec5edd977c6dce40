"""`all_reduce_rms_norm` and `matmul_all_reduce_rms_norm`, compared with the same steps one by one.

    python -m benchmarks.rms_norm
    python -m benchmarks.rms_norm --nproc 4 --rows 64 --columns 4096

The steps are `all_reduce`, an addition in place and torch's `rms_norm`, or `matmul_all_reduce` with
a residual and `rms_norm`. Results are checked against float64 first. Then the two variants
are interleaved call by call, in a random order; before each call the ranks meet in a small
all-reduce, and a call counts with its slowest rank. Prints a Markdown table: medians in us, the
ratio of the medians, and that of the 10th percentiles, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

import tpkernels
from benchmarks.interleaved import interleaved
from tpkernels.launch import Ranks
from tpkernels.planning.trials import MOST_CALLS

EPS = 1e-6


def job(
    rows: int, columns: int, k: int, dtype: torch.dtype, seconds: float
) -> dict[str, list[float]]:
    """Microseconds of each call on this rank, by variant."""
    group = dist.group.WORLD
    assert group is not None
    shared = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + group.rank())
    weight = torch.randn(columns, generator=shared).to(dtype)
    residual = torch.randn(rows, columns, generator=shared).to(dtype)
    x = torch.randn(rows, columns, generator=own).to(dtype)
    factor = torch.randn(rows, k, generator=own).to(dtype)
    w = (torch.randn(columns, k, generator=own) / k**0.5).to(dtype).t()

    def sum_fused() -> tuple[torch.Tensor, torch.Tensor]:
        return tpkernels.all_reduce_rms_norm(x, weight, group, residual=residual, eps=EPS)

    def sum_in_steps() -> tuple[torch.Tensor, torch.Tensor]:
        total = tpkernels.all_reduce(x, group).add_(residual)
        return rms_norm(total, [columns], weight, EPS), total

    def product_fused() -> tuple[torch.Tensor, torch.Tensor]:
        return tpkernels.matmul_all_reduce_rms_norm(
            factor, w, weight, group, residual=residual, eps=EPS
        )

    def product_in_steps() -> tuple[torch.Tensor, torch.Tensor]:
        total = tpkernels.matmul_all_reduce(factor, w, group, residual=residual)
        return rms_norm(total, [columns], weight, EPS), total

    sums = {"sum, fused": sum_fused, "sum, in steps": sum_in_steps}
    products = {"product, fused": product_fused, "product, in steps": product_in_steps}
    for name, run in (sums | products).items():
        normed, total = run()
        exact = rms_norm(total.double(), [columns], weight.double(), EPS)
        depth = columns / (128 if "fused" in name else 2)  # torch adds up squares in any order
        bound = torch.finfo(dtype).eps / 2 + (depth + 8) * 2**-24
        error = ((normed.double() - exact).abs() / exact.abs()).max().item()
        if error > bound:
            raise AssertionError(f"{name}: off by {error:.2e} of the result, allowed {bound:.2e}")
    return timed(sums, group, seconds) | timed(products, group, seconds)


def timed(
    variants: Mapping[str, Callable[[], object]], group: dist.ProcessGroup, seconds: float
) -> dict[str, list[float]]:
    """Microseconds of each call on this rank, by variant."""
    with torch.inference_mode():
        for _ in range(MOST_CALLS):  # of the trials of `auto`
            for run in variants.values():
                run()
    times = interleaved(variants, rounds(group, seconds), group)
    return {name: [1e6 * each for each in taken] for name, taken in times.items()}


def rounds(group: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """As many on all ranks as rank 0 has time for."""
    going, begin = torch.ones(1), time.perf_counter()
    while going.item():
        yield
        going.fill_(time.perf_counter() - begin < seconds and group.rank() == 0)
        tpkernels.all_reduce_(going, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--columns", type=int, nargs="+", default=[576, 2048, 4096])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each pair, roughly")
    given = parser.parse_args()
    head = "in steps | fused | ratio | 10 %"
    print(f"| dtype | columns | rows | sum: {head} | K | product: {head} |\n|" + "---|" * 12)
    for dtype in (torch.float32, torch.bfloat16):
        for columns in given.columns:
            for rows in given.rows:
                k = columns // given.nproc
                with Ranks(given.nproc) as ranks:
                    results = ranks.run(job, rows, columns, k, dtype, given.seconds, timeout=600)
                slowest = {
                    name: [max(each) for each in zip(*(r[name] for r in results), strict=True)]
                    for name in results[0]
                }
                cells: list[object] = [str(dtype).removeprefix("torch."), columns, rows]
                for kind in ("sum", "product"):
                    cells += [k] * (kind == "product")
                    cells += compared(slowest[f"{kind}, in steps"], slowest[f"{kind}, fused"])
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def compared(steps: list[float], fused: list[float]) -> list[str]:
    medians = statistics.median(steps), statistics.median(fused)
    tenths = (statistics.quantiles(each, n=10)[0] for each in (fused, steps))
    ratios = medians[1] / medians[0], next(tenths) / next(tenths)
    return [f"{value:.1f}" for value in medians] + [f"{value:.2f}" for value in ratios]


if __name__ == "__main__":
    main()
