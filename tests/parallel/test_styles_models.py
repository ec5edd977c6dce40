"""The fused styles in a model, together with torch's: gradients, optimizer steps and state dict are
those of the unsharded model, also compiled, and with FSDP2 and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)

from tests.support.ranked import on_ranks
from tpkernels.parallel import FusedColwiseParallel, FusedRowwiseParallel

BATCH, TOKENS, WIDTH, HIDDEN = 4, 12, 8, 12


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )
        self.norm2, self.gated = nn.RMSNorm(WIDTH), Gated()
        self.head = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.down(self.up(self.norm1(x)).relu())
        return self.head(x + self.gated(self.norm2(x)))


# The gated block gathers once for gate and up, with DTensors; its last layer is fused.
PLAN = {
    "norm1": SequenceParallel(),
    "up": FusedColwiseParallel(input_layouts=Shard(1)),
    "down": FusedRowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "gated": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "gated.gate": ColwiseParallel(use_local_output=False),
    "gated.up": ColwiseParallel(use_local_output=False),
    "gated.down": FusedRowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def _models(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """(unsharded, parallel), in float64: a difference larger than rounding is an error."""
    torch.manual_seed(2)
    whole, model = Model().double(), Model().double()
    model.load_state_dict(whole.state_dict())
    parallelize_module(model, mesh, PLAN)
    return whole, model


def _share(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


def _tokens(tokens: int = TOKENS) -> torch.Tensor:
    draw = torch.Generator().manual_seed(tokens)
    return torch.randn(BATCH, tokens, WIDTH, dtype=torch.float64, generator=draw)


def _differences(model: nn.Module, whole: nn.Module) -> list[str]:
    """Gradients that differ from those of the unsharded model."""
    failures = []
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad, want = p.grad, q.grad
        got = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert got is not None and want is not None
        if not torch.allclose(got, want, rtol=1e-12, atol=1e-12):
            failures.append(f"the gradient of {name} differs by {(got - want).abs().max()}")
    return failures


@on_ranks(2)
def test_among_torchs_styles() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole, model = _models(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (whole, model)]
    for module, x in ((whole, _tokens()), (model, _share(_tokens(), mesh))):
        (module(x) ** 2).sum().backward()
    failures = _differences(model, whole)
    for optimizer in optimizers:
        optimizer.step()
    full = dcp_state.StateDictOptions(full_state_dict=True)
    state = dcp_state.get_model_state_dict(model, options=full)
    if list(state) != list(whole.state_dict()):
        failures.append(f"the state dict has {list(state)}")
    for name, want in whole.state_dict().items():
        if not torch.allclose(state[name], want, rtol=1e-9, atol=1e-9):
            failures.append(f"{name} differs by {(state[name] - want).abs().max()} after a step")
    return failures


@pytest.mark.thorough
@on_ranks(4, timeout=200)
def test_with_fsdp_on_a_mesh(tmp_path: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, model = _models(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    x = _tokens()
    (whole(x) ** 2).sum().backward()
    mine = x.chunk(2)[mesh.get_local_rank("dp")]
    (2 * (model(_share(mine, mesh["tp"])) ** 2).sum()).backward()  # FSDP takes the mean of the two
    failures = _differences(model, whole)

    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    dcp.save(dcp_state.get_model_state_dict(model), checkpoint_id=tmp_path)
    fresh = {name: torch.zeros_like(value) for name, value in whole.state_dict().items()}
    dcp.load(fresh, checkpoint_id=tmp_path)
    for name, value in whole.state_dict().items():
        if not torch.equal(fresh[name], 3 * value):
            failures.append(f"the checkpoint's {name} differs")
    dist.barrier()
    return failures
