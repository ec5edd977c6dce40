"""Shards, the chunks of each shard, and matmuls that run chunk by chunk.

Problem: an algorithm that overlaps communication with a matmul multiplies one chunk at a time. The
result must be bitwise identical to the unsplit matmul.

Algorithm: the first call of a problem plans its chunks, and checks for every weight that chunks are
exact (`local.exactness`). A weight that fails the check is multiplied in one unsplit matmul.
`ChunkPlan` stores the chunks and the results of the check. It follows from the call, the buffer
size, the weight layouts and the number of threads, and the call caches it.
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
from tpkernels.local.exactness import is_chunking_exact
from tpkernels.local.matmul import local_matmul, weight_layout
from tpkernels.local.memory import empty
from tpkernels.local.packed import weight_columns
from tpkernels.local.weight import Weight
from tpkernels.planning.algorithms import LINE_BYTES, step_rows
from tpkernels.planning.op_spec import ExchangeOptions
from tpkernels.planning.problem import Problem

RowRun: TypeAlias = tuple[int, int, int]  # row in the shard, row in the full matrix, count


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] as a matrix [rows, K]."""
    return x.flatten(0, -2)


def new_partial(call: Call, x: torch.Tensor, w: Weight) -> torch.Tensor:
    """Allocate partial sums for ``x @ w`` in the communication dtype. x [..., K], w [K, N]."""
    return empty((*x.shape[:-1], weight_columns(w)), call.problem.dtype, x.device)


def compute_partial(call: Call, x: torch.Tensor, w: Weight | None) -> torch.Tensor:
    """Return the local partial sums: ``x @ w``, or x if the op has no matmul."""
    if w is None:
        return x
    partial = new_partial(call, x, w)
    local_matmul(as_rows(x), w, as_rows(partial))
    return partial


def shard_counts(problem: Problem) -> list[int]:
    """Return the number of elements of each shard."""
    return [problem.outer * size * problem.inner for size in problem.sizes]


def result_shape(problem: Problem, rank: int) -> list[int]:
    """Return the result shape of a call on ``rank``: the full tensor, or the shard of that rank."""
    shape, spec = list(problem.shape), problem.spec
    if spec.exchanges:
        options = problem.options_as(ExchangeOptions)
        shape[options.dim] = options.sizes[rank]
    elif spec.scatters:
        shape[problem.split_dim] = problem.sizes[rank]
    return shape


