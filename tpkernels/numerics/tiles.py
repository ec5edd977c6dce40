"""Passes over two matrices, a tile in float64 at a time: the memory does not grow with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch

from tpkernels.numerics.report import Region

Tile: TypeAlias = tuple[slice, slice]

_TILE_ELEMENTS = 1 << 20
_DIGIT_BITS = 16
_LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True, eq=False)
class Pair:
    """Reference and result as matrices of one shape, and the tolerance."""

    reference: torch.Tensor
    result: torch.Tensor
    atol: float | torch.Tensor
    rtol: float

    def tiles(self, begin: int, end: int) -> Iterator[Tile]:
        """Rows [begin, end) in pieces, in the order of their elements."""
        width = self.reference.shape[1]
        if width == 0:
            return
        rows, columns = max(1, _TILE_ELEMENTS // width), min(width, _TILE_ELEMENTS)
        for row in range(begin, end, rows):
            for column in range(0, width, columns):
                yield slice(row, min(row + rows, end)), slice(column, min(column + columns, width))

    def difference(self, tile: Tile) -> torch.Tensor:
        """|result - reference|; infinite where either is not finite and they are not the same."""
        result, reference = self.result[tile].double(), self._reference(tile)
        difference = (result - reference).abs_()
        if float(difference.amax()) < math.inf:  # not so for NaN either
            return difference
        same = (result == reference) | (result.isnan() & reference.isnan())
        return difference.nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(same, 0.0)

    def excess(self, tile: Tile, difference: torch.Tensor) -> torch.Tensor:
        """How far each difference is above its tolerance. Where the reference makes the tolerance
        infinite or NaN it is the largest number: only an infinite difference is above it."""
        atol = self.atol[tile].to(difference) if isinstance(self.atol, torch.Tensor) else self.atol
        tolerance = self.rtol * self._reference(tile).abs() + atol
        return difference - tolerance.nan_to_num_(nan=_LARGEST, posinf=_LARGEST)

    def _reference(self, tile: Tile) -> torch.Tensor:
        return self.reference[tile].to(device=self.result.device, dtype=torch.float64)


class Scan:
    """What one pass over a pair adds up, region by region."""

    def __init__(self, pair: Pair) -> None:
        self.above = 0
        self.not_finite = 0
        self.total = 0.0  # of the finite differences
        self.worst: tuple[int, int] | None = None
        self._worst_excess = -math.inf
        self._pair = pair

    def line(self, begin: int, end: int, column_edges: list[int]) -> tuple[Region, ...]:
        """The regions of rows [begin, end)."""
        width, device = self._pair.result.shape[1], self._pair.result.device
        above = torch.zeros(width, dtype=torch.int64, device=device)
        largest = torch.zeros(width, dtype=torch.float64, device=device)
        for tile in self._pair.tiles(begin, end):
            difference = self._pair.difference(tile)
            excess = self._pair.excess(tile, difference)
            columns = tile[1]
            above[columns] += (excess > 0).sum(0)
            largest[columns] = torch.maximum(largest[columns], difference.amax(0))
            self._add(tile, difference, excess)
        self.above += int(above.sum())
        line = []
        for left, right in pairwise(column_edges):
            count = (end - begin) * (right - left)
            share = int(above[left:right].sum()) / count if count else 0.0
            most = float(largest[left:right].max()) if count else 0.0
            line.append(Region((begin, end), (left, right), share, most))
        return tuple(line)

    def _add(self, tile: Tile, difference: torch.Tensor, excess: torch.Tensor) -> None:
        infinite = difference.isinf()
        self.not_finite += int(infinite.sum())
        self.total += float(difference.masked_fill(infinite, 0.0).sum())
        row, column = divmod(int(excess.argmax()), excess.shape[1])  # the first of equals
        if self.worst is None or float(excess[row, column]) > self._worst_excess:
            self._worst_excess = float(excess[row, column])
            self.worst = tile[0].start + row, tile[1].start + column


def median(pair: Pair, count: int) -> float:
    """Of the ``count`` finite differences; of an even number the lower of the two in the middle.

    Exact, and without all differences in memory: floats that are not negative are in the order of
    their bits as integers, so the bits of the median are found digit by digit, a pass for each.
    """
    rank, prefix = (count - 1) // 2, 0  # the infinite ones come last and do not matter
    size = 1 << _DIGIT_BITS
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        histogram = torch.zeros(size, dtype=torch.int64, device=pair.result.device)
        for tile in pair.tiles(0, pair.result.shape[0]):
            leading = pair.difference(tile).flatten().view(torch.int64) >> shift
            digits = leading[leading >> _DIGIT_BITS == prefix] & (size - 1)
            histogram += torch.bincount(digits, minlength=size)
        up_to = histogram.cumsum(0)
        digit = int((up_to <= rank).sum())
        rank -= int(up_to[digit - 1]) if digit else 0
        prefix = prefix << _DIGIT_BITS | digit
    return torch.tensor(prefix).view(torch.float64).item()
