"""The plans of known cases: what the planner derives, without any process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.support.meshes import ANY, S0, S1, P, Placements, R, placements_of
from tests.support.tiers import sweep
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem, choose, plans_for, steps_from

M, K, N = 8, 16, 4  # of the halves
BYTES = 4


def best(
    x: Placements, w: Placements, out: Placements | None = None, strategy: str = "auto"
) -> MatmulPlan:
    return choose(problem(x, w, out), strategy)


def problem(
    x: Placements, w: Placements, out: Placements | None = None, mesh: tuple[int, ...] = ()
) -> MatmulProblem:
    return MatmulProblem(
        m=2 * M,
        k=2 * K,
        n=2 * N,
        mesh_shape=mesh or (2,) * len(x),
        x=x,
        w=w,
        out=out,
        itemsize=BYTES,
    )


@pytest.mark.parametrize(
    ("split", "x", "w", "steps", "elements"),
    [
        ("M", (S0,), (R,), "matmul", 0),
        ("N", (R,), (S1,), "matmul", 0),
        ("K", (S1,), (S0,), "[matmul + reduce-scatter out dim 0 over mesh dim 0]", 4 * M * N),
        ("M,N", (S0, R), (R, S1), "matmul", 0),
        (
            "M,K",
            (S0, S1),
            (R, S0),
            "[matmul + reduce-scatter out dim 0 over mesh dim 1]",
            4 * M * N,
        ),
        (
            "K,N",
            (S1, R),
            (S0, S1),
            "[matmul + reduce-scatter out dim 0 over mesh dim 0]",
            4 * M * N,
        ),
        (  # M and N lie on the same mesh dim, so the smaller operand is gathered there
            "M,K",
            (S0, S1),
            (S1, S0),
            "all-gather w dim 1 over mesh dim 0; "
            "[matmul + reduce-scatter out dim 0 over mesh dim 1]",
            4 * K * N + 4 * M * N,
        ),
    ],
)
def test_the_seven_splits(
    split: str, x: Placements, w: Placements, steps: str, elements: int
) -> None:
    plan = best(x, w)
    if elements == 4 * K * N + 4 * M * N:  # the gather moves more, so it is the fused one
        steps = (
            "[all-gather w dim 1 over mesh dim 0 + matmul]; "
            "reduce-scatter out dim 0 over mesh dim 1"
        )
    assert (plan.strategy, str(plan), plan.nbytes) == (split, steps, elements * BYTES)
    assert plan.flops == 2 * 8 * M * K * N


def test_two_layers_need_nothing_between_them() -> None:
    up = best((R,), (S1,))
    down = best(up.out, (S0,), (R,))
    assert up.steps == () and up.out == (S1,)
    assert str(down) == "[matmul + all-reduce out over mesh dim 0]"


@pytest.mark.parametrize(
    ("x", "w", "out", "steps"),
    [
        ((S0,), (S1,), (S0,), "[all-gather w dim 1 over mesh dim 0 + matmul]"),
        (  # w and the result together are smaller than x
            (S0,),
            (S1,),
            (S1,),
            "[all-gather w dim 1 over mesh dim 0 + matmul]; "
            "all-to-all out dim 0 for dim 1 over mesh dim 0",
        ),
        ((S1,), (S0,), (P,), "matmul"),
        ((P,), (R,), (R,), "[matmul + all-reduce out over mesh dim 0]"),
        (  # K is split over different mesh dims; N too, for half the flops and fewer bytes
            (S1, R),
            (R, S0),
            (R, R),
            "all-to-all w dim 0 for dim 1 over mesh dim 1; slice w dim 0 over mesh dim 0; "
            "[matmul + all-reduce out over mesh dim 0]; all-gather out dim 1 over mesh dim 1",
        ),
    ],
)
def test_the_cheapest(x: Placements, w: Placements, out: Placements, steps: str) -> None:
    assert str(best(x, w, out)) == steps


def test_a_strategy_by_name() -> None:
    plan = best((S0,), (S1,), (S1,), strategy="N")
    assert str(plan) == "[all-gather x dim 0 over mesh dim 0 + matmul]"


@pytest.mark.parametrize("dims", sweep((1, 2)))
def test_the_result_is_never_partial_unless_asked_for(dims: int) -> None:
    for x, w in list(itertools.product(placements_of(dims), repeat=2))[:: 2 * dims - 1]:
        plans = plans_for(problem(x, w))
        assert plans and all(P not in plan.out for plan in plans)


@pytest.mark.parametrize("dims", sweep((1, 2)))
def test_every_placement_can_be_reached(dims: int) -> None:
    for x, w, out in list(itertools.product(placements_of(dims), repeat=3))[:: 4 * dims - 3]:
        plans = plans_for(problem(x, w, out))
        assert plans, (x, w, out)
        assert all(plan.out == out for plan in plans)
        assert len({plan.strategy for plan in plans}) == len(plans)
        costs = [(plan.nbytes, plan.flops) for plan in plans]
        assert costs == sorted(costs)


def held(
    shape: tuple[int, int], placements: Placements, mesh: tuple[int, ...], at: Sequence[int]
) -> set[int]:
    """The elements that a rank holds, by torch.chunk."""
    part = torch.arange(math.prod(shape)).view(shape)
    for placement, size, index in zip(placements, mesh, at, strict=True):
        if isinstance(placement, Shard):
            chunks = part.chunk(size, placement.dim)
            part = chunks[index] if index < len(chunks) else part[:0]
    return set(part.flatten().tolist())


@pytest.mark.parametrize("shape", [(7, 5), (12, 12), (2, 9), (0, 4)])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (3, 2)])
def test_an_all_to_all_receives_what_was_not_there(
    shape: tuple[int, int], mesh: tuple[int, ...]
) -> None:
    seen = 0
    for placements in placements_of(len(mesh)):
        for step in steps_from("x", shape, placements, mesh, 1, 1):
            if step.kind == "all_to_all":
                after, ranks = step.after(placements), itertools.product(*map(range, mesh))
                received = [
                    held(shape, after, mesh, at) - held(shape, placements, mesh, at) for at in ranks
                ]
                assert step.nbytes == sum(map(len, received)), (placements, step)
                seen += 1
    assert seen >= 2


def test_a_mesh_dim_of_one_rank_costs_nothing() -> None:
    for x, w, out in itertools.product(ANY, repeat=3):
        alone = best((x,), (w,), (out,))
        with_one = choose(problem((x, R), (w, R), (out, R), mesh=(2, 1)), "auto")
        assert with_one.nbytes == alone.nbytes


def test_an_unknown_strategy() -> None:
    with pytest.raises(ValueError, match=r"no strategy 'rows' for S0 @ R -> any .* 'auto' and 'M'"):
        best((S0,), (R,), strategy="rows")
