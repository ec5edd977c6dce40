"""Collectives along one axis and several axes of a mesh; sums and means of DTensors. Exact."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, R, draw, error_of, make_mesh
from tests.support.ranked import messages_of, report
from tpkernels import mesh as tpmesh


def gathers_job() -> dict[str, list[int]]:
    """What rank (i, j) of a 2 x 2 mesh gathers, each rank giving its number in the mesh."""
    mesh = make_mesh((2, 2))
    mine = torch.tensor([float(mesh.get_rank())])
    return {
        str(axes): tpmesh.all_gather(mine, mesh, axes).int().tolist()
        for axes in ("a", 1, ("a", "b"), ("b", "a"))
    }


def test_all_gather_along_each_axis(ranks: RanksFixture) -> None:
    """Rank (i, j) is number 2 i + j."""
    for number, got in enumerate(ranks(4).run(gathers_job)):
        i, j = divmod(number, 2)
        assert got == {
            "a": [j, 2 + j],
            "1": [2 * i, 2 * i + 1],
            "('a', 'b')": [0, 1, 2, 3],
            "('b', 'a')": [0, 1, 2, 3],
        }


def reductions_job() -> list[str]:
    mesh = make_mesh((2, 2))
    i, j = mesh.get_coordinate()  # type: ignore[misc]
    base = torch.arange(12.0).view(3, 4)

    def of(a: int, b: int) -> torch.Tensor:
        return base * (1 + 2 * a + b) - a

    each: dict[Any, list[torch.Tensor]] = {
        "a": [of(0, j), of(1, j)],
        ("b",): [of(i, 0), of(i, 1)],
        ("a", "b"): [of(a, b) for a, b in itertools.product((0, 1), repeat=2)],
    }
    wrong = []
    for axes, addends in each.items():
        total, world = torch.stack(addends).sum(0), len(addends)
        number = {"a": i, ("b",): j}.get(axes, 2 * i + j)
        got = tpmesh.all_reduce(of(i, j), mesh, axes)
        if not torch.equal(got, total):
            wrong.append(f"all_reduce over {axes}: {got}")
        sizes = [3, 1, 0, 0] if world == 4 else [3, 1]
        got = tpmesh.reduce_scatter(of(i, j), mesh, axes, 1, shard_sizes=sizes)
        if not torch.equal(got, total.split(sizes, 1)[number]):
            wrong.append(f"reduce_scatter over {axes}: {got}")
        x = of(i, j).split(sizes, 1)[number].clone().requires_grad_()
        gathered = tpmesh.all_gather(x, mesh, axes, 1, shard_sizes=sizes)
        (grad,) = torch.autograd.grad(gathered, x, torch.ones_like(gathered))
        if gathered.shape != base.shape or not torch.equal(grad, torch.full_like(x, world)):
            wrong.append(f"all_gather over {axes}: {gathered.shape}, {grad}")
    return wrong


def test_reductions_along_axes(ranks: RanksFixture) -> None:
    report(one for rank in ranks(4).run(reductions_job) for one in rank)


def summed(placement: Placement, dims: tuple[int, ...], keepdim: bool) -> Placement:
    """The placement of a sum over ``dims`` of a matrix."""
    if not isinstance(placement, Shard):
        return placement
    if placement.dim in dims:
        return R
    return placement if keepdim else S0


def sums_job() -> list[str]:
    """Results and gradients of sums and means of every placement, with uneven shards."""
    mesh = make_mesh((2, 2), ["rows", "columns"])
    wrong = []
    for placements in itertools.product((R, S0, S1, P), repeat=2):
        x = draw("x", (5, 3), mesh, placements)
        for dims, keepdim in (((0,), False), ((1,), True), ((0, 1), False), ((), True)):
            left = tuple(summed(one, dims, keepdim) for one in placements)
            for function in (tpmesh.sharded_sum, tpmesh.sharded_mean):
                mean = function is tpmesh.sharded_mean
                count = math.prod(x.value.shape[d] for d in dims) if mean else 1
                y = function(x.sharded, dims, keepdim=keepdim)
                total = x.value.sum(dims, keepdim=keepdim) if dims else x.value
                # One rounding of each rank's quotient, for which x.size is more than enough.
                rounding = torch.finfo(torch.float32).eps * x.size.sum() * (count > 1)
                bound = torch.full_like(total, float(rounding))
                case = f"{function.__name__} of {placements} over {dims}"
                error = error_of(y, total / count, bound, left)
                if error is not None:
                    wrong.append(f"{case}: {error}")
                whole = y.redistribute(placements=[R, R]).to_local().sum()
                (grad,) = torch.autograd.grad(whole, x.sharded)
                if not (grad.to_local() == torch.tensor(1 / count)).all():
                    wrong.append(f"{case}: gradient {grad}")
    return wrong


def test_sums_and_means(ranks: RanksFixture) -> None:
    report(one for rank in ranks(4).run(sums_job) for one in rank)


def axes_job() -> list[Any]:
    """A sum over one of two axes that split the dim is Partial along the other."""
    mesh = make_mesh((2, 2))
    x = draw("x", (5, 3), mesh, (S0, S0))
    half = tpmesh.sharded_sum(x.sharded, 0, "b")
    whole = tpmesh.sharded_sum(half, (), "a")
    return [
        half.placements,
        error_of(half, x.value.sum(0), torch.zeros(3, dtype=torch.float64), (P, R)),
        error_of(whole, x.value.sum(0), torch.zeros(3, dtype=torch.float64), (R, R)),
    ]


def test_a_sum_over_one_axis(ranks: RanksFixture) -> None:
    for result in ranks(4).run(axes_job):
        assert result == [(P, R), None, None]


def refusals_job() -> list[str]:
    mesh, plain = make_mesh((1, 2)), init_device_mesh("cpu", (1, 2))
    x, d = torch.ones(2, 3), DTensor.from_local(torch.ones(2, 3), mesh, [R, S1])
    return messages_of(
        [
            lambda: tpmesh.all_gather(x, mesh, "c"),
            lambda: tpmesh.all_gather(x, plain, "a"),
            lambda: tpmesh.all_reduce(x, mesh, (0, "a")),
            lambda: tpmesh.all_reduce(x, mesh, ()),
            lambda: tpmesh.all_reduce(x, plain, (0, 1)),
            lambda: tpmesh.reduce_scatter(d, mesh, "a"),
            lambda: tpmesh.sharded_sum(x),
            lambda: tpmesh.sharded_sum(d, 2),
            lambda: tpmesh.sharded_sum(d, 0, "b"),
        ]
    )


@pytest.mark.parametrize("world", [2])
def test_refusals(ranks: RanksFixture, world: int) -> None:
    expected = [
        "ValueError: the mesh has no axis 'c'; it has axes 0 to 1 named 'a', 'b'",
        "ValueError: the mesh has no axis 'a'; it has axes 0 to 1, without names",
        "ValueError: axes is (0, 'a'); name at least one axis, and each once",
        "ValueError: axes is (); name at least one axis, and each once",
        "ValueError: axes (0, 1) of a mesh without names cannot be made one group; pass "
        "mesh_dim_names to init_device_mesh",
        "TypeError: x is a DTensor; pass x.to_local(), or use x.redistribute",
        "TypeError: x is a Tensor, not a DTensor",
        "ValueError: dim is 2; x has 2 dims, and each can be named once",
        "ValueError: mesh axis 1 is S1 and splits none of the dims (0,): there is nothing to sum "
        "over along it",
    ]
    for got in ranks(world).run(refusals_job):
        assert got == expected
