"""`auto` after its trials, or after `tpkernels.autotune`, against the algorithms that it tries.

    python -m benchmarks.auto
    python -m benchmarks.auto --autotune --rows 1 16 256 4096 --weights 1024x1024
    python -m benchmarks.auto --rows 2048 4096 --weights 4096x4096 --repeat 7

Each case runs on ranks of its own, which know nothing at first. Prints what the thresholds give and
what the trials chose, the medians of interleaved repetitions (the slowest rank's), and the speed of
`auto` relative to the fastest algorithm and to `unfused`. bf16; weights are K x N over all ranks.
"""

from __future__ import annotations

import argparse
import functools
import math
import time

import torch

import tpkernels
from tpkernels.bench.cases import planned, random_case, run_tpkernels, settle
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.measuring import run_next
from tpkernels.bench.specs import Spec
from tpkernels.launch import Ranks
from tpkernels.planning.trials import ELIGIBLE
from tpkernels.timing import Samples, Variant, measure, summary

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def run(
    op: str, shape: tuple[int, int, int], repeat: int, budget: float, autotune: bool
) -> tuple[str, str, float, dict[str, Samples]]:
    """What `auto` takes before and after its trials, how long these took, and the times."""
    case = random_case(Spec(op, shape, torch.bfloat16))
    _, before = planned(case.copy(), "auto")
    began = time.perf_counter()
    if autotune:
        with tpkernels.autotune():
            run_tpkernels(case.copy(), "auto")
    else:
        settle(case, math.inf)
    settled = time.perf_counter() - began
    _, after = planned(case.copy(), "auto")
    inputs, names = Inputs(case, cold=True), ("auto", *ELIGIBLE, *["ring"] * autotune)
    variants = {name: Variant(functools.partial(run_next, inputs, name)) for name in names}
    samples = measure(variants, repeat=repeat, budget=budget)
    return before.algorithm, after.algorithm, settled, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 16, 64, 256, 512, 1024, 2048])
    parser.add_argument(
        "--weights", nargs="+", default=["1024x1024", "1024x2816"], help="K x N, such as 1024x2816"
    )
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds for a case")
    parser.add_argument("--autotune", action="store_true", help="on the spot, not in trials")
    given = parser.parse_args()
    for weight in given.weights:
        k, n = map(int, weight.split("x"))
        for op in OPS:
            for rows in given.rows:
                with Ranks(given.nproc, threads=1) as ranks:
                    reports = ranks.run(
                        run,
                        op,
                        (rows, n, k),
                        given.repeat,
                        given.budget,
                        given.autotune,
                        timeout=600,
                    )
                before, after, settled, samples = reports[0]
                ms = {name: summary([each[3][name] for each in reports]).median for name in samples}
                auto = ms.pop("auto")
                times = ", ".join(f"{name} {value:.3f}" for name, value in ms.items())
                chosen = min(ms.values()) / ms[after]
                print(
                    f"{op} ({rows}, {n}, {k}): {before}, then {after} after "
                    f"{settled:.1f} s; auto {auto:.3f} ms, "
                    f"{times}; to the fastest: the choice {chosen:.3f}, auto "
                    f"{min(ms.values()) / auto:.3f}, "
                    f"to unfused {ms['unfused'] / auto:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
