"""Collectives along one or several axes of a mesh, and sums and means of DTensors."""

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
from tests.support.meshes import S0, S1, P, R, draw, find_error, make_mesh
from tests.support.ranked import check_job, collect_messages
from tpkernels import mesh as tpmesh
from tpkernels import sharded_matmul
from tpkernels.parallel import FusedRowwiseParallel


def axes_job() -> None:
    """Check collectives over every combination of axes. Rank (i, j) has index 2 i + j, and several
    axes follow the mesh order."""
    mesh = make_mesh((2, 2))
    i, j = mesh.get_coordinate()  # type: ignore[misc]
    base = torch.arange(12.0).view(3, 4)

    def operand(a: int, b: int) -> torch.Tensor:
        return base * (1 + 2 * a + b) - a

    operands = [operand(a, b) for a, b in itertools.product((0, 1), repeat=2)]
    cases: dict[Any, tuple[int, list[torch.Tensor]]] = {  # axes -> index of this rank, addends
        "a": (i, [operand(0, j), operand(1, j)]),
        1: (j, [operand(i, 0), operand(i, 1)]),
        ("b",): (j, [operand(i, 0), operand(i, 1)]),
        ("a", "b"): (2 * i + j, operands),
        ("b", "a"): (2 * i + j, operands),
    }
    for axes, (index, addends) in cases.items():
        total, world = torch.stack(addends).sum(0), len(addends)
        got = tpmesh.all_reduce(operand(i, j), mesh, axes)
        assert torch.equal(got, total), f"all_reduce over {axes}: {got}"
        sizes = [3, 1, 0, 0] if world == 4 else [3, 1]
        got = tpmesh.reduce_scatter(operand(i, j), mesh, axes, 1, shard_sizes=sizes)
        assert torch.equal(got, total.split(sizes, 1)[index]), f"reduce_scatter over {axes}: {got}"
        x = operand(i, j).split(sizes, 1)[index].clone().requires_grad_()
        gathered = tpmesh.all_gather(x, mesh, axes, 1, shard_sizes=sizes)
        full = torch.cat([addend.split(sizes, 1)[n] for n, addend in enumerate(addends)], 1)
        (grad,) = torch.autograd.grad(gathered, x, torch.ones_like(gathered))
        assert torch.equal(gathered, full) and torch.equal(grad, torch.full_like(x, world)), axes


def summed(placement: Placement, dims: tuple[int, ...], keepdim: bool) -> Placement:
    """Return the placement of a matrix after a sum over ``dims``."""
    if not isinstance(placement, Shard):
        return placement
    if placement.dim in dims:
        return R
    return placement if keepdim else S0


def sums_job() -> None:
    """Check results and gradients of sums and means for every placement, with uneven shards."""
    mesh = make_mesh((2, 2), ["rows", "columns"])
    for placements in itertools.product((R, S0, S1, P), repeat=2):
        x = draw("x", (5, 3), mesh, placements)
        for dims, keepdim in (((0,), False), ((1,), True), ((0, 1), False), ((), True)):
            out_placements = tuple(summed(placement, dims, keepdim) for placement in placements)
            for function in (tpmesh.sharded_sum, tpmesh.sharded_mean):
                mean = function is tpmesh.sharded_mean
                count = math.prod(x.value.shape[d] for d in dims) if mean else 1
                y = function(x.sharded, dims, keepdim=keepdim)
                total = x.value.sum(dims, keepdim=keepdim) if dims else x.value
                # Each rank rounds its quotient once, and x.size exceeds the quotients.
                rounding = torch.finfo(torch.float32).eps * x.size.sum() * (count > 1)
                bound = torch.full_like(total, float(rounding))
                case = f"{function.__name__} of {placements} over {dims}"
                error = find_error(y, total / count, bound, out_placements)
                assert error is None, f"{case}: {error}"
                full_sum = y.redistribute(placements=[R, R]).to_local().sum()
                (grad,) = torch.autograd.grad(full_sum, x.sharded)
                assert (grad.to_local() == torch.tensor(1 / count)).all(), (case, grad)


def one_axis_job() -> list[str]:
    """Two axes shard the dim. A sum over axis b leaves the result Partial along axis a."""
    mesh = make_mesh((2, 2))
    x, exact = draw("x", (5, 3), mesh, (S0, S0)), torch.zeros(3, dtype=torch.float64)
    partial = tpmesh.sharded_sum(x.sharded, 0, "b")
    full = tpmesh.sharded_sum(partial, (), "a")
    pairs = (partial, (P, R)), (full, (R, R))
    errors = [find_error(got, x.value.sum(0), exact, placements) for got, placements in pairs]
    return [error for error in errors if error is not None]


@pytest.mark.parametrize("job", [axes_job, sums_job, one_axis_job])
def test_collectives(ranks: RanksFixture, job: Callable[[], list[str]]) -> None:
    check_job(ranks(4), job)


def refusals_job() -> list[str]:
    mesh, plain = make_mesh((1, 2)), init_device_mesh("cpu", (1, 2))
    x, d = torch.ones(2, 3), DTensor.from_local(torch.ones(2, 3), mesh, [R, S1])
    return collect_messages(
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
    """Return the errors on meshes whose ranks do not ascend along a dim. Some ranks cannot detect
    this from their coordinates."""
    permuted = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("rows", "turned"))
    transposed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    line = DeviceMesh("cpu", [2, 1, 0, 3])
    group = line.get_group()
    x, rank = torch.tensor([float(dist.get_rank())]), dist.get_rank()
    linear = nn.Linear(4, 4)
    sharded = distribute_tensor(torch.ones(4, 4), permuted, (S0, S1))
    messages = collect_messages(
        [
            lambda: tpmesh.all_gather(x, permuted, "turned"),
            lambda: tpmesh.reduce_scatter(torch.ones(4), transposed, ("a", "b")),
            lambda: sharded_matmul(sharded, sharded),
            lambda: tpkernels.all_gather(x, line),
            lambda: torch.compile(tpkernels.all_gather, backend="eager", fullgraph=True)(x, line),
            lambda: tpkernels.nn.ColumnParallelLinear(4, 4, line),
            lambda: parallelize_module(linear, line, FusedRowwiseParallel()),
        ]
    )
    assert not isinstance(linear.weight, DTensor)
    for mesh, axis, ranks in (
        (permuted, "rows", ([0, 3], [1, 2])),
        (transposed, "a", ([0, 1], [2, 3])),
        (transposed, 1, ([0, 2], [1, 3])),
    ):
        got = tpmesh.all_gather(x, mesh, axis).tolist()
        assert got == next(row for row in ranks if rank in row), (mesh, axis, got)
    # The error suggests this call instead.
    assert tpkernels.all_gather(x, group).tolist() == [0, 1, 2, 3]
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
