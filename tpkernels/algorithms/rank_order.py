"""Shards of another dim than the first, for algorithms that move whole rows.

Problem: x [B, S, K] is split along S. A rank's shard [B, s, K] is contiguous, but its rows are not
neighbours in the whole tensor.

Algorithm: the rows in the order of the ranks, one shard after the other, are a tensor that is split
along its first dim, with as many rows of each rank. A gather leaves its results in that order, and
they are copied to their places; a scatter takes a copy of x in that order. That is one pass over
the results or over x, which the copies between the GPUs do not overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from tpkernels.algorithms.parts import Products
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty


def by_owner(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return the elements of the ranks' shards along a dim, flat, one shard after the other."""
    if prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    if len(set(sizes)) == 1:
        ordered = x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0)
        return ordered.clone(memory_format=torch.contiguous_format).view(-1)
    shards = x.split(list(sizes), dim)
    whole = empty([x.numel()], x.dtype, x.device)
    for to, shard in zip(whole.split([s.numel() for s in shards]), shards, strict=True):
        to.view(shard.shape).copy_(shard)
    return whole


def join(flat: torch.Tensor, out: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Fill ``out`` with the ranks' shards, which lie one after the other in ``flat``."""
    counts = [out.numel() // out.shape[dim] * size if size else 0 for size in sizes]
    shapes = [(*out.shape[:dim], size, *out.shape[dim + 1 :]) for size in sizes]
    shards = flat.view(-1).split(counts)
    torch.cat([part.view(s) for part, s in zip(shards, shapes, strict=True)], dim, out=out)


def gathers_in_rank_order(function: Callable[..., None]) -> Callable[..., None]:
    """Make a `gather` that splits the first dim split any dim but the last."""

    @functools.wraps(function)
    def gather(call: Call, x: torch.Tensor, products: Products) -> None:
        problem = call.problem
        if problem.outer == 1:
            function(call, x, products)
            return
        results, count = products.results, len(products.outs)
        flat = [empty((problem.rows, y.shape[-1]), y.dtype, y.device) for y in results]
        whole = None if products.gathered is None else flat[-1]
        function(call, x, replace(products, outs=flat[:count], gathered=whole))
        for result, rows in zip(results, flat, strict=True):
            join(rows, result, problem.split_dim, problem.sizes)

    return gather


def scatters_in_rank_order(function: Callable[..., None]) -> Callable[..., None]:
    """Make a `reduce` that splits the first dim split any dim but the last."""

    @functools.wraps(function)
    def scatter(call: Call, x: torch.Tensor, *operands: object) -> None:
        problem = call.problem
        if problem.outer != 1:
            x = by_owner(x, problem.split_dim, problem.sizes).view(problem.rows, x.shape[-1])
        function(call, x, *operands)

    return scatter
