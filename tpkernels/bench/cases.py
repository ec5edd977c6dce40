"""`Case`: one rank's data of an op; the implementations that are compared; `Inputs`: copies of the
data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

import tpkernels
from tpkernels import groups
from tpkernels.bench.specs import EXPERTS, NORM_EPS, OPERANDS, TOP_K, Spec
from tpkernels.common.shards import shard_sizes
from tpkernels.groups.group import Group
from tpkernels.local.matmul import local_matmul
from tpkernels.local.scaled import ScaledMatrix, scaled_matmul
from tpkernels.planning.choose import Plan
from tpkernels.planning.machine import last_level_cache_bytes
from tpkernels.planning.op_spec import OPS, OpSpec
from tpkernels.symm.limits import available_bytes
from tpkernels.timing import slowest

Outputs = list[torch.Tensor]
Scaled = tuple[torch.Tensor, torch.Tensor]  # an operand's elements and its scales

# Inputs are cold if all copies exceed the last-level cache by this factor: a copy is then evicted
# before its next use.
COLD = 2.0
_MAX_COPIES = 1 << 14  # creating them takes 0.2 s; with 4 KiB inputs they exceed 32 MiB

# Renamed in torch 2.13; the old names warn.
_gather_shards = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_shards = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class Case:
    """An op with this rank's inputs: x [rows, K] and w [K, N] of a matmul op; x [elements] of
    a collective, [rows, N] of one that normalises or routes, or of an all-to-all, which splits N.

    Dim 0 is gathered or scattered, ``sizes[r]`` of it on rank ``r``. For an all-reduce ``sizes`` is
    the part of the result that each rank verifies.
    """

    op: str
    x: torch.Tensor
    sizes: tuple[int, ...]
    w: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None  #: of an op that normalises
    scales: tuple[torch.Tensor, ...] = ()  #: of x and the weight, if they are scaled
    dtype: torch.dtype | None = None  #: of the results, if it differs from the dtype of x
    #: Expert ids of all tokens [all rows, TOP_K], and weights of the local tokens [rows, TOP_K].
    routes: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    @property
    def spec(self) -> OpSpec:
        """Return what the op does."""
        return OPS[self.op]

    @property
    def out_dtype(self) -> torch.dtype:
        """Return the dtype of the results and of partials that are sent."""
        return self.dtype or self.x.dtype

    @property
    def operands(self) -> tuple[Scaled, Scaled]:
        """Return x and the weight with their scales."""
        assert self.w is not None  # only for cases with scales
        scale_x, scale_w = self.scales
        return (self.x, scale_x), (self.w, scale_w)

    @property
    def columns(self) -> list[int]:
        """Return the columns of each rank after an all-to-all."""
        return shard_sizes(self.x.shape[1], len(self.sizes))

    def copy(self) -> Case:
        """Return the case with a copy of ``x``: all_reduce works in place."""
        return replace(self, x=self.x.clone())


def random_case(spec: Spec, device: torch.device | str = "cpu") -> Case:
    """Draw inputs of this rank, the same on every device. Weights have the layout of
    ``linear.weight.t()``; products and scales have the order of 1."""
    rank, world, op = dist.get_rank(), dist.get_world_size(), OPS[spec.op]
    generator = torch.Generator().manual_seed(1000 + rank)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, spec.dtype)

    rows, *columns = spec.extents
    sizes = tuple(shard_sizes(rows, world))
    if op.routed:
        return _routed_case(spec, sizes, columns[0], normal)
    if not op.reduces:
        rows = sizes[rank]
    if not op.has_matmul:
        case = Case(spec.op, normal(rows, *columns), sizes)
    else:
        n, k = columns
        n, k = (n // world, k) if op.gathers else (n, k // world)
        scale = 1 / math.sqrt(spec.shape[2])
        x, w = normal(rows, k), normal(n, k, scale=1.0 if op.scaled else scale)
        case = Case(spec.op, x, sizes, w.t())
        if op.scaled:
            (x, scale_x), (w, scale_w) = _quantised(x), _quantised(w)
            scales = scale_x, scale_w.t() * scale
            case = Case(spec.op, x, sizes, w.t(), scales=scales, dtype=spec.dtype)
    if op.normed:  # the same on all ranks
        weight = torch.linspace(0.5, 1.5, columns[0]).to(case.x)
        case = replace(case, norm_weight=weight)
    return case


def _routed_case(
    spec: Spec, sizes: tuple[int, ...], width: int, normal: Callable[..., torch.Tensor]
) -> Case:
    """Draw tokens of this rank, or the rows of its experts, and the routes of all ranks."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(sum(sizes))
    routes = torch.rand(sum(sizes), EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(sum(sizes), TOP_K, generator=generator).split(sizes)[rank]
    case = Case(spec.op, normal(sizes[rank], width), sizes)
    case = replace(case, routes=routes.to(case.x.device), topk_weights=weights.to(case.x.device))
    if OPS[spec.op].dispatches:
        return case
    held = shard_sizes(EXPERTS, len(sizes))
    first = sum(held[:rank])
    here = (routes >= first) & (routes < first + held[rank])
    return replace(case, x=normal(int(here.sum()), width))


def _quantised(x: torch.Tensor) -> Scaled:
    """Quantise row by row: the largest number of a row becomes the largest that there is."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / torch.finfo(OPERANDS).max
    return (x / scale).to(OPERANDS), scale


def run_tpkernels(case: Case, algorithm: str = "auto") -> Outputs:
    """Run the op of this package; ``all_reduce`` works in place. Normalised rows come last."""
    op, operands, options = case.spec, [case.x], dict[str, Any](algorithm=algorithm)
    if case.routes is not None:  # the ops, whose functions also gather them
        run = getattr(torch.ops.tpkernels, case.op)
        weights = [] if op.dispatches else [case.topk_weights]
        name, options = world_group().name, options | {"shard_sizes": case.sizes}
        result = run(case.x, *weights, case.routes, EXPERTS, name, **options)
        return [result[0] if op.dispatches else result]
    if case.w is not None:
        operands += [case.w, *case.scales]
    if op.scaled:
        options["out_dtype"] = case.out_dtype
    if case.norm_weight is not None:
        operands.append(case.norm_weight)
        options["eps"] = NORM_EPS
    if op.exchanges:
        options |= {"gather_sizes": case.sizes, "scatter_sizes": case.columns}
    elif not op.keeps_sum:
        options["shard_sizes"] = case.sizes
    name = "all_reduce_" if case.op == "all_reduce" else case.op
    result = getattr(tpkernels, name)(*operands, dist.group.WORLD, **options)
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result)[::-1] if op.normed else list(result)


def world_group() -> Group:
    """Return the group of all ranks."""
    assert dist.group.WORLD is not None  # cases only run on ranks
    return groups.get(dist.group.WORLD.group_name)


def planned(case: Case, algorithm: str) -> tuple[Outputs, Plan]:
    """Run the op; return its results and its plan."""
    group = world_group()
    group.forget_calls()
    outputs = run_tpkernels(case, algorithm)
    (call,) = group.planned_calls()
    plan: Plan = call.plan
    return outputs, plan


def run_torch(case: Case) -> Outputs:
    """Run the same op by torch.distributed and torch.matmul; all-reduces of ``x`` work in place.
    Not for routed ops, which `unfused` runs by torch.distributed."""
    op, x = case.spec, case.x
    if op.gathers and op.has_matmul:
        return [run_matmul(gathered(case))]
    if op.gathers:
        y = all_gather(x, case.sizes)
    elif op.exchanges:
        y = _all_to_all(x, case.sizes, case.columns)
    else:
        y = run_matmul(case) if op.has_matmul else x
        if op.scatters:
            y = _reduce_scatter(y, case.sizes)
        else:
            dist.all_reduce(y)
    if case.norm_weight is None:
        return [y]
    return [y, rms_norm(y, [y.shape[-1]], case.norm_weight, NORM_EPS)]


def run_matmul(case: Case) -> torch.Tensor:
    """Run torch.matmul, or torch._scaled_mm, on local operands, see `gathered`."""
    if case.scales:
        (x, scale_x), (w, scale_w) = case.operands
        return torch._scaled_mm(x, w, scale_x, scale_w, out_dtype=case.out_dtype)
    assert case.w is not None  # only for ops with a matmul
    return torch.matmul(case.x, case.w)


def run_local_matmul(case: Case) -> torch.Tensor:
    """Run the local matmul of this package on local operands, see `gathered`."""
    assert case.w is not None  # only for ops with a matmul
    out = case.x.new_empty(case.x.shape[0], case.w.shape[1], dtype=case.out_dtype)
    if case.scales:
        x, w = (ScaledMatrix(*operand) for operand in case.operands)
        return scaled_matmul(x, w, out)
    return local_matmul(case.x, case.w, out)


def gathered(case: Case) -> Case:
    """Return the case with the operands of its local matmul: all rows of an all-gather."""
    if not case.spec.gathers or case.w is None:
        return case
    x = all_gather(case.x.view(torch.uint8) if case.scales else case.x, case.sizes)
    if not case.scales:
        return replace(case, x=x)
    scale, of_w = case.scales
    return replace(case, x=x.view(case.x.dtype), scales=(all_gather(scale, case.sizes), of_w))


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

    def __init__(self, case: Case, *, cold: bool) -> None:
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

    def sharded(self) -> Case:
        """Return the next copy, as an op takes it."""
        return next(self._sharded)

    def gathered(self) -> Case:
        """Return the next copy with the operands of the local matmul: see `gathered`."""
        return next(self._gathered)

    def restore(self) -> None:
        """Restore the copies, which in-place calls overwrite."""
        for copy in self._copies:
            copy.x.copy_(self._case.x)
