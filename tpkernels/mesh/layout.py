"""Where the parts of a DTensor lie: sizes of shards, and what a mesh holds of a tensor in all.

A DTensor splits a dim as ``torch.chunk`` does, mesh dims from left to right: with ``(Shard(0),
Shard(0))`` mesh dim 1 splits the chunk that mesh dim 0 has left.
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


def with_placement(placements: Placements, mesh_dim: int, placement: Placement) -> Placements:
    """Return the placements with another one on a mesh dim."""
    return (*placements[:mesh_dim], placement, *placements[mesh_dim + 1 :])


def local_shape(
    shape: Sequence[int],
    placements: Placements,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[int, ...]:
    """Return the shape of what the rank at ``coordinate`` holds. Placements on the first mesh dims
    alone may be given."""
    local = list(shape)
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=False):
        if isinstance(placement, Shard):
            local[placement.dim] = chunk_sizes(local[placement.dim], size)[index]
    return tuple(local)


def held_elements(shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> int:
    """Count the elements that all ranks of the mesh hold together: those of the tensor, once for
    each rank along the mesh dims that do not split it. Exact for uneven shards, too."""
    sizes = zip(mesh_shape, placements, strict=True)
    return prod(shape) * prod(size for size, one in sizes if not isinstance(one, Shard))


@functools.lru_cache(maxsize=4096)
def exchanged_elements(
    shape: tuple[int, ...],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    mesh_dim: int,
    to: int,
) -> int:
    """Count the elements that all ranks receive if Shard(i) on a mesh dim becomes Shard(to): what
    they hold after it and not before."""
    one, ranks = placements[mesh_dim], prod(mesh_shape)
    assert isinstance(one, Shard)
    after = with_placement(placements, mesh_dim, Shard(to))
    if not (shape[one.dim] % ranks or shape[to] % ranks):  # all shards are alike
        held = held_elements(shape, after, mesh_shape)
        return held // mesh_shape[mesh_dim] * (mesh_shape[mesh_dim] - 1)
    received = 0
    for coordinate in itertools.product(*map(range, mesh_shape)):
        had = local_shape(shape, placements, mesh_shape, coordinate)
        has = local_shape(shape, after, mesh_shape, coordinate)
        received += prod(has) - prod(map(min, had, has))
    return received


def placements_text(placements: Placements) -> str:
    """Write ``S0,R`` for ``(Shard(0), Replicate())``; P for Partial."""
    return ",".join(
        f"S{one.dim}" if isinstance(one, Shard) else "R" if isinstance(one, Replicate) else "P"
        for one in placements
    )


def checked_placements(
    placements: Sequence[Placement], tensor_dims: int, mesh_dims: int, what: str
) -> Placements:
    """Return the placements of a tensor, with dims counted from 0.

    Raises:
        ValueError: one placement too many or too few, or a dim that the tensor does not have.
        NotImplementedError: a placement other than Shard, Replicate and a sum's Partial.
    """
    if len(placements) != mesh_dims:
        raise ValueError(
            f"{what} has {len(placements)} placements, but the mesh has {mesh_dims} dims; pass one "
            "placement per mesh dim"
        )
    result: list[Placement] = []
    for one in placements:
        if type(one) is Shard:
            if not -tensor_dims <= one.dim < tensor_dims:
                raise ValueError(
                    f"{what} has Shard({one.dim}), but the tensor has dims 0 to {tensor_dims - 1}"
                )
            result.append(Shard(one.dim % tensor_dims))
        elif type(one) is Replicate or (type(one) is Partial and one.reduce_op == "sum"):
            result.append(one)
        else:
            raise NotImplementedError(
                f"{what} has {one!r}; supported: Shard, Replicate and Partial('sum'). Redistribute "
                "it first"
            )
    return tuple(result)
