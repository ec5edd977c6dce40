"""The linear layer whose input features are split over the ranks, which sum their partials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.linear import ParallelLinear, sharded_linear
from tpkernels.nn.sharding import LayerOptions, SequenceOptions
from tpkernels.ops.matmul_all_reduce import run_matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import run_matmul_reduce_scatter

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class RowOptions(SequenceOptions, total=False):
    """What `RowParallelLinear.from_linear` takes."""

    in_sizes: Sequence[int] | None


class RowParallelLinear(ParallelLinear):
    """``x @ weight^T + bias`` with the input features split over the ranks.

    Args:
        in_features, out_features: of the unsharded layer.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        bias: whether there is a bias. Every rank has all of it, and its whole gradient; it is added
            once, after the sum.
        in_sizes: input features of each rank; by default balanced (`tpkernels.shard_sizes`).
        sequence_parallel: the output is this rank's rows of the sequence. By default all ranks get
            all rows.
        sequence_dim: the dim of the output that ``sequence_parallel`` splits; 0 by default.
        device, dtype: of the parameters, as ``nn.Linear`` takes them.

    ``weight`` is [out_features, in_features of this rank]. With the same random state on all ranks,
    the initial values are those of ``nn.Linear``; without it, the ranks' biases differ.

    Raises:
        ValueError: ``in_sizes`` do not fit the group or ``in_features``.
    """

    _split_dim: ClassVar[int] = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        in_sizes: Sequence[int] | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, group, in_sizes, bias=bias, **options)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: GroupLike, **options: Unpack[RowOptions]
    ) -> Self:
        """Make a layer with copies of this rank's shards of ``linear``'s parameters; see
        `ColumnParallelLinear.from_linear`."""
        return sharded_linear(cls, check.linear(linear, "linear"), group, **options)

    @property
    def in_sizes(self) -> tuple[int, ...]:
        """Return the input features of each rank."""
        return self.splits["weight"].sizes

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
        sequence_parallel: bool | None = None,
    ) -> torch.Tensor:
        """Map x [..., in_features of this rank] to [..., out_features], all rows or this rank's.

        Args:
            x: the input.
            residual: of the output's shape, added after the bias; the output gets its dtype.
            shard_sizes: rows of each rank along ``sequence_dim``, unless they are all equal.
            sequence_parallel: for this call; by default the layer's.
        """
        rows_split = self.sequence_parallel if sequence_parallel is None else sequence_parallel
        w = self._factor(x)
        if self.empty:  # The ops need K >= 1: one zero feature, as in ColumnParallelLinear._zeros.
            x = x if x.shape[-1] else F.pad(x, (0, 1))
            w = F.pad(self.weight, (0, x.shape[-1])).t()
        dim = self.sequence_dim if rows_split else None
        return row_parallel(x, w, self.group, dim, self.bias, residual, shard_sizes)

    def extra_repr(self) -> str:
        return (
            f"in_features={list(self.in_sizes)}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sequence_parallel={self.sequence_parallel}, "
            f"rank={self.rank}"
        )


def row_parallel(
    x: torch.Tensor,
    w: torch.Tensor,
    group: str,
    scatter_dim: int | None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return ``sum_r(x_r @ w_r) + bias + residual``, in the residual's dtype if there is one: under
    autocast an fp32 residual stream stays fp32.

    Args:
        x, w: this rank's [..., K] and [K, N].
        scatter_dim: the dim along which each rank gets its shard; None: all ranks get all of it.
        shard_sizes: rows of each rank along that dim, unless they are all equal.
    """
    # The ops are called directly, for the reason given in `column_parallel`.
    out_dtype = None if residual is None else residual.dtype
    y: torch.Tensor
    if scatter_dim is None:
        y = run_matmul_all_reduce(x, w, group, bias, residual, out_dtype=out_dtype)
    else:
        y = run_matmul_reduce_scatter(
            x, w, group, scatter_dim, bias, residual, out_dtype=out_dtype, shard_sizes=shard_sizes
        )
    return y
