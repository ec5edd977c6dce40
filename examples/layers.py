"""A transformer block built from the layers of ``tpkernels.nn``.

Trains for a few steps on random tokens. Then saves a sharded checkpoint and a full checkpoint.

    torchrun --standalone --nproc-per-node 2 examples/layers.py
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import tpkernels
from tpkernels import nn as tnn

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP = 512, 72, 9, 3, 8, 192
SEQUENCE, BATCH = 33, 2  # neither needs to be divisible by the number of ranks


class Block(nn.Module):
    """Block with sequence parallelism: between the matmuls x is [local rows, batch, width]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.embedding = tnn.VocabParallelEmbedding(VOCAB, WIDTH, group, sequence_parallel=True)
        self.norm1 = tnn.RMSNorm(WIDTH, group=group)
        self.attention = tnn.ParallelAttention(
            WIDTH, HEADS, KV_HEADS, HEAD_DIM, group, sequence_parallel=True
        )
        self.norm2 = tnn.RMSNorm(WIDTH, group=group)
        self.mlp = tnn.ParallelMLP(WIDTH, MLP, group, sequence_parallel=True)
        self.head = tnn.ParallelLMHead(WIDTH, VOCAB, group, bias=False, sequence_parallel=True)
        self.head.tie(self.embedding)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next-token loss of tokens [sequence + 1, batch]."""
        rows = tpkernels.shard_sizes(tokens.shape[0] - 1, self.group.size())
        x = self.embedding(tokens[:-1], shard_sizes=rows)
        x = self.attention(self.norm1(x), residual=x, shard_sizes=rows)
        x = self.mlp(self.norm2(x), residual=x, shard_sizes=rows)
        logits = self.head(x, shard_sizes=rows)  # logits of the local vocabulary shard
        return tnn.vocab_parallel_cross_entropy(logits, tokens[1:], self.group, VOCAB)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)  # all ranks build the same model, then keep a shard
    model = Block(group)
    tokens = torch.randint(0, VOCAB, (SEQUENCE + 1, BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder[0]}/sharded")  # loads with any world size
    full_state = tnn.full_state_dict(model)  # collective
    if dist.get_rank() == 0:
        torch.save(full_state, f"{folder[0]}/whole.pt")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved to {folder[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
