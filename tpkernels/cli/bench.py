"""``tpkernels bench``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer import Option

from tpkernels import dtypes
from tpkernels.bench.measuring import run_case
from tpkernels.bench.probes import measure_rates, slowest_rates
from tpkernels.bench.report import show, write
from tpkernels.bench.results import (
    Report,
    Roofline,
    new_report,
    result,
    result_file,
    resumed,
    save,
)
from tpkernels.bench.sweep import (
    BYTES,
    LAYER,
    MODELS,
    PROJECTIONS,
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
from tpkernels.cli import exit_codes, options
from tpkernels.launch.session import is_leader, launched_ranks, open_session, resolve_device
from tpkernels.op_spec import OPS
from tpkernels.terminal import DTYPES, UsageError, at_least, console

Many = list[str] | None
_MANY = "Repeatable, or comma-separated."


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options in a file the defaults of those that the command line does not give."""
    if path is None:
        return None
    with exit_codes():
        options = read_file(path)
        several = {param.name for param in context.command.params if getattr(param, "multiple", 0)}
        for name, values in options.items():
            if name not in several and len(values) != 1:
                raise UsageError(f"'{path}': {name} takes one value, not {len(values)}")
        context.default_map = {
            name: values if name in several else values[0] for name, values in options.items()
        }
    return path


def bench(
    context: typer.Context,
    op: Annotated[Many, Option(help=f"{', '.join(OPS)}; default: all. {_MANY}")] = None,
    model: Annotated[
        Many,
        Option(help=f"Measure the matmuls of a model's layers: {', '.join(MODELS)}. {_MANY}"),
    ] = None,
    projection: Annotated[
        Many,
        Option(
            help=f"Which of the model's: {', '.join(PROJECTIONS)}; default: {', '.join(LAYER)}."
        ),
    ] = None,
    m: Annotated[
        Many,
        Option(help=f"Tokens for --model, over all ranks; default: {','.join(ROWS)}."),
    ] = None,
    shape: Annotated[
        Many,
        Option(
            help="M,N,K of a matmul op, over all ranks; repeatable. Default without --model: "
            f"{' and '.join(SHAPES)}."
        ),
    ] = None,
    bytes: Annotated[
        Many,
        Option(help=f"Sizes of a collective's tensor, over all ranks; default: {','.join(BYTES)}."),
    ] = None,
    tp: Annotated[
        Many,
        Option("--tp", "--nproc", help=f"Number of ranks; default 2, or torchrun's. {_MANY}"),
    ] = None,
    dtype: Annotated[Many, Option(help=f"{' | '.join(DTYPES)}; default: bf16. {_MANY}")] = None,
    algorithm: Annotated[Many, Option(help=f"auto (default) or an algorithm. {_MANY}")] = None,
    repeat: Annotated[
        int | None, Option(help=f"Maximum number of repetitions per case; default: {REPEAT}.")
    ] = None,
    seconds: Annotated[
        float | None,
        Option(
            help="Start no further repetition of a case after this time, once there are three; "
            "leave out baselines that use torch.matmul and need longer for three. Default: no "
            "limit."
        ),
    ] = None,
    threads: Annotated[int | None, Option(help="Threads per rank; default: 1.")] = None,
    quick: Annotated[
        bool | None,
        Option(
            "--quick/--full", help=f"Same as --repeat {QUICK_REPEAT} --seconds {QUICK_SECONDS:g}."
        ),
    ] = None,
    warm: Annotated[
        bool | None, Option("--warm/--cold", help="Allow inputs in the cache; default: cold.")
    ] = None,
    uneven: Annotated[
        bool | None,
        Option("--uneven/--even", help="Allow an M that is not divisible by the number of ranks."),
    ] = None,
    baselines: Annotated[
        bool | None,
        Option(help="Run baselines that use torch.matmul, slow in 16 bits on old CPUs."),
    ] = None,
    config: Annotated[
        Path | None,
        Option(help="YAML file with these options by name.", callback=_use_file, is_eager=True),
    ] = None,
    device: options.Device = None,
    out: Annotated[
        Path | None,
        Option(help="Write bench.json and report.txt to this folder."),
    ] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write the JSON to this file.")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Only measure cases that the JSON does not contain.")
    ] = False,
    timeout: options.Timeout = 1800,
) -> None:
    """Verify ops on random data, then time them against baselines.

    Each case is timed interleaved with its baselines: the unfused op, torch.distributed with
    torch.matmul, and the local matmul alone; on GPUs also NCCL and torch.ops.symm_mem. Times are
    medians of the slowest rank. Wrong results are not timed, and the exit code is 1. An interrupted
    run (exit code 130) keeps the finished cases in its file. Also under torchrun:
    torchrun --nproc-per-node 2 -m -- tpkernels bench
    """
    settings = Settings(
        **{field.name: context.params[field.name] for field in dataclasses.fields(Settings)}
    )
    at_least(1, timeout=timeout)
    sweep = plan_sweep(settings, ranks=launched_ranks(), device=resolve_device(device))
    with result_file(out, json_file, resume=resume) as file:
        report = new_report(sweep)
        if resume and file is not None and is_leader():
            report = resumed(file, report)
        interrupted = False
        try:
            run_sweep(sweep, report, file, timeout=timeout)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if is_leader():
                show(report, console())
            if is_leader() and out is not None:
                write(report, out / "report.txt")
                console().print(f"Written: {out}/report.txt", markup=False, soft_wrap=True)
    if interrupted:
        measured = f"{len(report.results)} of {len(report.cases)} cases"
        hint = "" if file is None else "; use --resume to continue"
        typer.echo(f"Interrupted: {measured} are measured{hint}.", err=True)
        raise typer.Exit(130)
    if not all(case.is_right for case in report.results):
        raise typer.Exit(1)


def run_sweep(sweep: Sweep, report: Report, path: Path | None, *, timeout: int) -> None:
    """Measure the cases that ``report`` lacks and adds them, saving to ``path`` after every case.
    Under a launcher, rank 0's report decides.

    Raises:
        RankError: ranks failed. Like an interrupt, this loses the case being measured.
    """
    method, path = sweep.method, path if is_leader() else None
    screen = Console(stderr=True)
    with Progress(
        *(MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left")),
        *(TimeRemainingColumn(), TextColumn("{task.description}")),
        console=screen,
        transient=True,
        disable=not (screen.is_terminal and is_leader()),
    ) as progress:
        bar = progress.add_task("", total=len(sweep.items))
        for world in dict.fromkeys(item.world for item in sweep.items):
            items = [item for item in sweep.items if item.world == world]
            if launched_ranks() is None and {item.key for item in items} <= report.done:
                continue  # no need to start ranks
            with open_session(
                world, threads=method.threads, timeout=timeout, device=method.device
            ) as run:
                done, rooflines = run(tuple, (report.done, report.rooflines))[0]
                rates = {entry.dtype: entry.rates for entry in rooflines if entry.tp == world}
                for item in items:
                    progress.update(bar, description=item.key)
                    if item.key not in done:
                        spec, dtype = item.spec, dtypes.name(item.spec.dtype)
                        if dtype not in rates:
                            measured = run(measure_rates, spec.dtype, method.device)
                            rates[dtype] = slowest_rates(measured)
                            report.rooflines.append(Roofline(world, dtype, rates[dtype]))
                        ranks = run(run_case, spec, method, rates[dtype])
                        report.results.append(result(item, rates[dtype], ranks))
                        if path is not None:
                            save(report, path)
                    progress.advance(bar)
    report.complete = True
    if path is not None:
        save(report, path)
