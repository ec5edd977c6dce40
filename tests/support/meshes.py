"""Reference for the mesh tests: sharded matrices, built and read without the package.

A matrix with Partial placements is the sum of random addends. All ranks draw all addends, so every
rank can compute the shard of every rank.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import tpkernels
from tests.support.ranked import TIMEOUT

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
ALL_PLACEMENTS: tuple[Placement, ...] = (R, S0, S1, P)
Placements = tuple[Placement, ...]


def make_mesh(shape: Sequence[int], names: Sequence[str] = ("a", "b")) -> DeviceMesh:
    """Create a mesh of all ranks with new groups that are initialized for the ops.

    The group timeout is short enough for a test. DTensor caches results of its operators by the
    mesh shape and names, and a cached mesh contains groups that ended with an earlier test. Jobs
    that use such operators pass different names.
    """
    ranks = torch.arange(math.prod(shape)).view(*shape)
    groups = []
    for dim, size in enumerate(shape):  # new groups: later tests need the default group
        rank_lists = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups.append(dist.new_subgroups_by_enumeration(rank_lists)[0])
    mesh = DeviceMesh.from_group(
        groups, "cpu", mesh=ranks, mesh_dim_names=tuple(names[: len(shape)])
    )
    for dim in range(mesh.ndim):
        tpkernels.init((mesh, dim), timeout=TIMEOUT, workspace_bytes=1 << 20, autotune=False)
    return mesh


def all_placements(dims: int) -> Iterator[Placements]:
    """Yield all combinations of placements."""
    return itertools.product(ALL_PLACEMENTS, repeat=dims)


def local_shard(matrix: torch.Tensor, placements: Placements, mesh: DeviceMesh) -> torch.Tensor:
    """Return the local shard by ``torch.chunk``, mesh dims from left to right."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # the mesh has all ranks
    for placement, size, index in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            chunks = matrix.chunk(size, placement.dim)
            matrix = chunks[index] if index < len(chunks) else matrix.narrow(placement.dim, 0, 0)
    return matrix


@dataclass(frozen=True)
class DrawnMatrix:
    """A sharded matrix and its value.

    Attributes:
        value: in float64.
        size: sum of the magnitudes of the addends in float64. Without Partial, the magnitude of the
            value.
    """

    sharded: DTensor
    value: torch.Tensor
    size: torch.Tensor


def draw(
    name: str,
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype = torch.float32,
    integers: bool = True,
) -> DrawnMatrix:
    """Draw the matrix of this name: small integers, or normally distributed."""
    partial_dims = [d for d, placement in enumerate(placements) if isinstance(placement, Partial)]
    count = math.prod(mesh.shape[d] for d in partial_dims)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape} {count}".encode()))
    if integers:
        addends = torch.randint(-3, 4, (count, *shape), generator=generator).to(dtype)
    else:
        addends = torch.randn((count, *shape), generator=generator).to(dtype)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    addend_index = 0
    for d in partial_dims:
        addend_index = addend_index * mesh.shape[d] + coordinate[d]
    local = local_shard(addends[addend_index], placements, mesh).contiguous()
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    fp64_addends = addends.double()
    return DrawnMatrix(sharded.requires_grad_(), fp64_addends.sum(0), fp64_addends.abs().sum(0))


def find_error(
    got: DTensor, exact: torch.Tensor, bound: torch.Tensor, placements: Placements
) -> str | None:
    """Describe the error of a sharded result, or return None. ``bound``: maximum error."""
    if got.placements != placements:
        return f"has placements {got.placements}, expected {placements}"
    if got.shape != exact.shape:
        return f"has shape {list(got.shape)}, expected {list(exact.shape)}"
    mesh, local = got.device_mesh, got.to_local()
    if not local.is_contiguous():
        return f"has strides {local.stride()}"
    total = local.detach().double().clone()
    for d, placement in enumerate(placements):
        if isinstance(placement, Partial):
            dist.all_reduce(total, group=mesh.get_group(d))
    want = local_shard(exact, placements, mesh)
    if total.shape != want.shape:
        return f"holds {list(total.shape)}, expected {list(want.shape)}"
    exceeded = (total - want).abs() > local_shard(bound, placements, mesh)
    if not exceeded.any() and not total.isnan().any():
        return None
    return f"differs by {(total - want).abs().max()}"
