"""The plans of known cases and their cost on a machine with round rates, without processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tests.support.cases import RanksFixture
from tests.support.meshes import ANY, S0, S1, P, Placements, R, draw, make_mesh, placements_of
from tests.support.tiers import sweep
from tpkernels import mesh as tpmesh
from tpkernels import sharded_matmul
from tpkernels.mesh import agreement
from tpkernels.mesh.planner import (
    MatmulPlan,
    MatmulProblem,
    choose,
    estimate,
    plans_for,
    ranked,
    steps_from,
)
from tpkernels.planning import store
from tpkernels.planning.cost import (
    Link,
    Profile,
    all_to_all_seconds,
    collective_seconds,
    fused_seconds,
    machine_named,
    machines,
    matmul_seconds,
)
from tpkernels.planning.machine import this_machine

M, K, N = 8, 16, 4  # of the halves
BYTES = 4


def problem(
    x: Placements, w: Placements, out: Placements | None = None, size: int = 0, **more: Any
) -> MatmulProblem:
    m, k, n = (size or 2 * length for length in (M, K, N))
    more = {"mesh_shape": (2,) * len(x), "itemsize": BYTES, **more}
    return MatmulProblem(m=m, k=k, n=n, x=x, w=w, out=out, **more)


def best(
    x: Placements, w: Placements, out: Placements | None = None, strategy: str = "auto"
) -> MatmulPlan:
    return choose(problem(x, w, out), strategy)


SCATTER = "[matmul + reduce-scatter out dim 0 over mesh dim {}]"


@pytest.mark.parametrize(
    ("split", "x", "w", "steps", "elements"),
    [
        ("K", (S1,), (S0,), SCATTER.format(0), M * N),
        ("M,N", (S0, R), (R, S1), "matmul", 0),
        ("M,K", (S0, S1), (R, S0), SCATTER.format(1), M * N),
        ("K,N", (S1, R), (S0, S1), SCATTER.format(0), M * N),
        # M and N lie on the same mesh dim, so the smaller operand is gathered there. The gather
        # moves more, so it is the fused one.
        ("M,K", (S0, S1), (S1, S0), "[all-gather w dim 1 over mesh dim 0 + matmul]; "
         "reduce-scatter out dim 0 over mesh dim 1", K * N + M * N),
    ],
)  # fmt: skip
def test_splits(split: str, x: Placements, w: Placements, steps: str, elements: int) -> None:
    plan = best(x, w)
    assert (plan.strategy, str(plan), plan.nbytes) == (split, steps, 4 * elements * BYTES)
    assert plan.flops == 2 * 8 * M * K * N


GATHERED_W = "[all-gather w dim 1 over mesh dim 0 + matmul]"


@pytest.mark.parametrize(
    ("x", "w", "out", "strategy", "steps"),
    [
        ((S0,), (S1,), (S0,), "auto", GATHERED_W),
        # w and the result together are smaller than x
        ((S0,), (S1,), (S1,), "auto",
         f"{GATHERED_W}; all-to-all out dim 0 for dim 1 over mesh dim 0"),
        ((S0,), (S1,), (S1,), "N", "[all-gather x dim 0 over mesh dim 0 + matmul]"),
        ((P,), (R,), (R,), "auto", "[matmul + all-reduce out over mesh dim 0]"),
        # K is split over different mesh dims; N too, for half the flops and fewer bytes
        ((S1, R), (R, S0), (R, R), "auto",
         "all-to-all w dim 0 for dim 1 over mesh dim 1; slice w dim 0 over mesh dim 0; "
         "[matmul + all-reduce out over mesh dim 0]; all-gather out dim 1 over mesh dim 1"),
    ],
)  # fmt: skip
def test_the_cheapest(
    x: Placements, w: Placements, out: Placements, strategy: str, steps: str
) -> None:
    assert str(best(x, w, out, strategy)) == steps


@pytest.mark.parametrize("dims", sweep((1, 2)))
def test_every_placement_can_be_reached(dims: int) -> None:
    """The result is never Partial unless that is asked for."""
    every = list(placements_of(dims))
    for x, w in list(itertools.product(every, repeat=2))[:: 2 * dims - 1]:
        plans = plans_for(problem(x, w))
        assert plans and all(P not in plan.out for plan in plans)
    for x, w, out in list(itertools.product(every, repeat=3))[:: 4 * dims - 3]:
        plans = plans_for(problem(x, w, out))
        assert plans and all(plan.out == out for plan in plans), (x, w, out)
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


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (3, 2)])
def test_an_all_to_all_receives_what_was_not_there(mesh: tuple[int, ...]) -> None:
    for shape in ((7, 5), (12, 12), (2, 9), (0, 4)):
        seen = 0
        for placements in placements_of(len(mesh)):
            for step in steps_from("x", shape, placements, mesh, 1, 1):
                if step.kind == "all_to_all":
                    after, ranks = step.after(placements), itertools.product(*map(range, mesh))
                    received = [
                        held(shape, after, mesh, at) - held(shape, placements, mesh, at)
                        for at in ranks
                    ]
                    assert step.nbytes == sum(map(len, received)), (shape, placements, step)
                    seen += 1
        assert seen >= 2


def test_a_mesh_dim_of_one_rank_costs_nothing() -> None:
    for x, w, out in itertools.product(ANY, repeat=3):
        with_one = choose(problem((x, R), (w, R), (out, R), mesh_shape=(2, 1)), "auto")
        assert with_one.nbytes == best((x,), (w,), (out,)).nbytes


# Costs.

MACHINE = Profile(
    title="round numbers",
    device="cpu",
    flops=(200.0, 100.0, 50.0),
    bandwidth=40.0,
    memory=0,
    node=4,
    within=Link(call=1.0, step=0.5, bandwidth=10.0),
    between=Link(call=2.0, step=1.0, bandwidth=5.0),
    host=None,
    overlaps=True,
    source="made up",
)


def by_strategy(given: MatmulProblem, strategy: str) -> MatmulPlan:
    (plan,) = [each for each in plans_for(given) if each.strategy == strategy]
    return plan


def test_a_product_is_bound_by_flops_or_by_memory() -> None:
    assert matmul_seconds(MACHINE, 100, 100, 100, 4) == 2e6 / 100
    assert matmul_seconds(MACHINE, 100, 100, 100, 2) == 2e6 / 200
    assert matmul_seconds(MACHINE, 1, 4, 5, 4) == (4 + 20 + 5) * 4 / 40
    both = 2 * 20 / 100 + (4 + 20 + 5) * 4 / 40
    assert matmul_seconds(replace(MACHINE, overlaps=False), 1, 4, 5, 4) == pytest.approx(both)


@pytest.mark.parametrize(
    ("ranks", "stride", "passes", "seconds"),
    [
        (1, 1, 1, 0.0),
        (4, 1, 1, 1 + 3 * 0.5 + 60 / 10),
        (4, 1, 2, 1 + 2 * (3 * 0.5 + 60 / 10)),
        (4, 4, 1, 2 + 3 * 1 + 60 / 5),  # one rank of each node
        (4, 2, 1, (2 + 1 + 20 / 5) + (1 + 0.5 + 40 / 10)),  # two of each of two nodes
        (6, 1, 1, (2 + 1 + 80 / 6 / 5) + (1 + 2 * 0.5 + 80 * 2 / 3 / 10)),  # three of each of two
        # All-to-alls.
        (4, 4, 0, 2 + 3 * 1 + 60 / 5),
        (8, 1, 0, (2 + 4 * 1 + 40 / 5) + (1 + 3 * 0.5 + 30 / 10)),  # four of the other node
    ],
)
def test_a_collective(ranks: int, stride: int, passes: int, seconds: float) -> None:
    if passes:
        got = collective_seconds(MACHINE, 80, ranks, stride=stride, passes=passes)
    else:
        got = all_to_all_seconds(MACHINE, 80, ranks, stride=stride)
    assert got == pytest.approx(seconds)


def test_communication_of_plans() -> None:
    """The rows of x for its columns: 256 bytes on eight ranks, four to a node. Of two mesh dims the
    first spans nodes."""
    given = problem((S0,), (S0,), (P,), 8, mesh_shape=(8,))
    plan, seconds = by_strategy(given, "K"), (2 + 4 * 1 + 16 / 5) + (1 + 3 * 0.5 + 12 / 10)
    assert [step.kind for step in plan.steps] == ["all_to_all"]
    assert estimate(plan, given, MACHINE).communication == pytest.approx(seconds)
    for x, seconds in (((S0, R), 2 + 1 + 128 / 5), ((R, S0), 1 + 3 * 0.5 + 192 / 10)):
        given = problem(x, (R, R), (R, R), 8, mesh_shape=(2, 4))
        costs = estimate(by_strategy(given, "none,none"), given, MACHINE)
        assert costs.communication == pytest.approx(seconds)


def test_a_fused_step_hides_all_but_a_chunk() -> None:
    """A product of few rows is not cut: each chunk would read the whole weight."""
    shape, alone = (100, 100, 100), 2e6 / 100
    for communication in (alone / 8, 4 * alone):
        least, most = sorted((alone, communication))
        got = fused_seconds(MACHINE, shape, 0, communication, 4, 4)
        assert got == pytest.approx(most + least / 4)
        serial = replace(MACHINE, overlaps=False)
        apart = fused_seconds(serial, shape, 0, communication, 4, 4)
        assert apart == matmul_seconds(serial, *shape, 4) + communication
    alone = matmul_seconds(MACHINE, 4, 100, 100, 4)
    assert fused_seconds(MACHINE, (4, 100, 100), 0, alone / 10, 4, 4) == alone * 1.1


def test_a_plan() -> None:
    """A gather of rows of x, which is one op with the product, and nothing else."""
    given = problem((S0,), (S1,), (S1,), 8)
    got = estimate(by_strategy(given, "N"), given, MACHINE)
    product = max(2 * 8 * 8 * 4 / 100, (64 + 32 + 32) * 4 / 40)
    gather = 1 + 0.5 + 8 * 8 * 4 / 2 / 10
    half = max(2 * 4 * 8 * 4 / 100, (32 + 32 + 16) * 4 / 40)
    assert (got.product, got.communication) == (product, gather)
    assert got.seconds == pytest.approx(gather / 2 + max(half, gather / 2) + half)
    assert got.exposed == got.seconds - product
    # Halves of x and w, the gathered x, half of the result.
    assert got.memory == 4 * (32 + 32 + 64 + 32)


@pytest.mark.parametrize(
    ("x", "w", "out", "strategy", "elements", "partials"),
    [
        ((S0,), (R,), (S0,), "M", 32 + 64 + 32, None),
        ((S1,), (S0,), (S0,), "K", 32 + 32 + 64 + 32, None),  # the partial result, then its shard
        ((R,), (S1,), (R,), "N", 64 + 32 + 32 + 64, None),
        ((R,), (R,), (S0,), "none", 64 + 64 + 64 + 32, None),
        ((S1,), (S0,), (P,), "K", 32 + 32 + 64, 0),  # nothing moves it
        ((S1,), (S0,), (S0,), "K", 32 + 32 + 32, 64),
        # Partial on one mesh dim to the end
        ((S1, S1), (S0, S0), (S0, P), "K,K", 16 + 16, 64 + 32),
    ],
)
def test_peak_memory(
    x: Placements,
    w: Placements,
    out: Placements,
    strategy: str,
    elements: int,
    partials: int | None,
) -> None:
    """Partials may be wider, by elements of 2 bytes."""
    given, wanted = problem(x, w, out, 8), BYTES * elements
    if partials is not None:
        given = replace(given, itemsize=2, partial_itemsize=4)
        wanted = 2 * elements + 4 * partials
    assert estimate(by_strategy(given, strategy), given, MACHINE).memory == wanted


def test_wider_partials_move_more_bytes() -> None:
    """One addend of the 8 x 4 elements travels in all; the sum's halves are gathered in bf16."""
    for out, narrow, wide in ((S0, 2 * 32, 4 * 32), (R, 2 * 32 + 2 * 32, 4 * 32 + 2 * 32)):
        for partial_itemsize, nbytes in ((None, narrow), (4, wide)):
            given = replace(problem((S1,), (S0,), (out,)), m=8, k=16, n=4, itemsize=2)
            given = replace(given, partial_itemsize=partial_itemsize)
            assert by_strategy(given, "K").nbytes == nbytes


