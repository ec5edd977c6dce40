"""The result of a comparison: numbers, text and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

import torch

from tpkernels import dtypes

_MAX_INCHES = 20.0  # of each side of the picture


@dataclass(frozen=True)
class Element:
    """One element of both tensors."""

    index: tuple[int, ...]
    reference: float  #: its value in the reference
    result: float  #: its value in the result


@dataclass(frozen=True)
class Region:
    """A block of the matrix. It may be empty: the shard of a rank without rows."""

    rows: tuple[int, int]  #: [begin, end)
    columns: tuple[int, int]  #: [begin, end)
    fraction: float  #: of the elements that are above tolerance, 0 to 1
    largest: float  #: largest difference

    @property
    def empty(self) -> bool:
        """Whether it has no elements."""
        return self.rows[0] == self.rows[1] or self.columns[0] == self.columns[1]


@dataclass(frozen=True)
class Report:
    """The result of `compare`. Differences are absolute and in float64.

    The difference is infinite if either value is NaN or infinite and the other is not the same.
    Such an element is above any tolerance. For an empty tensor, all numbers are 0.
    """

    passed: bool  #: whether no element is above tolerance
    shape: tuple[int, ...]
    reference_dtype: torch.dtype
    result_dtype: torch.dtype
    atol: float | None  #: None: each element has its own
    rtol: float
    max: float  #: largest difference
    mean: float  #: of the finite differences; infinite if there are none
    median: float  #: of the finite differences; infinite if there are none
    above: int  #: number of elements above tolerance
    not_finite: int  #: number of infinite differences
    worst: Element | None  #: the element furthest above, or closest below, its tolerance
    regions: tuple[tuple[Region, ...], ...]  #: ``regions[i][j]``: row i, column j of the grid

    @property
    def fraction(self) -> float:
        """The fraction of the elements that are above tolerance, 0 to 1."""
        return self.above / max(1, math.prod(self.shape))

    def __str__(self) -> str:
        atol = "by element" if self.atol is None else f"{self.atol:g}"
        lines = [
            f"{'PASS' if self.passed else 'FAIL'}: {list(self.shape)}, "
            f"{dtypes.name(self.result_dtype)} against {dtypes.name(self.reference_dtype)}, "
            f"atol {atol}, rtol {self.rtol:g}",
            f"difference: max {self.max:.3g}, mean {self.mean:.3g}, median {self.median:.3g}",
            f"above tolerance: {self.above} of {math.prod(self.shape)} elements "
            f"({_percent(self.fraction)})",
        ]
        if self.not_finite:
            lines[-1] += f", {self.not_finite} of them NaN or infinite in one tensor only"
        if self.worst is not None:
            lines.append(
                f"worst: {list(self.worst.index)} is {self.worst.result:.6g}, "
                f"expected {self.worst.reference:.6g}"
            )
        lines.append("regions: fraction above tolerance, largest difference")
        return "\n".join(lines + _grid(self.regions))

    def save_heatmap(self, path: str | PathLike[str]) -> None:
        """Draws the regions: the fraction above tolerance, and the largest difference.

        Args:
            path: where the picture is written. Its suffix selects the format: .png, .svg or .pdf.

        Raises:
            ImportError: matplotlib is missing; the extra ``plots`` installs it.
            OSError: ``path`` cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "save_heatmap needs matplotlib: pip install 'tpkernels[plots]'"
            ) from error
        height, width = len(self.regions), len(self.regions[0])
        size = min(5 + 0.9 * width, _MAX_INCHES), min(2 + 0.3 * height, _MAX_INCHES)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(str(self).partition("\n")[0], fontsize="medium")
        views: list[tuple[str, Callable[[Region], float]]] = [
            ("fraction above tolerance", lambda region: region.fraction),
            ("largest difference", lambda region: region.largest),
        ]
        for axes, (title, value) in zip(figure.subplots(1, len(views)), views, strict=True):
            numbers = [
                [math.nan if region.empty else value(region) for region in line]
                for line in self.regions
            ]
            # An infinite value would leave no colours for the rest, so it is drawn as the largest.
            finite = [n for line in numbers for n in line if math.isfinite(n)]
            top = 1.0 if title.startswith("fraction") else max(finite, default=0.0) or 1.0
            shown = [[min(n, top) for n in line] for line in numbers]
            image = axes.imshow(shown, vmin=0.0, vmax=top, cmap="inferno", aspect="auto")
            figure.colorbar(image, ax=axes)
            axes.set_title(title, fontsize="medium")
            columns = [_span(region.columns) for region in self.regions[0]]
            axes.set_xticks(range(width), columns, rotation=90, fontsize="x-small")
            rows = [f"{i}  {_span(line[0].rows)}" for i, line in enumerate(self.regions)]
            axes.set_yticks(range(height), rows, fontsize="x-small")
        figure.savefig(path, dpi=150)


def _grid(regions: tuple[tuple[Region, ...], ...]) -> list[str]:
    """A line for each row of the grid, with its number; regions that fail are marked."""
    head = ["", *(_span(region.columns) for region in regions[0])]
    cells = [head]
    for i, line in enumerate(regions):
        cells.append([f"{i}  {_span(line[0].rows)}", *(_cell(region) for region in line)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def _cell(region: Region) -> str:
    if region.empty:
        return "-"
    mark = "!" if region.fraction else ""
    return f"{mark}{_percent(region.fraction)} {region.largest:.1e}"


def _span(ends: tuple[int, int]) -> str:
    return f"{ends[0]}:{ends[1]}"


def _percent(fraction: float) -> str:
    """A percentage that is rounded to neither 0 nor 100 %."""
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    return f"{min(max(fraction, 0.001), 0.999):.1%}"
