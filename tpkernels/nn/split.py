"""How a dim of a parameter is split over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels import groups
from tpkernels.shards import check_sizes, shard_sizes

_PLANNED = "tpkernels: ranks that are planned, "  # followed by their number


def planned(world: int) -> str:
    """Name a group that does not exist, of which this process is rank 0. Modules can be made for
    it, to see how they would be split over ``world`` ranks; calls of them fail."""
    return f"{_PLANNED}{world}"


def position(group: str) -> tuple[int, int]:
    """Return (rank, world) in a group, by the group's name.

    Raises:
        ValueError: this rank has no such group.
    """
    if group.startswith(_PLANNED):
        return 0, int(group.removeprefix(_PLANNED))
    members = groups.get(group)
    return members.rank, members.world


# What torch.compiler.assume_constant_result does. That function imports the whole compiler, and
# Triton before it is known whether its interpreter is wanted.
position._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Split:
    """Rank r has ``sizes[r]`` entries of dim ``dim``, in rank order; ``rank`` is this rank."""

    dim: int
    sizes: tuple[int, ...]
    rank: int

    @classmethod
    def of(
        cls, dim: int, total: int, sizes: Sequence[int] | None, rank: int, world: int, what: str
    ) -> Split:
        """Split ``total`` entries: into ``sizes``, or balanced if ``sizes`` is None.

        Args:
            dim: the dim that is split.
            total: its unsharded size.
            sizes: entries of each rank.
            rank: this rank.
            world: number of ranks.
            what: what is split, for messages.

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
        """Return the index of the first entry of this rank's shard."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """Return the size of this rank's shard."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """Return the unsharded size."""
        return sum(self.sizes)

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of an unsharded tensor, as a view."""
        return whole.narrow(self.dim, self.offset, self.size)

    def local_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's shard of a tensor of shape ``whole``."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the unsharded shape of a tensor whose shard has shape ``local`` on this rank."""
        return (*local[: self.dim], self.total, *local[self.dim + 1 :])
