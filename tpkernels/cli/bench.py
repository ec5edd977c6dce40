"""``tpkernels bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpkernels.bench import plots, report, table
from tpkernels.bench.file import new_report, result_file, resumed
from tpkernels.bench.models import LAYER, MODELS, PROJECTIONS
from tpkernels.bench.results import Report, is_right
from tpkernels.bench.run import run_sweep
from tpkernels.bench.sweep import (
    BYTES,
    QUICK_REPEAT,
    QUICK_SECONDS,
    REPEAT,
    ROWS,
    SHAPES,
    Settings,
    plan_sweep,
    read_file,
)
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.launch.session import device_named, is_leader, launched_ranks
from tpkernels.op_spec import OPS
from tpkernels.terminal import DTYPES, at_least, console

_MANY = "Repeatable, or comma-separated."


def bench(
    op: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(OPS)}; default: all. {_MANY}")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"Measure the matmuls of a model's layers: {', '.join(MODELS)}. {_MANY}"),
    ] = None,
    projection: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Which of the model's: {', '.join(PROJECTIONS)}; default: {', '.join(LAYER)}."
        ),
    ] = None,
    m: Annotated[
        list[str] | None,
        typer.Option(help=f"Tokens for --model, over all ranks; default: {','.join(ROWS)}."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K of a matmul op, over all ranks; repeatable. Default without --model: "
            f"{' and '.join(SHAPES)}."
        ),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--bytes",
            help=f"Sizes of a collective's tensor, over all ranks; default: {','.join(BYTES)}.",
        ),
    ] = None,
    tp: Annotated[
        list[str] | None,
        typer.Option("--tp", "--nproc", help=f"Number of ranks; default 2, or torchrun's. {_MANY}"),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{' | '.join(DTYPES)}; default: bf16. {_MANY}")
    ] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option(help=f"auto (default) or an algorithm. {_MANY}")
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(help=f"Maximum number of repetitions per case; default: {REPEAT}."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Start no further repetition of a case after this time, once there are three; "
            "leave out baselines that use torch.matmul and need longer for three. Default: no "
            "limit."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads per rank; default: 1.")] = None,
    quick: Annotated[
        bool | None,
        typer.Option(
            "--quick/--full", help=f"Same as --repeat {QUICK_REPEAT} --seconds {QUICK_SECONDS:g}."
        ),
    ] = None,
    warm: Annotated[
        bool | None,
        typer.Option("--warm/--cold", help="Allow inputs in the cache; default: cold."),
    ] = None,
    uneven: Annotated[
        bool | None,
        typer.Option(
            "--uneven/--even", help="Allow an M that is not divisible by the number of ranks."
        ),
    ] = None,
    baselines: Annotated[
        bool | None,
        typer.Option(help="Run baselines that use torch.matmul, slow in 16 bits on old CPUs."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with these options by name.")
    ] = None,
    device: options.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write bench.json, bench.csv, report.html and plots to this folder."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the JSON to this file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Only measure cases that the JSON does not contain.")
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
    with exit_codes():
        at_least(1, timeout=timeout)
        if config is not None:
            settings = settings.over(read_file(config), config)
        sweep = plan_sweep(settings, ranks=launched_ranks(), device=device_named(device))
        with result_file(out, json_file, resume=resume) as file:
            results = new_report(sweep)
            if resume and file is not None and is_leader():
                results = resumed(file, results)
            interrupted = False
            try:
                run_sweep(sweep, results, file, timeout=timeout)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                if is_leader():
                    _show(results, out)
        if interrupted:
            measured = f"{len(results['results'])} of {len(results['cases'])} cases"
            hint = "" if file is None else "; use --resume to continue"
            typer.echo(f"Interrupted: {measured} are measured{hint}.", err=True)
            raise typer.Exit(130)
        if not all(map(is_right, results["results"])):
            raise typer.Exit(1)


def _show(results: Report, folder: Path | None) -> None:
    table.show(results, console())
    if folder is None:
        return
    report.write(results, folder)
    missing = plots.unsupported()
    if missing is not None:
        console().print(f"No plots: {missing}.", markup=False)
    console().print(f"Written: {folder}/report.html", markup=False, soft_wrap=True)
