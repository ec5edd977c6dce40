"""Rank-order layout for shards of a dim after the first, for algorithms that move full rows.

Problem: x [B, S, K] is split along S. A shard [B, s, K] is contiguous, but its rows are not
adjacent in the full tensor.

Algorithm: concatenated in rank order, the shards form a tensor that is split along its first dim.
Each rank has as many rows of it as of x. A gather leaves its results in rank order and copies them
to the output. A scatter copies x to rank order first. The copy is one pass over the results or over
x. It does not overlap with the copies between GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from tpkernels.algorithms.chunks import GatherOutputs
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty


def to_rank_order(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return the shards of x along ``dim``, concatenated in rank order, as a flat tensor."""
    if prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    if len(set(sizes)) == 1:
        ordered = x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0)
        return ordered.clone(memory_format=torch.contiguous_format).view(-1)
    shards = x.split(list(sizes), dim)
    flat = empty([x.numel()], x.dtype, x.device)
    for dst, shard in zip(flat.split([s.numel() for s in shards]), shards, strict=True):
        dst.view(shard.shape).copy_(shard)
    return flat


def from_rank_order(flat: torch.Tensor, out: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Fill ``out`` with the shards that ``flat`` holds in rank order."""
    counts = [out.numel() // out.shape[dim] * size if size else 0 for size in sizes]
    shapes = [(*out.shape[:dim], size, *out.shape[dim + 1 :]) for size in sizes]
    shards = flat.view(-1).split(counts)
    torch.cat(
        [shard.view(shape) for shard, shape in zip(shards, shapes, strict=True)], dim, out=out
    )


def rank_ordered_gather(function: Callable[..., None]) -> Callable[..., None]:
    """Extend a `gather` that splits the first dim to any dim but the last."""

    @functools.wraps(function)
    def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
        problem = call.problem
        if problem.outer == 1:
            function(call, x, outputs)
            return
        results, count = outputs.results, len(outputs.outs)
        flat_results = [empty((problem.rows, y.shape[-1]), y.dtype, y.device) for y in results]
        gathered = None if outputs.gathered is None else flat_results[-1]
        function(call, x, replace(outputs, outs=flat_results[:count], gathered=gathered))
        for result, rows in zip(results, flat_results, strict=True):
            from_rank_order(rows, result, problem.split_dim, problem.sizes)

    return gather


def rank_ordered_reduce(function: Callable[..., None]) -> Callable[..., None]:
    """Extend a `reduce` that splits the first dim to any dim but the last."""

    @functools.wraps(function)
    def scatter(call: Call, x: torch.Tensor, *operands: object) -> None:
        problem = call.problem
        if problem.outer != 1:
            x = to_rank_order(x, problem.split_dim, problem.sizes).view(problem.rows, x.shape[-1])
        function(call, x, *operands)

    return scatter
