"""Plans for reference cases, and their costs on a machine with round rates."""

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
from tests.support.meshes import (
    ALL_PLACEMENTS,
    S0,
    S1,
    P,
    Placements,
    R,
    all_placements,
    draw,
    make_mesh,
)
from tests.support.tiers import sweep
from tpkernels import mesh as tpmesh
from tpkernels import sharded_matmul
from tpkernels.mesh import agreement
from tpkernels.mesh.planner import (
    MatmulPlan,
    MatmulProblem,
    choose,
    estimate,
    make_plans,
    possible_steps,
    sort_plans,
)
from tpkernels.planning import store
from tpkernels.planning.cost import (
    Link,
    Profile,
    all_to_all_seconds,
    collective_seconds,
    fused_seconds,
    get_preset,
    machines,
    matmul_seconds,
)
from tpkernels.planning.machine import this_machine

M, K, N = 8, 16, 4  # sizes of the halves
BYTES = 4


def make_problem(
    x: Placements, w: Placements, out: Placements | None = None, size: int = 0, **overrides: Any
) -> MatmulProblem:
    m, k, n = (size or 2 * length for length in (M, K, N))
    overrides = {"mesh_shape": (2,) * len(x), "itemsize": BYTES, **overrides}
    return MatmulProblem(m=m, k=k, n=n, x=x, w=w, out=out, **overrides)


def best(
    x: Placements, w: Placements, out: Placements | None = None, strategy: str = "auto"
) -> MatmulPlan:
    return choose(make_problem(x, w, out), strategy)


SCATTER = "[matmul + reduce-scatter out dim 0 over mesh dim {}]"


@pytest.mark.parametrize(
    ("split", "x", "w", "steps", "elements"),
    [
        ("K", (S1,), (S0,), SCATTER.format(0), M * N),
        ("M,N", (S0, R), (R, S1), "matmul", 0),
        ("M,K", (S0, S1), (R, S0), SCATTER.format(1), M * N),
        ("K,N", (S1, R), (S0, S1), SCATTER.format(0), M * N),
        # M and N are sharded over the same mesh dim, so the smaller operand is gathered along it.
        # The gather moves more bytes than the reduction, so the gather is fused.
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
        # K is split over different mesh dims, and N as well for half the flops and fewer bytes
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
def test_every_placement_has_a_plan(dims: int) -> None:
    """The result is Partial only if that placement is requested."""
    placements = list(all_placements(dims))
    for x, w in list(itertools.product(placements, repeat=2))[:: 2 * dims - 1]:
        plans = make_plans(make_problem(x, w))
        assert plans and all(P not in plan.out for plan in plans)
    for x, w, out in list(itertools.product(placements, repeat=3))[:: 4 * dims - 3]:
        plans = make_plans(make_problem(x, w, out))
        assert plans and all(plan.out == out for plan in plans), (x, w, out)
        assert len({plan.strategy for plan in plans}) == len(plans)
        costs = [(plan.nbytes, plan.flops) for plan in plans]
        assert costs == sorted(costs)


def local_elements(
    shape: tuple[int, int], placements: Placements, mesh: tuple[int, ...], coordinate: Sequence[int]
) -> set[int]:
    """Return the elements that a rank holds, sharded by torch.chunk."""
    local = torch.arange(math.prod(shape)).view(shape)
    for placement, size, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Shard):
            chunks = local.chunk(size, placement.dim)
            local = chunks[index] if index < len(chunks) else local[:0]
    return set(local.flatten().tolist())


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (3, 2)])
def test_an_all_to_all_receives_only_missing_elements(mesh: tuple[int, ...]) -> None:
    for shape in ((7, 5), (12, 12), (2, 9), (0, 4)):
        num_steps = 0
        for placements in all_placements(len(mesh)):
            for step in possible_steps("x", shape, placements, mesh, 1, 1):
                if step.kind == "all_to_all":
                    resharded, coords = step.after(placements), itertools.product(*map(range, mesh))
                    received = [
                        local_elements(shape, resharded, mesh, coordinate)
                        - local_elements(shape, placements, mesh, coordinate)
                        for coordinate in coords
                    ]
                    assert step.nbytes == sum(map(len, received)), (shape, placements, step)
                    num_steps += 1
        assert num_steps >= 2


