"""Implementations of an op on `Operands`, to compare, and `Inputs`: copies used in rotation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

from tpkernels import groups
from tpkernels.bench.specs import EXPERTS, TOP_K, Spec
from tpkernels.groups.group import Group
from tpkernels.local.matmul import local_matmul
from tpkernels.local.scaled import ScaledMatrix, scaled_matmul
from tpkernels.planning.choose import Plan
from tpkernels.planning.machine import last_level_cache_bytes
from tpkernels.qualification.op_case import NORM_EPS, OpCase, Operands, Outputs
from tpkernels.symm.limits import available_bytes
from tpkernels.timing import slowest
from tpkernels.torch_private import scaled_mm

# Inputs are cold if all copies together have at least this multiple of the bytes of the last-level
# cache. A copy is then evicted before its next use.
COLD = 2.0
_MAX_COPIES = 1 << 14  # creating them lasts 0.2 s; inputs of 4 KiB then exceed 32 MiB

# Renamed in torch 2.13; the old names warn.
_gather_shards = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_shards = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def random_case(spec: Spec, device: torch.device | str = "cpu") -> Operands:
    """Draw random inputs of this rank."""
    case = OpCase(
        op=spec.op,
        extents=spec.extents,
        dtype=spec.dtype,
        world=dist.get_world_size(),
        device=torch.device(device),
        in_place=True,
        experts=EXPERTS,
        top_k=TOP_K,
    )
    return case.operands(dist.get_rank())


def world_group() -> Group:
    """Return the group of all ranks."""
    assert dist.group.WORLD is not None  # cases only run on ranks
    return groups.get(dist.group.WORLD.group_name)


def run_planned(operands: Operands, algorithm: str) -> tuple[Outputs, Plan]:
    """Run the op. Return the results and the plan."""
    group = world_group()
    group.clear_planned_calls()
    outputs = operands.run(algorithm)
    (call,) = group.planned_calls()
    plan: Plan = call.plan
    return outputs, plan


def run_torch(operands: Operands) -> Outputs:
    """Run the op with torch.distributed and torch.matmul. An all-reduce overwrites ``x``. Routed
    ops are not supported: for them `unfused` is already the torch.distributed program."""
    op, x = operands.spec, operands.x
    if op.gathers and op.has_matmul:
        return [run_matmul(gathered(operands))]
    if op.gathers:
        y = all_gather(x, operands.case.sizes)
    elif op.exchanges:
        y = _all_to_all(x, operands.case.sizes, operands.case.columns)
    else:
        y = run_matmul(operands) if op.has_matmul else x
        if op.scatters:
            y = _reduce_scatter(y, operands.case.sizes)
        else:
            dist.all_reduce(y)
    if operands.norm_weight is None:
        return [y]
    return [y, rms_norm(y, [y.shape[-1]], operands.norm_weight, NORM_EPS)]


def run_matmul(operands: Operands) -> torch.Tensor:
    """Run torch.matmul or torch._scaled_mm on local operands (see `gathered`)."""
    if operands.scales:
        x, w, scale_x, scale_w = operands.tensor_args
        return scaled_mm(x, w, scale_x, scale_w, out_dtype=operands.case.dtype)
    assert operands.w is not None  # only for ops with a matmul
    return torch.matmul(operands.x, operands.w)


def run_local_matmul(operands: Operands) -> torch.Tensor:
    """Run the local matmul of this package on local operands (see `gathered`)."""
    assert operands.w is not None  # only for ops with a matmul
    out = operands.x.new_empty(operands.x.shape[0], operands.w.shape[1], dtype=operands.case.dtype)
    if operands.scales:
        x, w, scale_x, scale_w = operands.tensor_args
        return scaled_matmul(ScaledMatrix(x, scale_x), ScaledMatrix(w, scale_w), out)
    return local_matmul(operands.x, operands.w, out)


def gathered(operands: Operands) -> Operands:
    """Return the operands of the local matmul. For an all-gather op, x has all rows."""
    if not operands.spec.gathers or operands.w is None:
        return operands
    x = all_gather(
        operands.x.view(torch.uint8) if operands.scales else operands.x, operands.case.sizes
    )
    if not operands.scales:
        return replace(operands, x=x)
    scale, w_scale = operands.scales
    return replace(
        operands,
        x=x.view(operands.x.dtype),
        scales=(all_gather(scale, operands.case.sizes), w_scale),
    )


def all_gather(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Gather all shards. Uneven shards are padded, because the collective needs equal shards."""
    largest = max(sizes)
    padded = x
    if x.shape[0] < largest:
        padded = x.new_zeros(largest, *x.shape[1:])
        padded[: x.shape[0]] = x
    full = x.new_empty(largest * len(sizes), *x.shape[1:])
    _gather_shards(full, padded)
    if min(sizes) == largest:
        return full
    shards = full.split(largest)
    return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])


