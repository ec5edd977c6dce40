"""Modules whose parameters are one rank's shards of an unsharded module's parameters.

In memory, a parameter is a plain tensor that holds the shard alone. A state dict has the names and
shapes of the unsharded module: its values are `ShardTensor`, and ``load_state_dict`` takes these,
or unsharded tensors, of which each rank keeps its shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypedDict

import torch
from torch import nn

from tpkernels import groups
from tpkernels.common import dtypes
from tpkernels.common.shards import check_sizes, shard_sizes
from tpkernels.groups import GroupLike
from tpkernels.nn.torch_tools import Mark, mark
from tpkernels.ops.all_gather import all_gather
from tpkernels.torch_private import (
    FakeTensor,
    OpOverload,
    assume_constant_result,
    aten_to_copy,
    has_hooks,
    make_wrapper_subclass,
    parameters_of,
    state_of,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_PLANNED = "tpkernels: ranks that are planned, "  # followed by their number
_aten = torch.ops.aten
# The ops that copy a state dict; they are applied to the shard.
_ON_SHARDS = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    aten_to_copy,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.copy_.default,
}


def planned(world: int) -> str:
    """Name a group that does not exist, of which this process is rank 0. Modules can be made for
    it, to see how they would be split over ``world`` ranks; calls of them fail."""
    return f"{_PLANNED}{world}"


@assume_constant_result
def position(group: str) -> tuple[int, int]:
    """Return (rank, world) in a group, by the group's name."""
    if group.startswith(_PLANNED):
        return 0, int(group.removeprefix(_PLANNED))
    members = groups.get(group)
    return members.rank, members.world


@dataclass(frozen=True)
class Box:
    """A part of a tensor: entries ``offsets[d]`` to ``offsets[d] + shape[d]`` of each dim d."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index of this part in the tensor."""
        pairs = zip(self.offsets, self.shape, strict=True)
        return tuple(slice(begin, begin + size) for begin, size in pairs)

    def common(self, other: Box) -> Box:
        """Return the intersection, whose size may be 0."""
        pairs = list(zip(self.slices, other.slices, strict=True))
        begins = tuple(max(a.start, b.start) for a, b in pairs)
        ends = (min(a.stop, b.stop) for a, b in pairs)
        return Box(begins, tuple(max(0, e - b) for b, e in zip(begins, ends, strict=True)))

    def relative_to(self, other: Box) -> Box:
        """Return this box with the first entry of ``other`` as the origin."""
        pairs = zip(self.offsets, other.offsets, strict=True)
        return Box(tuple(offset - origin for offset, origin in pairs), self.shape)


