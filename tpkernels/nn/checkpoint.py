"""The values in the state dict of a sharded module, and the unsharded state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tpkernels.nn.split import Split
from tpkernels.ops.all_gather import all_gather

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten = torch.ops.aten
# The ops that copy a state dict; they are applied to the shard.
_ON_SHARDS = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.copy_.default,
}


class ShardTensor(torch.Tensor):
    """This rank's shard of a tensor, with the shape of the unsharded tensor.

    ``torch.distributed.checkpoint`` saves each rank's shard once, and loads this rank's shard from
    a checkpoint of any number of ranks. A ShardTensor can be copied, detached and moved between
    devices; ``local`` is the shard as a plain tensor, `full_tensor` gathers the unsharded one.
    """

    local: torch.Tensor
    placement: Split
    group: str

    @staticmethod
    def __new__(cls, local: torch.Tensor, split: Split, group: str) -> ShardTensor:
        tensor: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, split.whole_shape(local.shape), dtype=local.dtype, device=local.device
        )
        tensor.local, tensor.placement, tensor.group = local, split, group
        return tensor

    def full_tensor(self) -> torch.Tensor:
        """Gather the unsharded tensor on every rank. Collective: all ranks call it."""
        split = self.placement
        return all_gather(self.local, self.group, split.dim, shard_sizes=split.sizes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> ShardTensor:
        first = args[0] if args else None
        if func not in _ON_SHARDS or not isinstance(first, ShardTensor):
            raise NotImplementedError(
                f"{func} needs more than this rank's shard of a ShardTensor; take .local, or "
                ".full_tensor() on all ranks"
            )
        if func is _aten.copy_.default and getattr(args[1], "placement", None) != first.placement:
            raise ValueError(f"cannot copy {args[1]!r} into {first!r}, which is split differently")
        shards = [x.local if isinstance(x, ShardTensor) else x for x in args]
        result = func(*shards, **(kwargs or {}))
        if result is first.local:
            return first
        return ShardTensor(result, first.placement, first.group)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        split = self.placement
        return (
            f"ShardTensor({list(self.shape)}, dim {split.dim} split {list(split.sizes)}, "
            f"rank {split.rank}: {self.local!r})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a ShardTensor is one rank's shard and cannot be pickled: save with "
            "torch.distributed.checkpoint, or torch.save tpkernels.nn.full_state_dict(model)"
        )

    def untyped_storage(self) -> NoReturn:
        """Raise TypeError. safetensors and others call it to save the unsharded memory, which no
        rank has."""
        raise TypeError(
            "a ShardTensor is one rank's shard and has no storage of the unsharded tensor: save "
            "with torch.distributed.checkpoint, or call tpkernels.nn.full_state_dict(model) on all "
            "ranks and pass the result to safetensors.torch.save_file or as state_dict"
        )

    storage = untyped_storage

    # The protocol of torch.distributed._checkpointable, for torch.distributed.checkpoint. Importing
    # that package takes half a second, but whoever calls these methods has done so already.

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self.local.numel() == 0:
            return []
        offsets = [0] * self.dim()
        offsets[self.placement.dim] = self.placement.offset
        return [ChunkStorageMetadata(torch.Size(offsets), self.local.size())]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local


def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """Gather the state dict of the unsharded module, with plain tensors for ``torch.save`` or for
    the ``load_state_dict`` of an unsharded model. Collective: all ranks call it.

    Args:
        module: a module with sharded layers.
        rank0_only: rank 0 gets the state dict, on the CPU; the others get an empty dict. No other
            rank, and no GPU, then has more than one unsharded parameter at a time.

    Raises:
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    return gathered(module, module.state_dict(), rank0_only)


def gathered(module: nn.Module, shards: Mapping[str, Any], rank0_only: bool) -> dict[str, Any]:
    """Return `full_state_dict` for ``shards``, a state dict of the module or a part of one."""
    # Keyed by the parameter's identity: tied parameters are gathered once, on every rank, and stay
    # one tensor.
    identity = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    whole: dict[int, torch.Tensor | None] = {}
    state: dict[str, Any] = {}
    ranks = {value.placement.rank for value in shards.values() if isinstance(value, ShardTensor)}
    keep = not rank0_only or ranks <= {0}
    for name, value in shards.items():
        key = identity.get(name, id(value))
        if key not in whole:
            tensor = value.full_tensor() if isinstance(value, ShardTensor) else value
            if rank0_only and isinstance(tensor, torch.Tensor):
                tensor = tensor.cpu()
            whole[key] = tensor if keep else None
        if keep:
            state[name] = whole[key]
    return state
