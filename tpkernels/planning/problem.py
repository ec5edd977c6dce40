"""The properties of a call that are identical on all ranks: the input of planning, and the values
that all ranks must pass.

N of a column-parallel weight and K of a row-parallel weight may differ by rank, so the problem does
not contain them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch

from tpkernels.common import dtypes
from tpkernels.common.shards import shard_sizes
from tpkernels.planning.op_spec import (
    NO_OPTIONS,
    OPS,
    ExchangeOptions,
    OpSpec,
    Options,
    ReduceOptions,
    SumUnits,
)
from tpkernels.planning.table import Series

# Summation of a reduction. ORDERED: in fp32, in rank order, rounded once. VENDOR: as the process
# group does it. INVARIANT: by a tree over K (csrc/host/sum_tree.h), for any number of ranks.
ORDERED, VENDOR, INVARIANT = "ordered", "vendor", "invariant"
NUMERICS = (VENDOR, ORDERED, INVARIANT)

Kind = TypeVar("Kind", bound=Options)


@dataclass(frozen=True)
class Problem:
    """The properties of a call that are identical on all ranks.

    Attributes:
        shape: global shape of the communicated tensor: the gathered ``x`` of an all-gather, the
            partial sum of a reduction.
        dim: gathered or scattered dim; None for an all-reduce.
        sizes: rows of each rank along ``dim``.
        dtype: communication dtype.
        options: all further options that must match on all ranks.
        numerics: `VENDOR` if the process group may determine the summation order of a reduction.
    """

    op: str
    device: str
    world: int
    shape: tuple[int, ...]
    dim: int | None
    sizes: tuple[int, ...]
    dtype: torch.dtype
    options: Options = NO_OPTIONS
    numerics: str = ORDERED

    @classmethod
    def evenly_split(
        cls,
        op: str,
        *,
        device: str,
        world: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        options: Options = NO_OPTIONS,
        numerics: str = ORDERED,
    ) -> Problem:
        """Return the problem of an op with dim 0 split as evenly as possible, if the op splits a
        dim. An exchange scatters dim 1."""
        spec = OPS[op]
        if spec.exchanges:
            options = ExchangeOptions(dim=1, sizes=tuple(shard_sizes(shape[1], world)))
        dim = None if spec.keeps_sum else 0
        sizes = () if spec.keeps_sum else tuple(shard_sizes(shape[0], world))
        return cls(op, device, world, shape, dim, sizes, dtype, options, numerics)

    @functools.cached_property
    def spec(self) -> OpSpec:
        """Return the properties of the op."""
        return OPS[self.op]

    def options_as(self, kind: type[Kind]) -> Kind:
        """Return the options, typed as the class of the op family."""
        assert isinstance(self.options, kind)
        return self.options

    @property
    def sum_units(self) -> SumUnits | None:
        """Return the units of K of a sum by a tree, or None if partial sums are reduced."""
        return self.options.sum_units if isinstance(self.options, ReduceOptions) else None

    @property
    def split_dim(self) -> int:
        """Return ``dim``. Only for ops that split a dim."""
        assert self.dim is not None
        return self.dim

    @functools.cached_property
    def outer(self) -> int:
        """Return the product of the sizes before ``dim``: the number of contiguous blocks in a
        shard."""
        return prod(self.shape[: self.dim]) if self.dim is not None else 1

    @property
    def inner(self) -> int:
        """Return the product of the sizes after ``dim``: the elements of one row."""
        return prod(self.shape[self.dim + 1 :]) if self.dim is not None else 1

    @functools.cached_property
    def rows(self) -> int:
        """Return the rows of the matmul: all dims except the last."""
        return prod(self.shape[:-1])

    @functools.cached_property
    def shard_rows(self) -> tuple[int, ...]:
        """Return the matrix rows of the shard of each rank. The sharded dim must not be the last
        dim."""
        rows_per_index = self.outer * prod(self.shape[self.split_dim + 1 : -1])
        return tuple(size * rows_per_index for size in self.sizes)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the global communicated tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tuning_key(self) -> tuple[Series, int] | None:
        """Return the series of measurements and the extent within it, or None if the problem is
        never tuned.

        Never tuned are empty problems, routed tokens, sums by a tree, and uneven splits. A split
        must be even along the rows or, without a matmul, along the elements. For an all-to-all it
        must be even along the first two dims.

        Bias, residual and norm are not part of the series, because they do not change the time.
        Numerics is part of it: `unfused` is slower if it sums in rank order.
        """
        matmul = self.spec.has_matmul
        width, total = (self.shape[-1] if matmul else 1), prod(self.shape)
        if not total or self.spec.routed or self.sum_units:
            return None
        extent = total // width
        options = self.options.timing_key().describe()
        if self.spec.exchanges:
            rows, columns = (tuple(shard_sizes(size, self.world)) for size in self.shape[:2])
            even = ExchangeOptions(dim=1, sizes=columns)
            if (self.dim, self.sizes, self.options) != (0, rows, even):
                return None
            options = ()
        elif self.dim is not None:
            if self.outer != 1 or (matmul and self.dim == len(self.shape) - 1):
                return None
            per_index = self.inner // width
            if [size * per_index for size in self.sizes] != shard_sizes(extent, self.world):
                return None
        if self.numerics != ORDERED:
            options += (self.numerics,)
        dtype = dtypes.name(self.dtype)
        return Series(self.op, self.device, self.world, width, dtype, options), extent

    def __str__(self) -> str:
        details = [f"{list(self.shape)} {dtypes.name(self.dtype)}"]
        if self.dim is not None:
            even = len(set(self.sizes)) == 1
            split = f"{self.sizes[0]} per rank" if even else str(list(self.sizes))
            details.append(f"dim {self.dim}: {split}")
        return f"{self.op}({', '.join([*details, *self.options.describe()])})"
