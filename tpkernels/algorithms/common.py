"""What several algorithms need: the sum of partials with its epilogue, and the rows of a share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from tpkernels import _C, dtypes
from tpkernels.algorithms.memory import empty
from tpkernels.algorithms.product import product
from tpkernels.algorithms.ranges import COPY, recorded
from tpkernels.problem import Problem

if TYPE_CHECKING:
    from tpkernels.backends import Call


@dataclass(frozen=True)
class Reduction:
    """What follows the sum of the partials: ``+ bias + residual``, then one rounding to
    ``out_dtype``.

    ``bias`` is [cols] in the accumulator's dtype; ``residual`` is contiguous, of the output's
    shape.
    """

    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def epilogue(self) -> _C.Epilogue:
        """The extension's form. It holds addresses: keep the reduction while it is in use."""
        bias, residual = self.bias, self.residual
        return _C.Epilogue(
            dtypes.CODES[self.out_dtype],
            bias.data_ptr() if bias is not None else 0,
            max(bias.numel(), 1) if bias is not None else 1,
            residual.data_ptr() if residual is not None else 0,
            dtypes.CODES[residual.dtype] if residual is not None else 0,
        )


def reduced(partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """The result where one rank's partial is the whole sum; ``partial`` itself if that is all."""
    plain = reduction.bias is None and reduction.residual is None
    if plain and reduction.out_dtype == partial.dtype:
        return partial
    out = empty(partial.shape, reduction.out_dtype, partial.device)
    reduce_into(out, [partial.contiguous()], reduction)
    return out


def reduce_into(
    out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction, begin: int = 0
) -> None:
    """``out = round(sum of partials in order + bias + residual)``. All contiguous and of one size;
    they stand at element ``begin`` of the whole output. ``out`` may be one of them."""
    if out.device.type != "cpu":
        _reduce_by_torch(out, partials, reduction, begin)
        return
    if begin and reduction.residual is not None:
        rest = reduction.residual.view(-1)[begin:]
        reduction = Reduction(reduction.out_dtype, reduction.bias, rest)
    addresses = [partial.data_ptr() for partial in partials]
    wire = dtypes.CODES[partials[0].dtype]
    with recorded(COPY):
        _C.sum_partials(
            out.data_ptr(), addresses, wire, begin, partials[0].numel(), reduction.epilogue()
        )


def _reduce_by_torch(
    out: torch.Tensor, partials: Sequence[torch.Tensor], reduction: Reduction, begin: int
) -> None:
    wide, count = dtypes.accumulator(partials[0].dtype), out.numel()
    total = partials[0].reshape(-1).to(wide, copy=True)
    for partial in partials[1:]:
        total += partial.reshape(-1)
    if reduction.bias is not None and count:
        columns = reduction.bias.numel()
        bias = reduction.bias.roll(-(begin % columns))
        total += bias.repeat(-(-count // columns))[:count]
    if reduction.residual is not None:
        total += reduction.residual.view(-1)[begin : begin + count]
    out.view(-1).copy_(total)


def matmul_partial(call: Call, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w`` in the dtype that partials travel in. x [..., K], w [K, N] -> [..., N]."""
    partial = empty((*x.shape[:-1], w.shape[1]), call.problem.dtype, x.device)
    product(as_rows(x), w, as_rows(partial))
    return partial


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as a matrix [rows, K]."""
    if x.dim() == 2:
        return x
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def after(call: Call) -> list[int]:
    """The other ranks, from the next one on, so that not all turn to the same one at once."""
    rank, world = call.group.rank, call.group.world
    return [(rank + i) % world for i in range(1, world)]


def share_rows(problem: Problem, rank: int) -> int:
    """Matrix rows of ``rank``'s share, which is cut along a dim that is not the last."""
    assert problem.dim is not None  # an all-reduce has no shares
    return problem.outer * problem.sizes[rank] * prod(problem.shape[problem.dim + 1 : -1])


def runs(problem: Problem, rank: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Rows [begin, end) of ``rank``'s share as runs that are contiguous in the whole matrix:
    (row in the share, row in the whole, count)."""
    assert problem.dim is not None  # an all-reduce has no shares
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


def multiply_share(
    problem: Problem,
    owner: int,
    begin: int,
    share: torch.Tensor,
    factors: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]],
    gathered: torch.Tensor | None = None,
) -> None:
    """All-gather and matmul on a part of it: rows ``begin`` and after of ``owner``'s share, [rows,
    K], times each (weight, bias, whole output). They are also copied to the whole ``gathered``."""
    for at, row, count in runs(problem, owner, begin, begin + share.shape[0]):
        part = share[at - begin : at - begin + count]
        for w, bias, out in factors:
            product(part, w, out[row : row + count], bias)
        if gathered is not None:
            gathered[row : row + count].copy_(part)


def partial_of_share(
    problem: Problem, owner: int, begin: int, x: torch.Tensor, w: torch.Tensor, to: torch.Tensor
) -> None:
    """Matmul and reduce-scatter on a part of it: ``to`` is rows ``begin`` and after of ``owner``'s
    share of ``x @ w``. x [rows, K], w [K, N]."""
    if problem.dim == len(problem.shape) - 1:
        first = sum(problem.sizes[:owner])
        columns = w[:, first : first + problem.sizes[owner]]
        product(x[begin : begin + to.shape[0]], columns, to)
        return
    for at, row, count in runs(problem, owner, begin, begin + to.shape[0]):
        product(x[row : row + count], w, to[at - begin : at - begin + count])


def share_shape(problem: Problem, owner: int) -> list[int]:
    """Shape of ``owner``'s share of what is gathered or scattered."""
    assert problem.dim is not None  # an all-reduce has no shares
    shape = list(problem.shape)
    shape[problem.dim] = problem.sizes[owner]
    return shape
