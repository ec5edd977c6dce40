"""``direct`` on GPUs: one matmul, and one kernel that moves all data.

csrc/cuda/shards.cuh, all_reduce.cuh and routed.cuh describe the kernels, slots and signals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpkernels import cuda
from tpkernels.algorithms.assignments import (
    ExpertPermutation,
    assigned_rows,
    invert_permutation,
    row_capacity,
)
from tpkernels.algorithms.chunks import GatherOutputs, as_rows, compute_partial, new_partial
from tpkernels.algorithms.rank_order import rank_ordered_gather, rank_ordered_reduce
from tpkernels.algorithms.reduction import Reduction, RmsNorm, with_rms_norm
from tpkernels.cuda.queued import queue
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.weight import Weight
from tpkernels.planning.problem import Problem
from tpkernels.symm.device import PreparedCall


def rows_per_rank(problem: Problem) -> tuple[int, ...]:
    """Return the number of rows of each shard, as counted by ``as_matrix``."""
    if len(problem.shape) == 1:
        return problem.sizes
    return problem.shard_rows


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """View x as a matrix whose rows are not split: [..., K] as [rows, K], a vector as a column."""
    return x.view(-1, 1) if x.dim() == 1 else as_rows(x)


@rank_ordered_gather
def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
    gathered, sizes = outputs.gather_buffer(call, x), rows_per_rank(call.problem)
    shard, rows = as_matrix(x.contiguous()), as_matrix(gathered)

    def prepare() -> PreparedCall:
        return cuda.prepare_all_gather(shard, rows, sizes, variants=_variants(call, x))

    queue(call, x.device, "gather", prepare, shard, rows)
    outputs.multiply(gathered)


def dispatch(
    call: Call, x: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the local experts, and the number of rows per expert.

    With ``max_rows`` the host does not wait.

    Args:
        x: [tokens, H].
        topk_ids: [tokens of all ranks, k].
    """
    problem, rank = call.problem, call.group.rank
    by_expert = ExpertPermutation.compute(problem, rank, topk_ids)
    rows = empty((by_expert.num_rows(problem, rank, topk_ids), x.shape[1]), x.dtype, x.device)

    def prepare() -> PreparedCall:
        return cuda.prepare_routed(x, rows, by_expert.permutation, problem.sizes)

    queue(
        call,
        x.device,
        "dispatch",
        prepare,
        x,
        rows,
        by_expert.permutation,
        by_expert.rank_offsets,
        len(rows),
    )
    return rows, by_expert.counts


def combine(
    call: Call, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill ``out`` [tokens, H] with the sums of expert outputs times ``weights`` [tokens, k].

    A token becomes NaN if one of its assignments got no row.
    """
    problem, rank = call.problem, call.group.rank
    by_expert = ExpertPermutation.compute(problem, rank, topk_ids)
    x = assigned_rows(problem, x, by_expert.num_rows(problem, rank, topk_ids))
    routing = (
        by_expert.permutation,
        by_expert.rank_offsets,
        row_capacity(problem),
        invert_permutation(by_expert.permutation),
    )

    def prepare() -> PreparedCall:
        return cuda.prepare_routed(x, out, by_expert.permutation, problem.sizes, weights)

    queue(call, x.device, "combine", prepare, x, out, *routing, weights)


@rank_ordered_reduce
def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x`` if all ranks keep the sum."""
    bias, residual, world = reduction.bias, reduction.residual, call.problem.world
    if call.problem.spec.scatters:
        sizes, partial = rows_per_rank(call.problem), compute_partial(call, x, w).contiguous()
        matrices = as_matrix(partial), as_matrix(out)
        epilogue = bias, None if residual is None else as_matrix(residual)

        def prepare_scatter() -> PreparedCall:
            return cuda.prepare_reduce_scatter(
                *matrices, sizes, *epilogue, variants=_variants(call, x)
            )

        queue(call, x.device, "scatter", prepare_scatter, *matrices, *epilogue)
        return
    partial, multiply = _partial_and_matmul(call, x, w)

    def prepare() -> PreparedCall:
        return cuda.prepare_all_reduce(
            *(world, partial, out, bias, residual),
            early=_allows_early_launch(partial, w),
            variants=_variants(call, x),
        )

    queue(call, x.device, "sum", prepare, partial, out, bias, residual, prologue=multiply)


_reduce_then_normalise = with_rms_norm(reduce)


def reduce_and_normalise(
    call: Call,
    x: torch.Tensor,
    w: Weight | None,
    out: torch.Tensor,
    reduction: Reduction,
    norm: RmsNorm,
) -> torch.Tensor:
    """Reduce and normalise in one launch, if the kernels support the row length.

    All ranks decide identically.
    """
    if not cuda.supports_rms_norm(out.dtype, norm.weight.numel()):
        return _reduce_then_normalise(call, compute_partial(call, x, w), None, out, reduction, norm)
    partial, multiply = _partial_and_matmul(call, x, w)
    normed, world = empty(out.shape, out.dtype, out.device), call.problem.world
    tensors, epilogue = (partial, out, normed, norm.weight), (reduction.bias, reduction.residual)

    def prepare() -> PreparedCall:
        return cuda.prepare_normed_all_reduce(
            *(world, *tensors, norm.eps, *epilogue),
            early=_allows_early_launch(partial, w),
            variants=_variants(call, x),
        )

    queue(call, x.device, "normed", prepare, *tensors, *epilogue, prologue=multiply)
    return normed


def _partial_and_matmul(
    call: Call, x: torch.Tensor, w: Weight | None
) -> tuple[torch.Tensor, Callable[[], object]]:
    """Return the partial, and a function that queues its matmul, if the op has a matmul.

    The matmul and the reduction are queued under one lock, without a launch between them.
    """
    if w is None:
        return x.contiguous(), lambda: None
    partial = new_partial(call, x, w)
    return partial, lambda: local_matmul(as_rows(x), w, as_rows(partial))


def _variants(call: Call, x: torch.Tensor) -> frozenset[str]:
    """Return the variants that are qualified on this machine."""
    return call.workspace.cuda_workspaces[x.device].current.variants


def _allows_early_launch(partial: torch.Tensor, w: Weight | None) -> bool:
    """Return True if the kernel after ``partial = x @ w`` may start during the matmul.

    This requires a torch matmul that launches a kernel. A `CustomMatmul` may queue any work, or
    no work.
    """
    return isinstance(w, torch.Tensor) and partial.numel() > 0
