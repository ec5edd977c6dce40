"""One call as all ranks see it: what is planned, and what the ranks must agree on.

What may differ between ranks is not part of it: the columns of a column-parallel weight and the K
of a row-parallel one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch

from tpkernels.common import dtypes
from tpkernels.common.shards import shard_sizes
from tpkernels.planning.op_spec import NO_OPTIONS, OPS, ExchangeOptions, OpSpec, Options
from tpkernels.planning.table import Series

# How a reduction sums: in fp32 and in rank order, rounded once; or as the process group does it.
ORDERED, VENDOR = "ordered", "vendor"
NUMERICS = (VENDOR, ORDERED)

Kind = TypeVar("Kind", bound=Options)


@dataclass(frozen=True)
class Problem:
    """One call as all ranks see it.

    ``shape`` is the global shape of the communicated tensor: the gathered ``x`` of an all-gather,
    the unreduced sum of a reduction. ``dim`` is the gathered or scattered dim (None for an
    all-reduce), of which rank ``r`` holds ``sizes[r]`` rows. ``dtype`` is the dtype on the wire.
    ``options`` is everything else that must be the same on all ranks. ``numerics`` is `VENDOR`
    where a reduction may leave the sum to the process group.
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
        """Return the problem of an op that splits dim 0, where it splits any, as evenly as
        possible. An exchange scatters dim 1."""
        spec = OPS[op]
        if spec.exchanges:
            options = ExchangeOptions(dim=1, sizes=tuple(shard_sizes(shape[1], world)))
        dim = None if spec.keeps_sum else 0
        sizes = () if spec.keeps_sum else tuple(shard_sizes(shape[0], world))
        return cls(op, device, world, shape, dim, sizes, dtype, options, numerics)

    @functools.cached_property
    def spec(self) -> OpSpec:
        """Return what the op does."""
        return OPS[self.op]

    def options_as(self, kind: type[Kind]) -> Kind:
        """Return the options, which are of the class of the op's family."""
        assert isinstance(self.options, kind)
        return self.options

    @property
    def split_dim(self) -> int:
        """Return ``dim``, of an op that splits one."""
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
        """Return the rows of the matrix product: all dims but the last."""
        return prod(self.shape[:-1])

    @functools.cached_property
    def shard_rows(self) -> tuple[int, ...]:
        """Return the matrix rows of each rank's shard. The sharded dim must not be the last."""
        each = self.outer * prod(self.shape[self.split_dim + 1 : -1])
        return tuple(size * each for size in self.sizes)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole communicated tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tuning_key(self) -> tuple[Series, int] | None:
        """Return the problem's series of measurements and its extent in it; None for a problem that
        is never tuned: an empty one, one of routed tokens, or one not split evenly along its rows
        (its elements, without a matmul; its first two dims, for an all-to-all).

        Bias, residual and norm are not part of the series, because they do not change the time.
        Numerics are: `unfused` takes longer where it sums in order.
        """
        matmul = self.spec.has_matmul
        width, total = (self.shape[-1] if matmul else 1), prod(self.shape)
        if not total or self.spec.routed:
            return None
        extent = total // width
        options = self.options.that_cost_time().texts()
        if self.spec.exchanges:
            rows, columns = (tuple(shard_sizes(size, self.world)) for size in self.shape[:2])
            even = ExchangeOptions(dim=1, sizes=columns)
            if (self.dim, self.sizes, self.options) != (0, rows, even):
                return None
            options = ()
        elif self.dim is not None:
            if self.outer != 1 or (matmul and self.dim == len(self.shape) - 1):
                return None
            each = self.inner // width
            if [size * each for size in self.sizes] != shard_sizes(extent, self.world):
                return None
        if self.numerics != ORDERED:
            options += (self.numerics,)
        dtype = dtypes.name(self.dtype)
        return Series(self.op, self.device, self.world, width, dtype, options), extent

    def __str__(self) -> str:
        parts = [f"{list(self.shape)} {dtypes.name(self.dtype)}"]
        if self.dim is not None:
            even = len(set(self.sizes)) == 1
            split = f"{self.sizes[0]} per rank" if even else str(list(self.sizes))
            parts.append(f"dim {self.dim}: {split}")
        return f"{self.op}({', '.join([*parts, *self.options.texts()])})"
