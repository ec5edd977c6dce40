"""The linear layer whose output features are split over the ranks; several of them on one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.linear import ParallelLinear, sharded_linear
from tpkernels.nn.regions import gather_from_ranks
from tpkernels.nn.sharding import LayerOptions, SequenceOptions
from tpkernels.ops.all_gather_matmul import run_all_gather_matmul
from tpkernels.ops.column_matmul import column_matmul
from tpkernels.ops.registration import bias_list

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class ColumnOptions(SequenceOptions, total=False):
    """What `ColumnParallelLinear.from_linear` takes."""

    gather_output: bool
    out_sizes: Sequence[int] | None
    stand_in: int


class ColumnParallelLinear(ParallelLinear):
    """``x @ weight^T + bias`` with the output features split over the ranks.

    Args:
        in_features, out_features: of the unsharded layer.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        bias: whether there is a bias; split as the output features are.
        gather_output: every rank gets all output features instead of its own. All ranks must then
            use them in the same way.
        out_sizes: output features of each rank; by default balanced (`tpkernels.shard_sizes`).
        stand_in: number of zero features that a rank without any features returns.
        sequence_parallel: the input is this rank's rows of the sequence, and the output has all
            rows. By default all ranks pass the same input, and its gradient is summed over them.
        sequence_dim: the dim of the input that ``sequence_parallel`` splits; 0 by default.
        device, dtype: of the parameters, as ``nn.Linear`` takes them.

    ``weight`` is [out_features of this rank, in_features]. With the same random state on all ranks,
    the initial values are those of ``nn.Linear``.

    Raises:
        ValueError: ``out_sizes`` do not fit the group or ``out_features``.
    """

    _split_dim: ClassVar[int] = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        gather_output: bool = False,
        out_sizes: Sequence[int] | None = None,
        stand_in: int = 0,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, group, out_sizes, bias=bias, **options)
        self.gather_output, self.stand_in = gather_output, stand_in

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: GroupLike, **options: Unpack[ColumnOptions]
    ) -> Self:
        """Make a layer with copies of this rank's shards of ``linear``'s parameters.

        Args:
            linear: the unsharded layer; features, bias, device and dtype are taken from it.
            **options: the others that the constructor takes.

        Raises:
            TypeError: ``linear`` is not a plain ``nn.Linear``.
            NotImplementedError: its weight is quantised or distributed.
        """
        return sharded_linear(cls, check.linear(linear, "linear"), group, **options)

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Return the output features of each rank."""
        return self.splits["weight"].sizes

    def forward(self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features of this rank, or all].

        Args:
            x: the input.
            shard_sizes: rows of each rank along ``sequence_dim``, unless they are all equal.
        """
        return column_parallel(x, [self], shard_sizes=shard_sizes)[0]

    def _zeros(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return zero weight and bias for a rank without features. The ops need a column on every
        rank, and the padding keeps this rank's backward in step with the others'."""
        weight, bias, width = self.weight, self.bias, max(self.stand_in, 1)
        return F.pad(weight, (0, 0, 0, width)), None if bias is None else F.pad(bias, (0, width))

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, given its matmul's result ``y``."""
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
    sequence_parallel: bool | None = None,
) -> list[torch.Tensor]:
    """Apply several column-parallel layers of one group to the same input, as one operation: with
    sequence parallelism they share one all-gather, without it one all-reduce of the input's
    gradient.

    Args:
        x: the input, [..., in_features].
        layers: the layers.
        shard_sizes: rows of each rank along ``sequence_dim``, unless they are all equal.
        sequence_parallel: for this call; by default the layers'.

    Returns:
        The output of each layer, in order.

    Raises:
        ValueError: the layers differ in group or sequence parallelism.
    """
    # Function calls are saved here, since each takes about 1 % of a small layer's time: the ops are
    # called directly, and `_zeros` and `_finish` only where they do something.
    first = layers[0]
    rows_split = first.sequence_parallel if sequence_parallel is None else sequence_parallel
    weights, biases, biased, finished = [], [], False, True
    for layer in layers:
        if (
            layer.group != first.group
            or layer.sequence_parallel != first.sequence_parallel
            or layer.sequence_dim != first.sequence_dim
        ):
            raise ValueError(f"layers of one input differ: {first!r} and {layer!r}")
        if layer.empty:
            weight, bias = layer._zeros()
            w = weight.t()
        else:
            w, bias = layer._factor(x), layer.bias
        weights.append(w)
        biases.append(bias)
        biased = biased or bias is not None
        finished = finished and not (layer.empty or layer.gather_output)
    bias_per_layer = biases if biased else None
    outputs: list[torch.Tensor]
    if rows_split:
        _, outputs = run_all_gather_matmul(
            x,
            weights,
            first.group,
            first.sequence_dim,
            bias_list(x, bias_per_layer),
            shard_sizes=shard_sizes,
        )
    else:
        outputs = column_matmul(x, weights, first.group, bias_per_layer)
    if finished:
        return outputs
    return [layer._finish(y) for layer, y in zip(layers, outputs, strict=True)]
