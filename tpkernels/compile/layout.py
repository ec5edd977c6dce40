"""Where the elements of a tensor come from, through ops that only move them.

A tensor is described by axes: each dim is a product of axes, the slowest first, as einops writes
"(w b) s k". A view regroups axes and a permutation reorders dims. A gather along a dim other than
the first, which is written as a chunk along one dim and a cat along another, moves an axis. A view
that cuts through an axis splits it, in all layouts that contain it.

So the effect of a chain of views, copies, transpositions and chunk-cat pairs (moves.py) can be read
off its final layout, however the chain is written and also with symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size: TypeAlias = "int | torch.SymInt"


def same(a: Size, b: Size) -> bool:
    """Return whether two sizes are known to be equal, without a new guard."""
    return statically_known_true(a == b)


def divides(divisor: Size, size: Size) -> bool:
    """Return whether ``divisor`` is known to divide ``size``, without a new guard."""
    rest: Size = size % divisor  # type: ignore[operator]
    return statically_known_true(rest == 0)


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Return whether two shapes are known to be equal, without a new guard."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@dataclass(eq=False)
class Axis:
    """An axis, or the axes into which a view has split it. Compared by identity."""

    size: Size
    parts: tuple[Axis, ...] = ()

    def split(self, first: Size) -> tuple[Axis, Axis]:
        """Split the axis permanently, into a slower axis of size ``first`` and the rest."""
        halves = Axis(first), Axis(self.size // first)
        self.parts = halves
        return halves

    @property
    def leaves(self) -> tuple[Axis, ...]:
        """Return the axes that it consists of now; itself if it has not been split."""
        return tuple(leaf for part in self.parts for leaf in part.leaves) or (self,)


Axes: TypeAlias = tuple[Axis, ...]


def _leaves(axes: Sequence[Axis]) -> Axes:
    return tuple(leaf for axis in axes for leaf in axis.leaves)


def size_of(axes: Axes) -> Size:
    """Return the product of the sizes of the axes."""
    return prod((axis.size for axis in axes), start=1)


class Layout:
    """The axes of each dim of a tensor. Dims of one element have none."""

    def __init__(self, dims: Sequence[Sequence[Axis]]) -> None:
        self._dims = tuple(tuple(dim) for dim in dims)

    @classmethod
    def of(cls, shape: Sequence[Size]) -> Layout:
        """Return the layout of a tensor of which only the shape is known."""
        return cls([() if same(size, 1) else (Axis(size),) for size in shape])

    @property
    def dims(self) -> tuple[Axes, ...]:
        """Return the axes of each dim, the slowest first."""
        return tuple(_leaves(dim) for dim in self._dims)

    @property
    def flat(self) -> Axes:
        """All axes, the slowest first."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(size_of(dim) for dim in self.dims)

    def regrouped(self, shape: Sequence[Size]) -> Layout | None:
        """The layout after a view as ``shape``; None if it is unknown."""
        left, dims = list(reversed(self.flat)), []
        for size in shape:
            dim: list[Axis] = []
            missing = size
            while not same(missing, 1):
                if not left:
                    return None
                axis = left.pop()
                if divides(axis.size, missing):
                    dim.append(axis)
                    missing = missing // axis.size
                elif divides(missing, axis.size):
                    first, rest = axis.split(missing)
                    dim.append(first)
                    left.append(rest)
                    missing = 1
                else:
                    return None
            dims.append(dim)
        return None if left else Layout(dims)

    def permuted(self, order: Sequence[int]) -> Layout:
        return Layout([self._dims[i] for i in order])

    def without_leading(self, dim: int, size: Size) -> tuple[Axis, Layout] | None:
        """Return the slowest axis of a dim, and the layout without it; None unless that axis has
        ``size``, or can be split so that it has."""
        axes = list(self.dims[dim])
        if not axes:
            return None
        if not same(axes[0].size, size):
            if not divides(size, axes[0].size):
                return None
            axes[:1] = axes[0].split(size)
        rest = [axes[1:] if i == dim else each for i, each in enumerate(self._dims)]
        return axes[0], Layout(rest)

    def with_leading(self, dim: int, axis: Axis) -> Layout:
        """Return the layout with ``axis`` as the slowest axis of a dim."""
        return Layout([(axis, *d) if i == dim else d for i, d in enumerate(self._dims)])
