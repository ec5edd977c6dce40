"""A small transformer over bytes, written once for two ways to multiply: unsharded in one process,
or tensor-parallel with sequence parallelism through the ops. Activations: [sequence, batch, width].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from tests.support.paths import DATA

TEXT = DATA / "declaration_of_independence.txt"
SEQUENCE, BATCH, WIDTH, HIDDEN, HEADS, LAYERS = 64, 4, 32, 88, 4, 2
SYMBOLS = 128
COLUMN, ROW = ("q", "k", "v", "gate", "up"), ("o", "down")

Parameters = dict[str, torch.Tensor]


class Whole:
    """The products of the unsharded model."""

    rank, world = 0, 1

    def column(self, x: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
        return [x @ w.t() for w in weights]

    def row(self, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x @ w.t() + residual

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Parallel:
    """Column- and row-parallel products; between them each rank has its rows of the sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()

    def column(self, x: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
        result: list[torch.Tensor] = tpkernels.all_gather_matmul(
            x, [w.t() for w in weights], self.group
        )
        return result

    def row(self, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return tpkernels.matmul_reduce_scatter(x, w.t(), self.group, residual=residual)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return tpkernels.all_reduce(x, self.group)


Way = Whole | Parallel


def parameters(way: Way) -> Parameters:
    """The same initial model for both ways; this rank's part of it."""
    torch.manual_seed(11)
    whole = {"embedding": torch.randn(SYMBOLS, WIDTH) * 0.1, "norm": torch.ones(WIDTH)}
    whole["positions"] = torch.randn(SEQUENCE, WIDTH) * 0.1
    whole["head"] = torch.randn(SYMBOLS, WIDTH) * WIDTH**-0.5
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            whole[f"{layer}.{name}"] = torch.randn(WIDTH, WIDTH) * WIDTH**-0.5
        for name in ("gate", "up"):
            whole[f"{layer}.{name}"] = torch.randn(HIDDEN, WIDTH) * WIDTH**-0.5
        whole[f"{layer}.down"] = torch.randn(WIDTH, HIDDEN) * HIDDEN**-0.5
        whole |= {f"{layer}.norm{i}": torch.ones(WIDTH) for i in (1, 2)}
    parts = {}
    for name, value in whole.items():
        kind = name.rpartition(".")[2]
        dim = 0 if kind in COLUMN else 1 if kind in ROW else None
        part = value if dim is None else value.chunk(way.world, dim)[way.rank]
        parts[name] = part.clone().requires_grad_()
    return parts


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = [x.unflatten(-1, (-1, WIDTH // HEADS)).permute(1, 2, 0, 3) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, is_causal=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def loss(way: Way, p: Parameters, tokens: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the mean loss; tokens [SEQUENCE + 1, BATCH]."""
    rows = slice(way.rank * SEQUENCE // way.world, (way.rank + 1) * SEQUENCE // way.world)
    inputs, targets = tokens[:-1][rows], tokens[1:][rows]
    x = p["embedding"][inputs] + p["positions"][rows, None]
    for layer in range(LAYERS):
        normed = F.rms_norm(x, (WIDTH,), p[f"{layer}.norm1"])
        q, k, v = way.column(normed, *(p[f"{layer}.{name}"] for name in ("q", "k", "v")))
        x = way.row(_attend(q, k, v), p[f"{layer}.o"], x)
        normed = F.rms_norm(x, (WIDTH,), p[f"{layer}.norm2"])
        gate, up = way.column(normed, p[f"{layer}.gate"], p[f"{layer}.up"])
        x = way.row(F.silu(gate) * up, p[f"{layer}.down"], x)
    logits = F.rms_norm(x, (WIDTH,), p["norm"]) @ p["head"].t()
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return summed / (SEQUENCE * BATCH)


def train(way: Way, steps: int) -> list[float]:
    """The loss of each step."""
    text = torch.tensor(list(TEXT.read_bytes()))
    p = parameters(way)
    replicated = [x for name, x in p.items() if name.rpartition(".")[2] not in (*COLUMN, *ROW)]
    optimizer = torch.optim.AdamW(p.values(), lr=3e-3)
    draw = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SEQUENCE - 1, (BATCH,), generator=draw)
        tokens = torch.stack([text[at : at + SEQUENCE + 1] for at in starts.tolist()], 1)
        mine = loss(way, p, tokens)
        optimizer.zero_grad()
        mine.backward()
        for x in replicated:  # each rank has what its rows contribute
            assert x.grad is not None
            x.grad = way.total(x.grad)
        optimizer.step()
        losses.append(float(way.total(mine.detach())))
    return losses
