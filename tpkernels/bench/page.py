"""A report as one HTML file that needs nothing else, no network either."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from tpkernels.bench.output import milliseconds
from tpkernels.bench.results import Report
from tpkernels.bench.table import COLUMNS, LEGEND, notes, rows, size_of

if TYPE_CHECKING:
    from tpkernels.bench.plots import Figure


def render(report: Report, figures: Sequence[Figure]) -> str:
    """The page; pictures are part of it."""
    templates = Environment(
        loader=PackageLoader("tpkernels.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"milliseconds": milliseconds, "size": size_of, "svg": _svg}
    return templates.get_template("report.html.j2").render(
        report=report,
        rows=rows(report),
        baselines=COLUMNS,
        notes=notes(report),
        legend=LEGEND,
        figures=figures,
    )


def _svg(figure: Figure) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(figure.svg).decode()}"
