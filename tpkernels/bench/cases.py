"""`Case`: one rank's part of an op's data; and the implementations of the op that are compared.

torch          torch.distributed collective and torch.matmul
tpkernels      the op, with any algorithm
matmul         torch.matmul of the local sizes, no communication
local_matmul   the local matmul that the algorithms use, no communication
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

import tpkernels
from tpkernels import groups
from tpkernels.bench.specs import NORM_EPS, OPERANDS, Spec, matrix_of, square_of
from tpkernels.local.matmul import local_matmul
from tpkernels.local.scaled import scaled_matmul
from tpkernels.op_spec import OPS
from tpkernels.planning.choose import Plan
from tpkernels.planning.trials import MOST_CALLS
from tpkernels.shards import shard_sizes
from tpkernels.timing import slowest
from tpkernels.tuning.trial import Tried

Outputs = list[torch.Tensor]
Scaled = tuple[torch.Tensor, torch.Tensor]  # an operand's elements and its scales

# Renamed in torch 2.13; the old names warn.
_gather_shards = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_shards = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class Case:
    """An op with this rank's inputs: x [rows, K] and weights [K, N] of a matmul op; x [elements] of
    a collective, [rows, N] of one that normalises or of an all-to-all, which splits N.

    Dim 0 is gathered or scattered, ``sizes[r]`` of it on rank ``r``. For an all-reduce ``sizes`` is
    the part of the result that each rank verifies.
    """

    op: str
    x: torch.Tensor
    sizes: tuple[int, ...]
    weights: tuple[torch.Tensor, ...] = ()
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None  #: of an op that normalises
    scales: tuple[torch.Tensor, ...] = ()  #: of x and the weight, where they are scaled
    dtype: torch.dtype | None = None  #: of the results, where x has another

    @property
    def out_dtype(self) -> torch.dtype:
        """Return that of the results, and of partials on the wire."""
        return self.dtype or self.x.dtype

    @property
    def gathers(self) -> bool:
        """Return whether the op gathers what it multiplies, or returns."""
        return OPS[self.op].gathers

    @property
    def operands(self) -> tuple[Scaled, Scaled]:
        """Return x and the weight with their scales."""
        (w,), (scale_x, scale_w) = self.weights, self.scales
        return (self.x, scale_x), (w, scale_w)

    def copy(self) -> Case:
        """Return the case with a copy of ``x``: all_reduce works in place."""
        return replace(self, x=self.x.clone())


def random_case(spec: Spec, device: torch.device | str = "cpu") -> Case:
    """Draw inputs of this rank, the same on every device. Weights have the layout of
    ``linear.weight.t()``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 + rank)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, spec.dtype)

    sizes = tuple(shard_sizes(spec.shape[0], world))
    if spec.op == "all_reduce_rms_norm":
        rows, columns = matrix_of(spec.shape[0])
        x, sizes = normal(rows, columns), tuple(shard_sizes(rows, world))
        return Case(spec.op, x, sizes, norm_weight=_norm_weight(columns, x))
    if spec.op == "all_to_all":
        rows, columns = square_of(spec.shape[0])
        sizes = tuple(shard_sizes(rows, world))
        return Case(spec.op, normal(sizes[rank], columns), sizes)
    if not spec.has_matmul:
        (elements,) = spec.shape
        x = normal(sizes[rank] if spec.gathers else elements)
        return Case(spec.op, x, sizes)
    m, n, k = spec.shape
    if spec.scaled:
        rows, n, k = (sizes[rank], n // world, k) if spec.gathers else (m, n, k // world)
        (x, scale_x), (w, scale_w) = _scaled_operands(spec, rows, k, n, normal)
        return Case(spec.op, x, sizes, (w,), scales=(scale_x, scale_w), dtype=spec.dtype)
    scale = 1 / math.sqrt(k)
    if spec.op == "all_gather_matmul":
        return Case(
            spec.op, normal(sizes[rank], k), sizes, (normal(n // world, k, scale=scale).t(),)
        )
    x, w = normal(m, k // world), normal(n, k // world, scale=scale).t()
    norm_weight = _norm_weight(n, x) if OPS[spec.op].normed else None
    return Case(spec.op, x, sizes, (w,), norm_weight=norm_weight)


def _scaled_operands(
    spec: Spec, rows: int, k: int, n: int, normal: Callable[..., torch.Tensor]
) -> tuple[Scaled, Scaled]:
    """Draw x [rows, k] and w [k, n] of this rank, in the layout of ``linear.weight.t()``. Scales
    vary by row and by rank; products have the order of 1."""
    (x, scale_x), (w, scale_w) = _quantised(normal(rows, k)), _quantised(normal(n, k))
    return (x, scale_x), (w.t(), scale_w.t() / spec.shape[2] ** 0.5)


def _quantised(x: torch.Tensor) -> Scaled:
    """Quantise row by row: the largest number of a row becomes the largest that there is."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / torch.finfo(OPERANDS).max
    return (x / scale).to(OPERANDS), scale


def worth(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what scaled elements stand for, exactly."""
    return elements.double() * scale.double()


def _run_scaled(case: Case, group: str, algorithm: str) -> torch.Tensor:
    (x, scale_x), (w, scale_w) = case.operands
    options = {} if "all_reduce" in case.op else {"shard_sizes": case.sizes}
    y: torch.Tensor = getattr(tpkernels, case.op)(
        x, w, scale_x, scale_w, group, out_dtype=case.out_dtype, algorithm=algorithm, **options
    )
    return y


def _norm_weight(columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return a weight that is the same on all ranks."""
    return torch.linspace(0.5, 1.5, columns).to(like)


def run_tpkernels(case: Case, algorithm: str = "auto") -> Outputs:
    """Run the op of this package; ``all_reduce`` works in place. Normalised rows come last."""
    group = _world()
    x, sizes, residual = case.x, case.sizes, case.residual
    if case.scales:
        return [_run_scaled(case, group, algorithm)]
    match case.op:
        case "all_gather_matmul":
            return tpkernels.all_gather_matmul(
                x, case.weights, group, shard_sizes=sizes, algorithm=algorithm
            )
        case "matmul_reduce_scatter":
            (w,) = case.weights
            y = tpkernels.matmul_reduce_scatter(
                x, w, group, residual=residual, shard_sizes=sizes, algorithm=algorithm
            )
        case "matmul_all_reduce":
            (w,) = case.weights
            y = tpkernels.matmul_all_reduce(x, w, group, residual=residual, algorithm=algorithm)
        case "matmul_all_reduce_rms_norm":
            (w,), norm_weight = case.weights, case.norm_weight
            assert norm_weight is not None  # of this op
            normed, y = tpkernels.matmul_all_reduce_rms_norm(
                x, w, norm_weight, group, residual=residual, eps=NORM_EPS, algorithm=algorithm
            )
            return [y, normed]
        case "all_reduce_rms_norm":
            assert case.norm_weight is not None  # of this op
            normed, y = tpkernels.all_reduce_rms_norm(
                x, case.norm_weight, group, residual=residual, eps=NORM_EPS, algorithm=algorithm
            )
            return [y, normed]
        case "all_gather":
            y = tpkernels.all_gather(x, group, shard_sizes=sizes, algorithm=algorithm)
        case "reduce_scatter":
            y = tpkernels.reduce_scatter(x, group, shard_sizes=sizes, algorithm=algorithm)
        case "all_to_all":
            y = tpkernels.all_to_all(
                x, group, gather_sizes=sizes, scatter_sizes=columns_of(case), algorithm=algorithm
            )
        case _:
            y = tpkernels.all_reduce_(x, group, algorithm=algorithm)
    return [y]


def planned(case: Case, algorithm: str) -> tuple[Outputs, Plan]:
    """Run the op; return its results and its plan."""
    group = groups.get(_world())
    group.forget_calls()
    outputs = run_tpkernels(case, algorithm)
    (call,) = group.planned_calls()
    plan: Plan = call.plan
    return outputs, plan


def settle(case: Case, seconds: float) -> None:
    """Run ``auto`` until it has tried the algorithms and keeps one, unless that might take longer
    than ``seconds``. Collective."""
    group = groups.get(_world())
    group.forget_calls()
    begin = time.perf_counter()
    run_tpkernels(case.copy())
    (call_seconds,) = slowest([time.perf_counter() - begin])
    if call_seconds * MOST_CALLS > seconds:
        return
    while any(isinstance(call.function, Tried) for call in group.planned_calls()):
        run_tpkernels(case.copy())


def run_torch(case: Case) -> Outputs:
    """Run the same op by torch.distributed and torch.matmul; all-reduces of ``x`` work in place."""
    x, sizes = case.x, case.sizes
    match case.op:
        case "all_gather_matmul" | "all_gather_scaled_matmul":
            return run_matmul(gathered(case))
        case "matmul_reduce_scatter" | "scaled_matmul_reduce_scatter":
            y = _reduce_scatter(run_matmul(case)[0], sizes)
        case "matmul_all_reduce" | "matmul_all_reduce_rms_norm" | "scaled_matmul_all_reduce":
            (y,) = run_matmul(case)
            dist.all_reduce(y)
        case "all_to_all":
            y = _all_to_all(x, sizes, columns_of(case))
        case "all_gather":
            y = _all_gather(x, sizes)
        case "reduce_scatter":
            y = _reduce_scatter(x, sizes)
        case _:
            y = x
            dist.all_reduce(y)
    return with_norm(case, y if case.residual is None else y + case.residual)


def with_norm(case: Case, y: torch.Tensor) -> Outputs:
    """Return the results of an op with sum ``y``."""
    if case.norm_weight is None:
        return [y]
    return [y, rms_norm(y, [y.shape[-1]], case.norm_weight, NORM_EPS)]


def run_matmul(case: Case) -> Outputs:
    """Run torch.matmul, or torch._scaled_mm, on local operands, see `gathered`."""
    if case.scales:
        (x, scale_x), (w, scale_w) = case.operands
        return [torch._scaled_mm(x, w, scale_x, scale_w, out_dtype=case.out_dtype)]
    return [torch.matmul(case.x, w) for w in case.weights]


def run_local_matmul(case: Case) -> Outputs:
    """Run the local matmul of this package on local operands, see `gathered`."""
    if case.scales:
        (x, scale_x), (w, scale_w) = case.operands
        out = x.new_empty(x.shape[0], w.shape[1], dtype=case.out_dtype)
        return [scaled_matmul(x, w, scale_x, scale_w, out)]
    rows = case.x.shape[0]
    return [local_matmul(case.x, w, case.x.new_empty(rows, w.shape[1])) for w in case.weights]


def gathered(case: Case) -> Case:
    """Return the case with the operands of its local matmul: all rows of an all-gather."""
    if not case.gathers or not case.weights:
        return case
    x = _all_gather(case.x.view(torch.uint8) if case.scales else case.x, case.sizes)
    if not case.scales:
        return replace(case, x=x)
    scale, of_w = case.scales
    return replace(case, x=x.view(case.x.dtype), scales=(_all_gather(scale, case.sizes), of_w))


def columns_of(case: Case) -> list[int]:
    """Return the columns of each rank after an all-to-all."""
    return shard_sizes(case.x.shape[1], len(case.sizes))


def _world() -> str:
    world = dist.group.WORLD
    assert world is not None  # cases only run on ranks
    return groups.name_of(world)


def _all_gather(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Gather all shards. The collective needs equal shards, so uneven ones are padded."""
    largest = max(sizes)
    even = min(sizes) == largest
    if not even:
        padded = x.new_zeros(largest, *x.shape[1:])
        padded[: x.shape[0]] = x
        x = padded
    whole = x.new_empty(largest * len(sizes), *x.shape[1:])
    _gather_shards(whole, x)
    if even:
        return whole
    shards = whole.split(largest)
    return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])


def _all_to_all(x: torch.Tensor, sizes: tuple[int, ...], columns: list[int]) -> torch.Tensor:
    """Exchange: the rows of all ranks, and this rank's columns."""
    mine = columns[dist.get_rank()]
    sent = torch.cat([part.reshape(-1) for part in x.split(columns, 1)])
    whole = x.new_empty(sum(sizes), mine)
    lengths_out = [x.shape[0] * count for count in columns]
    lengths_in = [size * mine for size in sizes]
    dist.all_to_all_single(whole.view(-1), sent, lengths_in, lengths_out)
    return whole


def _reduce_scatter(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    out = x.new_empty(sizes[dist.get_rank()], *x.shape[1:])
    if min(sizes) == max(sizes):
        _reduce_shards(out, x)
    else:
        dist.reduce_scatter(out, list(x.split(list(sizes))))
    return out
