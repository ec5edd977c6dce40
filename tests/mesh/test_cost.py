"""The cost model: exact times of a machine with round rates, and the plans that follow. Published
figures are in planning/test_cost.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, Placements, R, draw, make_mesh
from tpkernels import mesh as tpmesh
from tpkernels import sharded_matmul
from tpkernels.mesh import agreement
from tpkernels.mesh.planner import MatmulProblem, choose, estimate, plans_for, ranked
from tpkernels.planning import store
from tpkernels.planning.cost import (
    Link,
    Profile,
    all_to_all_seconds,
    collective_seconds,
    fused_seconds,
    machine_named,
    machines,
    product_seconds,
)
from tpkernels.planning.machine import this_machine

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


def problem(
    x: Placements,
    w: Placements,
    out: Placements | None,
    mesh: tuple[int, ...] = (2,),
    size: int = 8,
) -> MatmulProblem:
    return MatmulProblem(m=size, k=size, n=size, mesh_shape=mesh, x=x, w=w, out=out, itemsize=4)


def test_a_product_is_bound_by_flops_or_by_memory() -> None:
    assert product_seconds(MACHINE, 100, 100, 100, 4) == 2e6 / 100
    assert product_seconds(MACHINE, 100, 100, 100, 2) == 2e6 / 200
    assert product_seconds(MACHINE, 1, 4, 5, 4) == (4 + 20 + 5) * 4 / 40
    both = 2 * 20 / 100 + (4 + 20 + 5) * 4 / 40
    assert product_seconds(replace(MACHINE, overlaps=False), 1, 4, 5, 4) == pytest.approx(both)


@pytest.mark.parametrize(
    ("ranks", "stride", "passes", "seconds"),
    [
        (1, 1, 1, 0.0),
        (4, 1, 1, 1 + 3 * 0.5 + 60 / 10),
        (4, 1, 2, 1 + 2 * (3 * 0.5 + 60 / 10)),
        (4, 4, 1, 2 + 3 * 1 + 60 / 5),  # one rank of each node
        (4, 2, 1, (2 + 1 + 20 / 5) + (1 + 0.5 + 40 / 10)),  # two of each of two nodes
        (8, 1, 1, (2 + 1 + 10 / 5) + (1 + 3 * 0.5 + 60 / 10)),
        (6, 1, 1, (2 + 1 + 80 / 6 / 5) + (1 + 2 * 0.5 + 80 * 2 / 3 / 10)),  # three of each of two
    ],
)
def test_a_collective(ranks: int, stride: int, passes: int, seconds: float) -> None:
    assert collective_seconds(MACHINE, 80, ranks, stride=stride, passes=passes) == pytest.approx(
        seconds
    )


@pytest.mark.parametrize(
    ("ranks", "stride", "seconds"),
    [
        (1, 1, 0.0),
        (4, 1, 1 + 3 * 0.5 + 60 / 10),
        (4, 4, 2 + 3 * 1 + 60 / 5),  # one rank of each node
        (8, 1, (2 + 4 * 1 + 40 / 5) + (1 + 3 * 0.5 + 30 / 10)),  # four of the other node
    ],
)
def test_an_all_to_all(ranks: int, stride: int, seconds: float) -> None:
    assert all_to_all_seconds(MACHINE, 80, ranks, stride=stride) == pytest.approx(seconds)


def test_an_all_to_all_of_a_plan() -> None:
    """The rows of x for its columns: 256 bytes on eight ranks, four to a node."""
    given = problem((S0,), (S0,), (P,), mesh=(8,))
    (plan,) = [each for each in plans_for(given) if each.strategy == "K"]
    assert [step.kind for step in plan.steps] == ["all_to_all"]
    seconds = (2 + 4 * 1 + 16 / 5) + (1 + 3 * 0.5 + 12 / 10)
    assert estimate(plan, given, MACHINE).communication == pytest.approx(seconds)


def test_a_fused_step_hides_all_but_a_chunk() -> None:
    shape, alone = (100, 100, 100), 2e6 / 100
    for communication in (alone / 8, 4 * alone):
        least, most = sorted((alone, communication))
        got = fused_seconds(MACHINE, shape, 0, communication, 4, 4)
        assert got == pytest.approx(most + least / 4)
        serial = replace(MACHINE, overlaps=False)
        apart = fused_seconds(serial, shape, 0, communication, 4, 4)
        assert apart == product_seconds(serial, *shape, 4) + communication


def test_a_product_of_few_rows_is_not_cut() -> None:
    """Each chunk would read the whole weight."""
    alone = product_seconds(MACHINE, 4, 100, 100, 4)
    assert fused_seconds(MACHINE, (4, 100, 100), 0, alone / 10, 4, 4) == alone * 1.1


def test_a_plan() -> None:
    """A gather of rows of x, which is one op with the product, and nothing else."""
    given = problem((S0,), (S1,), (S1,))
    (plan,) = [each for each in plans_for(given) if each.strategy == "N"]
    got = estimate(plan, given, MACHINE)
    product = max(2 * 8 * 8 * 4 / 100, (64 + 32 + 32) * 4 / 40)
    gather = 1 + 0.5 + 8 * 8 * 4 / 2 / 10
    half = max(2 * 4 * 8 * 4 / 100, (32 + 32 + 16) * 4 / 40)
    assert (got.product, got.communication) == (product, gather)
    assert got.seconds == pytest.approx(gather / 2 + max(half, gather / 2) + half)
    assert got.exposed == got.seconds - product
    # Halves of x and w, the gathered x, half of the result.
    assert got.memory == 4 * (32 + 32 + 64 + 32)


def test_the_first_mesh_dim_spans_nodes() -> None:
    for x, seconds in (((S0, R), 2 + 1 + 128 / 5), ((R, S0), 1 + 3 * 0.5 + 192 / 10)):
        given = problem(x, (R, R), (R, R), mesh=(2, 4))
        (plan,) = [each for each in plans_for(given) if each.strategy == "none,none"]
        assert estimate(plan, given, MACHINE).communication == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("x", "w", "out", "strategy", "elements"),
    [
        ((S0,), (R,), (S0,), "M", 32 + 64 + 32),
        ((S1,), (S0,), (S0,), "K", 32 + 32 + 64 + 32),  # the partial result, then its shard
        ((S1,), (S0,), (P,), "K", 32 + 32 + 64),
        ((R,), (S1,), (R,), "N", 64 + 32 + 32 + 64),
        ((R,), (R,), (S0,), "none", 64 + 64 + 64 + 32),
    ],
)
def test_peak_memory(
    x: Placements, w: Placements, out: Placements, strategy: str, elements: int
) -> None:
    given = problem(x, w, out)
    (plan,) = [each for each in plans_for(given) if each.strategy == strategy]
    assert estimate(plan, given, MACHINE).memory == 4 * elements


@pytest.mark.parametrize(
    ("x", "w", "out", "elements", "partials"),
    [
        ((S1,), (S0,), (P,), 32 + 32 + 64, 0),  # nothing moves it
        ((S1,), (S0,), (S0,), 32 + 32 + 32, 64),
        ((S1, S1), (S0, S0), (S0, P), 16 + 16, 64 + 32),  # Partial on one mesh dim to the end
    ],
)
def test_peak_memory_with_wider_partials(
    x: Placements, w: Placements, out: Placements, elements: int, partials: int
) -> None:
    given = replace(problem(x, w, out, mesh=(2,) * len(x)), itemsize=2, partial_itemsize=4)
    plan = next(each for each in plans_for(given) if set(each.strategy) <= set("K,"))
    assert estimate(plan, given, MACHINE).memory == 2 * elements + 4 * partials


def test_the_fastest_is_not_the_one_with_the_fewest_bytes() -> None:
    given = problem((S0, R), (S1, R), (R, R), mesh=(2, 4), size=8192)
    by_bytes = choose(given, "auto")
    by_time = choose(given, "auto", machine_named("h200"))
    times = {plan: each.seconds for plan, each in ranked(given, machine_named("h200"))}
    assert by_time.nbytes > by_bytes.nbytes and times[by_time] < times[by_bytes]
    assert list(times.values()) == sorted(times.values())


def test_bytes_decide_between_equals() -> None:
    free = Link(call=1e-30, step=0.0, bandwidth=1e30)
    machine = replace(MACHINE, flops=(1e30,) * 3, bandwidth=1e30, within=free, between=free)
    given = problem((S0, S1), (S1, S0), (R, S0), mesh=(2, 2))
    assert [plan for plan, _ in ranked(given, machine)] == list(plans_for(given))


def test_what_does_not_fit_comes_last() -> None:
    given = problem((R, R), (R, S0), (R, S0), mesh=(2, 4), size=64)
    pairs = ranked(given, MACHINE)
    least = min(each.memory for _, each in pairs)
    assert pairs[0][1].memory > least
    small = ranked(given, replace(MACHINE, memory=least))
    assert small[0][1].memory == least and set(small) == set(pairs)
    fits = [each.memory <= least for _, each in small]
    assert fits == sorted(fits, reverse=True)


def test_an_unknown_strategy() -> None:
    with pytest.raises(ValueError, match=r"no strategy 'rows' for S0 @ R -> any"):
        choose(problem((S0,), (R,), None), "rows", MACHINE)


@pytest.mark.parametrize("name", machines())
def test_every_machine_is_complete(name: str) -> None:
    machine = machine_named(name)
    assert machine.source and machine.title and machine.node >= 1
    assert min(*machine.flops, machine.bandwidth) > 1e9
    for link in (machine.within, machine.between):
        assert link.call > 0 and link.bandwidth > 1e9
    assert store.profile_in(store.profile_text(machine)) == machine


def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for title, name in (
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("new", "h100"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda title=title: title)
        assert store.own_machine("cuda", 8) == (name, machine_named(name))
    assert store.own_machine("cpu", 8) == ("zen4-core", machine_named("zen4-core"))


def test_measured_rates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = this_machine("cpu", 2, 1, True)
    path = store.save_rates(here, MACHINE)
    assert store.load_rates(here) == MACHINE
    assert store.own_machine("cpu", 2) == ("this", MACHINE)
    assert store.own_machine("cpu", 3)[0] == "zen4-core"
    kept = path.read_text()
    for damaged in ("", "[]", kept.replace("10.0", "-1.0"), kept.replace(store._RATES_FORMAT, "0")):
        assert damaged != kept
        path.write_text(damaged)
        assert store.load_rates(here) is None
    path.write_text(kept)
    path.chmod(0o666)  # anybody can have written it
    assert store.load_rates(here) is None


def agreement_job() -> tuple[str, str, str]:
    """The machine before and after the first product, if each rank has another, and the plan."""

    def own(device: str, size: int) -> tuple[str, Profile]:
        assert (device, size) == ("cpu", 4)
        return "this", replace(MACHINE, title=f"rank {dist.get_rank()}")

    with mock.patch.object(agreement, "own_machine", own):
        mesh = make_mesh((2, 2))
        x = draw("x", (8, 8), mesh, (S0, S1)).sharded
        first = agreement.known_machine(mesh).title
        y = sharded_matmul(x, x)
        agreed = agreement.known_machine(mesh).title
        return first, agreed, f"{y.placements} {tpmesh.plans(x, x)[0]}"


def test_all_ranks_plan_by_the_first_ranks_machine(ranks: RanksFixture) -> None:
    first, agreed, plans = zip(*ranks(4).run(agreement_job), strict=True)
    assert first == tuple(f"rank {rank}" for rank in range(4))
    assert agreed == ("rank 0",) * 4
    assert len(set(plans)) == 1
