"""Passes over two matrices, one float64 tile at a time, so that memory does not grow with them."""

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
    """Reference and result as matrices of one shape, and the tolerances."""

    reference: torch.Tensor
    result: torch.Tensor
    atol: float | torch.Tensor
    rtol: float

    def tiles(self, begin: int, end: int) -> Iterator[Tile]:
        """The tiles of rows [begin, end), in row-major order."""
        width = self.reference.shape[1]
        if width == 0:
            return
        rows, columns = max(1, _TILE_ELEMENTS // width), min(width, _TILE_ELEMENTS)
        for row in range(begin, end, rows):
            for column in range(0, width, columns):
                yield slice(row, min(row + rows, end)), slice(column, min(column + columns, width))

    def difference(self, tile: Tile) -> torch.Tensor:
        """|result - reference|; infinite where either is not finite and the other not the same."""
        result, reference = self.result[tile].double(), self._reference(tile)
        difference = (result - reference).abs_()
        if float(difference.amax()) < math.inf:  # false for NaN too
            return difference
        same = (result == reference) | (result.isnan() & reference.isnan())
        return difference.nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(same, 0.0)

    def excess(self, tile: Tile, difference: torch.Tensor) -> torch.Tensor:
        """How far each difference is above its tolerance. A tolerance that the reference makes
        infinite or NaN becomes the largest number, which only an infinite difference exceeds."""
        atol = self.atol[tile].to(difference) if isinstance(self.atol, torch.Tensor) else self.atol
        tolerance = self.rtol * self._reference(tile).abs() + atol
        return difference - tolerance.nan_to_num_(nan=_LARGEST, posinf=_LARGEST)

    def _reference(self, tile: Tile) -> torch.Tensor:
        return self.reference[tile].to(device=self.result.device, dtype=torch.float64)


class Scan:
    """The sums of one pass over a pair, region by region."""

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
            fraction = int(above[left:right].sum()) / count if count else 0.0
            maximum = float(largest[left:right].max()) if count else 0.0
            line.append(Region((begin, end), (left, right), fraction, maximum))
        return tuple(line)

    def _add(self, tile: Tile, difference: torch.Tensor, excess: torch.Tensor) -> None:
        infinite = difference.isinf()
        self.not_finite += int(infinite.sum())
        self.total += float(difference.masked_fill(infinite, 0.0).sum())
        row, column = divmod(int(excess.argmax()), excess.shape[1])  # of equal ones the first
        if self.worst is None or float(excess[row, column]) > self._worst_excess:
            self._worst_excess = float(excess[row, column])
            self.worst = tile[0].start + row, tile[1].start + column


def median(pair: Pair, count: int) -> float:
    """The median of the ``count`` finite differences; the lower of the middle two if ``count`` is
    even.

    Exact, without all differences in memory, by radix selection: non-negative floats have the order
    of their bits as integers, so each pass finds one digit of the median's bits.
    """
    rank, prefix = (count - 1) // 2, 0  # infinite differences come last and do not matter
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
