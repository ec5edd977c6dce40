"""Collectives along mesh axes, and sums and means of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tpkernels import ops
from tpkernels.common import dtypes
from tpkernels.groups import group_name
from tpkernels.mesh.layout import check_placements, format_placements
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
    """Gather ``x`` over the ranks that differ only along ``axes``.

    Equals ``tpkernels.all_gather(x, group, gather_dim)`` with the group of these ranks.

    Args:
        x: the local shard.
        mesh: mesh that contains these ranks.
        axes: mesh axes, by name or index. Several axes are used in mesh order, so ranks along the
            last axis are adjacent, as in a DTensor.
        gather_dim: dim of ``x`` to concatenate along.
        shard_sizes: number of rows of each rank, in that order; by default equal.
        algorithm: algorithm of the op.

    Raises:
        ValueError: an axis does not exist, or ``axes`` lists several axes of a mesh without names.
        Exception: any error of the op.
    """
    group = _axes_group(mesh, axes, x)
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
    """Reduce-scatter ``x`` over the ranks that differ only along ``axes``.

    Equals ``tpkernels.reduce_scatter(x, group, scatter_dim)`` with the group of these ranks. See
    `all_gather` for the axes, their order and the errors.

    Args:
        x: local addend.
        mesh: mesh that contains these ranks.
        axes: mesh axes, by name or index.
        scatter_dim: dim of ``x`` to scatter along.
        out_dtype: dtype of the result; by default the dtype of ``x``.
        shard_sizes: number of rows of each rank; by default equal.
        algorithm: algorithm of the op.
    """
    return ops.reduce_scatter(
        x,
        _axes_group(mesh, axes, x),
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
    """All-reduce ``x`` over the ranks that differ only along ``axes``.

    Equals ``tpkernels.all_reduce(x, group)`` with the group of these ranks. A sum over several axes
    is one reduction that is rounded once. See `all_gather` for the axes and the errors.

    Args:
        x: local addend.
        mesh: mesh that contains these ranks.
        axes: mesh axes, by name or index.
        out_dtype: dtype of the result; by default the dtype of ``x``.
        algorithm: algorithm of the op.
    """
    return ops.all_reduce(x, _axes_group(mesh, axes, x), out_dtype=out_dtype, algorithm=algorithm)


def sharded_sum(
    x: DTensor,
    dim: int | Sequence[int] | None = None,
    axes: Axes | None = None,
    *,
    keepdim: bool = False,
    algorithm: str = "auto",
) -> DTensor:
    """Sum a DTensor over tensor dims, and reduce the sum over mesh axes.

    Equals ``x.full_tensor().sum(dim, keepdim)``, except for ``dim=()``.

    Args:
        x: DTensor with a floating-point dtype, and Shard, Replicate and Partial placements.
        dim: tensor dims to sum over. None: all dims. (): no dims, to reduce a Partial ``x``.
        axes: mesh axes to reduce over. Each must shard a summed dim or be Partial. The result is
            Replicate along these axes, and Partial along all other axes that shard a summed dim.
            None: all axes that shard a summed dim.
        keepdim: keep summed dims with size 1.
        algorithm: algorithm of the all-reduce.

    Returns:
        The sum in the dtype of ``x``, accumulated in fp32 and rounded once.

    Raises:
        TypeError: ``x`` is not a DTensor.
        ValueError: a dim or axis does not exist, or an axis has no sum to reduce.
        NotImplementedError: a dtype or placement is not supported.
    """
    return _reduce_dims(x, dim, axes, keepdim, algorithm, mean=False)


def sharded_mean(
    x: DTensor,
    dim: int | Sequence[int] | None = None,
    axes: Axes | None = None,
    *,
    keepdim: bool = False,
    algorithm: str = "auto",
) -> DTensor:
    """Average a DTensor over tensor dims, and reduce the mean over mesh axes.

    Equals ``x.full_tensor().mean(dim, keepdim)``, with shards of any size. See `sharded_sum` for
    the arguments and errors.
    """
    return _reduce_dims(x, dim, axes, keepdim, algorithm, mean=True)


def _reduce_dims(
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
    mesh, x_placements = (
        x.device_mesh,
        check_placements(x.placements, x.ndim, x.device_mesh.ndim, "x"),
    )
    dim_list = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({number % x.ndim for number in dim_list if -x.ndim <= number < x.ndim})
    if len(dims) < len(dim_list):
        raise ValueError(
            f"dim is {dim}; x has {x.ndim} dims, and dim must contain each of them at most once"
        )

    def placement_after_sum(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        below = 0 if keepdim else sum(d < placement.dim for d in dims)
        return Partial() if placement.dim in dims else Shard(placement.dim - below)

    placements = [placement_after_sum(placement) for placement in x_placements]
    changed_axes = [
        i for i, (b, a) in enumerate(zip(x_placements, placements, strict=True)) if b != a
    ]
    reduced_axes = (
        [i for i in changed_axes if placements[i] == Partial()]
        if axes is None
        else _dims(mesh, axes)
    )
    for i in reduced_axes:
        if not isinstance(placements[i], Partial):
            raise ValueError(
                f"axes contains mesh axis {i}, but its placement is "
                f"{format_placements((x_placements[i],))}, which does not shard the summed dims "
                f"{tuple(dims)}; remove it from axes"
            )
    grads = [Replicate() if isinstance(p, Partial) else p for p in x_placements]
    local = x.to_local(grad_placements=grads)
    acc_dtype = dtypes.accumulator(x.dtype)
    # torch.sum with an empty dim list sums over all dims.
    local_sum = local.sum(dims, keepdim=keepdim, dtype=acc_dtype) if dims else local.to(acc_dtype)
    if reduced_axes and local_sum.numel():
        local_sum = ops.all_reduce(local_sum, _axes_group(mesh, reduced_axes), algorithm=algorithm)
    if mean:
        local_sum = local_sum / prod(x.shape[d] for d in dims)
    for i in reduced_axes:
        placements[i] = Replicate()
    sizes = [1 if i in dims else size for i, size in enumerate(x.shape)]
    shape = torch.Size(size for i, size in enumerate(sizes) if keepdim or i not in dims)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local_sum.to(x.dtype), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _dims(mesh: DeviceMesh, axes: Axes) -> list[int]:
    """Return the mesh dims of ``axes``, in mesh order."""
    axis_list = [axes] if isinstance(axes, (int, str)) else list(axes)
    names = mesh.mesh_dim_names or ()
    dims = []
    for axis in axis_list:
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


def _axes_group(mesh: DeviceMesh, axes: Axes, x: torch.Tensor | None = None) -> str:
    """Return the group of the ranks that differ from this rank only along ``axes``.

    Ranks are in row-major order, with the first mesh axis outermost. The first call for several
    axes creates groups, so it is collective.
    """
    if isinstance(x, DTensor):
        raise TypeError("x is a DTensor; pass x.to_local(), or use x.redistribute")
    dims = _dims(mesh, axes)
    if len(dims) == 1:
        return group_name((mesh, dims[0]))
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"axes {tuple(dims)} of a mesh without dim names cannot be combined into one group; "
            "pass mesh_dim_names to init_device_mesh"
        )
    # One group instead of one collective per axis, so the sum is in rank order and rounded once.
    return group_name(flatten_mesh(mesh[tuple(names[dim] for dim in dims)]))
