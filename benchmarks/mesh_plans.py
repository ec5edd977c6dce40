"""The planner's choice for products on meshes compared with every plan: 60 cases of shape, mesh and
placements.

    python -m benchmarks.mesh_plans

First the rates of this machine are measured, as by `tpkernels tune --machine`. The best plans of a
case by the prediction are timed, interleaved in a random order; before each call the ranks meet. A
time is the median over the calls of the slowest rank's. A choice is right if it is the fastest of
the timed plans or within 10 % of it. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import tpkernels
from tpkernels.bench.machine import measure_machine, profile_of, rates_text
from tpkernels.launch import Ranks
from tpkernels.mesh.cost import ranked
from tpkernels.mesh.layout import local_shape, text_of
from tpkernels.mesh.planner import MatmulProblem
from tpkernels.planning.machines import Profile

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SHAPES = [(1024, 1024, 1024), (256, 2048, 2048), (2048, 512, 1024), (64, 2048, 1024)]
PLACEMENTS: list[tuple[Placement, Placement, Placement]] = [
    (S0, S1, S0),
    (S0, S1, S1),
    (S0, S0, S0),
    (S0, R, R),
    (S1, S0, R),
    (S1, S0, S0),
    (S1, S1, S1),
    (S1, R, S0),
    (R, S1, R),
    (R, S0, S1),
    (R, R, S0),
    (P, R, S0),
    (S0, P, S0),
    (S1, S1, R),
    (R, S0, R),
]
WITHIN = 1.10
WARMUP = 2


def cases(world: int) -> list[MatmulProblem]:
    """On 1 x world and on world x 1 alternately, which are the same to the ops."""
    problems = []
    for i, ((m, k, n), of) in enumerate(itertools.product(SHAPES, PLACEMENTS)):
        mesh = (1, world) if i % 2 else (world, 1)
        x, w, out = ((R, one) if i % 2 else (one, R) for one in of)
        problems.append(
            MatmulProblem(m=m, k=k, n=n, mesh_shape=mesh, x=x, w=w, out=out, itemsize=4)
        )
    return problems


def operand(shape: Sequence[int], placements: tuple[Placement, ...], mesh: Any) -> DTensor:
    local = local_shape(shape, placements, mesh.shape, mesh.get_coordinate())
    return DTensor.from_local(torch.randn(local), mesh, placements, run_check=False)


def measure(problem: MatmulProblem, strategies: list[str], repeat: int) -> dict[str, list[float]]:
    """Seconds of each call on this rank, by strategy."""
    mesh = init_device_mesh("cpu", problem.mesh_shape, mesh_dim_names=("a", "b"))
    torch.manual_seed(dist.get_rank())
    x = operand((problem.m, problem.k), problem.x, mesh)
    w = operand((problem.k, problem.n), problem.w, mesh)
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    meeting, group = torch.zeros(1), dist.group.WORLD
    assert group is not None
    # With `direct`, so that no trial of the ops' algorithms is among the calls.
    with torch.inference_mode():
        for repetition in range(WARMUP + repeat):
            for name in random.Random(repetition).sample(strategies, len(strategies)):
                tpkernels.all_reduce_(meeting, group)
                begin = time.perf_counter()
                tpkernels.sharded_matmul(x, w, problem.out, name, algorithm="direct")
                seconds[name].append(time.perf_counter() - begin)
    return {name: each[WARMUP:] for name, each in seconds.items()}


def plans_of(problem: MatmulProblem, profile: Profile, most: int) -> dict[str, float]:
    """Predicted seconds of the best plans. Of those that differ only on the mesh dim of one rank,
    one counts."""
    found: dict[tuple[object, ...], tuple[str, float]] = {}
    for plan, cost in ranked(problem, profile):
        steps = [step for step in plan.steps if problem.mesh_shape[step.mesh_dim] > 1]
        key = (plan.strategy.split(",")[problem.mesh_shape.index(max(problem.mesh_shape))], *steps)
        found.setdefault(key, (plan.strategy, cost.seconds))
    return dict(list(found.values())[:most])


def row(problem: MatmulProblem, predicted: dict[str, float], ranks: Any) -> dict[str, Any]:
    names = list(predicted)
    slowest = {
        name: list(map(max, zip(*(one[name] for one in ranks), strict=True))) for name in names
    }
    measured = {name: statistics.median(each) for name, each in slowest.items()}
    chosen, fastest = names[0], min(measured, key=measured.__getitem__)
    return {
        "shape": [problem.m, problem.k, problem.n],
        "mesh": list(problem.mesh_shape),
        "placements": [text_of(one) for one in (problem.x, problem.w, problem.out or ())],
        "chosen": chosen,
        "fastest": fastest,
        "ratio": measured[chosen] / measured[fastest],
        "predicted_ms": {name: 1e3 * each for name, each in predicted.items()},
        "measured_ms": {name: 1e3 * each for name, each in measured.items()},
        "least_ms": {name: 1e3 * min(each) for name, each in slowest.items()},
    }


HEADER = (
    "| m, k, n | mesh | x @ w -> result | chosen | ms | predicted | fastest | ms | ratio |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    x, w, out = row["placements"]
    cells = [
        ", ".join(map(str, row["shape"])),
        " x ".join(map(str, row["mesh"])),
        f"{x} @ {w} -> {out}",
        row["chosen"],
        f"{row['measured_ms'][row['chosen']]:.2f}",
        f"{row['predicted_ms'][row['chosen']]:.2f}",
        row["fastest"],
        f"{row['measured_ms'][row['fastest']]:.2f}",
        f"{row['ratio']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def error(rows: list[dict[str, Any]], of: str) -> float:
    """The median of how far predicted times are off."""
    return statistics.median(
        abs(one["predicted_ms"][name] / ms - 1) for one in rows for name, ms in one[of].items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--plans", type=int, default=6, help="the most that are timed of a case")
    parser.add_argument("--cases", type=int, default=60, help="the first so many")
    given = parser.parse_args()
    with Ranks(given.nproc) as ranks:
        profile = profile_of(ranks.run(measure_machine, "cpu", timeout=300), "this run")
        print(f"{profile.title}: {rates_text(profile)}\n\n{HEADER}")
        rows = []
        for problem in cases(given.nproc)[: given.cases]:
            predicted = plans_of(problem, profile, given.plans)
            times = ranks.run(measure, problem, list(predicted), given.repeat, timeout=300)
            rows.append(row(problem, predicted, times))
            print(line(rows[-1]), flush=True)
    right = sum(one["ratio"] <= WITHIN for one in rows)
    print(
        f"\n{right} of {len(rows)} choices within {WITHIN - 1:.0%} of the fastest; predicted times "
        f"are off by {error(rows, 'measured_ms'):.0%} in the median, and by "
        f"{error(rows, 'least_ms'):.0%} from each plan's fastest call"
    )


if __name__ == "__main__":
    main()
