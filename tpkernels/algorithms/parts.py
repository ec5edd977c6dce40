"""Which part of a tensor belongs to which rank, and products that are made part by part.

A product may be split only where its parts have the bits of the whole (`local.exactness`). That,
the rows of each step and where they lie follow from the call and the layout of the weights. They
are worked out when such a call is first met, and kept with the call (`Split`).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

import torch

from tpkernels.common.integers import ceil_div, round_up
from tpkernels.groups.call import Call
from tpkernels.local.exactness import multiplies_parts_exactly
from tpkernels.local.matmul import layout_of, local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of
from tpkernels.local.product import Weight
from tpkernels.planning.algorithms import LINE_BYTES, step_rows
from tpkernels.planning.op_spec import ExchangeOptions
from tpkernels.planning.problem import Problem

Run: TypeAlias = tuple[int, int, int]  # row in a part, row in the whole matrix, number of rows


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] as a matrix [rows, K]."""
    return x.flatten(0, -2)


def new_partial(call: Call, x: torch.Tensor, w: Weight) -> torch.Tensor:
    """Return memory for ``x @ w`` in the dtype in which partials travel. x [..., K], w [K, N]."""
    return empty((*x.shape[:-1], columns_of(w)), call.problem.dtype, x.device)


def partial_of(call: Call, x: torch.Tensor, w: Weight | None) -> torch.Tensor:
    """Return this rank's partial of the sum: ``x @ w``, or x itself without a matmul."""
    if w is None:
        return x
    partial = new_partial(call, x, w)
    local_matmul(as_rows(x), w, as_rows(partial))
    return partial


def shard_counts(problem: Problem) -> list[int]:
    """Return the elements of each rank's shard."""
    return [problem.outer * size * problem.inner for size in problem.sizes]


def result_shape(problem: Problem, rank: int) -> list[int]:
    """Return the shape of what a call leaves on a rank: all of the tensor, or the rank's shard."""
    shape, spec = list(problem.shape), problem.spec
    if spec.exchanges:
        to = problem.options_as(ExchangeOptions)
        shape[to.dim] = to.sizes[rank]
    elif spec.scatters:
        shape[problem.split_dim] = problem.sizes[rank]
    return shape


