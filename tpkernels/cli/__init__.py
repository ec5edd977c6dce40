"""The command line: what is here, a demonstration that checks itself, and measurements."""

from __future__ import annotations

import typer

from tpkernels.cli.bench import bench, compare
from tpkernels.cli.demo import demo
from tpkernels.cli.info import info

app = typer.Typer(
    help="Fused communication and compute for tensor parallelism in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(info)
app.command()(demo)
app.command()(bench)
app.command()(compare)


def main() -> None:
    """The console script ``tpkernels``."""
    app(prog_name="tpkernels")
