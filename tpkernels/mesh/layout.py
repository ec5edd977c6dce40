"""Shard shapes of DTensors, and element counts over a mesh.

A DTensor splits a dim like ``torch.chunk``, for each mesh dim from left to right. With ``(Shard(0),
Shard(0))``, mesh dim 1 splits the chunk of mesh dim 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from math import prod
from typing import TypeAlias

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpkernels.common.shards import chunk_sizes

Placements: TypeAlias = tuple[Placement, ...]


def replace_placement(placements: Placements, mesh_dim: int, placement: Placement) -> Placements:
    """Return the placements with ``placement`` on mesh dim ``mesh_dim``."""
    return (*placements[:mesh_dim], placement, *placements[mesh_dim + 1 :])


def local_shape(
    shape: Sequence[int],
    placements: Placements,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[int, ...]:
    """Return the shape of the shard of the rank at ``coordinate``.

    ``placements`` may cover only the first mesh dims.
    """
    local = list(shape)
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=False):
        if isinstance(placement, Shard):
            local[placement.dim] = chunk_sizes(local[placement.dim], size)[index]
    return tuple(local)


def count_stored_elements(
    shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]
) -> int:
    """Count the elements that all ranks of the mesh store in total. Exact for uneven shards.

    Each element counts once per rank along the mesh dims that do not shard the tensor.
    """
    sizes = zip(mesh_shape, placements, strict=True)
    return prod(shape) * prod(size for size, placement in sizes if not isinstance(placement, Shard))


@functools.lru_cache(maxsize=4096)
def count_exchanged_elements(
    shape: tuple[int, ...],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    mesh_dim: int,
    new_dim: int,
) -> int:
    """Count the elements that all ranks receive if Shard(i) on a mesh dim becomes Shard(new_dim).

    A rank receives the elements of its new shard that are not in its old shard.
    """
    placement, ranks = placements[mesh_dim], prod(mesh_shape)
    assert isinstance(placement, Shard)
    new_placements = replace_placement(placements, mesh_dim, Shard(new_dim))
    if not (shape[placement.dim] % ranks or shape[new_dim] % ranks):  # all shards have equal sizes
        stored = count_stored_elements(shape, new_placements, mesh_shape)
        return stored // mesh_shape[mesh_dim] * (mesh_shape[mesh_dim] - 1)
    received = 0
    for coordinate in itertools.product(*map(range, mesh_shape)):
        old_shard = local_shape(shape, placements, mesh_shape, coordinate)
        new_shard = local_shape(shape, new_placements, mesh_shape, coordinate)
        received += prod(new_shard) - prod(map(min, old_shard, new_shard))
    return received


def format_placements(placements: Placements) -> str:
    """Format placements as text: ``S0,R`` for ``(Shard(0), Replicate())``, P for Partial."""
    return ",".join(
        f"S{placement.dim}"
        if isinstance(placement, Shard)
        else "R"
        if isinstance(placement, Replicate)
        else "P"
        for placement in placements
    )


def check_placements(
    placements: Sequence[Placement], tensor_dims: int, mesh_dims: int, name: str
) -> Placements:
    """Return the placements of a tensor, with nonnegative dims.

    Raises:
        ValueError: the number of placements is not the number of mesh dims, or a dim is out of
            range.
        NotImplementedError: a placement is not Shard, Replicate or Partial("sum").
    """
    if len(placements) != mesh_dims:
        raise ValueError(
            f"{name} has {len(placements)} placements, but the mesh has {mesh_dims} dims; pass one "
            "placement per mesh dim"
        )
    result: list[Placement] = []
    for placement in placements:
        if type(placement) is Shard:
            if not -tensor_dims <= placement.dim < tensor_dims:
                raise ValueError(
                    f"{name} has Shard({placement.dim}), but the tensor has dims 0 to "
                    f"{tensor_dims - 1}"
                )
            result.append(Shard(placement.dim % tensor_dims))
        elif type(placement) is Replicate or (
            type(placement) is Partial and placement.reduce_op == "sum"
        ):
            result.append(placement)
        else:
            raise NotImplementedError(
                f"{name} has {placement!r}; supported: Shard, Replicate and Partial('sum'). "
                "Redistribute it first"
            )
    return tuple(result)
