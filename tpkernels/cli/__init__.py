"""The command line: what is here, a demonstration that checks itself, and measurements."""

from __future__ import annotations

import io
import sys

import typer

from tpkernels.cli import bench, compare, demo, explain, info, profile, tune

app = typer.Typer(
    help="Fused communication and compute for tensor parallelism in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(info.info)
app.command()(demo.demo)
app.command()(bench.bench)
app.command()(compare.compare)
app.command()(tune.tune)
app.command()(explain.explain)
# What follows the script is the script's, options too.
app.command(context_settings={"allow_interspersed_args": False})(profile.profile)


def main() -> None:
    """The console script ``tpkernels``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is
    app(prog_name="tpkernels")
