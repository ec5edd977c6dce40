"""How a dim of a parameter is split over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels import groups
from tpkernels.shards import check_sizes, shard_sizes


def position(group: str) -> tuple[int, int]:
    """(rank, world) in the group of that name.

    Raises:
        ValueError: there is no such group on this rank.
    """
    own = groups.get(group)
    return own.rank, own.world


# As torch.compiler.assume_constant_result does, which imports the whole compiler, and Triton before
# it is known whether its interpreter is wanted.
position._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Split:
    """``sizes[r]`` entries of dim ``dim`` are rank r's, in rank order; ``rank`` is this one."""

    dim: int
    sizes: tuple[int, ...]
    rank: int

    @classmethod
    def of(
        cls, dim: int, total: int, sizes: Sequence[int] | None, rank: int, world: int, what: str
    ) -> Split:
        """``sizes``, or the balanced split of ``total``.

        Raises:
            ValueError: ``sizes`` do not fit the group, or do not add up to ``total``.
        """
        if sizes is None:
            return cls(dim, tuple(shard_sizes(total, world)), rank)
        checked = check_sizes(sizes, world)
        if sum(checked) != total:
            raise ValueError(f"the split {list(checked)} of {what} does not add up to {total}")
        return cls(dim, checked, rank)

    @property
    def offset(self) -> int:
        """Where this rank's shard begins."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """Of this rank's shard."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of an unsharded tensor; a view."""
        return whole.narrow(self.dim, self.offset, self.size)

    def local_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        return (*local[: self.dim], self.total, *local[self.dim + 1 :])
