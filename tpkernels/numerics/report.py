"""What a comparison found: numbers, text and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

import torch

from tpkernels import dtypes

_MOST_INCHES = 20.0  # of a picture's side


@dataclass(frozen=True)
class Element:
    """One element: its index, and what both tensors have there."""

    index: tuple[int, ...]
    reference: float
    result: float


@dataclass(frozen=True)
class Region:
    """Rows and columns [begin, end) of the matrix, the share of the elements there that are above
    tolerance (0 to 1), and the largest difference. It may be empty: a rank without rows."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    share: float
    largest: float

    @property
    def empty(self) -> bool:
        return self.rows[0] == self.rows[1] or self.columns[0] == self.columns[1]


@dataclass(frozen=True)
class Report:
    """What `compare` found. Differences are absolute and in float64.

    The difference is infinite where one side is NaN or infinite and the other is not the same.
    These elements, ``not_finite`` in number, are above any tolerance and make ``max`` infinite;
    ``mean`` and ``median`` are those of the finite differences, infinite if there are none. Of an
    empty tensor all are 0. ``worst`` is what exceeds its tolerance most or comes closest to it;
    None in an empty tensor. ``regions[i][j]`` is the region in row i and column j of the grid.
    """

    passed: bool
    shape: tuple[int, ...]
    reference_dtype: torch.dtype
    result_dtype: torch.dtype
    atol: float | None  #: None: each element has its own
    rtol: float
    max: float
    mean: float
    median: float
    above: int
    not_finite: int
    worst: Element | None
    regions: tuple[tuple[Region, ...], ...]

    @property
    def share(self) -> float:
        """How many of the elements are above tolerance: 0 to 1."""
        return self.above / max(1, math.prod(self.shape))

    def __str__(self) -> str:
        atol = "by element" if self.atol is None else f"{self.atol:g}"
        lines = [
            f"{'PASS' if self.passed else 'FAIL'}: {list(self.shape)}, "
            f"{dtypes.name(self.result_dtype)} beside {dtypes.name(self.reference_dtype)}, "
            f"atol {atol}, rtol {self.rtol:g}",
            f"difference: max {self.max:.3g}, mean {self.mean:.3g}, median {self.median:.3g}",
            f"above tolerance: {self.above} of {math.prod(self.shape)} elements "
            f"({_percent(self.share)})",
        ]
        if self.not_finite:
            lines[-1] += f", {self.not_finite} of them NaN or infinite on one side"
        if self.worst is not None:
            lines.append(
                f"worst: {list(self.worst.index)} is {self.worst.result:.6g}, "
                f"expected {self.worst.reference:.6g}"
            )
        lines.append("regions: share above tolerance, largest difference")
        return "\n".join(lines + _grid(self.regions))

    def save_heatmap(self, path: str | PathLike[str]) -> None:
        """Draws the regions, in the format that the suffix of ``path`` says: .png, .svg, .pdf.

        Raises:
            ImportError: matplotlib, which the extra ``plots`` brings, is missing.
            OSError: ``path`` cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "save_heatmap needs matplotlib: pip install 'tpkernels[plots]'"
            ) from error
        height, width = len(self.regions), len(self.regions[0])
        size = min(5 + 0.9 * width, _MOST_INCHES), min(2 + 0.3 * height, _MOST_INCHES)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(str(self).partition("\n")[0], fontsize="medium")
        views: list[tuple[str, Callable[[Region], float]]] = [
            ("share above tolerance", lambda region: region.share),
            ("largest difference", lambda region: region.largest),
        ]
        for axes, (title, value) in zip(figure.subplots(1, len(views)), views, strict=True):
            numbers = [
                [math.nan if region.empty else value(region) for region in line]
                for line in self.regions
            ]
            # What is not finite would leave no colours for the rest: it is drawn as the largest.
            finite = [n for line in numbers for n in line if math.isfinite(n)]
            top = 1.0 if title.startswith("share") else max(finite, default=0.0) or 1.0
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
    """A line for each row of the grid, with its number; regions that fail carry a mark."""
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
    mark = "!" if region.share else ""
    return f"{mark}{_percent(region.share)} {region.largest:.1e}"


def _span(ends: tuple[int, int]) -> str:
    return f"{ends[0]}:{ends[1]}"


def _percent(share: float) -> str:
    """Neither 0 nor 100 % unless it is."""
    if share in (0, 1):
        return f"{share:.0%}"
    return f"{min(max(share, 0.001), 0.999):.1%}"
