"""One call as all ranks see it: what is planned, and what the ranks must agree on.

What may differ between ranks is not part of it: the columns of a column-parallel weight and the K
of a row-parallel one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod

import torch

from tpkernels import dtypes
from tpkernels.planning.table import Series, has_matmul
from tpkernels.shards import shard_sizes

# How a reduction sums: in fp32 and in rank order, rounded once; or as the process group does it.
ORDERED, VENDOR = "ordered", "vendor"
NUMERICS = (VENDOR, ORDERED)

NORM = "rms_norm"  # how the option of a `Problem` begins that describes a normalisation


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
    options: tuple[str, ...] = ()
    numerics: str = ORDERED

    @property
    def reduces(self) -> bool:
        """Whether the op sums over the ranks."""
        return "reduce" in self.op

    @property
    def gathers(self) -> bool:
        """Whether the op gathers what it multiplies, or returns."""
        return self.op.startswith("all_gather")

    @property
    def exchanges(self) -> bool:
        """Whether the op exchanges shards along one dim for shards along another."""
        return self.op == "all_to_all"

    @property
    def scaled(self) -> bool:
        """Whether the op multiplies operands with scales."""
        return "scaled" in self.op

    @property
    def normalises(self) -> bool:
        """Whether the op also returns the rows of its sum normalised."""
        return self.op.endswith(NORM)

    @property
    def has_matmul(self) -> bool:
        """Whether the op multiplies as well as communicates."""
        return has_matmul(self.op)

    @functools.cached_property
    def outer(self) -> int:
        """Elements before ``dim``: the number of blocks in one rank's shard."""
        return prod(self.shape[: self.dim]) if self.dim is not None else 1

    @property
    def inner(self) -> int:
        """Elements after ``dim``."""
        return prod(self.shape[self.dim + 1 :]) if self.dim is not None else 1

    @property
    def rows(self) -> int:
        """Rows of the matrix product: all dims but the last."""
        return prod(self.shape[:-1])

    @functools.cached_property
    def shard_rows(self) -> tuple[int, ...]:
        """Matrix rows of each rank's shard. The sharded dim must not be the last."""
        assert self.dim is not None  # an all-reduce has no shards
        each = self.outer * prod(self.shape[self.dim + 1 : -1])
        return tuple(size * each for size in self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole communicated tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tuning_key(self) -> tuple[Series, int] | None:
        """The series of measurements that this problem belongs to, and its extent in it. None where
        it belongs to none: it is not split evenly along its rows (along its elements, without a
        matmul). An all-to-all is split along the first two dims, each evenly.

        A bias and a residual do not count: every algorithm adds them while it sums. Nor does how
        rows are normalised. The numerics do: `unfused` takes longer where it sums in order.
        """
        matmul = self.has_matmul
        width, total = (self.shape[-1] if matmul else 1), prod(self.shape)
        if not total:
            return None
        extent = total // width
        if self.exchanges:
            evenly = f"scattered dim 1 by {shard_sizes(self.shape[1], self.world)}"
            if (self.dim, *self.options) != (0, evenly):
                return None
            if list(self.sizes) != shard_sizes(self.shape[0], self.world):
                return None
            dtype = dtypes.name(self.dtype)
            return Series(self.op, self.device, self.world, width, dtype, ()), extent
        if self.dim is not None:
            if self.outer != 1 or (matmul and self.dim == len(self.shape) - 1):
                return None
            each = self.inner // width
            if [size * each for size in self.sizes] != shard_sizes(extent, self.world):
                return None
        ignored = ("bias", "residual", NORM)
        options = tuple(one for one in self.options if not one.startswith(ignored))
        if self.numerics != ORDERED:
            options += (self.numerics,)
        dtype = dtypes.name(self.dtype)
        return Series(self.op, self.device, self.world, width, dtype, options), extent

    def __str__(self) -> str:
        parts = [f"{list(self.shape)} {dtypes.name(self.dtype)}"]
        if self.dim is not None:
            even = len(set(self.sizes)) == 1
            split = f"{self.sizes[0]} a rank" if even else str(list(self.sizes))
            parts.append(f"dim {self.dim} by {split}")
        return f"{self.op}({', '.join([*parts, *self.options])})"
