"""The fused styles on one dim of a mesh, FSDP2 on the other: the gradients of the unsharded model,
and checkpoints that load into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from cases import RanksFixture
from ranked import report
from test_styles import Block, plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

BATCH, TOKENS = 4, 6


def _loss(y: torch.Tensor) -> torch.Tensor:
    return (y**2).sum() / BATCH


def mesh_job(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, model_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    torch.manual_seed(2)
    whole, model = Block(), Block()
    model.load_state_dict(whole.state_dict())
    parallelize_module(model, mesh["tp"], plan(fused=True))
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(BATCH, TOKENS, 8)
    _loss(whole(x)).backward()
    mine = x.chunk(2)[data].chunk(2, 1)[model_rank]
    (2 * _loss(model(mine))).backward()  # FSDP takes the mean of the two
    failures = []
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad: Any = p.grad
        got, want = grad.full_tensor(), q.grad
        assert want is not None
        if not torch.allclose(got, want, rtol=1e-4, atol=1e-5):
            failures.append(f"{name} {p}: differs by {(got - want).abs().max()}")

    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    dcp.save(dcp_state.get_model_state_dict(model), checkpoint_id=folder)
    fresh = {name: torch.zeros_like(value) for name, value in whole.state_dict().items()}
    dcp.load(fresh, checkpoint_id=folder)
    for name, value in whole.state_dict().items():
        if not torch.equal(fresh[name], 3 * value):
            failures.append(f"the checkpoint's {name} differs")
    dist.barrier()
    return failures


def test_gradients_and_checkpoints_of_a_mesh(ranks: RanksFixture, tmp_path: Path) -> None:
    report(f for rank in ranks(4).run(mesh_job, str(tmp_path), timeout=200) for f in rank)