def test_a_mesh_dim_of_one_rank_costs_nothing() -> None:
    for x, w, out in itertools.product(ALL_PLACEMENTS, repeat=3):
        with_one = choose(make_problem((x, R), (w, R), (out, R), mesh_shape=(2, 1)), "auto")
        assert with_one.nbytes == best((x,), (w,), (out,)).nbytes


# Costs.

PROFILE = Profile(
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


def find_plan(problem: MatmulProblem, strategy: str) -> MatmulPlan:
    (plan,) = [candidate for candidate in make_plans(problem) if candidate.strategy == strategy]
    return plan


def test_a_matmul_is_bound_by_flops_or_by_memory() -> None:
    assert matmul_seconds(PROFILE, 100, 100, 100, 4) == 2e6 / 100
    assert matmul_seconds(PROFILE, 100, 100, 100, 2) == 2e6 / 200
    assert matmul_seconds(PROFILE, 1, 4, 5, 4) == (4 + 20 + 5) * 4 / 40
    both = 2 * 20 / 100 + (4 + 20 + 5) * 4 / 40
    assert matmul_seconds(replace(PROFILE, overlaps=False), 1, 4, 5, 4) == pytest.approx(both)


@pytest.mark.parametrize(
    ("ranks", "stride", "passes", "seconds"),
    [
        (1, 1, 1, 0.0),
        (4, 1, 1, 1 + 3 * 0.5 + 60 / 10),
        (4, 1, 2, 1 + 2 * (3 * 0.5 + 60 / 10)),
        (4, 4, 1, 2 + 3 * 1 + 60 / 5),  # one rank per node
        (4, 2, 1, (2 + 1 + 20 / 5) + (1 + 0.5 + 40 / 10)),  # two ranks per node
        # Three ranks per node.
        (6, 1, 1, (2 + 1 + 80 / 6 / 5) + (1 + 2 * 0.5 + 80 * 2 / 3 / 10)),
        # All-to-alls.
        (4, 4, 0, 2 + 3 * 1 + 60 / 5),
        (8, 1, 0, (2 + 4 * 1 + 40 / 5) + (1 + 3 * 0.5 + 30 / 10)),  # four peers on the second node
    ],
)
def test_a_collective(ranks: int, stride: int, passes: int, seconds: float) -> None:
    if passes:
        got = collective_seconds(PROFILE, 80, ranks, stride=stride, passes=passes)
    else:
        got = all_to_all_seconds(PROFILE, 80, ranks, stride=stride)
    assert got == pytest.approx(seconds)


def test_communication_of_plans() -> None:
    """An all-to-all exchanges rows of x for columns: 256 bytes on eight ranks, four per node. On a
    2-D mesh the first mesh dim spans nodes."""
    problem = make_problem((S0,), (S0,), (P,), 8, mesh_shape=(8,))
    plan, seconds = find_plan(problem, "K"), (2 + 4 * 1 + 16 / 5) + (1 + 3 * 0.5 + 12 / 10)
    assert [step.kind for step in plan.steps] == ["all_to_all"]
    assert estimate(plan, problem, PROFILE).communication == pytest.approx(seconds)
    for x, seconds in (((S0, R), 2 + 1 + 128 / 5), ((R, S0), 1 + 3 * 0.5 + 192 / 10)):
        problem = make_problem(x, (R, R), (R, R), 8, mesh_shape=(2, 4))
        costs = estimate(find_plan(problem, "none,none"), problem, PROFILE)
        assert costs.communication == pytest.approx(seconds)


def test_a_fused_step_hides_all_but_a_chunk() -> None:
    """A matmul with few rows is not chunked, because each chunk would read the full weight."""
    shape, matmul_time = (100, 100, 100), 2e6 / 100
    for communication in (matmul_time / 8, 4 * matmul_time):
        shorter, longer = sorted((matmul_time, communication))
        got = fused_seconds(PROFILE, shape, 0, communication, 4, 4)
        assert got == pytest.approx(longer + shorter / 4)
        serial = replace(PROFILE, overlaps=False)
        unfused = fused_seconds(serial, shape, 0, communication, 4, 4)
        assert unfused == matmul_seconds(serial, *shape, 4) + communication
    matmul_time = matmul_seconds(PROFILE, 4, 100, 100, 4)
    assert fused_seconds(PROFILE, (4, 100, 100), 0, matmul_time / 10, 4, 4) == matmul_time * 1.1


def test_a_plan() -> None:
    """The plan is a single op, a gather of rows of x fused with the matmul."""
    problem = make_problem((S0,), (S1,), (S1,), 8)
    got = estimate(find_plan(problem, "N"), problem, PROFILE)
    matmul = max(2 * 8 * 8 * 4 / 100, (64 + 32 + 32) * 4 / 40)
    gather = 1 + 0.5 + 8 * 8 * 4 / 2 / 10
    half_matmul = max(2 * 4 * 8 * 4 / 100, (32 + 32 + 16) * 4 / 40)
    assert (got.matmul, got.communication) == (matmul, gather)
    assert got.seconds == pytest.approx(gather / 2 + max(half_matmul, gather / 2) + half_matmul)
    assert got.exposed == got.seconds - matmul
    # Halves of x and w, the gathered x, half of the result.
    assert got.memory == 4 * (32 + 32 + 64 + 32)


@pytest.mark.parametrize(
    ("x", "w", "out", "strategy", "elements", "partials"),
    [
        ((S0,), (R,), (S0,), "M", 32 + 64 + 32, None),
        ((S1,), (S0,), (S0,), "K", 32 + 32 + 64 + 32, None),  # the partial result, then its shard
        ((R,), (S1,), (R,), "N", 64 + 32 + 32 + 64, None),
        ((R,), (R,), (S0,), "none", 64 + 64 + 64 + 32, None),
        ((S1,), (S0,), (P,), "K", 32 + 32 + 64, 0),  # the partial result is not moved
        ((S1,), (S0,), (S0,), "K", 32 + 32 + 32, 64),
        # The result stays Partial on one mesh dim.
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
    """With ``partials``, operands have 2 bytes and partial sums 4 bytes per element."""
    problem, expected = make_problem(x, w, out, 8), BYTES * elements
    if partials is not None:
        problem = replace(problem, itemsize=2, partial_itemsize=4)
        expected = 2 * elements + 4 * partials
    assert estimate(find_plan(problem, strategy), problem, PROFILE).memory == expected


def test_wider_partials_move_more_bytes() -> None:
    """In total one addend of 8 x 4 elements is sent. The halves of the sum are gathered in bf16."""
    for out, bf16_bytes, fp32_bytes in (
        (S0, 2 * 32, 4 * 32),
        (R, 2 * 32 + 2 * 32, 4 * 32 + 2 * 32),
    ):
        for partial_itemsize, nbytes in ((None, bf16_bytes), (4, fp32_bytes)):
            problem = replace(make_problem((S1,), (S0,), (out,)), m=8, k=16, n=4, itemsize=2)
            problem = replace(problem, partial_itemsize=partial_itemsize)
            assert find_plan(problem, "K").nbytes == nbytes


def test_the_fastest_plan_may_send_more_bytes() -> None:
    """Bytes decide between plans with equal times."""
    problem, h200 = (
        make_problem((S0, R), (S1, R), (R, R), 8192, mesh_shape=(2, 4)),
        get_preset("h200"),
    )
    by_bytes, by_time = choose(problem, "auto"), choose(problem, "auto", h200)
    times = {plan: cost.seconds for plan, cost in sort_plans(problem, h200)}
    assert by_time.nbytes > by_bytes.nbytes and times[by_time] < times[by_bytes]
    assert list(times.values()) == sorted(times.values())
    free = Link(call=1e-30, step=0.0, bandwidth=1e30)
    profile = replace(PROFILE, flops=(1e30,) * 3, bandwidth=1e30, within=free, between=free)
    problem = make_problem((S0, S1), (S1, S0), (R, S0), 8)
    assert [plan for plan, _ in sort_plans(problem, profile)] == list(make_plans(problem))


def test_plans_that_exceed_memory_come_last() -> None:
    problem = make_problem((R, R), (R, S0), (R, S0), 64, mesh_shape=(2, 4))
    pairs = sort_plans(problem, PROFILE)
    min_memory = min(cost.memory for _, cost in pairs)
    assert pairs[0][1].memory > min_memory
    small = sort_plans(problem, replace(PROFILE, memory=min_memory))
    assert small[0][1].memory == min_memory and set(small) == set(pairs)
    fits = [cost.memory <= min_memory for _, cost in small]
    assert fits == sorted(fits, reverse=True)


# Machines.


def test_every_machine_is_complete() -> None:
    for name in machines():
        profile = get_preset(name)
        assert profile.source and profile.title and profile.node >= 1
        assert min(*profile.flops, profile.bandwidth) > 1e9
        for link in (profile.within, profile.between):
            assert link.call > 0 and link.bandwidth > 1e9
        assert store.profile_from_json(store.profile_to_json(profile)) == profile
        within = replace(profile.within, step=0.0)
        profile_json = store.profile_to_json(replace(profile, within=within))
        with pytest.raises(ValueError, match=r"within: step is -1.0; it must be at least 0"):
            store.profile_from_json(profile_json.replace('"step": 0.0', '"step": -1.0', 1))


def test_gpu_profiles_by_device_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    named = {"NVIDIA H200": "h200", "AMD Instinct MI300X": "mi300x", "new": "h100"}
    for title, name in named.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda title=title: title)
        assert store.load_local_profile("cuda", 8) == (name, get_preset(name))
    assert store.load_local_profile("cpu", 8) == ("zen4-core", get_preset("zen4-core"))


def test_measured_rates_are_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local_machine = this_machine("cpu", 2, 1, True)
    path = store.save_profile(local_machine, PROFILE)
    assert store.load_profile(local_machine) == PROFILE
    assert store.load_local_profile("cpu", 2) == ("this", PROFILE)
    assert store.load_local_profile("cpu", 3)[0] == "zen4-core"
    saved = path.read_text()
    for damaged in (
        "",
        "[]",
        saved.replace("10.0", "-1.0"),
        saved.replace(store._PROFILE_FORMAT, "0"),
    ):
        assert damaged != saved
        path.write_text(damaged)
        assert store.load_profile(local_machine) is None
    path.write_text(saved)
    path.chmod(0o666)  # a file that any user can write is not trusted
    assert store.load_profile(local_machine) is None


def agreement_job() -> tuple[str, str, str]:
    """Give each rank a different profile. Return the title of the profile that the mesh uses before
    and after the first matmul, and the plan."""

    def local_profile(device: str, size: int) -> tuple[str, Profile]:
        assert (device, size) == ("cpu", 4)
        return "this", replace(PROFILE, title=f"rank {dist.get_rank()}")

    with mock.patch.object(agreement, "load_local_profile", local_profile):
        mesh = make_mesh((2, 2))
        x = draw("x", (8, 8), mesh, (S0, S1)).sharded
        first = agreement.get_profile(mesh).title
        y = sharded_matmul(x, x)
        agreed = agreement.get_profile(mesh).title
        return first, agreed, f"{y.placements} {tpmesh.plans(x, x)[0]}"


def test_all_ranks_plan_for_the_machine_of_rank_0(ranks: RanksFixture) -> None:
    first, agreed, plans = zip(*ranks(4).run(agreement_job), strict=True)
    assert first == tuple(f"rank {rank}" for rank in range(4))
    assert agreed == ("rank 0",) * 4
    assert len(set(plans)) == 1