def exchange_slices(
    problem: Problem, x: torch.Tensor, out: torch.Tensor
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the slices of an all-to-all.

    Returns:
        The send slices of ``x``, one per destination rank, and the receive slices of ``out``,
        one per source rank.
    """
    options = problem.options_as(ExchangeOptions)
    return x.split(list(options.sizes), options.dim), out.split(
        list(problem.sizes), problem.split_dim
    )


def all_reduce_offsets(total: int, world: int) -> list[int]:
    """Return the offset of the slice that each rank reduces, and ``total`` at the end.

    All slices have equal sizes, but the last slices may be smaller or empty.
    """
    size = ceil_div(total, world)
    return [min(total, rank * size) for rank in range(world + 1)]


def splits_columns(problem: Problem) -> bool:
    """Return True if the op splits the last dim, so that a matmul is split by columns."""
    return problem.dim == len(problem.shape) - 1


def row_runs(problem: Problem, rank: int, begin: int, end: int) -> Iterator[RowRun]:
    """Yield rows [begin, end) of the shard of ``rank`` as contiguous runs of the full matrix."""
    if problem.dim is None or splits_columns(problem):
        rank_offset = (
            all_reduce_offsets(problem.rows, problem.world)[rank] if problem.dim is None else 0
        )
        if begin < end:
            yield begin, rank_offset + begin, end - begin
        return
    inner_rows = prod(problem.shape[problem.dim + 1 : -1])
    block_rows = problem.sizes[rank] * inner_rows
    pitch = problem.shape[problem.dim] * inner_rows
    rank_offset = sum(problem.sizes[:rank]) * inner_rows
    if problem.outer == 1:
        block_rows = max(end, 1)
    row = begin
    while row < end:
        block, offset = divmod(row, block_rows)
        count = min(end - row, block_rows - offset)
        yield row, block * pitch + rank_offset + offset, count
        row += count


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """The shard of each rank, and the chunks of each shard.

    Attributes:
        rows, columns: size of each shard. Without a matmul, every element counts as a row.
        offsets: first element of each shard in the output of a reduction.
        chunk_rows: rows per chunk.
        exact: for each weight, whether chunked and unsplit matmuls are bitwise identical.
    """

    problem: Problem
    rows: Sequence[int]
    columns: Sequence[int]
    offsets: Sequence[int]
    chunk_rows: int
    exact: Sequence[bool] = ()
    _row_runs: dict[tuple[int, int, int], tuple[RowRun, ...]] = field(default_factory=dict)

    @classmethod
    def for_matmul(cls, problem: Problem, columns: int, buffer_bytes: int | None) -> ChunkPlan:
        """Plan the chunks of the matrix that is gathered or reduced.

        Args:
            columns: columns of the full matrix.
            buffer_bytes: size of a data buffer, which limits a chunk. None: one chunk per
                shard.
        """
        offsets, widths = [0] * problem.world, [columns] * problem.world
        if problem.dim is None:
            row_offsets = all_reduce_offsets(problem.rows, problem.world)
            rows = [b - a for a, b in itertools.pairwise(row_offsets)]
            offsets = [row * columns for row in row_offsets[:-1]]
        elif splits_columns(problem):
            rows, widths = [problem.rows] * problem.world, list(problem.sizes)
        else:
            rows = list(problem.shard_rows)
        chunk_rows = (
            max(rows) if buffer_bytes is None else min(max(rows), step_rows(problem, buffer_bytes))
        )
        return cls(problem, rows, widths, offsets, max(1, chunk_rows))

    @functools.cached_property
    def by_columns(self) -> bool:
        """Return True if the shards are column slices."""
        return splits_columns(self.problem)

    @functools.cached_property
    def counts(self) -> list[int]:
        """Return the number of elements of each shard."""
        return [rows * columns for rows, columns in zip(self.rows, self.columns, strict=True)]

    @functools.cached_property
    def num_chunks(self) -> int:
        """Return the number of chunks of the largest shard."""
        return ceil_div(max(self.rows), self.chunk_rows) if any(self.counts) else 0

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Return the size of a slot for one chunk in bytes, rounded up to cache lines."""
        return round_up(
            self.chunk_rows * max(self.columns) * self.problem.dtype.itemsize, LINE_BYTES
        )

    def chunk_range(self, owner: int, index: int) -> tuple[int, int]:
        """Return the first element and the number of elements of a chunk."""
        row = min(index * self.chunk_rows, self.rows[owner])
        columns = self.columns[owner]
        return row * columns, min(self.chunk_rows, self.rows[owner] - row) * columns

    def row_runs(self, owner: int, begin: int, count: int) -> tuple[RowRun, ...]:
        """Return rows [begin, begin + count) of a shard as contiguous runs."""
        key = owner, begin, count
        if key not in self._row_runs:
            self._row_runs[key] = tuple(row_runs(self.problem, owner, begin, begin + count))
        return self._row_runs[key]

    def matmul_shapes(self, columns: int, full_shards: bool) -> frozenset[tuple[int, int]]:
        """Return the (rows, columns) of all matmuls with a weight of ``columns`` columns.

        ``full_shards`` adds the matmuls of full shards to the matmuls of chunks.
        """
        shapes = set()
        for owner, rows in enumerate(self.rows):
            width = self.columns[owner] if self.by_columns else columns
            for chunk_rows in {self.chunk_rows, max(rows, 1) if full_shards else self.chunk_rows}:
                for begin in range(0, rows, chunk_rows):
                    end = min(begin + chunk_rows, rows)
                    shapes |= {(n, width) for _, _, n in row_runs(self.problem, owner, begin, end)}
        return frozenset(size for size in shapes if 0 not in size)


# Weight, bias and output of a matmul. The outputs of partial sums are allocated later.
MatmulArgs: TypeAlias = tuple[Weight, torch.Tensor | None, torch.Tensor]
PartialMatmulArgs: TypeAlias = tuple[Weight, None, None]
_get_weight = operator.itemgetter(0)


def _plan_chunks(
    call: Call,
    x: torch.Tensor,
    matmuls: Sequence[MatmulArgs | PartialMatmulArgs],
    buffer_bytes: int | None,
) -> ChunkPlan:
    """Plan the chunks of a call, or return the cached plan."""
    layouts = map(weight_layout, map(_get_weight, matmuls))
    key = "split", buffer_bytes, torch.get_num_threads(), *layouts
    chunk_plan: ChunkPlan | None = call.cache.get(key)
    if chunk_plan is None:
        problem, k, exact = call.problem, x.shape[-1], []
        columns = k if problem.spec.gathers else weight_columns(matmuls[0][0])
        chunk_plan = ChunkPlan.for_matmul(problem, columns, buffer_bytes)
        full_shards = problem.spec.reduces and call.node is not None  # full partials cross hosts
        for w, bias, out in matmuls:
            n, dtype = weight_columns(w), problem.dtype if out is None else out.dtype
            shapes, shape = chunk_plan.matmul_shapes(n, full_shards), (problem.rows, k, n)
            bias_dtype = None if bias is None else bias.dtype
            exact.append(
                x.is_cuda  # library GEMMs guarantee no bitwise equality
                or is_chunking_exact(w, shapes, shape, x.dtype, dtype, bias_dtype)
            )
        chunk_plan = call.cache[key] = replace(chunk_plan, exact=exact)
    return chunk_plan


@dataclass(frozen=True)
class GatherOutputs:
    """Results of a gather: ``outs[i] = gathered @ weights[i] + biases[i]``, and ``gathered``.

    If ``gathered`` is None, the gathered x is not a result. Without weights it is the only
    result.
    """

    weights: Sequence[Any]  #: of type `Weight` or `OpaqueWeight`
    biases: Sequence[torch.Tensor | None]
    outs: Sequence[torch.Tensor]
    gathered: torch.Tensor | None

    @property
    def results(self) -> list[torch.Tensor]:
        """Return all result tensors."""
        return [*self.outs, *([] if self.gathered is None else [self.gathered])]

    def gather_buffer(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Return memory for the gathered x: the result, or a new temporary."""
        if self.gathered is not None:
            return self.gathered
        return empty(call.problem.shape, x.dtype, x.device)

    @property
    def matmul_args(self) -> list[MatmulArgs]:
        """Return (weight, bias, out [rows, N]) of each matmul."""
        outs = [out.flatten(0, -2) for out in self.outs]
        return list(zip(self.weights, self.biases, outs, strict=True))

    def multiply(self, gathered: torch.Tensor) -> None:
        """Run all matmuls on the gathered x."""
        for w, bias, out in self.matmul_args:
            local_matmul(as_rows(gathered), w, out, bias)


class ChunkedMatmuls:
    """Matmuls of a gather that run on each chunk as it arrives.

    If chunking would change a result bitwise, that matmul runs unsplit in `finish`.

    Attributes:
        gathered: destination of the gathered rows: a result, or the input of unsplit matmuls.
            None if the gathered rows are not needed.
    """

    def __init__(
        self, call: Call, x: torch.Tensor, outputs: GatherOutputs, buffer_bytes: int | None
    ) -> None:
        self._chunked, self._unsplit = outputs.matmul_args, list[MatmulArgs]()
        self.chunk_plan = _plan_chunks(call, x, self._chunked, buffer_bytes)
        exact = self.chunk_plan.exact
        if not all(exact):
            matmuls = list(zip(self._chunked, exact, strict=True))
            self._chunked = [matmul for matmul, is_exact in matmuls if is_exact]
            self._unsplit = [matmul for matmul, is_exact in matmuls if not is_exact]
        needed = outputs.gathered is not None or self._unsplit
        self.gathered = outputs.gather_buffer(call, x) if needed else None
        self._gathered_rows = None if self.gathered is None else self.gathered.flatten(0, -2)

    def consume(self, owner: int, begin: int, chunk: torch.Tensor, in_place: bool = False) -> None:
        """Multiply ``chunk`` [n, K], the rows of ``owner`` from row ``begin`` on.

        The rows are also copied to ``gathered``, unless they are already there (``in_place``).
        """
        m = self.chunk_plan.problem.rows
        for shard_row, row, count in self.chunk_plan.row_runs(owner, begin, chunk.shape[0]):
            rows = chunk[shard_row - begin : shard_row - begin + count]
            for w, bias, out in self._chunked:
                local_matmul(rows, w, out[row : row + count], bias, full_rows=m)
            if self._gathered_rows is not None and not in_place:
                self._gathered_rows[row : row + count].copy_(rows)

    def finish(self) -> None:
        """Run the unsplit matmuls on the gathered rows."""
        for w, bias, out in self._unsplit:
            assert self._gathered_rows is not None
            local_matmul(self._gathered_rows, w, out, bias)


@dataclass(frozen=True)
class Partials:
    """Local partial sums for the shard of each rank, as flat tensors.

    Attributes:
        fill: ``fill(owner, begin, dst)`` fills ``dst`` with the partial sums for the shard of
            ``owner``, starting at element ``begin`` of the shard.
        precomputed: ``precomputed(owner)`` returns the partial sums of a full shard. None if a
            matmul must compute them.
    """

    chunk_plan: ChunkPlan
    fill: Callable[[int, int, torch.Tensor], None]
    precomputed: Callable[[int], torch.Tensor] | None = None

    def full(self, owner: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the partial sums of a full shard."""
        if self.precomputed is not None:
            return self.precomputed(owner)
        partial = empty([self.chunk_plan.counts[owner]], dtype, device)
        self.fill(owner, 0, partial)
        return partial


def input_partials(call: Call, x: torch.Tensor, chunk_bytes: int | None) -> Partials:
    """Return slices of x as the partial sums of a reduction without matmul.

    ``chunk_bytes`` is the maximum size of a chunk. None: one chunk per shard.
    """
    problem, offsets = call.problem, [0] * call.problem.world
    if problem.dim is None:
        x = x.contiguous().view(-1)
        offsets = all_reduce_offsets(x.numel(), problem.world)[:-1]
        shards = x.tensor_split(offsets[1:])
    else:
        shards = x.split(list(problem.sizes), problem.dim)
    counts = [shard.numel() for shard in shards]
    chunk_rows = (
        max(counts) if chunk_bytes is None else min(max(counts), chunk_bytes // x.element_size())
    )
    chunk_plan = ChunkPlan(problem, counts, [1] * problem.world, offsets, chunk_rows)

    @functools.cache
    def flat_shard(owner: int) -> torch.Tensor:
        return shards[owner].contiguous().view(-1)

    def fill(owner: int, begin: int, dst: torch.Tensor) -> None:
        dst.copy_(flat_shard(owner)[begin : begin + dst.numel()])

    return Partials(chunk_plan, fill, flat_shard)


def matmul_partials(call: Call, x: torch.Tensor, w: Weight, buffer_bytes: int | None) -> Partials:
    """Return the partial sums ``x @ w``.

    The matmul runs in chunks, or unsplit if chunking would change the result bitwise. Each chunk
    uses at most ``buffer_bytes`` of the data buffer. None: one chunk per shard.
    """
    problem, rows = call.problem, x.flatten(0, -2)
    chunk_plan = _plan_chunks(call, x, [(w, None, None)], buffer_bytes)
    full_partial = None
    if not chunk_plan.exact[0]:
        full_partial = empty((problem.rows, weight_columns(w)), problem.dtype, x.device)
        local_matmul(rows, w, full_partial)
    by_columns = chunk_plan.by_columns
    full_shape = problem.rows, problem.shape[-1]

    def fill(owner: int, begin: int, dst: torch.Tensor) -> None:
        if not dst.numel():
            return
        columns = chunk_plan.columns[owner]
        column = sum(chunk_plan.columns[:owner]) if by_columns else 0
        first_row, dst = begin // columns, dst.view(-1, columns)
        for shard_row, row, count in chunk_plan.row_runs(owner, first_row, dst.shape[0]):
            dst_rows = dst[shard_row - first_row : shard_row - first_row + count]
            if full_partial is not None:
                dst_rows.copy_(full_partial[row : row + count, column : column + columns])
                continue
            w_slice = w
            if by_columns:
                assert isinstance(w, torch.Tensor)  # validation.py: other weights cannot be sliced
                w_slice = w[:, column : column + columns]
            local_matmul(rows[row : row + count], w_slice, dst_rows, None, *full_shape)

    return Partials(chunk_plan, fill)
