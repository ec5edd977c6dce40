"""Modules whose parameters are local shards of the parameters of an unsharded module.

In memory, a parameter is a plain tensor that holds only the local shard. A state dict has the names
and shapes of the unsharded module, and its values are `ShardTensor`. ``load_state_dict`` accepts
these, or unsharded tensors: each rank then keeps the local shard.
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
    direct_parameters,
    has_hooks,
    make_wrapper_subclass,
    state_names,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_PLACEHOLDER_PREFIX = "tpkernels: ranks that are planned, "  # the world size follows
_aten = torch.ops.aten
# Ops that copy state dicts. They run on the local shard.
_SHARD_OPS = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    aten_to_copy,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.copy_.default,
}


def placeholder_group(world: int) -> str:
    """Return the name of a group that does not exist, with this process as rank 0.

    Create modules with it to inspect how they are split over ``world`` ranks. Their forward fails.
    """
    return f"{_PLACEHOLDER_PREFIX}{world}"


@assume_constant_result
def rank_and_world(group: str) -> tuple[int, int]:
    """Return (rank, world size) in a group, by group name."""
    if group.startswith(_PLACEHOLDER_PREFIX):
        return 0, int(group.removeprefix(_PLACEHOLDER_PREFIX))
    members = groups.get(group)
    return members.rank, members.world


@dataclass(frozen=True)
class Box:
    """A slice of a tensor: entries ``offsets[d]`` to ``offsets[d] + shape[d]`` of each dim d."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box of a full tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index of the tensor."""
        pairs = zip(self.offsets, self.shape, strict=True)
        return tuple(slice(begin, begin + size) for begin, size in pairs)

    def common(self, other: Box) -> Box:
        """Return the intersection. Its size may be 0."""
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
    """Sharding of dim ``dim`` of a tensor.

    Rank r holds the entries in ``ranges[r]``, a tuple of (begin, size) pairs. ``rank`` is the local
    rank.
    """

    dim: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    rank: int = 0

    @classmethod
    def of(
        cls, dim: int, total: int, group: str, name: str, sizes: Sequence[int] | Self | None = None
    ) -> Self:
        """Split ``total`` entries over a group, into ``sizes`` or balanced shards.

        Raises ValueError if the sizes do not fit. ``name`` is the name of the dim in the message.
        """
        rank, world = rank_and_world(group)
        if isinstance(sizes, Sharding):
            return replace(sizes, rank=rank)
        checked = shard_sizes(total, world) if sizes is None else check_sizes(sizes, world)
        if sum(checked) != total:
            raise ValueError(
                f"the shard sizes {list(checked)} of {name} sum to {sum(checked)}; expected {total}"
            )
        return replace(cls.packed(dim, [checked]), rank=rank)

    @classmethod
    def packed(cls, dim: int, segments: Sequence[Sequence[int]]) -> Self:
        """Split a dim that consists of consecutive segments.

        Rank r holds ``segment[r]`` entries of each segment.
        """
        ends = iter(accumulate(size for segment in segments for size in segment))
        by_segment = [[(next(ends) - size, size) for size in segment] for segment in segments]
        return cls(dim, tuple(zip(*by_segment, strict=True)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the shard size of each rank."""
        return tuple(sum(size for _, size in ranges) for ranges in self.ranges)

    @property
    def offset(self) -> int:
        """Return the index of the first entry of the local shard."""
        return self.ranges[self.rank][0][0]

    @property
    def size(self) -> int:
        """Return the size of the local shard."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """Return the unsharded size."""
        return max(begin + size for ranges in self.ranges for begin, size in ranges)

    @property
    def in_order(self) -> bool:
        """Return whether each shard is one range, and the ranges are consecutive in rank order."""
        return self.ranges == Sharding.packed(self.dim, [self.sizes]).ranges

    @property
    def replicated(self) -> bool:
        """Return whether several ranks hold the same entries."""
        return sum(self.sizes) > self.total

    @property
    def is_first_replica(self) -> bool:
        """Return whether no lower rank holds the entries of the local shard."""
        return self.ranges.index(self.ranges[self.rank]) == self.rank

    def boxes(self, shape: Sequence[int], rank: int | None = None) -> list[Box]:
        """Return the boxes that a rank holds of a tensor with the unsharded ``shape``.

        ``rank`` is by default the local rank.
        """
        origin, ranges = (0,) * len(shape), self.ranges[self.rank if rank is None else rank]
        return [
            Box(self._replace_dim(origin, begin), self._replace_dim(shape, size))
            for begin, size in ranges
        ]

    def chunks(self, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """Return each of the local `boxes` with its view of the local shard."""
        sizes = [size for _, size in self.ranges[self.rank]]
        boxes = self.boxes(self.full_shape(local.shape))
        return list(zip(boxes, local.split(sizes, self.dim), strict=True))

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return the local shard of an unsharded tensor, as a view if it is one range."""
        slices = [full[box.slices] for box in self.boxes(full.shape)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, self.dim)

    def unsharded(self, shards: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Return the unsharded tensor for the concatenated shards of all ranks.

        Entries that several ranks hold must be identical. With ``add`` they are added instead.
        """
        if self.in_order:
            return shards
        full = torch.zeros(self.full_shape(shards.shape), dtype=shards.dtype, device=shards.device)
        for rank, shard in enumerate(shards.split(self.sizes, self.dim)):
            for box, chunk in replace(self, rank=rank).chunks(shard):
                view = full[box.slices]
                view.copy_(view + chunk if add else chunk)
        return full

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shard shape of a rank, by default the local rank.

        ``shape`` is the shape of the unsharded tensor or of any shard.
        """
        return self._replace_dim(shape, self.sizes[self.rank if rank is None else rank])

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the unsharded shape."""
        return self._replace_dim(shape, self.total)

    def _replace_dim(self, shape: Sequence[int], value: int) -> tuple[int, ...]:
        """Return a shape, or offsets, with ``value`` for the sharded dim."""
        return (*shape[: self.dim], value, *shape[self.dim + 1 :])


class ShardTensor(torch.Tensor):
    """Local shard of a tensor, with the shape of the unsharded tensor.

    ``torch.distributed.checkpoint`` saves each shard once, and loads the local shard from a
    checkpoint of any number of ranks. A ShardTensor can be copied, detached and moved between
    devices. ``local`` is the shard as a plain tensor; `full_tensor` gathers the unsharded tensor.
    """

    local: torch.Tensor
    sharding: Sharding
    group: str
    _pre_load_hook: Callable[[], None] | None = None  # runs before a checkpoint is read

    @staticmethod
    def __new__(cls, local: torch.Tensor, sharding: Sharding, group: str) -> ShardTensor:
        tensor: ShardTensor = make_wrapper_subclass(
            cls, sharding.full_shape(local.shape), dtype=local.dtype, device=local.device
        )
        tensor.local, tensor.sharding, tensor.group = local, sharding, group
        return tensor

    def full_tensor(self) -> torch.Tensor:
        """Gather the unsharded tensor on every rank. Collective."""
        sharding = self.sharding
        shards = all_gather(self.local, self.group, sharding.dim, shard_sizes=sharding.sizes)
        return sharding.unsharded(shards)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> ShardTensor:
        first = args[0] if args else None
        if func not in _SHARD_OPS or not isinstance(first, ShardTensor):
            raise NotImplementedError(
                f"{func} is not supported on a ShardTensor, which holds only the local shard; use "
                ".local, or call .full_tensor() on all ranks"
            )
        if func is _aten.copy_.default and getattr(args[1], "sharding", None) != first.sharding:
            raise ValueError(
                f"cannot copy {args[1]!r} into {first!r}: they are sharded differently"
            )
        shards = [x.local if isinstance(x, ShardTensor) else x for x in args]
        result = func(*shards, **(kwargs or {}))
        if result is first.local:
            return first
        return ShardTensor(result, first.sharding, first.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        return ShardTensor(copy.deepcopy(self.local, memo), self.sharding, self.group)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        sharding = self.sharding
        return (
            f"ShardTensor({list(self.shape)}, dim {sharding.dim} split {list(sharding.sizes)}, "
            f"rank {sharding.rank}: {self.local!r})"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a ShardTensor is one rank's shard and cannot be pickled: save with "
            "torch.distributed.checkpoint, or torch.save tpkernels.nn.full_state_dict(model)"
        )

    def untyped_storage(self) -> NoReturn:
        """Raise TypeError: safetensors, for example, would read an unsharded storage here."""
        raise TypeError(
            "a ShardTensor is one rank's shard and has no storage of the unsharded tensor: save "
            "with torch.distributed.checkpoint, or call tpkernels.nn.full_state_dict(model) on all "
            "ranks and pass the result to safetensors.torch.save_file or as state_dict"
        )

    storage = untyped_storage

    # Protocol of torch.distributed._checkpointable, for torch.distributed.checkpoint. Importing
    # that package costs half a second, but the callers of these methods have already imported it.

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
        if self._pre_load_hook is not None:
            self._pre_load_hook()
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        boxes = self.sharding.boxes(self.shape) if self.local.numel() else []
        return [ChunkStorageMetadata(torch.Size(x.offsets), torch.Size(x.shape)) for x in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        chunks = self.sharding.chunks(self.local)
        return next(chunk for box, chunk in chunks if index.offset in (None, box.offsets))


class SequenceOptions(TypedDict, total=False):
    """Sharding options for the activations of a layer; see `tpkernels.nn`."""

    sequence_parallel: bool
    sequence_dim: int


class LayerOptions(SequenceOptions, total=False):
    """Options of all parallel layers; see `tpkernels.nn`."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class ShardedModule(nn.Module):
    """Module whose parameters are sharded over the ranks of a group.

    See `tpkernels.nn` for the arguments. A subclass creates its parameters with `add_parameter` and
    initializes them in ``reset_parameters``.
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
        self.group = groups.group_name(group)
        self.rank, self.world = rank_and_world(self.group)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.shardings: dict[str, Sharding] = {}  #: by name of the sharded parameter
        self._factory: Mapping[str, Any] = {"device": device, "dtype": dtype}

    def add_parameter(self, name: str, shape: Sequence[int], sharding: Sharding | None) -> None:
        """Create an uninitialised parameter with an unsharded ``shape``.

        Without ``sharding``, every rank holds the full parameter.
        """
        if sharding is not None:
            shape = sharding.local_shape(shape)
            self.shardings[name] = sharding
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, **self._factory)))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add or replace a parameter."""
        super().register_parameter(name, param)
        self._mark_shards()

    def __setattr__(self, name: str, value: torch.Tensor | nn.Module) -> None:
        """Set an attribute like ``nn.Module``.

        If a class does not define ``__setattr__``, FSDP2 bypasses `register_parameter` when it
        replaces parameters.
        """
        super().__setattr__(name, value)

    def _mark_shards(self) -> None:
        """Mark the parameters that are shards for the torch tools, see torch_tools.py."""
        for name, sharding in self.shardings.items():
            parameter = direct_parameters(self).get(name)
            if parameter is not None:
                to_state = partial(ShardTensor, sharding=sharding, group=self.group)
                from_state = partial(_shard_from_state, sharding=sharding, shape=parameter.shape)
                sum_replicas = (
                    partial(_sum_replicas, sharding, self.group) if sharding.replicated else None
                )
                mark(
                    parameter,
                    Mark(self.group, to_state, from_state, sharding.is_first_replica, sum_replicas),
                )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark_shards()  # torch may have created new parameters
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        actual = rank_and_world(state["group"])
        if actual != (state["rank"], state["world"]):
            raise ValueError(
                f"this module was pickled by rank {state['rank']} of {state['world']} and holds "
                f"the shards of that rank, but this is rank {actual[0]} of {actual[1]}: save with "
                "torch.distributed.checkpoint, or torch.save tpkernels.nn.full_state_dict(model)"
            )
        super().__setstate__(state)
        self._mark_shards()

    def fill(self, name: str, draw: Callable[[torch.Tensor], Any]) -> None:
        """Initialize an unsharded parameter with ``draw``, and keep the local shard.

        With the same random state, all ranks get the values of the unsharded module. Allocates the
        unsharded parameter temporarily.
        """
        parameter = self.get_parameter(name)
        if not parameter.is_meta:
            full = parameter.new_empty(self.full_shape(name))
            with torch.no_grad():
                draw(full)
                parameter.copy_(self.get_shard(name, full))

    def get_shard(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return the local shard of an unsharded parameter or of its gradient."""
        return self.shardings[name].shard(full) if name in self.shardings else full

    def adopt(
        self,
        module: nn.Module,
        shared_shards: dict[nn.Parameter, nn.Parameter | None] | None = None,
    ) -> Self:
        """Replace the parameters with copies of the local shards of a module, and return the layer.

        The shards keep dtype, device and ``requires_grad``.

        Args:
            module: the unsharded module.
            shared_shards: pass it if the layer replaces the module: the parameters then also get
                the gradients and the attributes of the parameters of ``module``. It maps each
                parameter that several modules share to its shard, or to None until the shard
                exists.

        Raises:
            ValueError: the parameters of ``module`` do not fit.
        """
        full_shapes = {name: list(p.shape) for name, p in module.named_parameters(recurse=False)}
        expected = {name: list(self.full_shape(name)) for name, _ in self.named_parameters()}
        if full_shapes != expected:
            raise ValueError(
                f"{module} has parameters of shapes {full_shapes}; expected {expected}"
            )
        for name in expected:
            full = module.get_parameter(name)
            shard = None if shared_shards is None else shared_shards.get(full)
            if shard is None:
                value = self.get_shard(name, full.detach()).clone()
                shard = nn.Parameter(value, full.requires_grad)
                if shared_shards is not None:
                    vars(shard).update(vars(full))
                    if full.grad is not None:
                        shard.grad = self.get_shard(name, full.grad).clone()
                    if full in shared_shards:
                        shared_shards[full] = shard
            self.register_parameter(name, shard)
        return self.train(module.training)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the unsharded shape of a parameter."""
        shape = tuple(self.get_parameter(name).shape)
        return self.shardings[name].full_shape(shape) if name in self.shardings else shape

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, sharding in self.shardings.items():
            key = prefix + name
            if key in destination:
                local = destination[key].data
                if type(local) is not torch.Tensor:
                    raise NotImplementedError(
                        f"{key} is a {type(local).__name__}: the state dict of a layer that is "
                        "sharded twice, such as by fully_shard, is not supported"
                    )
                destination[key] = ShardTensor(local, sharding, self.group)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        *_, error_messages = args
        values = dict(state_dict)
        # Clone before assigning: a view would keep the unsharded tensor alive.
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, sharding in self.shardings.items():
            key = prefix + name
            if key not in values or direct_parameters(self).get(name) is None:
                continue
            try:
                shard = _shard_from_state(values[key], sharding, self.get_parameter(name).shape)
            except ValueError as error:
                error_messages.append(f"{key}: {error}")
                shard = self.get_parameter(name).detach()
            values[key] = shard.clone() if assign else shard
        super()._load_from_state_dict(values, prefix, local_metadata, *args)


def _sum_replicas(sharding: Sharding, group: str, grad: torch.Tensor) -> torch.Tensor:
    """Sum the local gradient of a shard over all ranks that hold the shard."""
    grads = grad.to(dtypes.accumulator(grad.dtype)).contiguous()
    shards = all_gather(grads, group, sharding.dim, shard_sizes=sharding.sizes)
    return sharding.shard(sharding.unsharded(shards, add=True)).to(grad.dtype)


def _shard_from_state(value: torch.Tensor, sharding: Sharding, shape: torch.Size) -> torch.Tensor:
    """Return the local shard, of ``shape``, of a state dict value."""
    full = sharding.full_shape(shape)
    if tuple(value.shape) != full:
        raise ValueError(
            f"the shape in the state dict is {list(value.shape)}, but the unsharded parameter has "
            f"shape {list(full)}"
        )
    if not isinstance(value, ShardTensor):
        return sharding.shard(value)
    if value.sharding != sharding:
        raise ValueError(
            f"the state dict is sharded as {value.sharding}, but this module as {sharding}; load "
            "it with torch.distributed.checkpoint, or unsharded (tpkernels.nn.full_state_dict)"
        )
    return value.local


def check_parameter(value: torch.Tensor | None, name: str) -> None:
    """Raise NotImplementedError if a parameter cannot be sharded."""
    if value is None:
        return
    data = value.data
    if not value.is_floating_point() or type(data) not in (torch.Tensor, FakeTensor):
        raise NotImplementedError(
            f"{name} is a {type(data).__name__} of {dtypes.name(value.dtype)}; a quantized, packed "
            "or distributed weight cannot be sharded: parallelize the plain floating-point model"
        )
    if has_hooks(value):
        raise NotImplementedError(
            f"{name} has hooks, which its shard would lose; remove them first, and register them "
            "on the parameter of the parallel model"
        )
    dtypes.check_supported(value.dtype, name)


def find_customizations(module: nn.Module) -> list[str]:
    """Return descriptions of the hooks and overridden methods of a module instance."""
    attributes = vars(module).items()
    hooks = [
        f"its {key.strip('_')}" for key, value in attributes if key.endswith("_hooks") and value
    ]
    return hooks + [
        f"its overridden {key}"
        for key, value in attributes
        if key[0] != "_" and callable(value) and hasattr(type(module), key)
    ]


def check_plain(module: nn.Module, name: str, allowed: Collection[str]) -> None:
    """Raise NotImplementedError if replacing a module would lose some of its attributes.

    These are hooks, overridden methods, and parameters, buffers or children outside ``allowed``.
    """
    lost = [
        *find_customizations(module),
        *(f"its {key}" for key in state_names(module) if key not in allowed),
    ]
    if lost:
        raise NotImplementedError(
            f"{name} is replaced by a parallel layer, and would lose {', '.join(lost)}; remove "
            "that first. Hooks that work on a shard can be registered on the parallel model"
        )


def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """Gather the state dict of the unsharded module. Collective.

    The values are plain tensors for ``torch.save``, or for ``load_state_dict`` of an unsharded
    model.

    Args:
        module: a module with sharded layers.
        rank0_only: return the state dict on rank 0, on the CPU, and an empty dict on all other
            ranks. No rank but rank 0, and no GPU, then holds more than one unsharded parameter at a
            time.

    Returns:
        The state dict of the unsharded module.
    """
    return gather_state(module, module.state_dict(), rank0_only)


def gather_state(module: nn.Module, shards: Mapping[str, Any], rank0_only: bool) -> dict[str, Any]:
    """Return `full_state_dict` for ``shards``, a full or partial state dict of the module."""
    # Tied parameters are gathered once on every rank, and stay one tensor.
    identity = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    gathered: dict[int, torch.Tensor | None] = {}
    state: dict[str, Any] = {}
    ranks = {value.sharding.rank for value in shards.values() if isinstance(value, ShardTensor)}
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
