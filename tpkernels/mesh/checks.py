"""The checks of a sharded product, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tpkernels import dtypes
from tpkernels.mesh.layout import checked
from tpkernels.mesh.planner import MatmulProblem
from tpkernels.ops import _check

_MOST_MESH_DIMS = 2


def given_problem(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None,
    wire_dtype: torch.dtype | None,
) -> MatmulProblem:
    """The problem of two operands and what is wanted of their product."""
    check_operands(x, w)
    return checked_problem(x._spec, w._spec, out_placements, wire_dtype)


def check_operands(x: DTensor, w: DTensor) -> None:
    """What the specs do not tell."""
    for name, one in (("x", x), ("w", w)):
        if not isinstance(one, DTensor):
            raise TypeError(
                f"{name} is a {type(one).__name__}, not a DTensor; make it one with "
                "torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            )
        if one.device.type != one.device_mesh.device_type:
            raise ValueError(
                f"{name} is on {one.device} but its mesh on {one.device_mesh.device_type}; move "
                "its shards there, and make it a DTensor again"
            )


def checked_problem(
    x: DTensorSpec,
    w: DTensorSpec,
    out_placements: Sequence[Placement] | None,
    wire_dtype: torch.dtype | None,
) -> MatmulProblem:
    """The problem of operands with these specs, which are the same on all ranks.

    Raises:
        TypeError, ValueError: invalid, or not on one mesh.
        NotImplementedError: three mesh dims or more, a dtype, or a placement.
    """
    for name, one in (("x", x), ("w", w)):
        if one.ndim != 2:
            raise ValueError(f"{name} has shape {list(one.shape)}; it must be a matrix")
    mesh = x.mesh
    if w.mesh != mesh:
        raise ValueError(f"x is on {mesh} and w on {w.mesh}; both must be on the same mesh")
    if mesh.ndim > _MOST_MESH_DIMS:
        raise NotImplementedError(
            f"the mesh has {mesh.ndim} dims {mesh.shape}; meshes of one and two dims are supported"
        )
    assert x.tensor_meta is not None
    assert w.tensor_meta is not None
    x_dtype, w_dtype = x.tensor_meta.dtype, w.tensor_meta.dtype
    for name, dtype in (("x", x_dtype), ("w", w_dtype)):
        dtypes.check_supported(dtype, name)
    if x_dtype != w_dtype:
        raise TypeError(
            f"x is {dtypes.name(x_dtype)} but w is {dtypes.name(w_dtype)}; they must be equal"
        )
    if x.shape[1] != w.shape[0]:
        raise ValueError(
            f"x has shape {list(x.shape)} and w {list(w.shape)}: x's columns must be w's rows"
        )
    wire = _check.wire_dtype(wire_dtype, x_dtype)
    return problem_of(x, w, out_placements, x_dtype, wire)


def problem_of(
    x: DTensorSpec,
    w: DTensorSpec,
    out_placements: Sequence[Placement] | None,
    dtype: torch.dtype,
    wire: torch.dtype,
) -> MatmulProblem:
    """The same for operands that have been checked."""
    dims = x.mesh.ndim
    return MatmulProblem(
        m=x.shape[0],
        k=x.shape[1],
        n=w.shape[1],
        mesh_shape=tuple(x.mesh.shape),
        x=checked(x.placements, 2, dims, "x"),
        w=checked(w.placements, 2, dims, "w"),
        out=None if out_placements is None else checked(out_placements, 2, dims, "out_placements"),
        itemsize=dtype.itemsize,
        partial_itemsize=wire.itemsize,
    )
