"""Sharded matrices on meshes, made and read without the package: what the tests of ``mesh`` compare
with.

A matrix with Partial placements is the sum of addends, which are drawn; its value is their sum. So
every rank can make every rank's part.
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
ANY: tuple[Placement, ...] = (R, S0, S1, P)
Placements = tuple[Placement, ...]


def make_mesh(shape: Sequence[int], names: Sequence[str] = ("a", "b")) -> DeviceMesh:
    """A mesh of all ranks with groups of its own, which are set up for the ops: with a
    timeout that a test can wait for.

    DTensor caches results of its own operators by the mesh's shape and names, and a cached mesh has
    groups that ended with an earlier test. A job that uses these operators gives other names.
    """
    numbers = torch.arange(math.prod(shape)).view(*shape)
    groups = []
    for dim, size in enumerate(shape):  # none is the default group, which later tests need
        rows = numbers.movedim(dim, -1).reshape(-1, size).tolist()
        groups.append(dist.new_subgroups_by_enumeration(rows)[0])
    mesh = DeviceMesh.from_group(
        groups, "cpu", mesh=numbers, mesh_dim_names=tuple(names[: len(shape)])
    )
    for dim in range(mesh.ndim):
        tpkernels.init((mesh, dim), timeout=TIMEOUT, workspace_bytes=1 << 20, autotune=False)
    return mesh


def placements_of(dims: int) -> Iterator[Placements]:
    """All combinations."""
    return itertools.product(ANY, repeat=dims)


def take(whole: torch.Tensor, placements: Placements, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part, by ``torch.chunk``, mesh dims from left to right."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # the mesh has all ranks
    for placement, size, index in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(size, placement.dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


@dataclass(frozen=True)
class Drawn:
    """A sharded matrix, and what it is the value of.

    Attributes:
        value: in float64.
        size: the sum of the magnitudes of the addends, in float64; without Partial, of the value.
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
) -> Drawn:
    """The matrix of that name: small integers, or normally distributed."""
    summed = [d for d, placement in enumerate(placements) if isinstance(placement, Partial)]
    count = math.prod(mesh.shape[d] for d in summed)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape} {count}".encode()))
    if integers:
        addends = torch.randint(-3, 4, (count, *shape), generator=generator).to(dtype)
    else:
        addends = torch.randn((count, *shape), generator=generator).to(dtype)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    mine = 0
    for d in summed:
        mine = mine * mesh.shape[d] + coordinate[d]
    local = take(addends[mine], placements, mesh).contiguous()
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    wide = addends.double()
    return Drawn(sharded.requires_grad_(), wide.sum(0), wide.abs().sum(0))


def error_of(
    got: DTensor, exact: torch.Tensor, bound: torch.Tensor, placements: Placements
) -> str | None:
    """What is wrong with a sharded result, or None. ``bound``: how far it may be off."""
    if got.placements != placements:
        return f"has placements {got.placements}, expected {placements}"
    if got.shape != exact.shape:
        return f"has shape {list(got.shape)}, expected {list(exact.shape)}"
    mesh, local = got.device_mesh, got.to_local()
    if not local.is_contiguous():
        return f"has strides {local.stride()}"
    summed = local.detach().double().clone()
    for d, placement in enumerate(placements):
        if isinstance(placement, Partial):
            dist.all_reduce(summed, group=mesh.get_group(d))
    want = take(exact, placements, mesh)
    if summed.shape != want.shape:
        return f"holds {list(summed.shape)}, expected {list(want.shape)}"
    off = (summed - want).abs() > take(bound, placements, mesh)
    if not off.any() and not summed.isnan().any():
        return None
    return f"differs by {(summed - want).abs().max()}"
