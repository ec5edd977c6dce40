"""Training with tensor parallelism (fused styles) on one mesh dim and FSDP2 on the second.

The model is a small transformer on the bytes of a sentence.

    torchrun --standalone --nproc-per-node 4 examples/train_fsdp_tp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpkernels.parallel import FusedColwiseParallel, FusedRowwiseParallel

SYMBOLS, WIDTH, HEADS, HIDDEN, LAYERS = 128, 64, 4, 160, 2
SEQUENCE, BATCH, STEPS = 32, 8, 40
TEXT = (
    "We hold these truths to be self-evident, that all men are created equal, that they are "
    "endowed by their Creator with certain unalienable Rights, that among these are Life, Liberty "
    "and the pursuit of Happiness."
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: local sequence shard, [batch, sequence / tp, width]."""
        normed = self.norm1(x)
        heads = [
            projection(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Between the matmuls the sequence (dim 1) is sharded.
GATHERED, SCATTERED = (
    FusedColwiseParallel(input_layouts=Shard(1)),
    FusedRowwiseParallel(output_layouts=Shard(1)),
)
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.norm[12]": SequenceParallel(),
    **{f"blocks.*.{name}": GATHERED for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}": SCATTERED for name in ("o", "down")},
    "norm": SequenceParallel(),
    "head": FusedColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # identical model on all ranks
    model = Model()
    parallelize_module(model, mesh["tp"], PLAN)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    data = torch.tensor(list(TEXT.encode()))
    draw = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        starts = torch.randint(0, len(data) - SEQUENCE - 1, (BATCH,), generator=draw)
        tokens = torch.stack([data[start : start + SEQUENCE + 1] for start in starts.tolist()])
        local = tokens.chunk(world // 2)[mesh.get_local_rank("dp")]  # identical on all tp ranks
        loss = F.cross_entropy(model(local[:, :-1]).flatten(0, 1), local[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % (STEPS // 4 - 1) == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
