"""Collectives along one axis and several axes of a mesh; sums and means of DTensors. Exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, R, draw, error_of, make_mesh
from tests.support.ranked import check_job, messages_of
from tpkernels import mesh as tpmesh
from tpkernels import sharded_matmul
from tpkernels.parallel import FusedRowwiseParallel


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
        "ValueError: axes (0, 1) of a mesh without dim names cannot be combined into one "
        "group; pass mesh_dim_names to init_device_mesh",
        "TypeError: x is a DTensor; pass x.to_local(), or use x.redistribute",
        "TypeError: x is a Tensor, not a DTensor",
        "ValueError: dim is 2; x has 2 dims, and dim must contain each of them at most once",
        "ValueError: axes contains mesh axis 1, but its placement is S1, which does not shard the "
        "summed dims (0,); remove it from axes",
    ]
    for got in ranks(2).run(refusals_job):
        assert got == expected


def permuted_job() -> list[str]:
    """Meshes whose ranks do not ascend along a dim, of which some ranks could not know that by
    their own coordinates."""
    turned = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("rows", "turned"))
    upward = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    line = DeviceMesh("cpu", [2, 1, 0, 3])
    group = line.get_group()
    x, rank = torch.tensor([float(dist.get_rank())]), dist.get_rank()
    linear = nn.Linear(4, 4)
    sharded = distribute_tensor(torch.ones(4, 4), turned, (S0, S1))
    messages = messages_of(
        [
            lambda: tpmesh.all_gather(x, turned, "turned"),
            lambda: tpmesh.reduce_scatter(torch.ones(4), upward, ("a", "b")),
            lambda: sharded_matmul(sharded, sharded),
            lambda: tpkernels.all_gather(x, line),
            lambda: torch.compile(tpkernels.all_gather, backend="eager", fullgraph=True)(x, line),
            lambda: tpkernels.nn.ColumnParallelLinear(4, 4, line),
            lambda: parallelize_module(linear, line, FusedRowwiseParallel()),
        ]
    )
    assert not isinstance(linear.weight, DTensor)
    for mesh, axis, ranks in (
        (turned, "rows", ([0, 3], [1, 2])),
        (upward, "a", ([0, 1], [2, 3])),
        (upward, 1, ([0, 2], [1, 3])),
    ):
        got = tpmesh.all_gather(x, mesh, axis).tolist()
        assert got == next(one for one in ranks if rank in one), (mesh, axis, got)
    assert tpkernels.all_gather(x, group).tolist() == [0, 1, 2, 3]  # as the message advises
    return messages


def test_a_mesh_whose_ranks_do_not_ascend_is_refused(ranks: RanksFixture) -> None:
    expected = [
        "mesh dim 1 has ranks [3, 2], but the order in their process group is [2, 3]",
        "mesh dim 0 has ranks [0, 2, 1, 3], but the order in their process group is [0, 1, 2, 3]",
        "mesh dim 1 has ranks [3, 2], but the order in their process group is [2, 3]",
        *["mesh dim 0 has ranks [2, 1, 0, 3], but the order in their process group is [0, 1, 2, 3]"]
        * 4,
    ]
    for messages in ranks(4).run(permuted_job):
        for got, want in zip(messages, expected, strict=True):
            assert "NotImplementedError: " in got and want in got, got
