"""Shards of another dim than the first, for algorithms that move whole rows.

Problem: x [B, S, K] is split along S. A rank's shard [B, s, K] is contiguous, but its rows are not
neighbours in the whole tensor.

Algorithm: the rows in the order of the ranks, [W, B, s, K], are a tensor that is split along its
first dim, with as many rows of each rank. A gather leaves its results in that order, and they are
copied to their places; a scatter takes a copy of x in that order. That is one pass over the results
or over x, which the copies between the GPUs do not overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tpkernels.algorithms.parts import Products
from tpkernels.call import Call
from tpkernels.local.memory import empty
from tpkernels.planning.problem import Problem


def _pairs(
    problem: Problem, whole: torch.Tensor, rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of ``whole``, and of the same elements in ``rows`` [M, N], which are in the order of
    the ranks. One pair where all shards have the same size."""
    dim, sizes = problem.dim, problem.sizes
    assert dim is not None  # there are shards
    lead = whole.shape[:dim]
    if len(set(sizes)) == 1:
        blocks = (len(sizes), sizes[0])
        parts = rows.view(len(sizes), *lead, sizes[0], *whole.shape[dim + 1 :])
        yield whole.view(*lead, *blocks, *whole.shape[dim + 1 :]), parts.movedim(0, dim)
        return
    begin = row = 0
    for size, count in zip(sizes, problem.shard_rows, strict=True):
        part = whole.narrow(dim, begin, size)
        yield part, rows.narrow(0, row, count).view(part.shape)
        begin, row = begin + size, row + count


def gathers_in_rank_order(function: Callable[..., None]) -> Callable[..., None]:
    """Make an all_gather_matmul that splits the first dim split any dim but the last."""

    @functools.wraps(function)
    def gather(call: Call, x: torch.Tensor, products: Products) -> None:
        problem = call.problem
        if problem.outer == 1:
            function(call, x, products)
            return
        results, count = products.results, len(products.outs)
        flat = [empty((problem.rows, y.shape[-1]), y.dtype, y.device) for y in results]
        outs, whole = flat[:count], None if products.gathered is None else flat[-1]
        function(call, x, replace(products, outs=outs, gathered=whole))
        for result, rows in zip(results, flat, strict=True):
            for part, source in _pairs(problem, result, rows):
                part.copy_(source)

    return gather


def scatters_in_rank_order(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make a matmul_reduce_scatter that splits the first dim split any dim but the last."""

    @functools.wraps(function)
    def scatter(call: Call, x: torch.Tensor, w: Any, reduction: Any) -> torch.Tensor:
        problem = call.problem
        if problem.outer == 1:
            return function(call, x, w, reduction)
        x = x.contiguous()
        rows = empty((problem.rows, x.shape[-1]), x.dtype, x.device)
        for part, to in _pairs(problem, x, rows):
            to.copy_(part)
        return function(call, rows, w, reduction)

    return scatter
