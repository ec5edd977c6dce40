"""Column-parallel layers of one input, which share one gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.column import ColumnParallelLinear, column_parallel
from tpkernels.nn.heads import Heads

Made = TypeVar("Made", bound=nn.Module)


def _adopt(made: Made, linears: Mapping[str, nn.Linear]) -> Made:
    """Gives the layers of ``made``, which have biases, copies of this rank's shards of ``linears``;
    those without a bias lose theirs."""
    for name, linear in linears.items():
        layer = made.get_submodule(name)
        assert isinstance(layer, ColumnParallelLinear)
        if cast("torch.Tensor | None", linear.bias) is None:
            layer.drop_bias()
        try:
            layer.adopt(linear)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return made


class MergedColumnParallelLinear(nn.Module):
    """Several `ColumnParallelLinear` of one input, such as gate and up, as one operation.

    Args:
        in_features: of the unsharded layers.
        out_features: of each layer, by its name; the layers are submodules of these names.
        group, bias, sequence_parallel, sequence_dim: see `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        group: GroupLike,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, features in out_features.items():
            self.add_module(
                name,
                ColumnParallelLinear(
                    in_features,
                    features,
                    group,
                    bias=bias,
                    sequence_parallel=sequence_parallel,
                    sequence_dim=sequence_dim,
                    device=device,
                    dtype=dtype,
                ),
            )

    @property
    def layers(self) -> list[ColumnParallelLinear]:
        return cast("list[ColumnParallelLinear]", list(self.children()))

    @classmethod
    def from_linear(
        cls,
        linears: Mapping[str, nn.Linear],
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
    ) -> MergedColumnParallelLinear:
        """The layers with copies of this rank's shards, each with a bias if its linear has one.

        Raises:
            TypeError, NotImplementedError: as `ColumnParallelLinear.from_linear`.
            ValueError: their inputs differ.
        """
        for name, linear in linears.items():
            check.linear(linear, name)
        first = next(iter(linears.values()))
        made = cls(
            first.in_features,
            {name: linear.out_features for name, linear in linears.items()},
            group,
            bias=True,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device="meta",
        )
        return _adopt(made, linears)

    def forward(
        self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """x [..., in_features] -> [..., features of this rank] for each layer, in their order."""
        return column_parallel(x, self.layers, shard_sizes=shard_sizes)


class QKVParallelLinear(nn.Module):
    """The query, key and value projections of an attention with grouped queries, as one operation.

    Ranks get whole key-value groups: a key head, its value head and the query heads that attend to
    them. Numbers that do not divide are split as evenly as they can be (`Heads`); where there are
    more ranks than groups, a rank without one computes one of zeros, so that the shapes that follow
    need no special case, and its output projection multiplies it by nothing.

    Args:
        hidden_size: input features.
        heads, kv_heads, head_dim: of the unsharded attention; heads is a multiple of kv_heads.
        group, bias, sequence_parallel, sequence_dim: see `ColumnParallelLinear`.

    Raises:
        ValueError: heads that do not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        group: GroupLike,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads = Heads(heads, kv_heads, head_dim, groups.get(groups.name_of(group)).world)

        def projection(features: int, sizes: Sequence[int], stand_in: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden_size,
                features,
                group,
                bias=bias,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                out_sizes=sizes,
                stand_in=stand_in,
                device=device,
                dtype=dtype,
            )

        q, kv = self.heads.query_sizes, self.heads.kv_sizes
        self.q_proj = projection(heads * head_dim, q, self.heads.query_group)
        self.k_proj = projection(kv_heads * head_dim, kv, head_dim)
        self.v_proj = projection(kv_heads * head_dim, kv, head_dim)

    @property
    def layers(self) -> list[ColumnParallelLinear]:
        return [self.q_proj, self.k_proj, self.v_proj]

    @classmethod
    def from_linear(
        cls,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        head_dim: int,
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
    ) -> QKVParallelLinear:
        """The layers with copies of this rank's shards, each with a bias if its linear has one.

        Raises:
            TypeError, NotImplementedError: as `ColumnParallelLinear.from_linear`.
            ValueError: ``head_dim`` does not divide the projections, or they do not fit together.
        """
        linears = {"q_proj": q, "k_proj": k, "v_proj": v}
        for name, linear in linears.items():
            check.linear(linear, name)
            if linear.out_features % head_dim:
                raise ValueError(
                    f"{name} has {linear.out_features} features: no whole number of heads of "
                    f"{head_dim}"
                )
        made = cls(
            q.in_features,
            q.out_features // head_dim,
            k.out_features // head_dim,
            head_dim,
            group,
            bias=True,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device="meta",
        )
        return _adopt(made, linears)

    def forward(
        self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [..., hidden_size] -> q [..., heads of this rank * head_dim], k, v [..., key-value
        heads of this rank * head_dim]."""
        q, k, v = column_parallel(x, self.layers, shard_sizes=shard_sizes)
        return q, k, v
