"""Fuses the projections of one input that a model calls one after the other.

Problem: ``q_proj(x)``, ``k_proj(x)`` and ``v_proj(x)`` are three calls in code that is not ours.
The code around them also derives the output's shape from x, which under sequence parallelism has
only this rank's rows.

Algorithm: a hook on the parent module (the attention or the MLP) runs all projections at once when
the parent is called, with one all-gather, and stores each output in its projection. The parent gets
a placeholder for x, a single zero expanded to the shape of the gathered x. A projection that is
called returns the stored output and forgets it.

A stored output outlives the parent's call only if an exception ends that call, as recomputing an
activation checkpoint may do; the next call overwrites it. All of this is plain Python, which
torch.compile traces into one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpkernels.nn import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    column_parallel,
    gather_from_ranks,
    split_over_ranks,
)
from tpkernels.shards import shard_sizes

SEQUENCE_DIM = 1  #: transformers' activations are [batch, sequence, width]


class SharedInputLinear(ColumnParallelLinear):
    """A column-parallel projection whose output is computed by the hook of its parent module."""

    output: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        output, self.output = self.output, None
        if output is None:
            raise RuntimeError(
                "this projection shares its input with others and is computed when its parent "
                f"module is called; call the parent instead: {self!r}"
            )
        return output


@dataclass
class Rows:
    """How the sequence is split in the forward that is running."""

    world: int
    fewest: int = 1  #: shorter sequences are not split; all ranks have all their rows
    sizes: list[int] | None = None  #: rows of each rank; None: not split

    def split(self, tokens: int) -> None:
        """Begin a sequence of this many tokens."""
        self.sizes = shard_sizes(tokens, self.world) if tokens >= self.fewest else None


class OwnRowsLinear(RowParallelLinear):
    """A row-parallel projection that knows the split of the sequence."""

    rows: Rows | None = None  #: None: no sequence parallelism

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        sizes = None if self.rows is None else self.rows.sizes
        return super().forward(x, shard_sizes=sizes, sequence_parallel=sizes is not None)


class OwnRowsNorm(RMSNorm):
    """A norm of this rank's rows, or of all rows while the sequence is not split."""

    rows: Rows

    def shared_weight(self) -> torch.Tensor:
        return self.weight if self.rows.sizes is None else super().shared_weight()


@dataclass(frozen=True)
class ShareInput:
    """Forward pre-hook (with keyword arguments) of the parent of the projections ``names``."""

    names: tuple[str, ...]
    rows: Rows | None  #: None: no sequence parallelism

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layers = [getattr(module, name) for name in self.names]
        shape, sizes = list(x.shape), None
        if self.rows is not None:
            # A checkpointed layer is recomputed alone, perhaps after a forward of another length.
            # Its attention runs first and reads the number of tokens from the rotary embedding.
            if "position_embeddings" in kwargs:
                self.rows.split(kwargs["position_embeddings"][0].shape[SEQUENCE_DIM])
            sizes = self.rows.sizes
        if sizes is not None:
            shape[SEQUENCE_DIM] = sum(sizes)
        outputs = column_parallel(x, layers, shard_sizes=sizes, sequence_parallel=sizes is not None)
        for layer, output in zip(layers, outputs, strict=True):
            layer.output = output
        placeholder = x.new_zeros(()).expand(shape)
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": placeholder}
        return (placeholder, *args[1:]), kwargs


@dataclass(frozen=True)
class SplitRows:
    """Forward pre-hook (with keyword arguments) of the first layer: each rank keeps its rows."""

    group: str
    rows: Rows

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        self.rows.split(x.shape[SEQUENCE_DIM])
        if self.rows.sizes is None:
            return args, kwargs
        mine = split_over_ranks(x, self.group, SEQUENCE_DIM, self.rows.sizes)
        return (mine, *rest), kwargs


@dataclass(frozen=True)
class GatherRows:
    """Forward hook of the last norm: all ranks get all rows again."""

    group: str
    rows: Rows

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if self.rows.sizes is None:
            return output
        return gather_from_ranks(output, self.group, SEQUENCE_DIM, self.rows.sizes)
