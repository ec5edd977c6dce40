"""Collectives along axes of a mesh, and sums and means of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tpkernels import ops
from tpkernels.common import dtypes
from tpkernels.groups import name_of
from tpkernels.mesh.layout import checked_placements, placements_text
from tpkernels.torch_private import flatten_mesh

Axes: TypeAlias = int | str | Sequence[int | str]


def all_gather(
    x: torch.Tensor,
    mesh: DeviceMesh,
    axes: Axes,
    gather_dim: int = 0,
    *,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Run ``tpkernels.all_gather`` over the ranks that differ only along ``axes``.

    Args:
        x: this rank's shard.
        mesh: with all ranks of the groups.
        axes: one axis of the mesh, or several, by name or number. The order of several is that of
            the mesh: the shards along its last axis are neighbours, as in a DTensor.
        gather_dim: the dim of ``x`` to concatenate along.
        shard_sizes: rows of each rank in that order; default: all the same.
        algorithm: as for the op.

    Raises:
        ValueError: there is no such axis, or several are named of a mesh without names.
        Exception: whatever the op raises.
    """
    group = _group_of(mesh, axes, x)
    return ops.all_gather(x, group, gather_dim, shard_sizes=shard_sizes, algorithm=algorithm)


def reduce_scatter(
    x: torch.Tensor,
    mesh: DeviceMesh,
    axes: Axes,
    scatter_dim: int = 0,
    *,
    out_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Run ``tpkernels.reduce_scatter`` over the ranks that differ only along ``axes``. The axes,
    their order and the errors are those of `all_gather`."""
    return ops.reduce_scatter(
        x,
        _group_of(mesh, axes, x),
        scatter_dim,
        out_dtype=out_dtype,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )


def all_reduce(
    x: torch.Tensor,
    mesh: DeviceMesh,
    axes: Axes,
    *,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Run ``tpkernels.all_reduce`` over the ranks that differ only along ``axes``: one sum, rounded
    once, for several axes too. The axes and the errors are those of `all_gather`."""
    return ops.all_reduce(x, _group_of(mesh, axes, x), out_dtype=out_dtype, algorithm=algorithm)


def sharded_sum(
    x: DTensor,
    dim: int | Sequence[int] | None = None,
    axes: Axes | None = None,
    *,
    keepdim: bool = False,
    algorithm: str = "auto",
) -> DTensor:
    """Sum a DTensor over tensor dims, and reduce the sum over mesh axes, so that it is not left
    Partial there.

    Args:
        x: of a floating dtype; any placements of Shard, Replicate and Partial.
        dim: the tensor dims to sum over; None: all; (): none, to complete a Partial x.
        axes: the mesh axes to sum over, which must split a summed dim or be Partial. The result is
            Replicate along them, and Partial along the others that split a summed dim. None: all
            that split a summed dim.
        keepdim: keep summed dims with size 1.
        algorithm: of the all-reduce.

    Returns:
        The sum in ``x``'s dtype, summed in fp32 and rounded once.

    Raises:
        TypeError: ``x`` is not a DTensor.
        ValueError: there is no such dim or axis, or nothing to sum over along an axis.
        NotImplementedError: a dtype or a placement.
    """
    return _summed(x, dim, axes, keepdim, algorithm, mean=False)


def sharded_mean(
    x: DTensor,
    dim: int | Sequence[int] | None = None,
    axes: Axes | None = None,
    *,
    keepdim: bool = False,
    algorithm: str = "auto",
) -> DTensor:
    """Average a DTensor over tensor dims: `sharded_sum`, divided by the number of elements of the
    whole tensor, whatever the sizes of the shards."""
    return _summed(x, dim, axes, keepdim, algorithm, mean=True)


def _summed(
    x: DTensor,
    dim: int | Sequence[int] | None,
    axes: Axes | None,
    keepdim: bool,
    algorithm: str,
    mean: bool,
) -> DTensor:
    if not isinstance(x, DTensor):
        raise TypeError(f"x is a {type(x).__name__}, not a DTensor")
    dtypes.check_supported(x.dtype, "x")
    mesh, before = x.device_mesh, checked_placements(x.placements, x.ndim, x.device_mesh.ndim, "x")
    listed = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({number % x.ndim for number in listed if -x.ndim <= number < x.ndim})
    if len(dims) < len(listed):
        raise ValueError(
            f"dim is {dim}; x has {x.ndim} dims, and dim must contain each of them at most once"
        )

    def summed(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        below = 0 if keepdim else sum(d < placement.dim for d in dims)
        return Partial() if placement.dim in dims else Shard(placement.dim - below)

    placements = [summed(placement) for placement in before]
    split = [i for i, (b, a) in enumerate(zip(before, placements, strict=True)) if b != a]
    over = [i for i in split if placements[i] == Partial()] if axes is None else _dims(mesh, axes)
    for i in over:
        if not isinstance(placements[i], Partial):
            raise ValueError(
                f"axes contains mesh axis {i}, but its placement is "
                f"{placements_text((before[i],))}, which does not shard the summed dims "
                f"{tuple(dims)}; remove it from axes"
            )
    grads = [Replicate() if isinstance(p, Partial) else p for p in before]
    local = x.to_local(grad_placements=grads)
    wide = dtypes.accumulator(x.dtype)
    # torch's sum over no dims is one over all.
    part = local.sum(dims, keepdim=keepdim, dtype=wide) if dims else local.to(wide)
    if over and part.numel():
        part = ops.all_reduce(part, _group_of(mesh, over), algorithm=algorithm)
    if mean:
        part = part / prod(x.shape[d] for d in dims)
    for i in over:
        placements[i] = Replicate()
    sizes = [1 if i in dims else size for i, size in enumerate(x.shape)]
    shape = torch.Size(size for i, size in enumerate(sizes) if keepdim or i not in dims)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.to(x.dtype), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _dims(mesh: DeviceMesh, axes: Axes) -> list[int]:
    """Return the mesh dims that ``axes`` name, in the mesh's order."""
    listed = [axes] if isinstance(axes, (int, str)) else list(axes)
    names = mesh.mesh_dim_names or ()
    dims = []
    for axis in listed:
        if isinstance(axis, str) and axis in names:
            dims.append(names.index(axis))
        elif isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
            dims.append(axis % mesh.ndim)
        else:
            named = f" named {', '.join(map(repr, names))}" if names else ", without names"
            raise ValueError(
                f"the mesh has no axis {axis!r}; it has axes 0 to {mesh.ndim - 1}{named}"
            )
    if not dims or len(set(dims)) < len(dims):
        raise ValueError(f"axes is {axes!r}; name at least one axis, and each once")
    return sorted(dims)


def _group_of(mesh: DeviceMesh, axes: Axes, x: torch.Tensor | None = None) -> str:
    """Return the group of the ranks that differ from this one only along ``axes``: row-major, the
    first axis of the mesh outermost. Collective at the first call for several axes, which makes
    groups."""
    if isinstance(x, DTensor):
        raise TypeError("x is a DTensor; pass x.to_local(), or use x.redistribute")
    dims = _dims(mesh, axes)
    if len(dims) == 1:
        return name_of((mesh, dims[0]))
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"axes {tuple(dims)} of a mesh without dim names cannot be combined into one group; "
            "pass mesh_dim_names to init_device_mesh"
        )
    # One group instead of one collective per axis: the sum has one rounding, in rank order.
    return name_of(flatten_mesh(mesh[tuple(names[dim] for dim in dims)]))
