"""Layers that can pack their weights for inference on CPUs.

Invariant: a packed layer computes with its packed weights, but its state dict equals the state dict
of the plain layer. Methods that change the parameters (``to``, ``load_state_dict``,
``reset_parameters``) see plain weights, and the layer packs them again afterwards.
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
from tpkernels.torch_private import direct_parameters

Module = TypeVar("Module", bound=nn.Module)


class PackableModule(ShardedModule):
    """A layer that can pack the weights in ``packable``, all or none of them."""

    packable: ClassVar[tuple[str, ...]]
    empty: bool  #: this rank holds no shard of the weights, so it packs no weights
    _k_dim = 1  # dim of K in a plain weight, or in a stack of expert weights

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._packed: dict[str, torch.Tensor] = {}  # packed weights, the operands of the ops
        self._dropped: frozenset[str] = frozenset()  # weights that exist only packed
        self._requested_dtype: torch.dtype | None = None  # argument of `pack_`
        self._plain_dtype: torch.dtype | None = None  # dtype of the weights before packing
        # `_packed` and `_dropped` before `_use_plain_for_load`.
        self._packed_before_load: tuple[dict[str, torch.Tensor], frozenset[str]] | None = None

    def unsharded_k(self, name: str) -> int:
        """Return K of an unsharded weight."""
        raise NotImplementedError

    def pack_(self, *, drop: bool = False, dtype: torch.dtype | None = None) -> Self:
        """Pack the weights for inference on CPUs with `tpkernels.pack`, and return the layer.

        Calls that need a gradient then raise NotImplementedError. State dicts do not change.
        ``load_state_dict``, ``to`` and copies of the layer pack the new weights again, unless int8
        weights already have the same values. After any other change of a weight, call this method
        again. ``torch.distributed.checkpoint.load`` into a state dict of the layer unpacks it, even
        if loading fails; ``load_state_dict`` then packs it again. A rank without features packs no
        weights.

        Args:
            drop: free the plain weights. Both copies together need twice the memory. The parameters
                are then the packed weights, with one more dim; a state dict unpacks them. An
                embedding that is tied to the layer keeps the plain weight.
            dtype: dtype of the packed weights. None: the dtype of the weights. int8 is used if K is
                a multiple of 4. Its scales are the scales of the unsharded weights. A dropped int8
                weight does not require a gradient, even after it is unpacked.

        Raises:
            TypeError: ``dtype`` is neither the dtype of the weights nor int8.
            ValueError: a shard of K is not a multiple of the int8 scale group, or a weight has NaN
                or infinite elements, which int8 cannot represent.
            NotImplementedError: a weight cannot be packed, such as a CUDA or float64 weight.
        """
        for name in self.packable:
            self._can_pack(name, name, dtype)
        self.unpack_()
        for name in self.packable:
            self.pack_parameter(name, drop=drop, dtype=dtype)
        return self

    def check_packable(self, prefix: str, dtype: torch.dtype | None) -> None:
        """Raise the errors of `pack_`. ``prefix`` precedes the weight names in messages."""
        for name in self.packable:
            weight, full_name = self.get_parameter(name), f"{prefix}{name}"
            if not self.empty and not self._packed:
                check_packable(self._transposed(weight), full_name)
            if self._can_pack(name, full_name, dtype) and dtype == torch.int8 and not self.empty:
                check_finite(weight, full_name)

    def pack_parameter(self, name: str, *, drop: bool, dtype: torch.dtype | None) -> None:
        """Pack ``name`` if it is a packable weight. The caller must pack all packable weights."""
        if not self.empty and name in self.packable:
            packed_dtype = dtype if self._can_pack(name, name, dtype) else None
            weight = self._transposed(self.get_parameter(name))
            packed = pack_shard(weight, packed_dtype, self.unsharded_k(name))
            self.use_packed(name, packed, drop=drop, dtype=dtype)

    def use_packed(
        self, name: str, packed: torch.Tensor, *, drop: bool, dtype: torch.dtype | None
    ) -> None:
        """Set a packed weight, as `pack_parameter` does after packing.

        With ``drop``, the plain weight may be on the meta device.
        """
        weight = self.get_parameter(name)
        self._requested_dtype, self._plain_dtype = dtype, weight.dtype
        if drop:
            self._dropped |= {name}
            requires_grad = weight.requires_grad and packed.is_floating_point()
            self.register_parameter(name, nn.Parameter(packed, requires_grad))
        self._packed[name] = packed

    def unpack_(self) -> Self:
        """Undo `pack_`, and return the layer. Dropped weights get the values that were packed."""
        self._packed_before_load = None
        if self._packed:
            self._restore_plain(self._plain_weights())
        return self

    def _restore_plain(self, plain: Mapping[str, nn.Parameter]) -> None:
        for name, weight in plain.items():
            self.register_parameter(name, weight)
        self._packed, self._dropped = {}, frozenset()

    def _plain_weights(self) -> dict[str, nn.Parameter]:
        """Return the plain weights. Unpacks the dropped weights."""
        weights = {name: self.get_parameter(name) for name in self.packable}
        for name in self._dropped:
            plain = self._transposed(unpack(self._packed[name])).to(self._plain_dtype)
            weights[name] = nn.Parameter(plain, weights[name].requires_grad)
        return weights

    def _transposed(self, weight: torch.Tensor) -> torch.Tensor:
        """Map a weight of the layer to [K, N], or [experts, K, N], or back."""
        return weight.mT

    def _can_pack(self, name: str, full_name: str, dtype: torch.dtype | None) -> bool:
        """Return whether K of a weight allows packing it in ``dtype``, or raise ValueError."""
        sharding = self.shardings[name]
        sizes = sharding.sizes if sharding.dim == self._k_dim else ()
        return dtype != torch.int8 or scale_group(self.unsharded_k(name), full_name, sizes) > 1

    @contextmanager
    def _unpacked(self) -> Iterator[None]:
        """Unpack the layer within the block. Pack it again afterwards, even after an error."""
        packed, dropped = self._packed_before_load or (self._packed, self._dropped)
        self.unpack_()
        try:
            yield
        finally:
            for name, old_packed in packed.items():
                self._repack(name, old_packed, name in dropped)

    def _repack(self, name: str, old_packed: torch.Tensor, drop: bool) -> None:
        """Pack a weight again.

        If an int8 weight still has the same values, its integers are reused: quantizing it again
        could change them.
        """
        weight = self.get_parameter(name).detach()
        is_reusable = (
            old_packed.dtype == torch.int8 and weight.is_cpu and weight.dtype != torch.float64
        )
        if is_reusable and torch.equal(
            weight, self._transposed(unpack(old_packed)).to(weight.dtype)
        ):
            self.use_packed(name, old_packed, drop=drop, dtype=torch.int8)
            return
        try:
            self.pack_parameter(name, drop=drop, dtype=self._requested_dtype)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}; call unpack_() first") from None

    def _refuse_gradient(self, x: torch.Tensor) -> None:
        """Raise NotImplementedError if a call of the packed layer would need a gradient."""
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (x, *direct_parameters(self).values())
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
        saved, plain = dict(direct_parameters(self)), self._plain_weights()
        direct_parameters(self).update(plain)
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        finally:
            direct_parameters(self).update(saved)
        for name in plain:
            if isinstance(value := destination.get(prefix + name), ShardTensor):
                value._pre_load_hook = partial(_use_plain_for_load, weakref.ref(self), plain)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy. The packed form of a dropped weight is its restored parameter."""
        super().__setstate__(state)
        self._packed = {
            name: self.get_parameter(name).detach() if name in self._dropped else packed
            for name, packed in self._packed.items()
        }


