"""The planner's choice for products on meshes compared with every plan: 60 cases of shape, mesh and
placements.

    python -m benchmarks.mesh_plans

First the rates of this machine are measured, as by `tpkernels tune --machine`. The best plans of a
case by the prediction are timed, interleaved in a random order. A time is the median of the slowest
rank's. A choice is right if it is the fastest of
the timed plans or within 10 % of it. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import tpkernels
from tpkernels.bench.probes import measure_machine, profile_of, rates_text
from tpkernels.launch import Ranks
from tpkernels.mesh.layout import local_shape, placements_text
from tpkernels.mesh.planner import MatmulProblem, ranked
from tpkernels.planning.cost import Profile
from tpkernels.timing import Samples, Variant, measure, summary

R = Replicate()
NAMES: dict[str, Placement] = {"R": R, "S0": Shard(0), "S1": Shard(1), "P": Partial()}
SHAPES = [(1024, 1024, 1024), (256, 2048, 2048), (2048, 512, 1024), (64, 2048, 1024)]
PLACEMENTS = (  # of x, w and the result
    "S0 S1 S0, S0 S1 S1, S0 S0 S0, S0 R R, S1 S0 R, S1 S0 S0, S1 S1 S1, S1 R S0, R S1 R, R S0 S1, "
    "R R S0, P R S0, S0 P S0, S1 S1 R, R S0 R"
)
WITHIN = 1.10


def cases(world: int) -> list[MatmulProblem]:
    """List the cases, on 1 x world and on world x 1 alternately, which are the same to the ops."""
    problems = []
    for i, ((m, k, n), of) in enumerate(itertools.product(SHAPES, PLACEMENTS.split(", "))):
        mesh = (1, world) if i % 2 else (world, 1)
        placements = (NAMES[name] for name in of.split())
        x, w, out = ((R, placement) if i % 2 else (placement, R) for placement in placements)
        problems.append(
            MatmulProblem(m=m, k=k, n=n, mesh_shape=mesh, x=x, w=w, out=out, itemsize=4)
        )
    return problems


def operand(shape: Sequence[int], placements: tuple[Placement, ...], mesh: Any) -> DTensor:
    local = local_shape(shape, placements, mesh.shape, mesh.get_coordinate())
    return DTensor.from_local(torch.randn(local), mesh, placements, run_check=False)


def times(problem: MatmulProblem, strategies: list[str], repeat: int) -> dict[str, Samples]:
    """Time the strategies, interleaved, on one of the ranks."""
    mesh = init_device_mesh("cpu", problem.mesh_shape, mesh_dim_names=("a", "b"))
    torch.manual_seed(dist.get_rank())
    x = operand((problem.m, problem.k), problem.x, mesh)
    w = operand((problem.k, problem.n), problem.w, mesh)

    def run(strategy: str) -> object:
        # With `direct`, so that no trial of the ops' algorithms is among the calls.
        return tpkernels.sharded_matmul(x, w, problem.out, strategy, algorithm="direct")

    with torch.inference_mode():
        variants = {name: Variant(functools.partial(run, name)) for name in strategies}
        return measure(variants, repeat=repeat)


def plans_of(problem: MatmulProblem, profile: Profile, most: int) -> dict[str, float]:
    """Predict the seconds of the best plans. Of those that differ only on the mesh dim of one rank,
    one counts."""
    found: dict[tuple[object, ...], tuple[str, float]] = {}
    for plan, cost in ranked(problem, profile):
        steps = [step for step in plan.steps if problem.mesh_shape[step.mesh_dim] > 1]
        key = (plan.strategy.split(",")[problem.mesh_shape.index(max(problem.mesh_shape))], *steps)
        found.setdefault(key, (plan.strategy, cost.seconds))
    return dict(list(found.values())[:most])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--plans", type=int, default=6, help="the most that are timed of a case")
    parser.add_argument("--cases", type=int, default=60, help="the first so many")
    args = parser.parse_args()
    with Ranks(args.nproc) as ranks:
        profile = profile_of(ranks.run(measure_machine, "cpu", timeout=300), "this run")
        print(f"{profile.title}: {rates_text(profile)}\n")
        print(
            "| m, k, n | mesh | x @ w -> result | chosen | ms | predicted | fastest | ms | ratio |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        ratios: list[float] = []
        errors: list[tuple[float, float]] = []  # of predictions, from medians and fastest calls
        for problem in cases(args.nproc)[: args.cases]:
            predicted = plans_of(problem, profile, args.plans)
            samples = ranks.run(times, problem, list(predicted), args.repeat, timeout=300)
            found = {name: summary([rank[name] for rank in samples]) for name in predicted}
            chosen = next(iter(predicted))
            fastest = min(found, key=lambda name: found[name].median)
            ratios.append(found[chosen].median / found[fastest].median)
            for name, expected in predicted.items():
                timed = found[name].median, found[name].min
                errors.append(tuple(abs(1e3 * expected / ms - 1) for ms in timed))  # type: ignore[arg-type]
            x, w, out = map(placements_text, (problem.x, problem.w, problem.out or ()))
            print(
                f"| {problem.m}, {problem.k}, {problem.n} "
                f"| {' x '.join(map(str, problem.mesh_shape))} | {x} @ {w} -> {out} "
                f"| {chosen} | {found[chosen].median:.2f} | {1e3 * predicted[chosen]:.2f} "
                f"| {fastest} | {found[fastest].median:.2f} | {ratios[-1]:.2f} |",
                flush=True,
            )
    right = sum(ratio <= WITHIN for ratio in ratios)
    off, off_fastest = map(statistics.median, zip(*errors, strict=True))
    print(
        f"\n{right} of {len(ratios)} choices within {WITHIN - 1:.0%} of the fastest; predicted "
        f"times are off by {off:.0%} in the median, and by {off_fastest:.0%} from each plan's "
        "fastest call"
    )


if __name__ == "__main__":
    main()
