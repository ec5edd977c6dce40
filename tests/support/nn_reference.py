"""A small language model built from ``tpkernels.nn`` layers, and its reference.

The reference is the same model in plain torch with unsharded parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tpkernels
from tpkernels import nn as tnn

F64 = torch.float64
#: World sizes. The model sizes are not multiples of 3.
SWEEP = (3, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 2, 4)))


@dataclass(frozen=True)
class Shape:
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 4
    hidden: int = 12
    mlp: int = 10
    vocab: int = 11
    sequence: int = 7
    batch: int = 2
    tied: bool = False
    bias: bool = True


class Model(nn.Module):
    """One decoder block between an embedding and a head. ``sequence_dim``: 0 or 1."""

    def __init__(
        self, shape: Shape, group: dist.ProcessGroup, sequence: bool, sequence_dim: int = 0
    ) -> None:
        super().__init__()
        self.shape, self.sequence, self.dim = shape, sequence, sequence_dim
        s, options = shape, {"sequence_parallel": sequence, "sequence_dim": sequence_dim}
        self.pg = group
        self.embed = tnn.VocabParallelEmbedding(
            s.vocab, s.hidden, group, padding_idx=2, dtype=F64, **options
        )
        self.norm1 = tnn.RMSNorm(s.hidden, group=group if sequence else None, dtype=F64)
        self.attention = tnn.ParallelAttention(
            s.hidden, s.heads, s.kv_heads, s.head_dim, group, bias=s.bias, out_bias=s.bias,
            dtype=F64, **options,
        )  # fmt: skip
        self.norm2 = tnn.RMSNorm(s.hidden, group=group if sequence else None, dtype=F64)
        self.mlp = tnn.ParallelMLP(s.hidden, s.mlp, group, bias=s.bias, dtype=F64, **options)
        self.head = tnn.ParallelLMHead(s.hidden, s.vocab, group, bias=False, dtype=F64, **options)
        if s.tied:
            self.head.tie(self.embed)

    def forward(self, ids: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        sizes = None
        if self.sequence:
            sizes = tpkernels.shard_sizes(ids.shape[self.dim], self.pg.size())
        x = self.embed(ids, shard_sizes=sizes)
        x = self.attention(self.norm1(x), rotary=rotary, residual=x, shard_sizes=sizes)
        x = self.mlp(self.norm2(x), residual=x, shard_sizes=sizes)
        return self.head(x, shard_sizes=sizes)

    def loss(
        self, ids: torch.Tensor, targets: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        logits = self(ids, rotary)
        return tnn.vocab_parallel_cross_entropy(logits, targets, self.pg, self.shape.vocab)


def reference_logits(
    p: dict[str, torch.Tensor],
    shape: Shape,
    ids: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    sequence_dim: int,
) -> torch.Tensor:
    """Compute the logits of `Model` from unsharded parameters."""
    x = F.embedding(ids, p["embed.weight"], 2)
    if sequence_dim == 0:
        x = x.transpose(0, 1)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary
        half = shape.head_dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    normed = F.rms_norm(x, (shape.hidden,), p["norm1.weight"], 1e-6)
    q, k, v = (
        linear(normed, f"attention.{n}_proj").unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        for n in "qkv"
    )
    ratio = shape.heads // shape.kv_heads
    k, v = (rotate(k).repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1))
    scores = rotate(q) @ k.transpose(-1, -2) * shape.head_dim**-0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    x = x + linear(attended.transpose(1, 2).flatten(2), "attention.o_proj")
    normed = F.rms_norm(x, (shape.hidden,), p["norm2.weight"], 1e-6)
    inner = F.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj")
    x = x + linear(inner, "mlp.down_proj")
    logits = linear(x, "head")
    return logits.transpose(0, 1) if sequence_dim == 0 else logits


def inputs(
    shape: Shape, sequence_dim: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Create (ids, targets, rotary), equal on all ranks.

    About one target in five is ignored.
    """
    torch.manual_seed(4)
    size = (shape.batch, shape.sequence)
    ids, targets = (torch.randint(0, shape.vocab, size) for _ in range(2))
    targets[torch.rand(size) < 0.2] = -100
    targets[0, 0] = 1  # if all were ignored, the mean would be NaN
    angles = torch.randn(shape.sequence, shape.head_dim // 2, dtype=F64).repeat(1, 2)
    if sequence_dim == 0:
        ids, targets = ids.t(), targets.t()
    return ids, targets, (angles.cos(), angles.sin())


def shard(model: nn.Module, name: str, full: torch.Tensor) -> torch.Tensor:
    """Return the local shard of an unsharded parameter, or of its gradient."""
    owner, _, parameter = name.rpartition(".")
    shardings = getattr(model.get_submodule(owner), "shardings", {})
    return shardings[parameter].shard(full) if parameter in shardings else full


def find_mismatch(got: torch.Tensor | None, want: torch.Tensor, scale: float = 1e-12) -> str | None:
    """Describe the mismatch of two float64 results, or return None.

    Each result has an error of at most a few hundred roundings, 1.1e-16 of the largest term each. A
    wrong term is always larger.
    """
    if got is None:
        return "there is none"
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    error = (got - want).abs().max().item() if want.numel() else 0.0
    limit = scale * max(1.0, want.abs().max().item() if want.numel() else 0.0)
    return None if error <= limit else f"off by {error:.3g}, allowed {limit:.3g}"
