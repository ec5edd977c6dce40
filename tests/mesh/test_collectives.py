"""Collectives along one axis and several axes of a mesh; sums and means of DTensors. Exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, R, draw, error_of, make_mesh
from tests.support.ranked import check_job, messages_of
from tpkernels import mesh as tpmesh


def axes_job() -> None:
    """Rank (i, j) is number 2 i + j; the order of several axes is that of the mesh."""
    mesh = make_mesh((2, 2))
    i, j = mesh.get_coordinate()  # type: ignore[misc]
    base = torch.arange(12.0).view(3, 4)

    def of(a: int, b: int) -> torch.Tensor:
        return base * (1 + 2 * a + b) - a

    every = [of(a, b) for a, b in itertools.product((0, 1), repeat=2)]
    along: dict[Any, tuple[int, list[torch.Tensor]]] = {  # this rank's number, and all addends
        "a": (i, [of(0, j), of(1, j)]),
        1: (j, [of(i, 0), of(i, 1)]),
        ("b",): (j, [of(i, 0), of(i, 1)]),
        ("a", "b"): (2 * i + j, every),
        ("b", "a"): (2 * i + j, every),
    }
    for axes, (number, addends) in along.items():
        total, world = torch.stack(addends).sum(0), len(addends)
        got = tpmesh.all_reduce(of(i, j), mesh, axes)
        assert torch.equal(got, total), f"all_reduce over {axes}: {got}"
        sizes = [3, 1, 0, 0] if world == 4 else [3, 1]
        got = tpmesh.reduce_scatter(of(i, j), mesh, axes, 1, shard_sizes=sizes)
        assert torch.equal(got, total.split(sizes, 1)[number]), f"reduce_scatter over {axes}: {got}"
        x = of(i, j).split(sizes, 1)[number].clone().requires_grad_()
        gathered = tpmesh.all_gather(x, mesh, axes, 1, shard_sizes=sizes)
        whole = torch.cat([one.split(sizes, 1)[n] for n, one in enumerate(addends)], 1)
        (grad,) = torch.autograd.grad(gathered, x, torch.ones_like(gathered))
        assert torch.equal(gathered, whole) and torch.equal(grad, torch.full_like(x, world)), axes


def summed(placement: Placement, dims: tuple[int, ...], keepdim: bool) -> Placement:
    """The placement of a sum over ``dims`` of a matrix."""
    if not isinstance(placement, Shard):
        return placement
    if placement.dim in dims:
        return R
    return placement if keepdim else S0


def sums_job() -> None:
    """Results and gradients of sums and means of every placement, with uneven shards."""
    mesh = make_mesh((2, 2), ["rows", "columns"])
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
                assert error is None, f"{case}: {error}"
                whole = y.redistribute(placements=[R, R]).to_local().sum()
                (grad,) = torch.autograd.grad(whole, x.sharded)
                assert (grad.to_local() == torch.tensor(1 / count)).all(), (case, grad)


def one_axis_job() -> list[str]:
    """A sum over one of two axes that split the dim is Partial along the other."""
    mesh = make_mesh((2, 2))
    x, exact = draw("x", (5, 3), mesh, (S0, S0)), torch.zeros(3, dtype=torch.float64)
    half = tpmesh.sharded_sum(x.sharded, 0, "b")
    whole = tpmesh.sharded_sum(half, (), "a")
    pairs = (half, (P, R)), (whole, (R, R))
    errors = [error_of(got, x.value.sum(0), exact, left) for got, left in pairs]
    return [error for error in errors if error is not None]


@pytest.mark.parametrize("job", [axes_job, sums_job, one_axis_job])
def test_collectives(ranks: RanksFixture, job: Callable[[], list[str]]) -> None:
    check_job(ranks(4), job)


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


def test_refusals(ranks: RanksFixture) -> None:
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
    for got in ranks(2).run(refusals_job):
        assert got == expected
