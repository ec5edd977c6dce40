"""Torch tensor parallelism, compiled with the pass that inserts the fused ops.

The model does not import tpkernels.

    torchrun --standalone --nproc-per-node 2 examples/compile_pass.py
"""

from __future__ import annotations

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpkernels

BATCH, SEQUENCE, WIDTH, HIDDEN = 2, 64, 64, 192


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


PLAN = {
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # identical model and input on all ranks
    model = Block()
    x = torch.randn(BATCH, SEQUENCE, WIDTH)
    expected = model(x).chunk(world, 1)[rank]

    parallelize_module(model, mesh, PLAN)
    torch._inductor.config.force_disable_caches = True  # the report omits cached graphs
    fusion = tpkernels.compile.fuse_collectives(mesh)
    compiled = torch.compile(model, options=fusion.options)
    y = compiled(x.chunk(world, 1)[rank].contiguous())
    (y**2).sum().backward()
    if rank == 0:
        print(fusion.report)
        print(f"differs from one process by at most {(y - expected).abs().max().item():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
