"""What a state dict of a sharded module holds, for torch.distributed.checkpoint and for users."""

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
# What copies of state dicts are made with; they do to the shard what they do to a tensor.
_ON_SHARES = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.copy_.default,
}


class ShardTensor(torch.Tensor):
    """This rank's shard of a tensor that looks unsharded: it has the shape of the whole.

    torch.distributed.checkpoint saves each rank's shard once, and loads whatever part of a saved
    tensor is this rank's, however it was split when it was saved. A shard can be copied, detached
    and moved; ``local`` is the shard as a plain tensor, `full_tensor` gathers the whole.
    """

    local: torch.Tensor
    placement: Split
    group: str

    @staticmethod
    def __new__(cls, local: torch.Tensor, split: Split, group: str) -> ShardTensor:
        made: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, split.whole_shape(local.shape), dtype=local.dtype, device=local.device
        )
        made.local, made.placement, made.group = local, split, group
        return made

    def full_tensor(self) -> torch.Tensor:
        """The whole, on every rank. Collective."""
        split = self.placement
        return all_gather(self.local, self.group, split.dim, shard_sizes=split.sizes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> ShardTensor:
        first = args[0] if args else None
        if func not in _ON_SHARES or not isinstance(first, ShardTensor):
            raise NotImplementedError(
                f"{func} of a ShardTensor, of which this rank has a shard only; take .local, or "
                ".full_tensor() on all ranks"
            )
        if func is _aten.copy_.default and getattr(args[1], "placement", None) != first.placement:
            raise ValueError(f"cannot copy {args[1]!r} into {first!r}, which is not split alike")
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
            "a ShardTensor is one rank's shard and is not pickled: save with "
            "torch.distributed.checkpoint, or torch.save tpkernels.nn.full_state_dict(model)"
        )

    def untyped_storage(self) -> NoReturn:
        """What safetensors asks for, among others."""
        raise TypeError(
            "a ShardTensor is one rank's shard and has no memory of the whole: save with "
            "torch.distributed.checkpoint, or give tpkernels.nn.full_state_dict(model), called on "
            "all ranks, to safetensors.torch.save_file or as state_dict"
        )

    storage = untyped_storage

    # torch.distributed._checkpointable: how torch.distributed.checkpoint sees a tensor. Who calls
    # these has imported that package, which takes half a second.

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
    """The state dict of the unsharded module: plain tensors, as ``torch.save`` and an unsharded
    model's ``load_state_dict`` take them. Collective: all ranks call it.

    Args:
        rank0_only: the other ranks get an empty dict, and rank 0's tensors are on the CPU: no rank
            but this one, and no GPU, has more than one whole parameter at a time.

    Raises:
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    return gathered(module, module.state_dict(), rank0_only)


def gathered(module: nn.Module, shards: Mapping[str, Any], rank0_only: bool) -> dict[str, Any]:
    """`full_state_dict` of what ``shards``, a state dict of the module or a part of it, holds."""
    # By the parameter's identity, which is the same question on every rank: tied parameters are
    # gathered once, and stay one tensor.
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
