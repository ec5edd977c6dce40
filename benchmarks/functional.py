"""Ops that return a new tensor, with the result pool and without it, and `all_reduce_` in place.

    python -m benchmarks.functional --mib 4 32 64 --repeat 30 --rounds 3

The variants of a group are interleaved call by call. A round runs one group with the pool and
one without it, so both meet the same load. Prints the slowest rank's medians over all rounds, in
ms, and the medians' ratios: `all_reduce` to `all_reduce_` in the same groups, and every op with the
pool to itself without.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
import torch.distributed as dist

import tpkernels
from tpkernels.defaults import POOL_VARIABLE, RESULT_POOL_BYTES
from tpkernels.launch import Ranks
from tpkernels.symm.steps import PRIVATE_CALLS
from tpkernels.timing import Samples, Variant, measure

COLUMNS, K = 4096, 256  # of the matmul; K on each rank


def job(mib: int, dtype: torch.dtype, repeat: int) -> dict[str, Samples]:
    """Every result has ``mib`` MiB."""
    group = dist.group.WORLD
    assert group is not None
    count = (mib << 20) // dtype.itemsize
    x, part = torch.ones(count, dtype=dtype), torch.ones(count // group.size(), dtype=dtype)
    rows, w = torch.randn(count // COLUMNS, K).to(dtype), torch.randn(K, COLUMNS).to(dtype)

    def reset() -> None:
        x.fill_(1.0)  # sums in place would overflow

    variants = {
        "all_reduce_": Variant(lambda: tpkernels.all_reduce_(x, group), reset),
        "all_reduce": Variant(lambda: tpkernels.all_reduce(x, group), reset),
        "all_gather": Variant(lambda: tpkernels.all_gather(part, group)),
        "matmul_all_reduce": Variant(lambda: tpkernels.matmul_all_reduce(rows, w, group)),
    }
    for _ in range(PRIVATE_CALLS + 2):  # results move to shared memory
        tpkernels.all_reduce(x, group)
    reset()
    return measure(variants, repeat=repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 32, 64])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    for mib in given.mib:
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(given.rounds):
            for limit in (0, RESULT_POOL_BYTES):
                with Ranks(given.nproc, env={POOL_VARIABLE: str(limit)}) as ranks:
                    results = ranks.run(job, mib, dtype, given.repeat, timeout=600)
                for op in results[0]:
                    each = zip(*(rank[op].seconds for rank in results), strict=True)
                    times[op, limit] += [1e3 * max(ranks) for ranks in each]
        medians = {key: statistics.median(samples) for key, samples in times.items()}
        for op in dict.fromkeys(op for op, _ in medians):
            off, on = medians[op, 0], medians[op, RESULT_POOL_BYTES]
            text = f"{mib} MiB, {op}: without {off:.3f} ms, with {on:.3f} ms, {on / off:.2f}"
            if op == "all_reduce":
                ratios = [
                    medians[op, limit] / medians["all_reduce_", limit]
                    for limit in (0, RESULT_POOL_BYTES)
                ]
                text += f"; / all_reduce_ {ratios[0]:.2f} without, {ratios[1]:.2f} with"
            print(text, flush=True)


if __name__ == "__main__":
    main()
