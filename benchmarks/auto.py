"""`auto` after its trials against every algorithm that it tries.

    python -m benchmarks.auto
    python -m benchmarks.auto --rows 2048 4096 --weights 4096x4096 --repeat 7

Each case runs on ranks of its own, which know nothing at first. Prints what the thresholds give and
what the trials chose, the medians of interleaved repetitions (the slowest rank's), and the speed of
`auto` relative to the fastest algorithm and to `unfused`. bf16; weights are K x N over all ranks.
"""

from __future__ import annotations

import argparse
import functools
import math

import torch

from tpkernels.bench.cases import planned, random_case, settle
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.measuring import run_next
from tpkernels.bench.specs import Spec
from tpkernels.bench.timing import Samples, Variant, measure, summary
from tpkernels.launch import Ranks
from tpkernels.planning.trials import ELIGIBLE

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def run(
    op: str, shape: tuple[int, int, int], repeat: int, budget: float
) -> tuple[str, str, dict[str, Samples]]:
    """What `auto` takes before and after its trials, and the times."""
    case = random_case(Spec(op, shape, torch.bfloat16))
    _, before = planned(case.copy(), "auto")
    settle(case, math.inf)
    _, after = planned(case.copy(), "auto")
    inputs = Inputs(case, cold=True)
    variants = {
        name: Variant(functools.partial(run_next, inputs, name)) for name in ("auto", *ELIGIBLE)
    }
    return before.algorithm, after.algorithm, measure(variants, repeat=repeat, budget=budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 16, 64, 256, 512, 1024, 2048])
    parser.add_argument(
        "--weights", nargs="+", default=["1024x1024", "1024x2816"], help="K x N, such as 1024x2816"
    )
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds for a case")
    given = parser.parse_args()
    for weight in given.weights:
        k, n = map(int, weight.split("x"))
        for op in OPS:
            for rows in given.rows:
                with Ranks(given.nproc, threads=1) as ranks:
                    reports = ranks.run(
                        run, op, (rows, n, k), given.repeat, given.budget, timeout=600
                    )
                before, after, samples = reports[0]
                ms = {name: summary([each[2][name] for each in reports]).median for name in samples}
                auto = ms.pop("auto")
                times = ", ".join(f"{name} {value:.3f}" for name, value in ms.items())
                print(
                    f"{op} ({rows}, {n}, {k}): {before}, then {after}; auto {auto:.3f} ms, "
                    f"{times}; to the fastest {min(ms.values()) / auto:.3f}, "
                    f"to unfused {ms['unfused'] / auto:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
