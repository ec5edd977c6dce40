"""Column-parallel layers of one input, which share one all-gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.column import ColumnParallelLinear, column_parallel
from tpkernels.nn.heads import QKV, Heads
from tpkernels.nn.linear import pack_
from tpkernels.nn.sharding import LayerOptions, SequenceOptions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class _MergedLinear(nn.Module):
    """Column-parallel layers of one input, by name."""

    @property
    def layers(self) -> list[ColumnParallelLinear]:
        """Return the layers, in order."""
        return cast("list[ColumnParallelLinear]", list(self.children()))

    def pack_(self, *, drop: bool = False) -> Self:
        """Pack each layer's weight; see `ColumnParallelLinear.pack_`."""
        return pack_(self, drop=drop)

    def _adopt(self, linears: Mapping[str, nn.Linear]) -> Self:
        """Give the layers copies of this rank's shards of ``linears``. The layers have biases;
        those whose linear has none lose theirs."""
        for (name, linear), layer in zip(linears.items(), self.layers, strict=True):
            if cast("torch.Tensor | None", linear.bias) is None:
                layer.bias = None
                layer.splits.pop("bias", None)
            try:
                layer.adopt(linear)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return self


class MergedColumnParallelLinear(_MergedLinear):
    """Several `ColumnParallelLinear` of one input, such as gate and up, as one operation.

    Args:
        in_features: of the unsharded layers.
        out_features: of each unsharded layer, by its name; the layers are submodules of these
            names.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        bias: whether the layers have biases.
        **options: ``sequence_parallel``, ``sequence_dim``, ``device`` and ``dtype``, as
            `ColumnParallelLinear` takes them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        group: GroupLike,
        *,
        bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        for name, features in out_features.items():
            layer = ColumnParallelLinear(in_features, features, group, bias=bias, **options)
            self.add_module(name, layer)

    @classmethod
    def from_linear(
        cls,
        linears: Mapping[str, nn.Linear],
        group: GroupLike,
        **options: Unpack[SequenceOptions],
    ) -> MergedColumnParallelLinear:
        """Make the layers with copies of this rank's shards, each with a bias if its linear has
        one.

        Args:
            linears: the unsharded layers, by name.
            group: as the constructor takes it.
            **options: ``sequence_parallel`` and ``sequence_dim``, as `ColumnParallelLinear` takes
                them.

        Raises:
            TypeError: a layer is not a plain ``nn.Linear``.
            NotImplementedError: a weight is quantised or distributed.
            ValueError: the layers have different input features.
        """
        check.linears(linears)
        first = next(iter(linears.values()))
        widths = {name: linear.out_features for name, linear in linears.items()}
        layer = cls(
            first.in_features,
            widths,
            group,
            bias=True,
            device="meta",
            dtype=first.weight.dtype,
            **options,
        )
        return layer._adopt(linears)

    def forward(
        self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Map x [..., in_features] to [..., out_features of this rank] for each layer, in order.

        Args:
            x: the input.
            shard_sizes: rows of each rank along ``sequence_dim``, unless they are all equal.
        """
        return column_parallel(x, self.layers, shard_sizes=shard_sizes)


class QKVParallelLinear(_MergedLinear):
    """The query, key and value projections of grouped-query attention, as one operation.

    Each rank gets whole key-value groups: a key head, its value head and the query heads that
    attend to them. Groups that do not divide by the ranks are split as evenly as possible. A rank
    without a group returns one of zeros, so that the attention needs no special case; the output
    projection has no weights for it.

    Args:
        hidden_size: input features.
        heads, kv_heads, head_dim: of the unsharded attention; ``heads`` is a multiple of
            ``kv_heads``.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        bias: whether the projections have biases.
        **options: ``sequence_parallel``, ``sequence_dim``, ``device`` and ``dtype``, as
            `ColumnParallelLinear` takes them.

    Raises:
        ValueError: ``heads`` is not a multiple of ``kv_heads``.
    """

    q_proj: ColumnParallelLinear
    k_proj: ColumnParallelLinear
    v_proj: ColumnParallelLinear

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        group: GroupLike,
        *,
        bias: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.heads = Heads(heads, kv_heads, head_dim, groups.get(groups.name_of(group)).world)
        for name, (sizes, stand_in) in self.heads.projections.items():
            layer = ColumnParallelLinear(
                hidden_size,
                sum(sizes),
                group,
                bias=bias,
                out_sizes=sizes,
                stand_in=stand_in,
                **options,
            )
            self.add_module(name, layer)

    @classmethod
    def from_linear(
        cls,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        head_dim: int,
        group: GroupLike,
        **options: Unpack[SequenceOptions],
    ) -> QKVParallelLinear:
        """Make the projections with copies of this rank's shards, each with a bias if its linear
        has one.

        Args:
            q, k, v: the unsharded projections.
            head_dim: features of a head.
            group: as the constructor takes it.
            **options: ``sequence_parallel`` and ``sequence_dim``, as `ColumnParallelLinear` takes
                them.

        Raises:
            TypeError: a projection is not a plain ``nn.Linear``.
            NotImplementedError: a weight is quantised or distributed.
            ValueError: ``head_dim`` does not divide the features of a projection, or the
                projections do not fit together.
        """
        linears = dict(zip(QKV, (q, k, v), strict=True))
        check.linears(linears)
        for name, linear in linears.items():
            if linear.out_features % head_dim:
                raise ValueError(
                    f"{name} has {linear.out_features} output features, which is not a whole "
                    f"number of heads of {head_dim}"
                )
        layer = cls(
            q.in_features,
            q.out_features // head_dim,
            k.out_features // head_dim,
            head_dim,
            group,
            bias=True,
            device="meta",
            dtype=q.weight.dtype,
            **options,
        )
        return layer._adopt(linears)

    def forward(
        self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map x [..., hidden_size] to queries [..., heads of this rank * head_dim], keys and values
        [..., key-value heads of this rank * head_dim].

        Args:
            x: the input.
            shard_sizes: rows of each rank along ``sequence_dim``, unless they are all equal.
        """
        q, k, v = column_parallel(x, self.layers, shard_sizes=shard_sizes)
        return q, k, v
