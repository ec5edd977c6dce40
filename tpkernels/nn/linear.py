"""What column- and row-parallel linear layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn.sharding import LayerOptions, ShardedModule
from tpkernels.nn.split import Split

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class ParallelLinear(ShardedModule):
    """``x @ weight^T + bias``, the weight split along one of its dims.

    A subclass sets ``split_dim``: 0 splits the output features, and the bias with them; 1 splits
    the input features, and every rank has the whole bias.
    """

    split_dim: ClassVar[int]  #: of the weight [out_features, in_features]
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
            (out_features, "out_features") if self.split_dim == 0 else (in_features, "in_features")
        )
        split = Split.of(self.split_dim, total, sizes, self.rank, self.world, what)
        self.empty = split.size == 0  #: this rank has no features
        self.add_parameter("weight", (out_features, in_features), split)
        if bias:
            self.add_parameter("bias", (out_features,), split if self.split_dim == 0 else None)
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

    @classmethod
    def from_checked(cls, linear: nn.Linear, group: GroupLike, **options: Any) -> Self:
        """``from_linear`` of a layer that has passed `check.linear`."""
        layer = cls(
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
