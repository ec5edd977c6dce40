"""The linear layer of which each rank has some input features, whose products are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.sharding import ShardedModule, draw_linear
from tpkernels.nn.split import Split

Row = TypeVar("Row", bound="RowParallelLinear")


class RowParallelLinear(ShardedModule):
    """``x @ weight^T + bias`` with the input features split over the ranks.

    Args:
        in_features, out_features: of the unsharded layer.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        sequence_parallel: the output is this rank's rows of the sequence; otherwise all ranks get
            all rows.
        sequence_dim: the dim that is split with ``sequence_parallel``.
        in_sizes: input features of each rank; balanced by default (`tpkernels.shard_sizes`).

    ``weight`` is [out_features, in_features of this rank], ``bias`` whole on every rank, and so is
    its gradient. With the same random state on all ranks the initial values are those of
    ``nn.Linear``; ``bias`` needs it, to be the same everywhere.

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
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        in_sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        split = Split.of(1, in_features, in_sizes, self.rank, self.world, "in_features")
        self.empty = split.size == 0  #: this rank has no features
        self.add_sharded("weight", (out_features, in_features), split, device, dtype)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def in_sizes(self) -> tuple[int, ...]:
        """Input features of each rank."""
        return self.splits["weight"].sizes

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.device.type != "meta":
                self.fill(name, draw_linear(self.in_features))

    @classmethod
    def from_linear(
        cls: type[Row],
        linear: nn.Linear,
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        in_sizes: Sequence[int] | None = None,
    ) -> Row:
        """The layer with copies of this rank's shards of ``linear``'s parameters; raises as
        `ColumnParallelLinear.from_linear` does."""
        check.linear(linear, "linear")
        layer = cls(
            linear.in_features,
            linear.out_features,
            group,
            bias=linear.bias is not None,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            in_sizes=in_sizes,
            device="meta",
        )
        layer.adopt(linear)
        return layer

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """x [..., in_features of this rank] -> [..., out_features], all rows or this rank's.

        Args:
            residual: of the output's shape, added after the bias; the output has its dtype.
            shard_sizes: rows of each rank along ``sequence_dim`` where they are not all equal.
        """
        weight: torch.Tensor = self.weight
        if self.empty:  # a K of zero: see ColumnParallelLinear.zeros
            x = x if x.shape[-1] else F.pad(x, (0, 1))
            weight = F.pad(weight, (0, x.shape[-1]))
        # A residual stream in fp32, as under autocast, stays so. The ops are called themselves, for
        # the reason that `column_parallel` gives.
        out_dtype = None if residual is None else residual.dtype
        y: torch.Tensor
        if not self.sequence_parallel:
            y = torch.ops.tpkernels.matmul_all_reduce.default(
                x, weight.t(), self.group, self.bias, residual, out_dtype=out_dtype
            )
            return y
        y = torch.ops.tpkernels.matmul_reduce_scatter.default(
            x,
            weight.t(),
            self.group,
            self.sequence_dim,
            self.bias,
            residual,
            out_dtype=out_dtype,
            shard_sizes=shard_sizes,
        )
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={list(self.in_sizes)}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sequence_parallel={self.sequence_parallel}, "
            f"rank={self.rank}"
        )
