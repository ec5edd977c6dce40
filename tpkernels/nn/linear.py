"""What column- and row-parallel linear layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.local.packed import check_packable, pack
from tpkernels.nn.sharding import LayerOptions, ShardedModule
from tpkernels.nn.split import Split

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Module = TypeVar("Module", bound=nn.Module)
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
    _packed: torch.Tensor | None = None  # what the ops get in place of weight.t()
    _dropped = False  # `weight` is the packed weight: there is no other

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
        """Draw weight and bias as ``nn.Linear`` does, by the unsharded fan-in."""

        def draw(whole: torch.Tensor) -> None:
            bound = self.in_features**-0.5
            nn.init.uniform_(whole, -bound, bound)

        with self._plain_weight():
            for name, _ in self.named_parameters():
                self.fill(name, draw)

    def pack_(self, *, drop: bool = False) -> Self:
        """Pack the weight for inference on CPUs; see `tpkernels.pack`. Return the layer.

        State dicts stay as they are, and ``load_state_dict``, ``to`` and copies of the layer pack
        the new weight. Other changes of ``weight`` do not reach the packed one: pack it again.
        Where a gradient would be needed, the layer raises NotImplementedError. A rank without
        features has nothing to pack.

        Args:
            drop: do not keep the plain weight, which takes as much memory again. ``weight`` is then
                an opaque tensor of the same shape; a state dict unpacks it. An embedding that is
                tied to the layer keeps the weight that they shared.

        Raises:
            ValueError, NotImplementedError: as `tpkernels.pack`.
        """
        self.unpack_()
        if self.empty:
            return self
        packed = pack(self.weight.t())
        if drop:
            self.weight = nn.Parameter(packed, self.weight.requires_grad)
        self._packed, self._dropped = packed, drop
        return self

    def unpack_(self) -> Self:
        """Undo `pack_`: the values are those that were packed if the plain weight was dropped.
        Returns the layer."""
        if self._dropped:
            self.weight = self._dense_weight()
        self._packed, self._dropped = None, False
        return self

    def _dense_weight(self) -> nn.Parameter:
        """Return the weight as it was before `pack_` dropped it."""
        return nn.Parameter(self.weight.detach().to_dense(), self.weight.requires_grad)

    @contextmanager
    def _plain_weight(self) -> Iterator[None]:
        """Unpack the layer within the block, and pack it again after it."""
        packed, drop = self._packed is not None, self._dropped
        self.unpack_()
        yield
        if packed:
            try:
                self.pack_(drop=drop)
            except NotImplementedError as error:
                raise NotImplementedError(f"{error}; call unpack_() before") from None

    def _factor(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the ops get as the weight."""
        if self._packed is None:
            return self.weight.t()
        if torch.is_grad_enabled():
            self._refuse_gradient(x)
        return self._packed

    def _refuse_gradient(self, x: torch.Tensor) -> None:
        """Raise where a packed layer would need a gradient."""
        parts = (x, self.weight, self.bias)
        if any(part is not None and part.requires_grad for part in parts):
            raise NotImplementedError(
                f"{self!r} is packed and has no gradient; call it under torch.no_grad(), or "
                "unpack_() it"
            )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        with self._plain_weight():
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._plain_weight():
            super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        held = self.weight
        if self._dropped:
            self._parameters["weight"] = self._dense_weight()
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        finally:
            self._parameters["weight"] = held

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: an opaque tensor has neither."""
        state = self.__dict__.copy()
        if self._dropped:
            state["_parameters"] = self._parameters | {"weight": self._dense_weight()}
        state["_packed"] = self._packed is not None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed, drop = state["_packed"], state.get("_dropped", False)
        super().__setstate__(state | {"_packed": None, "_dropped": False})
        if packed:
            self.pack_(drop=drop)


def pack_(module: Module, *, drop: bool = False) -> Module:
    """Pack every parallel linear layer in a module; see `ParallelLinear.pack_`. Returns the
    module, which is unchanged if a layer cannot be packed."""
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLinear)]
    for layer in layers:
        if layer._packed is None and not layer.empty:
            check_packable(layer.weight, "a weight")
    for layer in layers:
        layer.pack_(drop=drop)
    return module


def sharded_linear(
    kind: type[Linear], linear: nn.Linear, group: GroupLike, **options: Any
) -> Linear:
    """Run ``kind.from_linear`` for a layer that `check.linear` has accepted."""
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
