"""Axes of a mesh by name or number, and the groups of ranks that differ only along them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from tpkernels.groups import name_of

Axes: TypeAlias = int | str | Sequence[int | str]


def axis_dims(mesh: DeviceMesh, axes: Axes) -> tuple[int, ...]:
    """The mesh dims that ``axes`` name, in the mesh's order.

    Raises:
        ValueError: there is no such axis, it is named twice, or none is named.
    """
    given = [axes] if isinstance(axes, (int, str)) else list(axes)
    names = mesh.mesh_dim_names or ()
    dims = []
    for axis in given:
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
    return tuple(sorted(dims))


def group_of(mesh: DeviceMesh, axes: Axes) -> str:
    """The group of the ranks that differ from this one only along ``axes``: row-major, the first
    axis of the mesh outermost. Collective at the first call for several axes, which makes groups.

    Raises:
        ValueError: as ``axis_dims``, or several axes of a mesh without names.
    """
    dims = axis_dims(mesh, axes)
    if len(dims) == 1:
        return name_of((mesh, dims[0]))
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"axes {dims} of a mesh without names cannot be made one group; pass mesh_dim_names to "
            "init_device_mesh"
        )
    # One group instead of one collective per axis: the sum has one rounding, in rank order.
    return name_of(mesh[tuple(names[dim] for dim in dims)]._flatten())
