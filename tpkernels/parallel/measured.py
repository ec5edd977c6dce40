"""Where the fused styles do what torch's do: see `ops._measured`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.op_spec import NO_OPTIONS, OPS
from tpkernels.ops._measured import read_times, why_left_to_torch
from tpkernels.ops._reduction import reduction_options


def left_to_torch(linear: nn.Linear, mesh: DeviceMesh, op: str, width: int) -> bool:
    """Whether a style is to do what torch's does instead of calling the op; ``width``: of the rows
    that travel. Collective on a mesh of GPUs."""
    if not _has_gpus(mesh):
        return False
    name, dtype = groups.name_of(mesh), linear.weight.dtype
    read_times(name)
    options = reduction_options(dtype, dtype) if OPS[op].reduces else NO_OPTIONS
    reason = why_left_to_torch(
        groups.get(name), op, "cuda", rows=None, width=width, dtype=dtype, options=options
    )
    return reason is not None


def _has_gpus(mesh: DeviceMesh) -> bool:
    return mesh.device_type == "cuda"
