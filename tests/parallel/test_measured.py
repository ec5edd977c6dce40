"""The fused styles on a mesh of GPUs, for which one of CPUs is taken."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.support.cases import RanksFixture
from tpkernels import groups
from tpkernels.bench.specs import Spec
from tpkernels.parallel import FusedColwiseParallel, FusedRowwiseParallel, styles
from tpkernels.planning.table import Measurement, Table

F32 = torch.float32
STYLES: dict[str, Any] = {
    "all_gather_matmul": lambda: FusedColwiseParallel(input_layouts=Shard(0)),
    "matmul_reduce_scatter": lambda: FusedRowwiseParallel(output_layouts=Shard(0)),
    "matmul_all_reduce": lambda: FusedRowwiseParallel(output_layouts=Replicate()),
}


def style_job(op: str, ms: dict[str, float] | None, width: int) -> tuple[str, bool]:
    """What a Linear(24, 40) becomes, with times for rows of that width; and whether it is right."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    linear, whole = nn.Linear(24, 40), nn.Linear(24, 40)
    whole.load_state_dict(linear.state_dict())
    group = groups.get(mesh.get_group().group_name)
    group.measured.tables.pop("cuda", None)
    if ms is not None:
        shape = (64, 40, width) if op == "all_gather_matmul" else (64, width, 24)
        spec = Spec(op, shape, F32)
        key = spec.problem(world, "cuda").tuning_key
        assert key is not None
        one = Measurement(*key, other=spec.other, ms=ms, date="2026-11-22")
        group.measured.tables["cuda"] = Table((one,))
    with mock.patch.object(styles, "_has_gpus", lambda mesh: True):
        parallelize_module(linear, mesh, STYLES[op]())
    group.measured.tables.pop("cuda", None)
    x = torch.randn(8, 24)
    rank, column = dist.get_rank(), op == "all_gather_matmul"
    y = linear(x.chunk(world)[rank] if column else x.chunk(world, 1)[rank])
    want = whole(x)
    if op == "matmul_reduce_scatter":
        want = want.chunk(world)[rank]
    elif column:
        want = want.chunk(world, 1)[rank]
    return type(linear).__name__, torch.allclose(y, want, atol=1e-5)


@pytest.mark.parametrize("op", STYLES)
def test_torchs_style_stays_unless_the_op_is_faster(ranks: RanksFixture, op: str) -> None:
    width = 24 if op == "all_gather_matmul" else 40
    fast, slow = {"unfused": 2.0, "direct": 1.0}, {"unfused": 1.0, "direct": 2.0}
    fused = "_ColwiseLinear" if op == "all_gather_matmul" else "_RowwiseLinear"
    for ms, at, name in (
        (None, width, "Linear"),
        (slow, width, "Linear"),
        (fast, width, fused),
        (fast, width + 8, "Linear"),
    ):
        for found in ranks(2).run(style_job, op, ms, at):
            assert found == (name, True), (ms, at)
