"""Projections of one input that a model calls one after the other, as one operation.

Problem: ``q_proj(x)``, ``k_proj(x)``, ``v_proj(x)`` are three calls in code that is not ours, and
the code around them takes the output's shape from x, which under sequence parallelism has this
rank's rows only.

Algorithm: a hook on the module around them (the attention, the MLP) makes all their products when
that is called, with one gather, and gives each projection its own. In place of x the module gets a
placeholder of the gathered x's shape: one zero, expanded, without memory. A projection that is
called returns what it was given, once.

Nothing outlives a call of the module unless that is left by an exception, as the recomputation of
an activation checkpoint may be; the next call replaces it then. All of it is plain Python, which
torch.compile traces into one graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tpkernels.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    gather_from_ranks,
    split_over_ranks,
)
from tpkernels.shards import shard_sizes

SEQUENCE_DIM = 1  #: transformers' activations are [batch, sequence, width]


class SharedInputLinear(ColumnParallelLinear):
    """A column-parallel projection whose product the hook of the module around it makes."""

    given: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        given, self.given = self.given, None
        if given is None:
            raise RuntimeError(
                "this projection shares its input with others, and is computed where the module "
                f"around it is called; call that: {self!r}"
            )
        return given


@dataclass
class Rows:
    """The split of the sequence in the layer that runs: rows of each rank."""

    world: int
    sizes: list[int] = field(default_factory=list)

    def split(self, tokens: int) -> None:
        self.sizes = shard_sizes(tokens, self.world)


class OwnRowsLinear(RowParallelLinear):
    """A row-parallel projection that is called with its input alone."""

    rows: Rows | None = None  #: with sequence parallelism

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, shard_sizes=None if self.rows is None else self.rows.sizes)


@dataclass(frozen=True)
class ShareInput:
    """Forward pre-hook (with keyword arguments) of the module around projections ``names``."""

    names: tuple[str, ...]
    rows: Rows | None  #: with sequence parallelism

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layers = [getattr(module, name) for name in self.names]
        shape, sizes = list(x.shape), None
        if self.rows is not None:
            # A checkpointed layer is recomputed by itself, maybe after a forward of another length.
            # Its attention, which comes first, is told how many tokens there are.
            if "position_embeddings" in kwargs:
                self.rows.split(kwargs["position_embeddings"][0].shape[SEQUENCE_DIM])
            sizes = self.rows.sizes
            shape[SEQUENCE_DIM] = sum(sizes)
        for layer, product in zip(
            layers, column_parallel(x, layers, shard_sizes=sizes), strict=True
        ):
            layer.given = product
        placeholder = x.new_zeros(()).expand(shape)
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": placeholder}
        return (placeholder, *args[1:]), kwargs


@dataclass(frozen=True)
class SplitRows:
    """Forward pre-hook (with keyword arguments) of the first layer: from here on each rank has its
    rows."""

    group: str
    rows: Rows

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        self.rows.split(x.shape[SEQUENCE_DIM])
        mine = split_over_ranks(x, self.group, SEQUENCE_DIM, self.rows.sizes)
        return (mine, *rest), kwargs


@dataclass(frozen=True)
class GatherRows:
    """Forward hook of the last norm: from here on all ranks have all rows again."""

    group: str
    rows: Rows

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return gather_from_ranks(output, self.group, SEQUENCE_DIM, self.rows.sizes)