def pieces_of(
    problem: Problem, x: torch.Tensor, out: torch.Tensor
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return this rank's piece for each rank in an exchange, and the places in ``out`` of the
    ranks' pieces for this one."""
    to = problem.options_as(ExchangeOptions)
    return x.split(list(to.sizes), to.dim), out.split(list(problem.sizes), problem.split_dim)


def edges_of(total: int, world: int) -> list[int]:
    """Return where the ranks' parts of an all-reduce begin, and the end of the last. All have the
    same size, but the last ones, which may be smaller or empty."""
    part = ceil_div(total, world)
    return [min(total, rank * part) for rank in range(world + 1)]


def splits_columns(problem: Problem) -> bool:
    """Return whether the last dim is split, so that a matmul is split by columns."""
    return problem.dim == len(problem.shape) - 1


def runs(problem: Problem, rank: int, begin: int, end: int) -> Iterator[Run]:
    """Yield rows [begin, end) of ``rank``'s part as runs that are contiguous in the whole
    matrix."""
    if problem.dim is None or splits_columns(problem):
        before = edges_of(problem.rows, problem.world)[rank] if problem.dim is None else 0
        if begin < end:
            yield begin, before + begin, end - begin
        return
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


@dataclass(frozen=True, eq=False)
class Split:
    """What is communicated, split by rank, and each rank's part into steps.

    Attributes:
        rows, columns: of each rank's part. Without a matmul all elements are rows.
        begins: where each part begins in the output of a reduction, in elements.
        step: rows of each rank at a time.
        exact: for each weight, whether products in these parts have the bits of the whole.
    """

    problem: Problem
    rows: Sequence[int]
    columns: Sequence[int]
    begins: Sequence[int]
    step: int
    exact: Sequence[bool] = ()
    _runs: dict[tuple[int, int, int], tuple[Run, ...]] = field(default_factory=dict)

    @classmethod
    def of_matmul(cls, problem: Problem, columns: int, room: int | None) -> Split:
        """Split the matrix that is gathered or summed, of so many columns. A step takes ``room``
        bytes of a data buffer; None: there is one step."""
        begins, widths = [0] * problem.world, [columns] * problem.world
        if problem.dim is None:
            edges = edges_of(problem.rows, problem.world)
            rows = [b - a for a, b in itertools.pairwise(edges)]
            begins = [edge * columns for edge in edges[:-1]]
        elif splits_columns(problem):
            rows, widths = [problem.rows] * problem.world, list(problem.sizes)
        else:
            rows = list(problem.shard_rows)
        fitting = max(rows) if room is None else min(max(rows), step_rows(problem, room))
        return cls(problem, rows, widths, begins, max(1, fitting))

    @functools.cached_property
    def by_columns(self) -> bool:
        """Return whether each rank's part has its own columns."""
        return splits_columns(self.problem)

    @functools.cached_property
    def counts(self) -> list[int]:
        """Return the elements of each rank's part."""
        return [rows * columns for rows, columns in zip(self.rows, self.columns, strict=True)]

    @functools.cached_property
    def steps(self) -> int:
        """Return the number of steps."""
        return ceil_div(max(self.rows), self.step) if any(self.counts) else 0

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Return the bytes of one step of any part, in whole cache lines."""
        return round_up(self.step * max(self.columns) * self.problem.dtype.itemsize, LINE_BYTES)

    def piece(self, owner: int, index: int) -> tuple[int, int]:
        """Return the first element and the number of elements of a step of a part."""
        row = min(index * self.step, self.rows[owner])
        columns = self.columns[owner]
        return row * columns, min(self.step, self.rows[owner] - row) * columns

    def runs(self, owner: int, begin: int, count: int) -> tuple[Run, ...]:
        """Return the runs of ``count`` rows of a part, from ``begin`` on."""
        key = owner, begin, count
        if key not in self._runs:
            self._runs[key] = tuple(runs(self.problem, owner, begin, begin + count))
        return self._runs[key]

    def products(self, columns: int, whole_parts: bool) -> frozenset[tuple[int, int]]:
        """Return the rows and columns of the products by a weight with so many columns. With
        ``whole_parts`` there are also products of all of a part."""
        found = set()
        for owner, rows in enumerate(self.rows):
            width = self.columns[owner] if self.by_columns else columns
            for step in {self.step, max(rows, 1) if whole_parts else self.step}:
                for begin in range(0, rows, step):
                    end = min(begin + step, rows)
                    found |= {(n, width) for _, _, n in runs(self.problem, owner, begin, end)}
        return frozenset(size for size in found if 0 not in size)


# A weight, its bias, and the product's memory, which a partial has not yet.
Factor: TypeAlias = tuple[Weight, torch.Tensor | None, torch.Tensor]
PartialFactor: TypeAlias = tuple[Weight, None, None]
_weight_of = operator.itemgetter(0)


def _split_of(
    call: Call, x: torch.Tensor, factors: Sequence[Factor | PartialFactor], room: int | None
) -> Split:
    """Return how a call splits its matmul."""
    layouts = map(layout_of, map(_weight_of, factors))
    key = "split", room, torch.get_num_threads(), *layouts
    split: Split | None = call.kept.get(key)
    if split is None:
        problem, k, exact = call.problem, x.shape[-1], []
        columns = k if problem.spec.gathers else columns_of(factors[0][0])
        split = Split.of_matmul(problem, columns, room)
        whole_parts = problem.spec.reduces and call.node is not None  # partials that travel
        for w, bias, out in factors:
            n, dtype = columns_of(w), problem.dtype if out is None else out.dtype
            products, shape = split.products(n, whole_parts), (problem.rows, k, n)
            bias_dtype = None if bias is None else bias.dtype
            exact.append(
                x.is_cuda  # vendors' products promise no bits
                or multiplies_parts_exactly(w, products, shape, x.dtype, dtype, bias_dtype)
            )
        split = call.kept[key] = replace(split, exact=exact)
    return split


@dataclass(frozen=True)
class Products:
    """The results of a gather: ``outs[i] = x @ weights[i] + biases[i]`` of the gathered x, and this
    itself, unless ``gathered`` is None. Without weights it is the only result."""

    weights: Sequence[Any]  #: each a `Weight` or another `Product`
    biases: Sequence[torch.Tensor | None]
    outs: Sequence[torch.Tensor]
    gathered: torch.Tensor | None

    @property
    def results(self) -> list[torch.Tensor]:
        """Return the memory of all results."""
        return [*self.outs, *([] if self.gathered is None else [self.gathered])]

    def memory(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Return memory for the gathered x, also where it is no result."""
        if self.gathered is not None:
            return self.gathered
        return empty(call.problem.shape, x.dtype, x.device)

    @property
    def factors(self) -> list[Factor]:
        """Return each weight with its bias and output [rows, N]."""
        outs = [out.flatten(0, -2) for out in self.outs]
        return list(zip(self.weights, self.biases, outs, strict=True))

    def multiply(self, whole: torch.Tensor) -> None:
        """Multiply the gathered x."""
        for w, bias, out in self.factors:
            local_matmul(as_rows(whole), w, out, bias)


class SplitProducts:
    """`Products` that are made shard by shard, where that gives the bits of the whole.

    ``gathered`` is the result, or memory for products that are made at the end; None: nobody needs
    the gathered x.
    """

    def __init__(self, call: Call, x: torch.Tensor, products: Products, room: int | None) -> None:
        self._parts, self._rest = products.factors, list[Factor]()
        self.split = _split_of(call, x, self._parts, room)
        exact = self.split.exact
        if not all(exact):
            factors = list(zip(self._parts, exact, strict=True))
            self._parts = [factor for factor, is_exact in factors if is_exact]
            self._rest = [factor for factor, is_exact in factors if not is_exact]
        needed = products.gathered is not None or self._rest
        self.gathered = products.memory(call, x) if needed else None
        self._rows = None if self.gathered is None else self.gathered.flatten(0, -2)

    def use(self, owner: int, begin: int, shard: torch.Tensor, in_place: bool = False) -> None:
        """Multiply rows [n, K] of ``owner``'s shard, from ``begin`` on. Copy them to ``gathered``,
        unless they are ``in_place`` there."""
        m = self.split.problem.rows
        for at, row, count in self.split.runs(owner, begin, shard.shape[0]):
            part = shard[at - begin : at - begin + count]
            for w, bias, out in self._parts:
                local_matmul(part, w, out[row : row + count], bias, whole_rows=m)
            if self._rows is not None and not in_place:
                self._rows[row : row + count].copy_(part)

    def finish(self) -> None:
        """Make the products that are not split, of the gathered rows."""
        for w, bias, out in self._rest:
            assert self._rows is not None
            local_matmul(self._rows, w, out, bias)


@dataclass(frozen=True)
class Partials:
    """This rank's partials of the ranks' parts of a sum, as flat tensors.

    Attributes:
        fill: ``fill(owner, begin, to)`` writes a partial from element ``begin`` on, as much as
            ``to`` holds.
        there: ``there(owner)`` is a whole partial; None: it has to be computed.
    """

    split: Split
    fill: Callable[[int, int, torch.Tensor], None]
    there: Callable[[int], torch.Tensor] | None = None

    def whole(self, owner: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a whole partial."""
        if self.there is not None:
            return self.there(owner)
        partial = empty([self.split.counts[owner]], dtype, device)
        self.fill(owner, 0, partial)
        return partial


def partials_of(call: Call, x: torch.Tensor, chunk: int | None) -> Partials:
    """Return the partials of an x that is summed itself, ``chunk`` bytes of a part at a time."""
    problem, begins = call.problem, [0] * call.problem.world
    if problem.dim is None:
        x = x.contiguous().view(-1)
        begins = edges_of(x.numel(), problem.world)[:-1]
        parts = x.tensor_split(begins[1:])
    else:
        parts = x.split(list(problem.sizes), problem.dim)
    counts = [part.numel() for part in parts]
    step = max(counts) if chunk is None else min(max(counts), chunk // x.element_size())
    split = Split(problem, counts, [1] * problem.world, begins, step)

    @functools.cache
    def flat(owner: int) -> torch.Tensor:
        return parts[owner].contiguous().view(-1)

    def fill(owner: int, begin: int, to: torch.Tensor) -> None:
        to.copy_(flat(owner)[begin : begin + to.numel()])

    return Partials(split, fill, flat)


def partials_of_product(call: Call, x: torch.Tensor, w: Weight, room: int | None) -> Partials:
    """Return the partials of ``x @ w``, which is made part by part, or at once where the parts
    would have other bits. A step takes ``room`` bytes."""
    problem, rows = call.problem, x.flatten(0, -2)
    split = _split_of(call, x, [(w, None, None)], room)
    product = None
    if not split.exact[0]:
        product = empty((problem.rows, columns_of(w)), problem.dtype, x.device)
        local_matmul(rows, w, product)
    by_columns = split.by_columns
    whole = problem.rows, problem.shape[-1]

    def fill(owner: int, begin: int, to: torch.Tensor) -> None:
        if not to.numel():
            return
        columns = split.columns[owner]
        left = sum(split.columns[:owner]) if by_columns else 0
        first, to = begin // columns, to.view(-1, columns)
        for at, row, count in split.runs(owner, first, to.shape[0]):
            part = to[at - first : at - first + count]
            if product is not None:
                part.copy_(product[row : row + count, left : left + columns])
                continue
            factor = w
            if by_columns:
                assert isinstance(w, torch.Tensor)  # validation.py: only those can be sliced
                factor = w[:, left : left + columns]
            local_matmul(rows[row : row + count], factor, part, None, *whole)

    return Partials(split, fill)
