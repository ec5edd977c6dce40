"""The linear layer of which each rank has some output features; several of them on one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.regions import gather_from_ranks
from tpkernels.nn.sharding import ShardedModule, draw_linear
from tpkernels.nn.split import Split
from tpkernels.ops._column_matmul import column_matmul
from tpkernels.ops._library import bias_list

Column = TypeVar("Column", bound="ColumnParallelLinear")


class ColumnParallelLinear(ShardedModule):
    """``x @ weight^T + bias`` with the output features split over the ranks.

    Args:
        in_features, out_features: of the unsharded layer.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        gather_output: every rank gets all features, to be used alike on all, instead of its own.
        sequence_parallel: the input is this rank's rows of the sequence, the output has all rows.
            Otherwise all ranks give the same input, and its gradient is summed over them.
        sequence_dim: the dim of the input that is split with ``sequence_parallel``.
        out_sizes: output features of each rank; balanced by default (`tpkernels.shard_sizes`).
        stand_in: features, all zero, that a rank without any computes in their place.

    ``weight`` is [out_features of this rank, in_features]. With the same random state on all ranks
    its initial values are those of ``nn.Linear``.

    Raises:
        ValueError: sizes that do not fit.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        out_sizes: Sequence[int] | None = None,
        stand_in: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.stand_in = gather_output, stand_in
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        split = Split.of(0, out_features, out_sizes, self.rank, self.world, "out_features")
        self.empty = split.size == 0  #: this rank has no features
        self.add_sharded("weight", (out_features, in_features), split, device, dtype)
        if bias:
            self.add_sharded("bias", (out_features,), split, device, dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Output features of each rank."""
        return self.splits["weight"].sizes

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.device.type != "meta":
                self.fill(name, draw_linear(self.in_features))

    @classmethod
    def from_linear(
        cls: type[Column],
        linear: nn.Linear,
        group: GroupLike,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        out_sizes: Sequence[int] | None = None,
        stand_in: int = 0,
    ) -> Column:
        """The layer with copies of this rank's shards of ``linear``'s parameters.

        Raises:
            TypeError: not an ``nn.Linear``.
            NotImplementedError: its weight is quantised.
        """
        check.linear(linear, "linear")
        layer = cls(
            linear.in_features,
            linear.out_features,
            group,
            bias=linear.bias is not None,
            gather_output=gather_output,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            out_sizes=out_sizes,
            stand_in=stand_in,
            device="meta",
        )
        layer.adopt(linear)
        return layer

    def forward(self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features of this rank, or all].

        ``shard_sizes``: rows of each rank along ``sequence_dim`` where they are not all equal.
        """
        return column_parallel(x, [self], shard_sizes=shard_sizes)[0]

    def zeros(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a rank without features: the ops need a column on every rank, which
        also keeps its backward in step with the others'."""
        weight, bias, width = self.weight, self.bias, max(self.stand_in, 1)
        return F.pad(weight, (0, 0, 0, width)), None if bias is None else F.pad(bias, (0, width))

    def drop_bias(self) -> None:
        """Has the layer add none."""
        self.bias = None
        self.splits.pop("bias", None)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """What the layer returns for its product ``y``."""
        if self.empty and (self.gather_output or not self.stand_in):
            y = y[..., :0]
        if self.gather_output:
            y = gather_from_ranks(y, self.group, y.dim() - 1, self.out_sizes)
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={list(self.out_sizes)}, "
            f"bias={self.bias is not None}, sequence_parallel={self.sequence_parallel}, "
            f"gather_output={self.gather_output}, rank={self.rank}"
        )


def column_parallel(
    x: torch.Tensor,
    layers: Sequence[ColumnParallelLinear],
    *,
    shard_sizes: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """What several column-parallel layers of one group make of one input, as one operation: with
    sequence parallelism they share one gather, without it one sum of the input's gradient.

    Raises:
        ValueError: the layers differ in group or sequence parallelism.
    """
    # Written out, since each call of a function takes a small layer a per cent of its time: the ops
    # themselves, and `zeros` and `finish` only where they do something.
    first = layers[0]
    weights, biases, biased, finished = [], [], False, True
    for layer in layers:
        if (
            layer.group != first.group
            or layer.sequence_parallel != first.sequence_parallel
            or layer.sequence_dim != first.sequence_dim
        ):
            raise ValueError(f"layers of one input differ: {first!r} and {layer!r}")
        weight, bias = layer.zeros() if layer.empty else (layer.weight, layer.bias)
        weights.append(weight.t())
        biases.append(bias)
        biased = biased or bias is not None
        finished = finished and not (layer.empty or layer.gather_output)
    each_bias = biases if biased else None
    products: list[torch.Tensor]
    if first.sequence_parallel:
        _, products = torch.ops.tpkernels.all_gather_matmul.default(
            x,
            weights,
            first.group,
            first.sequence_dim,
            bias_list(x, each_bias),
            shard_sizes=shard_sizes,
        )
    else:
        products = column_matmul(x, weights, first.group, each_bias)
    if finished:
        return products
    return [layer.finish(y) for layer, y in zip(layers, products, strict=True)]