def _use_plain_for_load(
    layer_ref: weakref.ref[PackableModule], plain: Mapping[str, nn.Parameter]
) -> None:
    """Unpack a packed layer before a checkpoint is read into its state dict.

    The layer uses the ``plain`` weights of the state dict until it is packed again.
    """
    layer = layer_ref()
    if layer is None:
        return
    for name, weight in plain.items():
        parameter = layer.get_parameter(name)
        dtype = layer._plain_dtype if name in layer._dropped else parameter.dtype
        if (weight.dtype, weight.device) != (dtype, parameter.device):
            return  # the layer was moved or cast after the state dict was created
        weight.requires_grad_(parameter.requires_grad)
    if layer._packed:
        layer._packed_before_load = layer._packed, layer._dropped
    if layer._packed_before_load is not None:
        layer._restore_plain(plain)


def pack_(module: Module, *, drop: bool = False, dtype: torch.dtype | None = None) -> Module:
    """Pack all parallel linear layers and `MoE` layers of a module.

    See `ColumnParallelLinear.pack_` for details and errors. If a layer cannot be packed, the module
    does not change.

    Args:
        module: module with the layers.
        drop: free the plain weights.
        dtype: dtype of the packed weights: the dtype of the weights (default), or int8.

    Returns:
        ``module``.
    """
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, PackableModule)
    }
    for name, layer in layers.items():
        layer.check_packable(f"{name}." if name else "", dtype)
    for layer in layers.values():
        layer.pack_(drop=drop, dtype=dtype)
    return module
