"""``direct`` on GPUs: one matmul, and one kernel that moves all the data at once.

The kernels, their slots and words are in csrc/cuda/shards.cuh and all_reduce.cuh.
"""

from __future__ import annotations

import torch

from tpkernels import cuda
from tpkernels.algorithms.parts import (
    Products,
    as_rows,
    matmul_partial,
    partial_for,
    shard_shape,
)
from tpkernels.algorithms.rank_order import gathers_in_rank_order, scatters_in_rank_order
from tpkernels.algorithms.reduction import Reduction, RmsNorm, Rows, behind_all_reduce
from tpkernels.call import Call
from tpkernels.cuda.queued import queue, queued
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.planning.problem import Problem
from tpkernels.symm.device import Launch


def rows_by_rank(problem: Problem) -> tuple[int, ...]:
    """Rows of each rank's shard, as ``as_blocks`` counts them."""
    if len(problem.shape) == 1:
        return problem.sizes
    return problem.shard_rows


def as_blocks(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows stay whole: [..., K] as [rows, K], a vector as a column."""
    return x.view(-1, 1) if x.dim() == 1 else as_rows(x)


def _gather_into(call: Call, x: torch.Tensor, whole: torch.Tensor) -> None:
    rows, sizes = as_blocks(x.contiguous()), rows_by_rank(call.problem)
    queue(call, x.device, cuda.prepare_all_gather(rows, as_blocks(whole), sizes))


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    out = empty(call.problem.shape, x.dtype, x.device)
    _gather_into(call, x, out)
    return out


@gathers_in_rank_order
def all_gather_matmul(call: Call, x: torch.Tensor, products: Products) -> None:
    whole = products.memory(call, x)
    _gather_into(call, x, whole)
    products.multiply(whole)


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, x.device)
    rows, sizes = as_blocks(x.contiguous()), rows_by_rank(call.problem)
    residual = None if reduction.residual is None else as_blocks(reduction.residual)
    launch = cuda.prepare_reduce_scatter(rows, as_blocks(out), sizes, reduction.bias, residual)
    queue(call, x.device, launch)
    return out


@scatters_in_rank_order
def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    return reduce_scatter(call, matmul_partial(call, x, w), reduction)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``."""
    queue(call, x.device, _all_reduce(call, x.contiguous(), out, reduction))


def _all_reduce(
    call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction, early: bool = False
) -> Launch:
    return cuda.prepare_all_reduce(
        call.problem.world,
        x,
        out,
        reduction.bias,
        reduction.residual,
        early,
        call.workspace.on_gpus[x.device].current.ll128,
    )


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    partial = partial_for(call, x, w)
    out = empty(partial.shape, reduction.out_dtype, x.device)
    launch = _all_reduce(call, partial, out, reduction, _starts_early(partial, w))
    _queue_behind_product(call, x, w, partial, launch)
    return out


def _starts_early(partial: torch.Tensor, w: Weight) -> bool:
    """Return whether the kernel behind ``partial = x @ w`` may start while the product runs: it is
    torch's and a kernel. What a caller's product queues is not known, nor whether it queues
    anything."""
    return isinstance(w, torch.Tensor) and partial.numel() > 0


def _queue_behind_product(
    call: Call, x: torch.Tensor, w: Weight, partial: torch.Tensor, launch: Launch
) -> None:
    """The product within the call's turn, so that nothing comes between it and the launch."""
    with queued(call, x.device, launch.words, launch.buffer_bytes, launch.sizes) as memory:
        local_matmul(as_rows(x), w, as_rows(partial))
        launch.run(memory.current, call.plan.signature)


_in_steps = behind_all_reduce(all_reduce)


def _normed(
    call: Call, x: torch.Tensor, reduction: Reduction, norm: RmsNorm, early: bool = False
) -> tuple[Rows, Launch]:
    """Return the results of one launch, and the launch."""
    total = empty(x.shape, reduction.out_dtype, x.device)
    normed = empty(x.shape, reduction.out_dtype, x.device)
    launch = cuda.prepare_normed_all_reduce(
        call.problem.world,
        x,
        total,
        normed,
        norm.weight,
        norm.eps,
        reduction.bias,
        reduction.residual,
        early=early,
    )
    return (normed, total), launch


def all_reduce_rms_norm(call: Call, x: torch.Tensor, reduction: Reduction, norm: RmsNorm) -> Rows:
    """One launch, where the kernels take rows of that length; all ranks decide alike."""
    if not cuda.normalises(x.dtype, norm.weight.numel()):
        return _in_steps(call, x, reduction, norm)
    rows, launch = _normed(call, x.contiguous(), reduction, norm)
    queue(call, x.device, launch)
    return rows


def matmul_all_reduce_rms_norm(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction, norm: RmsNorm
) -> Rows:
    partial = partial_for(call, x, w)
    if not cuda.normalises(partial.dtype, norm.weight.numel()):
        local_matmul(as_rows(x), w, as_rows(partial))
        return _in_steps(call, partial, reduction, norm)
    rows, launch = _normed(call, partial, reduction, norm, _starts_early(partial, w))
    _queue_behind_product(call, x, w, partial, launch)
    return rows
