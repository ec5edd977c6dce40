"""The command line: what is here, a demonstration that checks itself, and measurements."""

from __future__ import annotations

import io
import sys

import typer

from tpkernels.cli.bench import bench, compare
from tpkernels.cli.demo import demo
from tpkernels.cli.explain import explain
from tpkernels.cli.info import info
from tpkernels.cli.profile import profile
from tpkernels.cli.tune import tune

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
app.command()(tune)
app.command()(explain)
# What follows the script is the script's, options too.
app.command(context_settings={"allow_interspersed_args": False})(profile)


def main() -> None:
    """The console script ``tpkernels``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is
    app(prog_name="tpkernels")