def _all_to_all(x: torch.Tensor, sizes: tuple[int, ...], columns: list[int]) -> torch.Tensor:
    """Exchange rows for columns. Return the columns of this rank, with the rows of all ranks."""
    width = columns[dist.get_rank()]
    send = torch.cat([shard.reshape(-1) for shard in x.split(columns, 1)])
    out, received = x.new_empty(sum(sizes), width), [size * width for size in sizes]
    dist.all_to_all_single(out.view(-1), send, received, [len(x) * count for count in columns])
    return out


def _reduce_scatter(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    out = x.new_empty(sizes[dist.get_rank()], *x.shape[1:])
    if min(sizes) == max(sizes):
        _reduce_shards(out, x)
    else:
        dist.reduce_scatter(out, list(x.split(list(sizes))))
    return out


def memory_budget(device: str) -> int:
    """Return the bytes per rank for copies: half of the available memory / number of ranks.
    Identical on all ranks. Collective."""
    available = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    (largest,) = slowest([-float(available)])  # no rank allocates before all have measured
    return int(-largest) // (2 * dist.get_world_size())


class Inputs:
    """Copies of ``operands`` in rotation, so that the inputs of a call are not cached. Collective.

    Between two uses of a copy, ``over_cache`` times the bytes of the last-level cache are read. If
    ``over_cache`` is at least `COLD`, a call reads its weights from memory, as in a model with many
    layers.

    Args:
        cold: create as many copies as necessary, if memory permits. Otherwise create a single copy.
    """

    over_cache: float  #: bytes of all copies / bytes of the last-level cache; inf for empty inputs

    def __init__(self, operands: Operands, *, cold: bool) -> None:
        device, local, count = operands.x.device.type, gathered(operands), 1
        w = operands.w
        nbytes = operands.x.nbytes + (0 if w is None else w.nbytes)
        cache = last_level_cache_bytes(device)
        if cold:
            footprint = nbytes + (0 if w is None else local.x.nbytes)
            max_copies = memory_budget(device) // max(1, footprint)
            count = min(math.ceil(COLD * cache / max(1, nbytes)), _MAX_COPIES, max(1, max_copies))
        self.over_cache = count * nbytes / cache if nbytes else math.inf
        self._original = operands
        self._copies = [
            replace(operands, x=operands.x.clone(), w=None if w is None else w.clone())
            for _ in range(count)
        ]
        self._sharded = cycle(self._copies)
        self._gathered = cycle(
            []
            if w is None
            else [replace(copy, x=local.x.clone(), scales=local.scales) for copy in self._copies]
        )

    def sharded(self) -> Operands:
        """Return the next copy, with the sharded operands of the op."""
        return next(self._sharded)

    def gathered(self) -> Operands:
        """Return the next copy, with the operands of the local matmul (see `gathered`)."""
        return next(self._gathered)

    def restore(self) -> None:
        """Restore the copies after in-place calls."""
        for copy in self._copies:
            copy.x.copy_(self._original.x)
