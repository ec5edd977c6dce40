"""Decide whether an op replaces a torch collective and matmul.

On CUDA tensors `auto` makes the same two torch calls, unless measured times favor a different
algorithm. The compiler pass and the parallel styles therefore keep the torch calls, unless measured
times favor the op or `tpkernels.autotune` is about to measure it.
"""

from __future__ import annotations

import torch

from tpkernels import groups
from tpkernels.groups.group import Group
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.op_spec import NO_OPTIONS, OPS, Options
from tpkernels.planning.problem import ORDERED, Problem
from tpkernels.planning.table import Table
from tpkernels.torch_private import get_backend

_TORCH_CALLS_NOTE = "CUDA tensors use the torch calls unless measured times favor the op"


def read_times(name: str) -> None:
    """Broadcast the measured times for CUDA tensors and the qualification report of rank 0.

    Collective on groups that use NCCL for CUDA tensors. No-op on all other groups and without GPUs.
    """
    if not torch.cuda.is_available():
        return
    group = groups.get(name)
    has_cuda_backend = get_backend(group.pg, "cuda") is not None  # otherwise CPU tensors only
    if has_cuda_backend and group.world > 1 and group.has_times("cuda"):
        group.ready("cuda").timing_table("cuda")
        group.qualification()


def reason_against_replacement(
    group: Group,
    op: str,
    device: str,
    *,
    rows: int | None,
    width: int | None,
    dtype: torch.dtype,
    options: Options = NO_OPTIONS,
) -> str | None:
    """Return the reason to keep the torch calls, or None to replace them.

    Does not communicate: it reads the measured times of the group, which are equal on all ranks.

    Args:
        rows: Rows of the communicated tensor over all ranks. None if unknown: then any measured
            extent counts.
        width: Last dim of the communicated tensor. None if unknown or not split along rows.
    """
    if device != "cuda" or group.tuning_for(device) is not None:
        return None
    if width is None:
        return f"{_TORCH_CALLS_NOTE}; no times are measured for this split"
    times = group.planner_inputs.tables.get(device, Table())
    problem = Problem.evenly_split(
        op,
        device=device,
        world=group.world,
        shape=(rows or group.world, width),
        dtype=dtype,
        options=options,
        numerics=group.numerics_state.requested if OPS[op].reduces else ORDERED,
    )
    if problem.tuning_key is None:
        return f"{_TORCH_CALLS_NOTE}; no times are measured for this split"
    series, extent = problem.tuning_key
    extents = times.extents(series) if rows is None else [extent]
    results = [times.select(series, extent, ALGORITHMS, default="unfused") for extent in extents]
    choices = [choice for choice in results if choice is not None]
    if any(algorithm != "unfused" for algorithm, _ in choices):
        return None
    return (
        f"{_TORCH_CALLS_NOTE}: {choices[0][1]}"
        if choices
        else f"{_TORCH_CALLS_NOTE}; no times are measured for it"
    )
