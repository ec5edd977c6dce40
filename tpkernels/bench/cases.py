"""The implementations of an op that are compared on `Operands`, and `Inputs`: copies of these."""

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

# Inputs are cold if all copies exceed the last-level cache by this factor: a copy is then evicted
# before its next use.
COLD = 2.0
_MAX_COPIES = 1 << 14  # creating them takes 0.2 s; with 4 KiB inputs they exceed 32 MiB

# Renamed in torch 2.13; the old names warn.
_gather_shards = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_shards = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def random_case(spec: Spec, device: torch.device | str = "cpu") -> Operands:
    """Draw inputs of this rank."""
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


def planned(case: Operands, algorithm: str) -> tuple[Outputs, Plan]:
    """Run the op; return its results and its plan."""
    group = world_group()
    group.forget_calls()
    outputs = case.run(algorithm)
    (call,) = group.planned_calls()
    plan: Plan = call.plan
    return outputs, plan


def run_torch(case: Operands) -> Outputs:
    """Run the same op by torch.distributed and torch.matmul; all-reduces of ``x`` work in place.
    Not for routed ops, which `unfused` runs by torch.distributed."""
    op, x = case.spec, case.x
    if op.gathers and op.has_matmul:
        return [run_matmul(gathered(case))]
    if op.gathers:
        y = all_gather(x, case.of.sizes)
    elif op.exchanges:
        y = _all_to_all(x, case.of.sizes, case.of.columns)
    else:
        y = run_matmul(case) if op.has_matmul else x
        if op.scatters:
            y = _reduce_scatter(y, case.of.sizes)
        else:
            dist.all_reduce(y)
    if case.norm_weight is None:
        return [y]
    return [y, rms_norm(y, [y.shape[-1]], case.norm_weight, NORM_EPS)]


def run_matmul(case: Operands) -> torch.Tensor:
    """Run torch.matmul, or torch._scaled_mm, on local operands, see `gathered`."""
    if case.scales:
        x, w, scale_x, scale_w = case.factors
        return scaled_mm(x, w, scale_x, scale_w, out_dtype=case.of.dtype)
    assert case.w is not None  # only for ops with a matmul
    return torch.matmul(case.x, case.w)


def run_local_matmul(case: Operands) -> torch.Tensor:
    """Run the local matmul of this package on local operands, see `gathered`."""
    assert case.w is not None  # only for ops with a matmul
    out = case.x.new_empty(case.x.shape[0], case.w.shape[1], dtype=case.of.dtype)
    if case.scales:
        x, w, scale_x, scale_w = case.factors
        return scaled_matmul(ScaledMatrix(x, scale_x), ScaledMatrix(w, scale_w), out)
    return local_matmul(case.x, case.w, out)


def gathered(case: Operands) -> Operands:
    """Return the case with the operands of its local matmul: all rows of an all-gather."""
    if not case.spec.gathers or case.w is None:
        return case
    x = all_gather(case.x.view(torch.uint8) if case.scales else case.x, case.of.sizes)
    if not case.scales:
        return replace(case, x=x)
    scale, of_w = case.scales
    return replace(case, x=x.view(case.x.dtype), scales=(all_gather(scale, case.of.sizes), of_w))


def all_gather(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Gather all shards. The collective needs equal shards, so uneven ones are padded."""
    largest = max(sizes)
    padded = x
    if x.shape[0] < largest:
        padded = x.new_zeros(largest, *x.shape[1:])
        padded[: x.shape[0]] = x
    whole = x.new_empty(largest * len(sizes), *x.shape[1:])
    _gather_shards(whole, padded)
    if min(sizes) == largest:
        return whole
    shards = whole.split(largest)
    return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])


def _all_to_all(x: torch.Tensor, sizes: tuple[int, ...], columns: list[int]) -> torch.Tensor:
    """Exchange rows for columns: return this rank's columns of the rows of all ranks."""
    width = columns[dist.get_rank()]
    send = torch.cat([part.reshape(-1) for part in x.split(columns, 1)])
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
    """Return the bytes that each rank may use for copies: an equal part of half the memory
    available now. The same on all ranks. Collective."""
    available = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    (largest,) = slowest([-float(available)])  # no rank allocates before all have measured
    return int(-largest) // (2 * dist.get_world_size())


class Inputs:
    """Copies of ``case``, used in rotation, so many that a call finds none of its inputs in the
    cache. Collective.

    Before a copy is used again, copies of ``over_cache`` times the size of the last-level cache
    have been read. From `COLD` on, a call reads its weights from memory, as in a model whose other
    layers evict them.

    Args:
        cold: make as many copies as that needs, memory permitting; otherwise make one.
    """

    over_cache: float  #: bytes of all copies over the last-level cache; inf if a rank has no input

    def __init__(self, case: Operands, *, cold: bool) -> None:
        device, local, count = case.x.device.type, gathered(case), 1
        w = case.w
        nbytes = case.x.nbytes + (0 if w is None else w.nbytes)
        cache = last_level_cache_bytes(device)
        if cold:
            footprint = nbytes + (0 if w is None else local.x.nbytes)
            fitting = memory_budget(device) // max(1, footprint)
            count = min(math.ceil(COLD * cache / max(1, nbytes)), _MAX_COPIES, max(1, fitting))
        self.over_cache = count * nbytes / cache if nbytes else math.inf
        self._case = case
        self._copies = [
            replace(case, x=case.x.clone(), w=None if w is None else w.clone())
            for _ in range(count)
        ]
        self._sharded = cycle(self._copies)
        self._gathered = cycle(
            []
            if w is None
            else [replace(copy, x=local.x.clone(), scales=local.scales) for copy in self._copies]
        )

    def sharded(self) -> Operands:
        """Return the next copy, as an op takes it."""
        return next(self._sharded)

    def gathered(self) -> Operands:
        """Return the next copy with the operands of the local matmul: see `gathered`."""
        return next(self._gathered)

    def restore(self) -> None:
        """Restore the copies, which in-place calls overwrite."""
        for copy in self._copies:
            copy.x.copy_(self._case.x)
