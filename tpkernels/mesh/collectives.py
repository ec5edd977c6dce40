"""The collectives along axes of a mesh, and sums and means of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tpkernels import dtypes, ops
from tpkernels.mesh.axes import Axes, axis_dims, group_of
from tpkernels.mesh.layout import text_of


def all_gather(
    x: torch.Tensor,
    mesh: DeviceMesh,
    axes: Axes,
    gather_dim: int = 0,
    *,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """``tpkernels.all_gather`` over the ranks that differ only along ``axes``.

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

    And what the op raises.
    """
    _plain(x)
    group = group_of(mesh, axes)
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
    """``tpkernels.reduce_scatter`` over the ranks that differ only along ``axes``. The axes, their
    order and the errors are those of `all_gather`."""
    _plain(x)
    return ops.reduce_scatter(
        x,
        group_of(mesh, axes),
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
    """``tpkernels.all_reduce`` over the ranks that differ only along ``axes``: one sum, rounded
    once, for several axes too. The axes and the errors are those of `all_gather`."""
    _plain(x)
    return ops.all_reduce(x, group_of(mesh, axes), out_dtype=out_dtype, algorithm=algorithm)


def sharded_sum(
    x: DTensor,
    dim: int | Sequence[int] | None = None,
    axes: Axes | None = None,
    *,
    keepdim: bool = False,
    algorithm: str = "auto",
) -> DTensor:
    """The sum of a DTensor over tensor dims, complete over mesh axes.

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
    local, placements, _ = _summed(x, dim, axes, keepdim, algorithm)
    return _like(x, local.to(x.dtype), placements, _shape(x, dim, keepdim))


def sharded_mean(
    x: DTensor,
    dim: int | Sequence[int] | None = None,
    axes: Axes | None = None,
    *,
    keepdim: bool = False,
    algorithm: str = "auto",
) -> DTensor:
    """The mean of a DTensor over tensor dims: `sharded_sum`, divided by the number of elements of
    the whole tensor, whatever the sizes of the shards."""
    local, placements, count = _summed(x, dim, axes, keepdim, algorithm)
    return _like(x, (local / count).to(x.dtype), placements, _shape(x, dim, keepdim))


def _plain(x: torch.Tensor) -> None:
    if isinstance(x, DTensor):
        raise TypeError("x is a DTensor; pass x.to_local(), or use x.redistribute")


def _dims(x: DTensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    given = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = {one % x.ndim for one in given if -x.ndim <= one < x.ndim}
    if len(dims) < len(given):
        raise ValueError(f"dim is {dim}; x has {x.ndim} dims, and each can be named once")
    return tuple(sorted(dims))


def _shape(x: DTensor, dim: int | Sequence[int] | None, keepdim: bool) -> torch.Size:
    dims = _dims(x, dim)
    sizes = [1 if i in dims else size for i, size in enumerate(x.shape)]
    return torch.Size(size for i, size in enumerate(sizes) if keepdim or i not in dims)


def _summed(
    x: DTensor, dim: int | Sequence[int] | None, axes: Axes | None, keepdim: bool, algorithm: str
) -> tuple[torch.Tensor, list[Placement], int]:
    """(this rank's part of the sum, in the accumulator's dtype; its placements; elements summed)"""
    if not isinstance(x, DTensor):
        raise TypeError(f"x is a {type(x).__name__}, not a DTensor")
    dtypes.check_supported(x.dtype, "x")
    dims, mesh = _dims(x, dim), x.device_mesh
    placements: list[Placement] = []
    for one in x.placements:
        if type(one) is Shard:
            below = 0 if keepdim else sum(d < one.dim for d in dims)
            placements.append(Partial() if one.dim in dims else Shard(one.dim - below))
        elif type(one) is Replicate or (type(one) is Partial and one.reduce_op == "sum"):
            placements.append(one)
        else:
            raise NotImplementedError(
                f"x has {one!r}; supported: Shard, Replicate and Partial('sum'): redistribute it "
                "first"
            )
    if axes is None:
        over = tuple(
            i
            for i, (before, after) in enumerate(zip(x.placements, placements, strict=True))
            if isinstance(before, Shard) and isinstance(after, Partial)
        )
    else:
        over = axis_dims(mesh, axes)
        for i in over:
            if not isinstance(placements[i], Partial):
                raise ValueError(
                    f"mesh axis {i} is {text_of((x.placements[i],))} and splits none of the dims "
                    f"{dims}: there is nothing to sum over along it"
                )
    grads = [Replicate() if isinstance(one, Partial) else one for one in x.placements]
    local = x.to_local(grad_placements=grads)
    wide = dtypes.accumulator(x.dtype)
    # torch's sum over no dims is one over all.
    part = local.sum(dims, keepdim=keepdim, dtype=wide) if dims else local.to(wide)
    if over and part.numel():
        part = ops.all_reduce(part, group_of(mesh, over), algorithm=algorithm)
    for i in over:
        placements[i] = Replicate()
    return part, placements, prod(x.shape[d] for d in dims)


def _like(
    x: DTensor, local: torch.Tensor, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, x.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
