"""The command line: one file per command, with its options and output; `bench` does the work."""

from __future__ import annotations

import io
import sys

import typer

from tpkernels.cli import (
    bench,
    compare,
    demo,
    explain,
    generate,
    info,
    plan,
    profile,
    serve,
    shard,
    tune,
)

app = typer.Typer(
    help="Fused communication and compute for tensor parallelism in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(info.info)
app.command()(demo.demo)
app.command()(bench.bench)
app.command()(compare.compare)
app.command()(tune.tune)
app.command()(explain.explain)
app.command()(plan.plan)
app.command()(shard.shard)
app.command()(generate.generate)
app.command()(serve.serve)
# Everything after the script belongs to the script, including options.
app.command(context_settings={"allow_interspersed_args": False})(profile.profile)


def main() -> None:
    """The console script ``tpkernels``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr
    app(prog_name="tpkernels")