@dataclass(frozen=True)
class Sharding:
    """Rank r has the ``ranges[r]`` of dim ``dim``, each a (begin, size); ``rank`` is this rank."""

    dim: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    rank: int = 0

    @classmethod
    def of(
        cls, dim: int, total: int, group: str, what: str, sizes: Sequence[int] | Self | None = None
    ) -> Self:
        """Split ``total`` entries of ``what`` over a group: into ``sizes``, by default balanced.
        Raise ValueError if the sizes do not fit."""
        rank, world = position(group)
        if isinstance(sizes, Sharding):
            return replace(sizes, rank=rank)
        checked = shard_sizes(total, world) if sizes is None else check_sizes(sizes, world)
        if sum(checked) != total:
            raise ValueError(
                f"the shard sizes {list(checked)} of {what} sum to {sum(checked)}; expected {total}"
            )
        return replace(cls.packed(dim, [checked]), rank=rank)

    @classmethod
    def packed(cls, dim: int, parts: Sequence[Sequence[int]]) -> Self:
        """Split a dim of which one part follows another: rank r has ``part[r]`` entries of each."""
        ends = iter(accumulate(size for part in parts for size in part))
        by_part = [[(next(ends) - size, size) for size in part] for part in parts]
        return cls(dim, tuple(zip(*by_part, strict=True)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the size of each rank's shard."""
        return tuple(sum(size for _, size in ranges) for ranges in self.ranges)

    @property
    def offset(self) -> int:
        """Return the index of the first entry of this rank's shard."""
        return self.ranges[self.rank][0][0]

    @property
    def size(self) -> int:
        """Return the size of this rank's shard."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """Return the unsharded size."""
        return max(begin + size for ranges in self.ranges for begin, size in ranges)

    @property
    def in_order(self) -> bool:
        """Return whether the shards, each of one range, follow each other."""
        return self.ranges == Sharding.packed(self.dim, [self.sizes]).ranges

    @property
    def replicated(self) -> bool:
        """Return whether several ranks have the same entries."""
        return sum(self.sizes) > self.total

    @property
    def is_first(self) -> bool:
        """Return whether no rank before this one has its entries."""
        return self.ranges.index(self.ranges[self.rank]) == self.rank

    def boxes(self, shape: Sequence[int], rank: int | None = None) -> list[Box]:
        """Return the parts that a rank, by default this one, has of a tensor of this unsharded
        shape."""
        origin, ranges = (0,) * len(shape), self.ranges[self.rank if rank is None else rank]
        return [Box(self._with(origin, begin), self._with(shape, size)) for begin, size in ranges]

    def chunks(self, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """Return the `boxes` of this rank, each with its view of the rank's shard ``local``."""
        sizes = [size for _, size in self.ranges[self.rank]]
        boxes = self.boxes(self.full_shape(local.shape))
        return list(zip(boxes, local.split(sizes, self.dim), strict=True))

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of an unsharded tensor, as a view if it is one range."""
        parts = [full[box.slices] for box in self.boxes(full.shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def unsharded(self, shards: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Return the unsharded tensor, given the concatenated shards of all ranks. Entries that
        several ranks have are the same, or are to be added."""
        if self.in_order:
            return shards
        full = torch.zeros(self.full_shape(shards.shape), dtype=shards.dtype, device=shards.device)
        for rank, shard in enumerate(shards.split(self.sizes, self.dim)):
            for box, chunk in replace(self, rank=rank).chunks(shard):
                place = full[box.slices]
                place.copy_(place + chunk if add else chunk)
        return full

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's shard, by default this one's, given that of a tensor or of
        any shard."""
        return self._with(shape, self.sizes[self.rank if rank is None else rank])

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the unsharded shape."""
        return self._with(shape, self.total)

    def _with(self, shape: Sequence[int], entry: int) -> tuple[int, ...]:
        """Return a shape, or offsets, with another entry for the split dim."""
        return (*shape[: self.dim], entry, *shape[self.dim + 1 :])


class ShardTensor(torch.Tensor):
    """This rank's shard of a tensor, with the shape of the unsharded tensor.

    ``torch.distributed.checkpoint`` saves each rank's shard once, and loads this rank's shard from
    a checkpoint of any number of ranks. A ShardTensor can be copied, detached and moved between
    devices; ``local`` is the shard as a plain tensor, `full_tensor` gathers the unsharded one.
    """

    local: torch.Tensor
    placement: Sharding
    group: str
    _before_load: Callable[[], None] | None = None  # called before a checkpoint is read into it

    @staticmethod
    def __new__(cls, local: torch.Tensor, split: Sharding, group: str) -> ShardTensor:
        tensor: ShardTensor = make_wrapper_subclass(
            cls, split.full_shape(local.shape), dtype=local.dtype, device=local.device
        )
        tensor.local, tensor.placement, tensor.group = local, split, group
        return tensor

    def full_tensor(self) -> torch.Tensor:
        """Gather the unsharded tensor on every rank. Collective: all ranks call it."""
        split = self.placement
        shards = all_gather(self.local, self.group, split.dim, shard_sizes=split.sizes)
        return split.unsharded(shards)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> ShardTensor:
        first = args[0] if args else None
        if func not in _ON_SHARDS or not isinstance(first, ShardTensor):
            raise NotImplementedError(
                f"{func} is not supported on a ShardTensor, which holds only the local shard; use "
                ".local, or call .full_tensor() on all ranks"
            )
        if func is _aten.copy_.default and getattr(args[1], "placement", None) != first.placement:
            raise ValueError(
                f"cannot copy {args[1]!r} into {first!r}: they are sharded differently"
            )
        shards = [x.local if isinstance(x, ShardTensor) else x for x in args]
        result = func(*shards, **(kwargs or {}))
        if result is first.local:
            return first
        return ShardTensor(result, first.placement, first.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        return ShardTensor(copy.deepcopy(self.local, memo), self.placement, self.group)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        split = self.placement
        return (
            f"ShardTensor({list(self.shape)}, dim {split.dim} split {list(split.sizes)}, "
            f"rank {split.rank}: {self.local!r})"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a ShardTensor is one rank's shard and cannot be pickled: save with "
            "torch.distributed.checkpoint, or torch.save tpkernels.nn.full_state_dict(model)"
        )

    def untyped_storage(self) -> NoReturn:
        """Raise TypeError: safetensors and others would save the unsharded memory."""
        raise TypeError(
            "a ShardTensor is one rank's shard and has no storage of the unsharded tensor: save "
            "with torch.distributed.checkpoint, or call tpkernels.nn.full_state_dict(model) on all "
            "ranks and pass the result to safetensors.torch.save_file or as state_dict"
        )

    storage = untyped_storage

    # The protocol of torch.distributed._checkpointable, for torch.distributed.checkpoint. Importing
    # that package takes half a second, but whoever calls these methods has done so already.

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
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
        if self._before_load is not None:
            self._before_load()
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        boxes = self.placement.boxes(self.shape) if self.local.numel() else []
        return [ChunkStorageMetadata(torch.Size(x.offsets), torch.Size(x.shape)) for x in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        chunks = self.placement.chunks(self.local)
        return next(chunk for box, chunk in chunks if index.offset in (None, box.offsets))


class SequenceOptions(TypedDict, total=False):
    """How a layer splits its activations; see `tpkernels.nn`."""

    sequence_parallel: bool
    sequence_dim: int


class LayerOptions(SequenceOptions, total=False):
    """The options that all parallel layers take; see `tpkernels.nn`."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class ShardedModule(nn.Module):
    """A module of which each rank of a group holds a shard; see `tpkernels.nn` for the arguments. A
    subclass creates its parameters with `add_parameter`, and draws them in `reset_parameters`."""

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
        self.splits: dict[str, Sharding] = {}  #: of the sharded parameters, by name
        self._factory: Mapping[str, Any] = {"device": device, "dtype": dtype}

    def add_parameter(self, name: str, shape: Sequence[int], split: Sharding | None) -> None:
        """Create a parameter, uninitialised, of an unsharded ``shape``. Without a ``split`` every
        rank has all of it."""
        if split is not None:
            shape = split.local_shape(shape)
            self.splits[name] = split
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, **self._factory)))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, or replace one."""
        super().register_parameter(name, param)
        self._mark_shards()

    def __setattr__(self, name: str, value: torch.Tensor | nn.Module) -> None:
        """Do what ``nn.Module`` does. FSDP2 replaces parameters without `register_parameter` where
        a class has not its own ``__setattr__``."""
        super().__setattr__(name, value)

    def _mark_shards(self) -> None:
        """Tell torch's own tools which parameters are shards."""
        for name, split in self.splits.items():
            parameter = parameters_of(self).get(name)
            if parameter is not None:
                to_state = partial(ShardTensor, split=split, group=self.group)
                from_state = partial(_shard_of, split=split, shape=parameter.shape)
                total = partial(_sum_replicas, split, self.group) if split.replicated else None
                mark(parameter, Mark(self.group, to_state, from_state, split.is_first, total))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark_shards()  # torch may have made new parameters
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        here = position(state["group"])
        if here != (state["rank"], state["world"]):
            raise ValueError(
                f"this module was pickled by rank {state['rank']} of {state['world']} and holds "
                f"the shards of that rank, but this is rank {here[0]} of {here[1]}: save with "
                "torch.distributed.checkpoint, or torch.save tpkernels.nn.full_state_dict(model)"
            )
        super().__setstate__(state)
        self._mark_shards()

    def fill(self, name: str, draw: Callable[[torch.Tensor], Any]) -> None:
        """Draw the unsharded parameter, which needs memory for it, and keep this rank's shard: with
        the same random state, ranks get the values of the unsharded module."""
        parameter = self.get_parameter(name)
        if not parameter.is_meta:
            full = parameter.new_empty(self.full_shape(name))
            with torch.no_grad():
                draw(full)
                parameter.copy_(self.shard_of(name, full))

    def shard_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of an unsharded parameter, or of its gradient."""
        return self.splits[name].shard(full) if name in self.splits else full

    def adopt(
        self, module: nn.Module, made: dict[nn.Parameter, nn.Parameter | None] | None = None
    ) -> Self:
        """Replace the parameters with copies of this rank's shards of ``module``'s parameters, of
        the same dtype, device and ``requires_grad``, and return the layer; or raise ValueError if
        they do not fit.

        Args:
            made: where the layer replaces the module, and its parameters get the gradients and
                attributes, too: the shard of each parameter that several modules share, or None as
                long as it is not made.
        """
        full_shapes = {name: list(p.shape) for name, p in module.named_parameters(recurse=False)}
        expected = {name: list(self.full_shape(name)) for name, _ in self.named_parameters()}
        if full_shapes != expected:
            raise ValueError(
                f"{module} has parameters of shapes {full_shapes}; expected {expected}"
            )
        for name in expected:
            full = module.get_parameter(name)
            shard = None if made is None else made.get(full)
            if shard is None:
                value = self.shard_of(name, full.detach()).clone()
                shard = nn.Parameter(value, full.requires_grad)
                if made is not None:
                    vars(shard).update(vars(full))
                    if full.grad is not None:
                        shard.grad = self.shard_of(name, full.grad).clone()
                    if full in made:
                        made[full] = shard
            self.register_parameter(name, shard)
        return self.train(module.training)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the unsharded shape of a parameter."""
        shape = tuple(self.get_parameter(name).shape)
        return self.splits[name].full_shape(shape) if name in self.splits else shape

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, split in self.splits.items():
            key = prefix + name
            if key in destination:
                local = destination[key].data
                if type(local) is not torch.Tensor:
                    raise NotImplementedError(
                        f"{key} is a {type(local).__name__}: the state dict of a layer that is "
                        "sharded twice, such as by fully_shard, is not supported"
                    )
                destination[key] = ShardTensor(local, split, self.group)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        *_, error_messages = args
        values = dict(state_dict)
        # Cloned before it is assigned: a view would keep the unsharded tensor alive.
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, split in self.splits.items():
            key = prefix + name
            if key not in values or parameters_of(self).get(name) is None:
                continue
            try:
                shard = _shard_of(values[key], split, self.get_parameter(name).shape)
            except ValueError as error:
                error_messages.append(f"{key}: {error}")
                shard = self.get_parameter(name).detach()
            values[key] = shard.clone() if assign else shard
        super()._load_from_state_dict(values, prefix, local_metadata, *args)


def _sum_replicas(split: Sharding, group: str, grad: torch.Tensor) -> torch.Tensor:
    """Return a shard's gradient, given this rank's part of it."""
    grads = grad.to(dtypes.accumulator(grad.dtype)).contiguous()
    shards = all_gather(grads, group, split.dim, shard_sizes=split.sizes)
    return split.shard(split.unsharded(shards, add=True)).to(grad.dtype)


def _shard_of(value: torch.Tensor, split: Sharding, shape: torch.Size) -> torch.Tensor:
    """Return this rank's shard, of ``shape``, of a value in a state dict."""
    full = split.full_shape(shape)
    if tuple(value.shape) != full:
        raise ValueError(
            f"the shape in the state dict is {list(value.shape)}, but the unsharded parameter has "
            f"shape {list(full)}"
        )
    if not isinstance(value, ShardTensor):
        return split.shard(value)
    if value.placement != split:
        raise ValueError(
            f"the state dict is sharded as {value.placement}, but this module as {split}; load it "
            "with torch.distributed.checkpoint, or unsharded (tpkernels.nn.full_state_dict)"
        )
    return value.local


def check_parameter(value: torch.Tensor | None, what: str) -> None:
    """Raise NotImplementedError if a parameter cannot be split."""
    if value is None:
        return
    data = value.data
    if not value.is_floating_point() or type(data) not in (torch.Tensor, FakeTensor):
        raise NotImplementedError(
            f"{what} is a {type(data).__name__} of {dtypes.name(value.dtype)}; a quantized, packed "
            "or distributed weight cannot be sharded: parallelize the plain floating-point model"
        )
    if has_hooks(value):
        raise NotImplementedError(
            f"{what} has hooks, which its shard would lose; remove them first, and register them "
            "on the parameter of the parallel model"
        )
    dtypes.check_supported(value.dtype, what)


def additions(module: nn.Module) -> list[str]:
    """Name what a module has beyond its class: hooks, and methods of its own."""
    own = vars(module).items()
    hooks = [f"its {key.strip('_')}" for key, value in own if key.endswith("_hooks") and value]
    return hooks + [
        f"its overridden {key}"
        for key, value in own
        if key[0] != "_" and callable(value) and hasattr(type(module), key)
    ]


def check_plain(module: nn.Module, name: str, known: Collection[str]) -> None:
    """Raise NotImplementedError if a module that is to be replaced has something that would be
    lost: hooks, a method of its own, or a parameter, buffer or child that is not ``known``."""
    lost = [*additions(module), *(f"its {key}" for key in state_of(module) if key not in known)]
    if lost:
        raise NotImplementedError(
            f"{name} is replaced by a parallel layer, and would lose {', '.join(lost)}; remove "
            "that first. Hooks that work on a shard can be registered on the parallel model"
        )


def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """Gather the state dict of the unsharded module, with plain tensors for ``torch.save`` or for
    the ``load_state_dict`` of an unsharded model. Collective: all ranks call it.

    Args:
        rank0_only: rank 0 gets the state dict, on the CPU; the others get an empty dict. No other
            rank, and no GPU, then has more than one unsharded parameter at a time.
    """
    return gather_state(module, module.state_dict(), rank0_only)


def gather_state(module: nn.Module, shards: Mapping[str, Any], rank0_only: bool) -> dict[str, Any]:
    """Return `full_state_dict` for ``shards``, a state dict of the module or a part of one."""
    # Tied parameters are gathered once, on every rank, and stay one tensor.
    identity = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    gathered: dict[int, torch.Tensor | None] = {}
    state: dict[str, Any] = {}
    ranks = {value.placement.rank for value in shards.values() if isinstance(value, ShardTensor)}
    keep = not rank0_only or ranks <= {0}
    for name, value in shards.items():
        key = identity.get(name, id(value))
        if key not in gathered:
            tensor = value.full_tensor() if isinstance(value, ShardTensor) else value
            if rank0_only and isinstance(tensor, torch.Tensor):
                tensor = tensor.cpu()
            gathered[key] = tensor if keep else None
        if keep:
            state[name] = gathered[key]
    return state
