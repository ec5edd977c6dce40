"""What column- and row-parallel linear layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn.sharding import LayerOptions, ShardedModule
from tpkernels.nn.split import Split

if TYPE_CHECKING:
    from typing_extensions import Unpack

Linear = TypeVar("Linear", bound="ParallelLinear")


class ParallelLinear(ShardedModule):
    """``x @ weight^T + bias``, the weight split along one of its dims.

    A subclass sets the dim of the weight [out_features, in_features] that is split: 0 splits the
    output features, and the bias with them; 1 splits the input features, and every rank has the
    whole bias.
    """

    _split_dim: ClassVar[int]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        sizes: Sequence[int] | None,
        *,
        bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(group, **options)
        self.in_features, self.out_features = in_features, out_features
        total, what = (
            (out_features, "out_features") if self._split_dim == 0 else (in_features, "in_features")
        )
        split = Split.of(self._split_dim, total, sizes, self.rank, self.world, what)
        self.empty = split.size == 0  #: this rank has no features
        self.add_parameter("weight", (out_features, in_features), split)
        if bias:
            self.add_parameter("bias", (out_features,), split if self._split_dim == 0 else None)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias as ``nn.Linear`` does, by the unsharded fan-in."""

        def draw(whole: torch.Tensor) -> None:
            bound = self.in_features**-0.5
            nn.init.uniform_(whole, -bound, bound)

        for name, _ in self.named_parameters():
            self.fill(name, draw)


def sharded_linear(
    kind: type[Linear], linear: nn.Linear, group: GroupLike, **options: Any
) -> Linear:
    """``kind.from_linear`` for a layer that `check.linear` has accepted."""
    layer = kind(
        linear.in_features,
        linear.out_features,
        group,
        bias=linear.bias is not None,
        device="meta",
        dtype=linear.weight.dtype,
        **options,
    )
    layer.adopt(linear)
    return layer
