"""`auto` by its rules, before anything is measured, next to `unfused` and the other algorithms.

    python -m benchmarks.auto --dtype fp32 --op all_gather_matmul

Two ranks with one thread each, interleaved, cold inputs. Prints a Markdown table with two times of
each algorithm in ms: the shortest wall time of the slowest rank, and the shortest CPU time, the
mean of the ranks. Other work on the machine hardly changes the CPU time, and waiting for a peer
does not count. `auto` shares the samples of the algorithm that it chose, which is the same call.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import torch
import torch.distributed as dist

from tpkernels.bench.cases import Inputs, planned, random_case, run_tpkernels
from tpkernels.bench.specs import Spec
from tpkernels.launch import Ranks
from tpkernels.terminal import DTYPES
from tpkernels.timing import interleaved, slowest

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ROWS = (2, 32, 256, 512, 1024)
WEIGHTS = ((1024, 1024), (2816, 1024), (2048, 2048))  # N, K
ALGORITHMS = ("unfused", "direct", "pipelined", "ring")
MIN_ROUNDS, MAX_ROUNDS, REGION_SECONDS = 5, 25, 5e-3


def measure(spec: Spec, budget: float) -> tuple[str, dict[str, tuple[float, float]]]:
    """What `auto` chooses, and the wall and CPU milliseconds of each algorithm. Collective."""
    case = random_case(spec)
    _, plan = planned(case, "auto")
    inputs, times = Inputs(case, cold=True), defaultdict[str, list[tuple[float, float]]](list)

    def sample(name: str, calls: int) -> tuple[float, float]:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run_tpkernels(inputs.sharded(), name)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        total = torch.tensor([cpu], dtype=torch.float64)
        dist.all_reduce(total)
        return 1e3 * slowest([wall])[0] / calls, 1e3 * total.item() / dist.get_world_size() / calls

    calls = {}
    for name in ALGORITHMS:
        sample(name, 1)
        calls[name] = max(1, min(50, round(1e3 * REGION_SECONDS / sample(name, 1)[0])))
    begun = time.perf_counter()
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and slowest([time.perf_counter() - begun])[0] > budget:
            break
        for name in interleaved(ALGORITHMS, 1, seed=done):
            times[name].append(sample(name, calls[name]))
    walls = {name: min(wall for wall, _ in times[name]) for name in ALGORITHMS}
    return plan.algorithm, {
        name: (walls[name], min(cpu for _, cpu in times[name])) for name in ALGORITHMS
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--op", nargs="+", default=OPS)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=DTYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--budget", type=float, default=4.0)
    options = parser.parse_args()
    with Ranks(2) as ranks:
        for op in options.op:
            for dtype in options.dtype:
                for rows in options.rows:
                    for weight in WEIGHTS:
                        spec = Spec(op, (rows, *weight), DTYPES[dtype])
                        chosen, ms = ranks.run(measure, spec, options.budget)[0]
                        cells = [f"{wall:.3g} / {cpu:.3g}" for wall, cpu in ms.values()]
                        ratios = [
                            f"{a / b:.2f}" for a, b in zip(ms["unfused"], ms[chosen], strict=True)
                        ]
                        best = f"{min(cpu for _, cpu in ms.values()) / ms[chosen][1]:.2f}"
                        row = [op, f"{rows}, {weight[0]}, {weight[1]}", dtype, chosen]
                        print("|", " | ".join([*row, *ratios, best, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
