"""Whether an op is to take the place of torch's own collective and matmul.

On CUDA tensors `auto` makes the same two calls, unless measured times say that another algorithm is
faster. So what rewrites a program leaves them there, unless some do, or `tpkernels.autotune` is to
find out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import groups
from tpkernels.groups.group import Group
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.problem import ORDERED, Problem
from tpkernels.planning.table import Table
from tpkernels.shards import shard_sizes

_UNLESS = "CUDA tensors keep torch's calls unless measured times favour the op"


def read_times(name: str) -> None:
    """Broadcasts rank 0's measured times for CUDA tensors. Collective on groups that move these by
    NCCL; on others, and without GPUs, it does nothing."""
    if not torch.cuda.is_available():
        return
    group = groups.get(name)
    try:
        group.pg._get_backend(torch.device("cuda"))
    except RuntimeError:  # it moves CPU tensors only
        return
    if group.world > 1 and group.has_times("cuda"):
        group.ready("cuda").tuned("cuda")


def why_left_to_torch(
    group: Group,
    op: str,
    device: str,
    *,
    rows: int | None,
    width: int | None,
    dtype: torch.dtype,
    options: Sequence[str] = (),
) -> str | None:
    """Why torch's calls are to stay; None: the op is to replace them. Communicates nothing: it goes
    by the times that the group has, which are the same on all ranks.

    Args:
        rows: of the tensor that travels, on all ranks; None: not known yet, any measured ones do.
        width: its last dim. None: not known, or not split along its rows; no times are for that.
        dtype: its dtype.
        options: of the `Problem`.
    """
    if device != "cuda" or group.tuning is not None:
        return None
    if width is None:
        return f"{_UNLESS}, and none are for this split"
    known = group.times.get(device, Table())
    problem = _problem(group, op, device, rows or group.world, width, dtype, options)
    if problem.tuning_key is None:
        return f"{_UNLESS}, and none are for this split"
    series, extent = problem.tuning_key
    extents = known.extents(series) if rows is None else [extent]
    found = [known.choice(series, each, ALGORITHMS, unless="unfused") for each in extents]
    choices = [choice for choice in found if choice is not None]
    if any(algorithm != "unfused" for algorithm, _ in choices):
        return None
    return f"{_UNLESS}: {choices[0][1]}" if choices else f"{_UNLESS}, and there are none for it"


def _problem(
    group: Group,
    op: str,
    device: str,
    rows: int,
    width: int,
    dtype: torch.dtype,
    options: Sequence[str],
) -> Problem:
    whole = op.endswith("all_reduce")
    return Problem(
        op=op,
        device=device,
        world=group.world,
        shape=(rows, width),
        dim=None if whole else 0,
        sizes=() if whole else tuple(shard_sizes(rows, group.world)),
        dtype=dtype,
        options=tuple(options),
        numerics=group.cuda_sums.wanted if "reduce" in op else ORDERED,
    )
