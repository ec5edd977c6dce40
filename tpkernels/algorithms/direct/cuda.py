"""``direct`` on GPUs: one matmul, and one kernel that moves all the data at once.

The kernels, their slots and words are in csrc/cuda/shards.cuh, all_reduce.cuh and routed.cuh.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpkernels import cuda
from tpkernels.algorithms.parts import Products, as_rows, new_partial, partial_of
from tpkernels.algorithms.rank_order import gathers_in_rank_order, scatters_in_rank_order
from tpkernels.algorithms.reduction import Reduction, RmsNorm, normalising
from tpkernels.algorithms.routes import Places, filled, most_rows, places_of
from tpkernels.cuda.queued import queue
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.planning.problem import Problem
from tpkernels.symm.device import Prepared


def rows_by_rank(problem: Problem) -> tuple[int, ...]:
    """Rows of each rank's shard, as ``as_blocks`` counts them."""
    if len(problem.shape) == 1:
        return problem.sizes
    return problem.shard_rows


def as_blocks(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows stay whole: [..., K] as [rows, K], a vector as a column."""
    return x.view(-1, 1) if x.dim() == 1 else as_rows(x)


@gathers_in_rank_order
def gather(call: Call, x: torch.Tensor, products: Products) -> None:
    whole, sizes = products.memory(call, x), rows_by_rank(call.problem)
    shard, rows = as_blocks(x.contiguous()), as_blocks(whole)

    def prepare() -> Prepared:
        return cuda.prepare_all_gather(shard, rows, sizes, variants=_variants(call, x))

    queue(call, x.device, "gather", prepare, shard, rows)
    products.multiply(whole)


def dispatch(
    call: Call, x: torch.Tensor, routes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of this rank's experts, and how many each has. x [tokens, H], routes [tokens
    of all ranks, k]. With ``max_rows`` the host waits for nothing."""
    problem, rank = call.problem, call.group.rank
    found = Places.of(problem, rank, routes)
    rows = empty((found.rows(problem, rank, routes), x.shape[1]), x.dtype, x.device)

    def prepare() -> Prepared:
        return cuda.prepare_routed(x, rows, found.order, problem.sizes)

    queue(call, x.device, "dispatch", prepare, x, rows, found.order, found.edges, len(rows))
    return rows, found.counts


def combine(
    call: Call, x: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill ``out`` [tokens, H] with the sums of the tokens' rows by ``weights`` [tokens, k]. A
    token that has a route without a row becomes NaN."""
    problem, rank = call.problem, call.group.rank
    found = Places.of(problem, rank, routes)
    x = filled(problem, x, found.rows(problem, rank, routes))
    placed = found.order, found.edges, most_rows(problem), places_of(found.order)

    def prepare() -> Prepared:
        return cuda.prepare_routed(x, out, found.order, problem.sizes, weights)

    queue(call, x.device, "combine", prepare, x, out, *placed, weights)


@scatters_in_rank_order
def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x``, where all ranks keep the sum."""
    bias, residual, world = reduction.bias, reduction.residual, call.problem.world
    if call.problem.spec.scatters:
        sizes, partial = rows_by_rank(call.problem), partial_of(call, x, w).contiguous()
        moved = as_blocks(partial), as_blocks(out)
        added = bias, None if residual is None else as_blocks(residual)

        def prepare_scatter() -> Prepared:
            return cuda.prepare_reduce_scatter(*moved, sizes, *added, variants=_variants(call, x))

        queue(call, x.device, "scatter", prepare_scatter, *moved, *added)
        return
    partial, multiply = _partial_and_product(call, x, w)

    def prepare() -> Prepared:
        return cuda.prepare_all_reduce(
            *(world, partial, out, bias, residual),
            early=_starts_early(partial, w),
            variants=_variants(call, x),
        )

    queue(call, x.device, "sum", prepare, partial, out, bias, residual, first=multiply)


_in_steps = normalising(reduce)


def reduce_and_normalise(
    call: Call,
    x: torch.Tensor,
    w: Weight | None,
    out: torch.Tensor,
    reduction: Reduction,
    norm: RmsNorm,
) -> torch.Tensor:
    """One launch, where the kernels take rows of that length; all ranks decide alike."""
    if not cuda.normalises(out.dtype, norm.weight.numel()):
        return _in_steps(call, partial_of(call, x, w), None, out, reduction, norm)
    partial, multiply = _partial_and_product(call, x, w)
    normed, world = empty(out.shape, out.dtype, out.device), call.problem.world
    tensors, added = (partial, out, normed, norm.weight), (reduction.bias, reduction.residual)

    def prepare() -> Prepared:
        return cuda.prepare_normed_all_reduce(
            *(world, *tensors, norm.eps, *added),
            early=_starts_early(partial, w),
            variants=_variants(call, x),
        )

    queue(call, x.device, "normed", prepare, *tensors, *added, first=multiply)
    return normed


def _partial_and_product(
    call: Call, x: torch.Tensor, w: Weight | None
) -> tuple[torch.Tensor, Callable[[], object]]:
    """Return the partial, and what queues the product that fills it, if there is one. It comes in
    the same turn as the sum: nothing between."""
    if w is None:
        return x.contiguous(), lambda: None
    partial = new_partial(call, x, w)
    return partial, lambda: local_matmul(as_rows(x), w, as_rows(partial))


def _variants(call: Call, x: torch.Tensor) -> frozenset[str]:
    """Return the variants that are qualified here."""
    return call.workspace.on_gpus[x.device].current.variants


def _starts_early(partial: torch.Tensor, w: Weight | None) -> bool:
    """Return whether the kernel behind ``partial = x @ w`` may start while the product runs: it is
    torch's and a kernel. What a caller's product queues is not known, nor whether it queues
    anything."""
    return isinstance(w, torch.Tensor) and partial.numel() > 0
