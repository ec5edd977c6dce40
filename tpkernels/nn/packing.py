"""Layers whose weights can be packed for inference on CPUs.

Invariant: a packed layer computes with its packed weights, and what reads its parameters gets plain
ones. So a state dict is that of the plain layer. What changes the parameters (``to``,
``load_state_dict``, ``reset_parameters``) finds plain weights, which are packed again after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from tpkernels.local.packed import check_finite, check_packable, pack_shard, scale_group, unpack
from tpkernels.nn.sharding import ShardedModule, ShardTensor
from tpkernels.torch_private import parameters_of

Module = TypeVar("Module", bound=nn.Module)


class PackableModule(ShardedModule):
    """A layer whose weights `pack_` packs: all that have a name in ``packable``, or none."""

    packable: ClassVar[tuple[str, ...]]
    empty: bool  #: this rank has no part of the weights, so there is nothing to pack
    _k_dim = 1  # of a plain weight, or of a stack of them

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._packed: dict[str, torch.Tensor] = {}  # what the ops get in place of the weights
        self._dropped: frozenset[str] = frozenset()  # weights whose packed ones are the parameters
        self._asked_dtype: torch.dtype | None = None  # that `pack_` was given
        self._plain_dtype: torch.dtype | None = None  # of the weights that were packed
        # `_packed` and `_dropped` before `_load_into`.
        self._before_load: tuple[dict[str, torch.Tensor], frozenset[str]] | None = None

    def unsharded_k(self, name: str) -> int:
        """Return K of an unsharded weight."""
        raise NotImplementedError

    def pack_(self, *, drop: bool = False, dtype: torch.dtype | None = None) -> Self:
        """Pack the weights for inference on CPUs, as `tpkernels.pack`; return the layer.

        State dicts stay as they are, and ``load_state_dict``, ``to`` and copies of the layer pack
        the new weights, unless 8 bits have their values already. Other changes of a weight do not
        reach the packed one: pack it again. ``torch.distributed.checkpoint.load`` into a state dict
        of the layer unpacks it, even if that fails; ``load_state_dict`` packs it again. Where a
        gradient would be needed, the layer raises NotImplementedError. A rank without features has
        nothing to pack.

        Args:
            drop: do not keep the plain weights, which take as much memory again. The parameters are
                then the packed weights, which have one more dim; a state dict unpacks them. An
                embedding that is tied to the layer keeps the weight that they shared.
            dtype: of the packed weights: the weights' (default), or int8, which is used where K is
                a multiple of 4. Its scales are those of the unsharded weights, so layers whose K is
                split are split at multiples of their groups: ValueError if they are not. A dropped
                weight of int8 needs no gradient, also when it is unpacked.
        """
        for name in self.packable:
            self._fits(name, name, dtype)
        self.unpack_()
        for name in self.packable:
            self.pack_parameter(name, drop=drop, dtype=dtype)
        return self

    def check_packable(self, what: str, dtype: torch.dtype | None) -> None:
        """Raise what `pack_` raises. ``what`` precedes the names of weights in messages."""
        for name in self.packable:
            weight, full_name = self.get_parameter(name), f"{what}{name}"
            if not self.empty and not self._packed:
                check_packable(self._transposed(weight), full_name)
            if self._fits(name, full_name, dtype) and dtype == torch.int8 and not self.empty:
                check_finite(weight, full_name)

    def pack_parameter(self, name: str, *, drop: bool, dtype: torch.dtype | None) -> None:
        """Pack one of the weights, if ``name`` is one; the layer needs all of them packed."""
        if not self.empty and name in self.packable:
            fitting = dtype if self._fits(name, name, dtype) else None
            weight = self._transposed(self.get_parameter(name))
            packed = pack_shard(weight, fitting, self.unsharded_k(name))
            self.use_packed(name, packed, drop=drop, dtype=dtype)

    def use_packed(
        self, name: str, packed: torch.Tensor, *, drop: bool, dtype: torch.dtype | None
    ) -> None:
        """Do what `pack_parameter` does, given the packed weight. If it is dropped, the plain one
        may be on the meta device."""
        weight = self.get_parameter(name)
        self._asked_dtype, self._plain_dtype = dtype, weight.dtype
        if drop:
            self._dropped |= {name}
            trained = weight.requires_grad and packed.is_floating_point()
            self.register_parameter(name, nn.Parameter(packed, trained))
        self._packed[name] = packed

    def unpack_(self) -> Self:
        """Undo `pack_`; return the layer. A dropped weight has the values that were packed."""
        self._before_load = None
        if self._packed:
            self._use_plain(self._plain_weights())
        return self

    def _use_plain(self, plain: Mapping[str, nn.Parameter]) -> None:
        for name, weight in plain.items():
            self.register_parameter(name, weight)
        self._packed, self._dropped = {}, frozenset()

    def _plain_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights; those that were dropped are unpacked."""
        weights = {name: self.get_parameter(name) for name in self.packable}
        for name in self._dropped:
            plain = self._transposed(unpack(self._packed[name])).to(self._plain_dtype)
            weights[name] = nn.Parameter(plain, weights[name].requires_grad)
        return weights

    def _transposed(self, weight: torch.Tensor) -> torch.Tensor:
        """Map a weight of the layer to [K, N], or [experts, K, N], or back."""
        return weight.mT

    def _fits(self, name: str, full_name: str, dtype: torch.dtype | None) -> bool:
        """Return whether a weight's K allows packing it in ``dtype``, or raise ValueError."""
        split = self.splits[name]
        sizes = split.sizes if split.dim == self._k_dim else ()
        return dtype != torch.int8 or scale_group(self.unsharded_k(name), full_name, sizes) > 1

    @contextmanager
    def _unpacked(self) -> Iterator[None]:
        """Unpack the layer within the block, and pack it again after it, even if it raises."""
        packed, dropped = self._before_load or (self._packed, self._dropped)
        self.unpack_()
        try:
            yield
        finally:
            for name, before in packed.items():
                self._pack_again(name, before, name in dropped)

    def _pack_again(self, name: str, before: torch.Tensor, drop: bool) -> None:
        """Pack a weight. Integers are kept if it still has their values: they would be quantised
        again."""
        weight = self.get_parameter(name).detach()
        kept = before.dtype == torch.int8 and weight.is_cpu and weight.dtype != torch.float64
        if kept and torch.equal(weight, self._transposed(unpack(before)).to(weight.dtype)):
            self.use_packed(name, before, drop=drop, dtype=torch.int8)
            return
        try:
            self.pack_parameter(name, drop=drop, dtype=self._asked_dtype)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}; call unpack_() first") from None

    def _refuse_gradient(self, x: torch.Tensor) -> None:
        """Raise NotImplementedError if a call of the packed layer would need a gradient."""
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (x, *parameters_of(self).values())
        ):
            raise NotImplementedError(
                f"{self!r} is packed, and packed weights do not support gradients; call it under "
                "torch.no_grad(), or call unpack_() on it"
            )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        with self._unpacked():
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._unpacked():
            super()._load_from_state_dict(*args)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        kept, plain = dict(parameters_of(self)), self._plain_weights()
        parameters_of(self).update(plain)
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        finally:
            parameters_of(self).update(kept)
        for name in plain:
            if isinstance(value := destination.get(prefix + name), ShardTensor):
                value._before_load = partial(_load_into, weakref.ref(self), plain)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose weights are the packed ones again where that is all there was."""
        super().__setstate__(state)
        self._packed = {
            name: self.get_parameter(name).detach() if name in self._dropped else packed
            for name, packed in self._packed.items()
        }


def _load_into(layer_ref: weakref.ref[PackableModule], plain: Mapping[str, nn.Parameter]) -> None:
    """Before a checkpoint is read into the ``plain`` weights of a state dict: if the layer is
    packed, let it use these until it is packed again."""
    layer = layer_ref()
    if layer is None:
        return
    for name, weight in plain.items():
        parameter = layer.get_parameter(name)
        dtype = layer._plain_dtype if name in layer._dropped else parameter.dtype
        if (weight.dtype, weight.device) != (dtype, parameter.device):
            return  # the state dict is older than a move of the layer
        weight.requires_grad_(parameter.requires_grad)
    if layer._packed:
        layer._before_load = layer._packed, layer._dropped
    if layer._before_load is not None:
        layer._use_plain(plain)


def pack_(module: Module, *, drop: bool = False, dtype: torch.dtype | None = None) -> Module:
    """Pack every parallel linear layer and `MoE` in a module, as `ColumnParallelLinear.pack_`;
    return the module, which is unchanged if a layer cannot be packed."""
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, PackableModule)
    }
    for name, layer in layers.items():
        layer.check_packable(f"{name}." if name else "", dtype)
    for layer in layers.values():
        layer.pack_(drop=drop, dtype=dtype)
    return module
