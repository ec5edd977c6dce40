"""Modules whose parameters are this rank's shard of an unsharded module's.

In memory a parameter is a plain tensor, the shard alone. A state dict has the unsharded names and
shapes: its values are `ShardTensor` (see checkpoint.py), and `load_state_dict` takes these, or
unsharded tensors, of which each rank takes its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn.checkpoint import ShardTensor
from tpkernels.nn.split import Split, position


def draw_linear(fan_in: int) -> Callable[[torch.Tensor], Any]:
    """How ``nn.Linear`` draws weight and bias: by the unsharded fan-in."""
    bound = fan_in**-0.5
    return lambda whole: nn.init.uniform_(whole, -bound, bound)


class ShardedModule(nn.Module):
    """A module of which each rank of a group has a shard.

    Subclasses make sharded parameters with `add_sharded` and draw the values of all in
    `reset_parameters`.
    """

    def __init__(self, group: GroupLike) -> None:
        super().__init__()
        self.group = groups.name_of(group)
        self.rank, self.world = position(self.group)
        self.splits: dict[str, Split] = {}  #: of the sharded parameters, by name

    def add_sharded(
        self,
        name: str,
        shape: Sequence[int],
        split: Split,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """A parameter of which the unsharded shape is ``shape``; this rank's shard, not filled."""
        value = torch.empty(split.local_shape(shape), device=device, dtype=dtype)
        self.register_parameter(name, nn.Parameter(value))
        self.splits[name] = split

    def fill(self, name: str, draw: Callable[[torch.Tensor], Any]) -> None:
        """Draws the whole parameter and keeps this rank's shard: with the same random state on all
        ranks, the values are those of the unsharded module. It needs the memory of the whole."""
        parameter = self.get_parameter(name)
        split = self.splits.get(name)
        whole = parameter.new_empty(self.whole_shape(name))
        with torch.no_grad():
            draw(whole)
            parameter.copy_(whole if split is None else split.shard(whole))

    def adopt(self, module: nn.Module) -> None:
        """Makes the parameters copies of this rank's shards of those of ``module``, with their
        dtype, device and ``requires_grad``.

        Raises:
            ValueError: ``module`` has other parameters, or of other shapes.
        """
        theirs = {name: list(p.shape) for name, p in module.named_parameters(recurse=False)}
        mine = {name: list(self.whole_shape(name)) for name, _ in self.named_parameters()}
        if theirs != mine:
            raise ValueError(f"{module} has parameters {theirs}, expected {mine}")
        for name in mine:
            whole = module.get_parameter(name)
            value = whole.detach()
            if name in self.splits:
                value = self.splits[name].shard(value)
            self.register_parameter(name, nn.Parameter(value.clone(), whole.requires_grad))
        self.train(module.training)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """The unsharded shape of a parameter."""
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
                        f"{key} is a {type(local).__name__}: a layer that is split once more, as "
                        "by fully_shard, has no state dict"
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
        mine = dict(state_dict)
        # An assigned parameter must not keep the whole of which it is a part.
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, split in self.splits.items():
            key = prefix + name
            if key not in mine or self._parameters.get(name) is None:
                continue
            try:
                shard = _shard_of(mine[key], split, self.get_parameter(name).shape)
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
                shard = self.get_parameter(name).detach()
            mine[key] = shard.clone() if assign else shard
        super()._load_from_state_dict(
            mine, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _shard_of(value: torch.Tensor, split: Split, shape: torch.Size) -> torch.Tensor:
    """The shard of a value in a state dict, for a parameter of which ``shape`` is here."""
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
