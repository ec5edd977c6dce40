"""The rows of a rank's shard, and the products with them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from tpkernels.call import Call
from tpkernels.integers import ceil_div
from tpkernels.local.exactness import multiplies_parts_exactly
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of
from tpkernels.local.product import Product, Weight
from tpkernels.planning.problem import Problem

Factor: TypeAlias = tuple[Weight, "torch.Tensor | None", torch.Tensor]


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


def _cut(total: int, step: int) -> set[int]:
    """Lengths of the pieces of ``total``, ``step`` at a time."""
    return {min(total, step), total % step} - {0}


@functools.lru_cache(maxsize=1024)
def parts_of(problem: Problem, step: int, columns: int) -> frozenset[tuple[int, int]]:
    """Rows and columns of the products of a matmul that is split by rank, ``step`` rows of each
    rank at a time; the whole has ``columns``."""
    ranks, step = range(problem.world), max(1, step)
    if problem.dim is None:
        edges = edges_of(problem.rows, problem.world)
        rows = set().union(*(_cut(b - a, step) for a, b in itertools.pairwise(edges)))
    elif problem.dim == len(problem.shape) - 1:
        return frozenset(itertools.product(_cut(problem.rows, step), {*problem.sizes} - {0}))
    else:
        rows = {
            count
            for rank in ranks
            for begin in range(0, problem.shard_rows[rank], step)
            for _, _, count in runs(
                problem, rank, begin, min(begin + step, problem.shard_rows[rank])
            )
        }
    return frozenset((count, columns) for count in rows)


@dataclass(frozen=True)
class Factors:
    """By what an all-gather's rows are multiplied: part by part, and at the end.

    Attributes:
        gathered: [rows, K], to which the rows are copied; None if nobody needs them.
        parts: (weight, bias, whole output) of the products whose parts have the bits of the whole.
        rest: of the others.
    """

    gathered: torch.Tensor | None
    parts: list[Factor]
    rest: list[Factor]

    def finish(self) -> None:
        """Make the products that are not split, of the gathered rows."""
        for w, bias, out in self.rest:
            assert self.gathered is not None
            local_matmul(as_rows(self.gathered), w, out, bias)


def split_gather(
    problem: Problem,
    x: torch.Tensor,
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    gathered: torch.Tensor | None,
    step: int,
) -> Factors:
    """Return the factors of an all-gather and matmul that is split, ``step`` rows of each rank at a
    time. ``gathered`` is the result, or None."""
    parts: list[Factor] = []
    rest: list[Factor] = []
    for w, bias, out in zip(weights, biases, map(as_rows, outs), strict=True):
        products = parts_of(problem, step, columns_of(w))
        exact = _splits_exactly(problem, x, w, out.dtype, products, bias)
        (parts if exact else rest).append((w, bias, out))
    if rest and gathered is None:
        gathered = empty(problem.shape, x.dtype, x.device)
    return Factors(gathered, parts, rest)


class _Multiplied(Product):
    """Stands for the weight of rows that have been multiplied."""

    def __init__(self, product: torch.Tensor) -> None:
        self.shape, self.dtype = (product.shape[1],) * 2, product.dtype

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return out.copy_(x)


def split_partial(
    problem: Problem, x: torch.Tensor, w: Weight, parts: frozenset[tuple[int, int]]
) -> tuple[torch.Tensor, Any]:
    """``(x, w)`` as a matmul and reduction is to multiply them in these parts. They are multiplied
    at once where a part would have other bits than the whole. x [rows, K], w [K, N]."""
    if _splits_exactly(problem, x, w, problem.dtype, parts):
        return x, w
    product = empty((x.shape[0], columns_of(w)), problem.dtype, x.device)
    local_matmul(x, w, product)
    return product, _Multiplied(product)


def _splits_exactly(
    problem: Problem,
    x: torch.Tensor,
    w: Weight,
    out_dtype: torch.dtype,
    parts: frozenset[tuple[int, int]],
    bias: torch.Tensor | None = None,
) -> bool:
    """Vendors' products on GPUs promise no bits."""
    shape = problem.rows, x.shape[-1], columns_of(w)
    return x.is_cuda or multiplies_parts_exactly(
        w, parts, shape, x.dtype, out_dtype, None if bias is None else bias.dtype
    )


def multiply_shard(
    problem: Problem,
    owner: int,
    begin: int,
    shard: torch.Tensor,
    factors: Sequence[Factor],
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
        first = sum(problem.sizes[:owner])
        if isinstance(w, _Multiplied):
            to.copy_(x[begin : begin + to.shape[0], first : first + to.shape[1]])
            return
        assert isinstance(w, torch.Tensor)  # validation.py: only those can be sliced
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
    """Return where the ranks' parts of an all-reduce begin, and the end of the last. All have the
    same size, but the last ones, which may be smaller or empty."""
    part = ceil_div(total, world)
    return [min(total, rank * part) for rank in range(world + 1)]


def shard_shape(problem: Problem, owner: int) -> list[int]:
    """Shape of ``owner``'s shard of the gathered or scattered tensor."""
    assert problem.dim is not None  # an all-reduce has no shards
    shape = list(problem.shape)
    shape[problem.dim] = problem.sizes[owner]
    return shape
