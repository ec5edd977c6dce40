"""Whether an op is to take the place of torch's own collective and matmul.

On CUDA tensors `auto` makes the same two calls, unless measured times say that another algorithm is
faster. So the compiler pass and the parallel styles keep torch's calls, unless measured times
favour an op or `tpkernels.autotune` is about to measure it.
"""

from __future__ import annotations

import torch

from tpkernels import groups
from tpkernels.groups.group import Group
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.op_spec import NO_OPTIONS, OPS, Options
from tpkernels.planning.problem import ORDERED, Problem
from tpkernels.planning.table import Table
from tpkernels.torch_private import backend_of

_UNLESS = "CUDA tensors use the torch calls unless measured times favor the op"


def read_times(name: str) -> None:
    """Broadcast rank 0's measured times for CUDA tensors, and its qualification report.
    Collective on groups that move these by NCCL; on others, and without GPUs, it does nothing."""
    if not torch.cuda.is_available():
        return
    group = groups.get(name)
    moves = backend_of(group.pg, "cuda") is not None  # otherwise CPU tensors only
    if moves and group.world > 1 and group.has_times("cuda"):
        group.ready("cuda").tuned("cuda")
        group.qualification()


def why_left_to_torch(
    group: Group,
    op: str,
    device: str,
    *,
    rows: int | None,
    width: int | None,
    dtype: torch.dtype,
    options: Options = NO_OPTIONS,
) -> str | None:
    """Return the reason to keep torch's calls, or None to replace them. Communicates nothing: it
    goes by the times that the group has, which are the same on all ranks. The communicated tensor
    has ``rows`` rows over all ranks (None: not known yet, any measured extent counts) and last dim
    ``width`` (None: not known, or not split along rows)."""
    if device != "cuda" or group.tuning_on(device) is not None:
        return None
    if width is None:
        return f"{_UNLESS}; no times are measured for this split"
    known = group.measured.tables.get(device, Table())
    problem = Problem.evenly_split(
        op,
        device=device,
        world=group.world,
        shape=(rows or group.world, width),
        dtype=dtype,
        options=options,
        numerics=group.cuda_sums.wanted if OPS[op].reduces else ORDERED,
    )
    if problem.tuning_key is None:
        return f"{_UNLESS}; no times are measured for this split"
    series, extent = problem.tuning_key
    extents = known.extents(series) if rows is None else [extent]
    found = [known.choice(series, each, ALGORITHMS, default="unfused") for each in extents]
    choices = [choice for choice in found if choice is not None]
    if any(algorithm != "unfused" for algorithm, _ in choices):
        return None
    return f"{_UNLESS}: {choices[0][1]}" if choices else f"{_UNLESS}; no times are measured for it"
