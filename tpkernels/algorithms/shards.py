"""The rows of a rank's shard, and the products with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from tpkernels.call import Call
from tpkernels.integers import ceil_div
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of
from tpkernels.local.product import Weight
from tpkernels.planning.problem import Problem


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as a matrix [rows, K]."""
    if x.dim() == 2:
        return x
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def partial_for(call: Call, x: torch.Tensor, w: Weight) -> torch.Tensor:
    """Memory for `matmul_partial`."""
    return empty((*x.shape[:-1], columns_of(w)), call.problem.dtype, x.device)


def matmul_partial(call: Call, x: torch.Tensor, w: Weight) -> torch.Tensor:
    """``x @ w`` in the dtype in which partials travel. x [..., K], w [K, N] -> [..., N]."""
    partial = partial_for(call, x, w)
    local_matmul(as_rows(x), w, as_rows(partial))
    return partial


def runs(problem: Problem, rank: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Rows [begin, end) of ``rank``'s shard as runs that are contiguous in the whole matrix. Yields
    (row in the shard, row in the whole matrix, number of rows)."""
    assert problem.dim is not None  # an all-reduce has no shards
    middle = prod(problem.shape[problem.dim + 1 : -1])
    width = problem.sizes[rank] * middle
    pitch = problem.shape[problem.dim] * middle
    before = sum(problem.sizes[:rank]) * middle
    if problem.outer == 1:
        width = max(end, 1)
    row = begin
    while row < end:
        block, at = divmod(row, width)
        count = min(end - row, width - at)
        yield row, block * pitch + before + at, count
        row += count


def multiply_shard(
    problem: Problem,
    owner: int,
    begin: int,
    shard: torch.Tensor,
    factors: Sequence[tuple[Weight, torch.Tensor | None, torch.Tensor]],
    gathered: torch.Tensor | None = None,
) -> None:
    """One part of an all-gather and matmul: multiplies ``shard`` [rows, K], the rows of ``owner``'s
    shard from ``begin`` on, for each (weight, bias, whole output). Also copies them to the whole
    ``gathered``."""
    for at, row, count in runs(problem, owner, begin, begin + shard.shape[0]):
        part = shard[at - begin : at - begin + count]
        for w, bias, out in factors:
            local_matmul(part, w, out[row : row + count], bias, problem.rows)
        if gathered is not None:
            gathered[row : row + count].copy_(part)


def partial_of_shard(
    problem: Problem, owner: int, begin: int, x: torch.Tensor, w: Weight, to: torch.Tensor
) -> None:
    """One part of a matmul and reduce-scatter: fills ``to`` with the rows of ``owner``'s shard of
    ``x @ w`` from ``begin`` on. x [rows, K], w [K, N]."""
    if problem.dim == len(problem.shape) - 1:
        assert isinstance(w, torch.Tensor)  # ops/_check.py: only those can be sliced
        first = sum(problem.sizes[:owner])
        columns = w[:, first : first + problem.sizes[owner]]
        part = x[begin : begin + to.shape[0]]
        local_matmul(part, columns, to, whole_rows=problem.rows, whole_columns=w.shape[1])
        return
    for at, row, count in runs(problem, owner, begin, begin + to.shape[0]):
        part = to[at - begin : at - begin + count]
        local_matmul(x[row : row + count], w, part, whole_rows=problem.rows)


def shard_counts(problem: Problem) -> list[int]:
    """Elements of each rank's shard."""
    return [problem.outer * size * problem.inner for size in problem.sizes]


def edges_of(total: int, world: int) -> list[int]:
    """Where the ranks' parts of an all-reduce begin, and the end of the last. All have the same
    size, but the last ones, which may be smaller or empty."""
    part = ceil_div(total, world)
    return [min(total, rank * part) for rank in range(world + 1)]


def shard_shape(problem: Problem, owner: int) -> list[int]:
    """Shape of ``owner``'s shard of the gathered or scattered tensor."""
    assert problem.dim is not None  # an all-reduce has no shards
    shape = list(problem.shape)
    shape[problem.dim] = problem.sizes[owner]
    return shape
