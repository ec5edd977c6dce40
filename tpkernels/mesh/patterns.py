"""Which redistributions and products of DTensors the fused ops can do; pure functions of shapes and
placements, so all ranks decide alike.

A product is ``x [..., K] @ w [K, N] + bias [N]``. ``n_dim`` is the dim of the stored weight that
has N: 0 for [N, K], as that of a linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tpkernels.mesh.deferred import Deferred
from tpkernels.mesh.layout import Placements
from tpkernels.shards import chunk_sizes

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; 0 in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def can_split(length: int, ranks: int) -> bool:
    """Whether there is anything to send, and every rank has a part."""
    return ranks > 1 and all(chunk_sizes(length, ranks))


def single_change(x: DTensor, placements: Sequence[Placement]) -> tuple[int, Placements] | None:
    """The mesh dim along which a redistribution gathers, or completes a sum, and its placements.
    None if it does anything else, or where a rank has nothing to send or to receive."""
    target = tuple(Shard(one.dim % x.ndim) if type(one) is Shard else one for one in placements)
    if len(target) != len(x.placements):
        return None
    changed = [i for i, one in enumerate(x.placements) if one != target[i]]
    if len(changed) != 1:
        return None
    (mesh_dim,) = changed
    if any(type(one) not in (Replicate, Shard) for one in target):
        return None
    pair = x.placements[mesh_dim], target[mesh_dim]
    kinds = tuple(map(type, pair))
    if kinds not in ((Shard, Replicate), (Partial, Replicate), (Partial, Shard)):
        return None
    if kinds == (Shard, Replicate) and pair[0] == Shard(x.ndim - 1):
        return None
    for one in pair:
        if isinstance(one, Shard):
            alone = (x.placements + target).count(one) == 1
            if not alone or not can_split(x.shape[one.dim], x.device_mesh.size(mesh_dim)):
                return None
    return mesh_dim, target


def fusable(*tensors: DTensor | None) -> bool:
    """Whether the ops take these, as far as one can tell without their placements."""
    given = [one for one in tensors if one is not None]
    first = given[0]
    return (
        first.dtype in _DTYPES
        and all(one.dtype == first.dtype for one in given)
        and all(one.device_mesh == first.device_mesh for one in given)
        and all(prod(one.shape) for one in given)
        # Not a collective's result that is still awaited, nor a tensor of torch.compile.
        and all(
            type(one._local_tensor) in (torch.Tensor, torch.nn.Parameter)
            for one in given
            if not isinstance(one, Deferred)
        )
        and first.device_mesh.get_coordinate() is not None
        and not torch.is_autocast_enabled(first.device.type)
    )


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def replaced(placements: Placements, mesh_dim: int, by: Placement) -> Placements:
    return (*placements[:mesh_dim], by, *placements[mesh_dim + 1 :])


def weight_grads(own: Placements, x: Placements, mesh_dim: int) -> Placements:
    """Placements of the gradient of a weight or bias: a sum over the mesh dims that split rows."""
    return tuple(
        Partial() if i != mesh_dim and type(split) is Shard else placement
        for i, (placement, split) in enumerate(zip(own, x, strict=True))
    )


@functools.lru_cache(maxsize=1024)
def row_dim(
    x: Placements, w: Placements, bias: Placements | None, ndim: int, n_dim: int
) -> int | None:
    """The mesh dim along which a product is row-parallel, or None."""
    rows = [i for i, one in enumerate(x) if one == Shard(ndim - 1)]
    if len(rows) != 1 or w[rows[0]] != Shard(1 - n_dim) or not _plain(x, w, rows[0]):
        return None
    if bias is not None and any(not isinstance(one, Replicate) for one in bias):
        return None
    return rows[0]


@functools.lru_cache(maxsize=1024)
def column_dim(
    x: Placements, w: Placements, bias: Placements | None, ndim: int, n_dim: int
) -> int | None:
    """The mesh dim along which a product is column-parallel, or None."""
    columns = [i for i, one in enumerate(w) if one == Shard(n_dim)]
    if len(columns) != 1 or Shard(ndim - 1) in x or not _plain(x, w, columns[0]):
        return None
    expected = replaced((Replicate(),) * len(x), columns[0], Shard(0))
    if bias is not None and bias != expected:
        return None
    return columns[0]


def _plain(x: Placements, w: Placements, mesh_dim: int) -> bool:
    """Whether along the other mesh dims ``w`` is replicated, and ``x`` replicated or split."""
    return all(
        type(one) in (Replicate, Shard) and isinstance(other, Replicate)
        for i, (one, other) in enumerate(zip(x, w, strict=True))
        if i != mesh_dim
    )
