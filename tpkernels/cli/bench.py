"""``tpkernels bench``: its options."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from tpkernels.backends import OPS
from tpkernels.bench import report as output
from tpkernels.bench.device import device_named
from tpkernels.bench.file import new_report, resumed
from tpkernels.bench.models import LAYER, MODELS, PROJECTIONS
from tpkernels.bench.options import DTYPES, UsageError, at_least, writable, writing
from tpkernels.bench.output import console
from tpkernels.bench.results import Report, is_right
from tpkernels.bench.run import run_sweep
from tpkernels.bench.session import is_leader, launched_ranks
from tpkernels.bench.sweep import (
    BYTES,
    QUICK_REPEAT,
    QUICK_SECONDS,
    REPEAT,
    ROWS,
    SHAPES,
    Settings,
    Sweep,
    plan_sweep,
    read_file,
)
from tpkernels.cache import locked
from tpkernels.cli.exit_codes import exit_codes

_MANY = "May be repeated, or hold several with commas."


def bench(
    op: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(OPS)}; all by default. {_MANY}")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"The products of a model's layers: {', '.join(MODELS)}. {_MANY}"),
    ] = None,
    projection: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of the model: {', '.join(PROJECTIONS)}; {', '.join(LAYER)} by default."
        ),
    ] = None,
    m: Annotated[
        list[str] | None,
        typer.Option(help=f"Tokens for --model, over all ranks; {','.join(ROWS)} by default."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K of a matmul op, over all ranks; may be repeated. Without a model "
            f"{' and '.join(SHAPES)} by default."
        ),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--bytes",
            help=f"Sizes for the collectives alone, over all ranks; {','.join(BYTES)} by default.",
        ),
    ] = None,
    tp: Annotated[
        list[str] | None,
        typer.Option(
            "--tp", "--nproc", help=f"Ranks; 2 by default, torchrun's under torchrun. {_MANY}"
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{' | '.join(DTYPES)}; bf16 by default. {_MANY}")
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help=f"auto (the default) or an algorithm. {_MANY}"),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(help=f"Repetitions of each case at the most; {REPEAT} by default."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Of timing a case, after which no further repetition begins; there are three at "
            "least. Baselines by torch.matmul that take longer for three are left out. No limit "
            "by default."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of a rank; 1 by default.")] = None,
    quick: Annotated[
        bool | None,
        typer.Option(
            "--quick/--full",
            help=f"--repeat {QUICK_REPEAT} --seconds {QUICK_SECONDS:g} where they are not given.",
        ),
    ] = None,
    warm: Annotated[
        bool | None,
        typer.Option("--warm/--cold", help="Inputs may be in the cache; not by default."),
    ] = None,
    uneven: Annotated[
        bool | None,
        typer.Option(
            "--uneven/--even", help="Split an M that the ranks do not divide; refused by default."
        ),
    ] = None,
    baselines: Annotated[
        bool | None,
        typer.Option(help="Also time what uses torch.matmul, slow for 16-bit on old CPUs."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with these options by name.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu | cuda; cuda by default where there is a GPU.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json, bench.csv, report.html and plots.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the JSON here.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Measure only what the JSON does not hold yet.")
    ] = False,
    timeout: Annotated[int, typer.Option(help="Seconds that one case may take.")] = 1800,
) -> None:
    """Check ops on random data, then time them: slowest rank, median of the repetitions.

    Each case is timed by turns with its baselines: the op unfused, torch.distributed and
    torch.matmul, the local product alone; on GPUs NCCL and torch.ops.symm_mem too. The exit code is
    1 if a result is wrong; wrong ones are not timed. What is finished is in the file when the run
    is interrupted (exit code 130). Also: torchrun --nproc-per-node 2 -m -- tpkernels bench
    """
    given = Settings(
        op=tuple(op or ()),
        model=tuple(model or ()),
        projection=tuple(projection or ()),
        m=tuple(m or ()),
        shape=tuple(shape or ()),
        bytes=tuple(sizes or ()),
        tp=tuple(tp or ()),
        dtype=tuple(dtype or ()),
        algorithm=tuple(algorithm or ()),
        repeat=repeat,
        seconds=seconds,
        threads=threads,
        quick=quick,
        warm=warm,
        uneven=uneven,
        baselines=baselines,
    )
    with exit_codes(), contextlib.ExitStack() as stack:
        at_least(1, timeout=timeout)
        if config is not None:
            given = given.over(read_file(config), config)
        sweep = plan_sweep(given, ranks=launched_ranks(), device=device_named(device))
        target = _target(stack, out, json_file, resume)
        report = new_report(sweep)
        if resume and target is not None and is_leader():  # whose report counts
            report = resumed(target, report)
        _measure(sweep, report, target, out, timeout)


def _measure(
    sweep: Sweep, report: Report, target: Path | None, out: Path | None, timeout: int
) -> None:
    """Runs the sweep and shows what there is of it, however it ended."""
    interrupted = False
    try:
        run_sweep(sweep, report, target, timeout=timeout)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if is_leader():
            output.show(report, console())
            if out is not None:
                output.write(report, out, console())
    if interrupted:
        measured = f"{len(report['results'])} of {len(report['cases'])} cases"
        hint = "; --resume goes on" if target is not None else ""
        typer.echo(f"Interrupted: {measured} are measured{hint}.", err=True)
        raise typer.Exit(130)
    if not all(map(is_right, report["results"])):
        raise typer.Exit(1)


def _target(
    stack: contextlib.ExitStack, out: Path | None, json_file: Path | None, resume: bool
) -> Path | None:
    """Where the JSON goes, if it can be written; on other hosts than rank 0's nothing is. No other
    run may write there until ``stack`` is left."""
    path = json_file
    if out is not None:
        path = path or out / "bench.json"
        if is_leader():
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot make folder '{out}': {error.strerror}") from error
    if path is None:
        if resume:
            raise UsageError("--resume needs the --out or --json of the run to go on with")
        return None
    if is_leader():
        with writing(path):
            stack.enter_context(locked(path.with_name(f".{path.name}.lock"), seconds=1))
        writable(path)
    return path