def test_the_fastest_is_not_the_one_with_the_fewest_bytes() -> None:
    """But bytes decide between equals."""
    given, h200 = problem((S0, R), (S1, R), (R, R), 8192, mesh_shape=(2, 4)), machine_named("h200")
    by_bytes, by_time = choose(given, "auto"), choose(given, "auto", h200)
    times = {plan: each.seconds for plan, each in ranked(given, h200)}
    assert by_time.nbytes > by_bytes.nbytes and times[by_time] < times[by_bytes]
    assert list(times.values()) == sorted(times.values())
    free = Link(call=1e-30, step=0.0, bandwidth=1e30)
    machine = replace(MACHINE, flops=(1e30,) * 3, bandwidth=1e30, within=free, between=free)
    given = problem((S0, S1), (S1, S0), (R, S0), 8)
    assert [plan for plan, _ in ranked(given, machine)] == list(plans_for(given))


def test_what_does_not_fit_comes_last() -> None:
    given = problem((R, R), (R, S0), (R, S0), 64, mesh_shape=(2, 4))
    pairs = ranked(given, MACHINE)
    least = min(each.memory for _, each in pairs)
    assert pairs[0][1].memory > least
    small = ranked(given, replace(MACHINE, memory=least))
    assert small[0][1].memory == least and set(small) == set(pairs)
    fits = [each.memory <= least for _, each in small]
    assert fits == sorted(fits, reverse=True)


