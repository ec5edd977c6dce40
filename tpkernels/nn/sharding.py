"""Modules whose parameters are one rank's shards of an unsharded module's parameters.

In memory, a parameter is a plain tensor that holds the shard alone. A state dict has the names and
shapes of the unsharded module: its values are `ShardTensor` (see checkpoint.py), and
``load_state_dict`` takes these, or unsharded tensors, of which each rank keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import nn

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn.checkpoint import ShardTensor
from tpkernels.nn.split import Split, position


class SequenceOptions(TypedDict, total=False):
    """How a layer splits its activations. `ShardedModule` has the defaults."""

    sequence_parallel: bool
    sequence_dim: int


class LayerOptions(SequenceOptions, total=False):
    """The options that all parallel layers take. `ShardedModule` has the defaults."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class ShardedModule(nn.Module):
    """A module of which each rank of a group holds a shard.

    A subclass creates its parameters with `add_parameter` and draws their values in
    `reset_parameters`.

    Args:
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        sequence_parallel: the activations outside the layer are split along ``sequence_dim``.
        sequence_dim: the dim of the sequence.
        device, dtype: of the parameters, as torch's layers take them.
    """

    def __init__(
        self,
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = groups.name_of(group)
        self.rank, self.world = position(self.group)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.splits: dict[str, Split] = {}  #: of the sharded parameters, by name
        self._factory: Mapping[str, Any] = {"device": device, "dtype": dtype}

    def add_parameter(self, name: str, shape: Sequence[int], split: Split | None) -> None:
        """Create a parameter, uninitialised.

        Args:
            shape: of the unsharded parameter.
            split: how it is sharded; None: every rank has all of it.
        """
        if split is not None:
            shape = split.local_shape(shape)
            self.splits[name] = split
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, **self._factory)))

    def fill(self, name: str, draw: Callable[[torch.Tensor], Any]) -> None:
        """Draw the unsharded parameter and keep this rank's shard, so that ranks with the same
        random state get the values of the unsharded module. Needs memory for the unsharded
        parameter. Does nothing on the meta device."""
        parameter = self.get_parameter(name)
        if parameter.is_meta:
            return
        split = self.splits.get(name)
        whole = parameter.new_empty(self.whole_shape(name))
        with torch.no_grad():
            draw(whole)
            parameter.copy_(whole if split is None else split.shard(whole))

    def adopt(self, module: nn.Module) -> None:
        """Replace the parameters with copies of this rank's shards of ``module``'s parameters, of
        the same dtype, device and ``requires_grad``.

        Raises:
            ValueError: ``module`` has different parameters, or different shapes.
        """
        whole_shapes = {name: list(p.shape) for name, p in module.named_parameters(recurse=False)}
        expected = {name: list(self.whole_shape(name)) for name, _ in self.named_parameters()}
        if whole_shapes != expected:
            raise ValueError(f"{module} has parameters {whole_shapes}, expected {expected}")
        for name in expected:
            whole = module.get_parameter(name)
            value = whole.detach()
            if name in self.splits:
                value = self.splits[name].shard(value)
            self.register_parameter(name, nn.Parameter(value.clone(), whole.requires_grad))
        self.train(module.training)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the unsharded shape of a parameter."""
        shape = tuple(self.get_parameter(name).shape)
        return self.splits[name].whole_shape(shape) if name in self.splits else shape

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, split in self.splits.items():
            key = prefix + name
            if key in destination:
                local = destination[key].data
                if type(local) is not torch.Tensor:
                    raise NotImplementedError(
                        f"{key} is a {type(local).__name__}: a layer that is sharded a second "
                        "time, such as by fully_shard, has no state dict"
                    )
                destination[key] = ShardTensor(local, split, self.group)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        values = dict(state_dict)
        # Cloned before it is assigned: a view would keep the unsharded tensor alive.
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, split in self.splits.items():
            key = prefix + name
            if key not in values or self._parameters.get(name) is None:
                continue
            try:
                shard = _shard_of(values[key], split, self.get_parameter(name).shape)
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
                shard = self.get_parameter(name).detach()
            values[key] = shard.clone() if assign else shard
        super()._load_from_state_dict(
            values, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _shard_of(value: torch.Tensor, split: Split, shape: torch.Size) -> torch.Tensor:
    """Return this rank's shard of a value in a state dict.

    Args:
        shape: of the parameter on this rank.
    """
    whole = split.whole_shape(shape)
    if tuple(value.shape) != whole:
        raise ValueError(
            f"the state dict has shape {list(value.shape)}, the unsharded parameter {list(whole)}"
        )
    if not isinstance(value, ShardTensor):
        return split.shard(value)
    if value.placement != split:
        raise ValueError(
            f"the state dict has {value.placement}, this module {split}; load it through "
            "torch.distributed.checkpoint, or unsharded (tpkernels.nn.full_state_dict)"
        )
    return value.local
