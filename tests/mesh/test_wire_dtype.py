"""Sharded products of bf16 whose partial results travel in fp32."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, Placements, R, make_mesh, take
from tests.support.ranked import report
from tests.support.tiers import thorough
from tpkernels import mesh as tpmesh

BF16, F32 = torch.bfloat16, torch.float32

# x, w and the result. The result is partial on one mesh dim or on both.
SUMS: dict[tuple[int, ...], list[tuple[Placements, Placements, Placements]]] = {
    (2,): [((S1,), (S0,), (out,)) for out in (R, S0, S1)] + [((P,), (R,), (R,))],
    (2, 2): [((S1, S1), (S0, S0), out) for out in [(R, R), (S0, S0), (S1, S0), (R, S0), (S0, R)]],
}
M, K, N = 6, 8, 4


def operand(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """In bf16. Of a Partial one, the first rank has the first half of the columns."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    mine = whole.clone()
    for at, one in zip(coordinate, placements, strict=True):
        if one == P:
            mine[:, K // 2 :] *= at > 0
            mine[:, : K // 2] *= at == 0
    local = take(mine, placements, mesh).to(BF16)
    return DTensor.from_local(local, mesh, placements, run_check=False)


def summed_job(mesh_shape: tuple[int, ...]) -> tuple[list[str], int]:
    """What is wrong with sums of 257, -256 and zeros, and how many are if partials travel in bf16,
    in which 257 is 256. One stays Partial along one of two mesh dims."""
    mesh, wrong, narrow = make_mesh(mesh_shape), [], 0
    rows = torch.zeros(M, K)
    rows[:, 0], rows[:, 1], rows[:, K // 2] = 256, 1, -256
    for x, w, out in SUMS[mesh_shape]:
        a, b = operand(rows, mesh, x), operand(torch.ones(K, N), mesh, w)
        for plan in tpmesh.plans(a, b, out, wire_dtype=F32):
            y = tpkernels.sharded_matmul(a, b, out, plan.strategy, wire_dtype=F32)
            if y.dtype != BF16 or not (y.to_local() == 1).all():
                wrong.append(f"{x} {w} {out}: {plan} gives {y.to_local()}")
            z = tpkernels.sharded_matmul(a, b, out, plan.strategy)
            narrow += not (z.to_local() == 1).all()
    if len(mesh_shape) == 2:
        rows[:, 2], rows[:, K // 2] = -256, 0
        a, b = operand(rows, mesh, (S1, S1)), operand(torch.ones(K, N), mesh, (S0, S0))
        y = tpkernels.sharded_matmul(a, b, [P, R], "K,K", wire_dtype=F32)
        total = y.to_local().clone()
        dist.all_reduce(total, group=mesh.get_group(0))
        if y.dtype != BF16 or not (total == 1).all():
            wrong.append(f"left Partial: {y}")
    return wrong, narrow


@pytest.mark.parametrize("mesh_shape", [(2,), thorough((2, 2))], ids=str)
def test_sums_that_are_exact_in_fp32_only(ranks: RanksFixture, mesh_shape: tuple[int, ...]) -> None:
    wrong, narrow = zip(*ranks(math.prod(mesh_shape)).run(summed_job, mesh_shape), strict=True)
    report(failure for rank in wrong for failure in rank)
    assert max(narrow) > 0