# Machines.


def test_every_machine_is_complete() -> None:
    for name in machines():
        machine = machine_named(name)
        assert machine.source and machine.title and machine.node >= 1
        assert min(*machine.flops, machine.bandwidth) > 1e9
        for link in (machine.within, machine.between):
            assert link.call > 0 and link.bandwidth > 1e9
        assert store.profile_in(store.profile_text(machine)) == machine
        within = replace(machine.within, step=0.0)
        text = store.profile_text(replace(machine, within=within))
        with pytest.raises(ValueError, match=r"within: step is -1.0; it must be at least 0"):
            store.profile_in(text.replace('"step": 0.0', '"step": -1.0', 1))


def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    named = {"NVIDIA H200": "h200", "AMD Instinct MI300X": "mi300x", "new": "h100"}
    for title, name in named.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda title=title: title)
        assert store.machine_here("cuda", 8) == (name, machine_named(name))
    assert store.machine_here("cpu", 8) == ("zen4-core", machine_named("zen4-core"))


def test_measured_rates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = this_machine("cpu", 2, 1, True)
    path = store.save_profile(here, MACHINE)
    assert store.load_profile(here) == MACHINE
    assert store.machine_here("cpu", 2) == ("this", MACHINE)
    assert store.machine_here("cpu", 3)[0] == "zen4-core"
    kept = path.read_text()
    for damaged in (
        "",
        "[]",
        kept.replace("10.0", "-1.0"),
        kept.replace(store._PROFILE_FORMAT, "0"),
    ):
        assert damaged != kept
        path.write_text(damaged)
        assert store.load_profile(here) is None
    path.write_text(kept)
    path.chmod(0o666)  # anybody can have written it
    assert store.load_profile(here) is None


def agreement_job() -> tuple[str, str, str]:
    """The machine before and after the first product, if each rank has another, and the plan."""

    def own(device: str, size: int) -> tuple[str, Profile]:
        assert (device, size) == ("cpu", 4)
        return "this", replace(MACHINE, title=f"rank {dist.get_rank()}")

    with mock.patch.object(agreement, "machine_here", own):
        mesh = make_mesh((2, 2))
        x = draw("x", (8, 8), mesh, (S0, S1)).sharded
        first = agreement.machine_of(mesh).title
        y = sharded_matmul(x, x)
        agreed = agreement.machine_of(mesh).title
        return first, agreed, f"{y.placements} {tpmesh.plans(x, x)[0]}"


def test_all_ranks_plan_by_the_first_ranks_machine(ranks: RanksFixture) -> None:
    first, agreed, plans = zip(*ranks(4).run(agreement_job), strict=True)
    assert first == tuple(f"rank {rank}" for rank in range(4))
    assert agreed == ("rank 0",) * 4
    assert len(set(plans)) == 1
