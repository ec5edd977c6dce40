"""What the algorithms of the all-to-all share: the pieces that ranks give each other.

Rank r has the rows ``problem.sizes[r]`` of ``problem.dim`` and all of another dim. It gives rank p
its rows of that dim, and has all of ``problem.dim`` in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tpkernels.call import Call
from tpkernels.local.memory import empty


@dataclass(frozen=True)
class Exchange:
    """The dim that is whole before and split after, and the rows that each rank gets of it."""

    dim: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, given: Any, world: int) -> Exchange:
        """Read it from the op's arguments, which have been checked."""
        dim, sizes = given.scatter_dim, given.scatter_sizes
        rows = given.x.shape[dim]
        return cls(dim, (rows // world,) * world if sizes is None else tuple(sizes))

    def given(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return this rank's piece for each rank."""
        return x.split(list(self.sizes), self.dim)

    def result_shape(self, call: Call) -> list[int]:
        """Return the shape of what this rank has in the end."""
        shape = list(call.problem.shape)
        shape[self.dim] = self.sizes[call.group.rank]
        return shape

    def result(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Return memory for it."""
        return empty(self.result_shape(call), x.dtype, x.device)

    def taken(self, call: Call, out: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the place in the result for each rank's piece for this one."""
        assert call.problem.dim is not None
        return out.split(list(call.problem.sizes), call.problem.dim)

    def largest(self, call: Call) -> int:
        """Return the elements of the largest piece."""
        problem, dims = call.problem, (call.problem.dim, self.dim)
        rest = prod(size for d, size in enumerate(problem.shape) if d not in dims)
        return rest * max(problem.sizes) * max(self.sizes)


def counts_of(pieces: Sequence[torch.Tensor]) -> list[int]:
    """Return the elements of each piece."""
    return [piece.numel() for piece in pieces]


def place(pieces: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Copy flat pieces to their places."""
    for piece, to in zip(pieces, places, strict=True):
        to.copy_(piece.view(to.shape))
