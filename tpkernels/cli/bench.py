"""``tpkernels bench``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from typer import Option
from typer.models import OptionInfo

from tpkernels.bench import charts, sweep
from tpkernels.bench.measuring import run_case
from tpkernels.bench.probes import measure_rates
from tpkernels.bench.report import show
from tpkernels.bench.results import Row, create_run, line, make_rows
from tpkernels.cli import options
from tpkernels.common.text import pluralize
from tpkernels.launch.session import is_leader, launched_ranks, open_session, resolve_device
from tpkernels.launch.terminal import (
    DTYPES,
    UsageError,
    check_workers,
    console,
    make_output_folder,
    parse_dtype,
    require_at_least,
    writing,
)
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.op_spec import OPS

_REPEAT, _QUICK_REPEAT, _QUICK_SECONDS = 20, 10, 2.0
Many = list[str] | None


def _many(description: str, *names: str) -> OptionInfo:
    return Option(*names, help=f"{description} Repeatable or comma-separated.")


def bench(
    op: Annotated[Many, _many(f"Ops: {', '.join(OPS)}. Default: all.")] = None,
    model: Annotated[
        Many, _many(f"Models whose matmul shapes are measured: {', '.join(sweep.MODELS)}.")
    ] = None,
    projection: Annotated[
        Many,
        _many(f"Projections of --model: {', '.join(sweep.PROJECTIONS)}. Default: all but lm_head."),
    ] = None,
    m: Annotated[
        Many,
        _many(f"Tokens for --model, over all ranks. Default: {','.join(map(str, sweep.ROWS))}."),
    ] = None,
    shape: Annotated[
        Many,
        Option(
            help="Shape M,N,K of a matmul op, over all ranks. Repeatable. Default without --model: "
            f"{' and '.join(sweep.SHAPES)}."
        ),
    ] = None,
    bytes: Annotated[
        Many, _many(f"Tensor sizes of a collective, over all ranks. Default: {sweep.BYTES}.")
    ] = None,
    tp: Annotated[
        Many,
        _many("Numbers of ranks. Default: 2, or WORLD_SIZE under torchrun.", "--tp", "--nproc"),
    ] = None,
    dtype: Annotated[Many, _many(f"Dtypes: {' | '.join(DTYPES)}. Default: bf16.")] = None,
    algorithm: Annotated[
        Many, _many(f"Algorithms: auto, {', '.join(ALGORITHMS)}. Default: auto.")
    ] = None,
    repeat: Annotated[
        int | None, Option(help=f"Maximum number of repetitions per case. Default: {_REPEAT}.")
    ] = None,
    seconds: Annotated[
        float | None,
        Option(
            help="Time budget per case, in seconds. Each case runs at least three repetitions; a "
            "torch.matmul baseline that would exceed the budget with three is skipped."
        ),
    ] = None,
    threads: options.Threads = 1,
    quick: Annotated[
        bool,
        Option(
            "--quick", help=f"Short run: --repeat {_QUICK_REPEAT} --seconds {_QUICK_SECONDS:g}."
        ),
    ] = False,
    warm: Annotated[
        bool,
        Option("--warm", help="Time with inputs that may be in the cache. Default: cold inputs."),
    ] = False,
    baselines: Annotated[
        bool, Option(help="Run the torch baselines. torch.matmul is slow in 16 bits on older CPUs.")
    ] = True,
    device: options.Device = None,
    out: Annotated[
        Path | None, Option(help="Folder for bench.jsonl and report.html, which contains charts.")
    ] = None,
    timeout: options.Timeout = 1800,
) -> None:
    """Verify ops on random data, then time them against baselines.

    The baselines are the unfused op, torch.distributed with torch.matmul, the local matmul without
    communication and, on GPUs, torch.ops.symm_mem. The op and its baselines are timed in
    interleaved repetitions. Times are medians of the slowest rank. If a result is wrong, it is not
    timed and the exit code is 1. An interrupted run (exit code 130) keeps the finished cases. To
    run under torchrun: torchrun --nproc-per-node 2 -m -- tpkernels bench
    """
    if quick:
        repeat = _QUICK_REPEAT if repeat is None else repeat
        seconds = _QUICK_SECONDS if seconds is None else seconds
    method = sweep.Method(
        algorithms=list(dict.fromkeys(options.split(algorithm) or ["auto"])),
        threads=threads,
        device=resolve_device(device),
        repeat=_REPEAT if repeat is None else repeat,
        seconds=seconds,
        cold=not warm,
        baselines=baselines,
    )
    require_at_least(1, repeat=method.repeat, timeout=timeout)
    check_workers(threads=threads)
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--seconds is {seconds:g}; it must be positive and finite")
    items = sweep.plan_sweep(
        method,
        worlds=_parse_worlds(tp),
        types=list(dict.fromkeys(parse_dtype(name) for name in options.split(dtype) or ["bf16"])),
        ops=options.split(op),
        models=options.split(model),
        projections=options.split(projection),
        rows=options.numbers("m", m),
        shapes=shape or (),
        sizes=",".join(bytes or [sweep.BYTES]),
    )
    run, rows, leader, screen = create_run(method), list[Row](), is_leader(), Console(stderr=True)
    if out is not None and leader:
        make_output_folder(out)
        _write(out, line(run), "w")
    cases = track(
        measure_all(items, method, timeout),
        total=len(items),
        console=screen,
        transient=True,
        disable=not (screen.is_terminal and leader),
    )
    try:
        for case in cases:
            rows += case
            if out is not None and leader:
                _write(out, "".join(map(line, case)), "a")
    finally:
        if leader:
            show(run, rows, console())
            if len(measured := {row.case for row in rows}) < len(items):
                typer.echo(f"{len(measured)} of {len(items)} cases were measured.", err=True)
        if out is not None and leader:
            with writing(out / "report.html"):
                missing = charts.write(run, rows, out / "report.html")
            typer.echo("\n".join([f"Saved to {out}/bench.jsonl and {out}/report.html", *missing]))
    if any(row.status == "wrong" for row in rows):
        raise typer.Exit(1)


def measure_all(items: list[sweep.Item], method: sweep.Method, timeout: int) -> Iterator[list[Row]]:
    """Measure the cases one at a time. Yield the rows of each case.

    Raises:
        RankError: ranks failed. As with an interrupt, the current case is lost.
    """
    for world in dict.fromkeys(item.world for item in items):
        with open_session(
            world, threads=method.threads, timeout=timeout, device=method.device
        ) as run:
            rates = {}
            for item in (item for item in items if item.world == world):
                dtype = item.spec.dtype
                if dtype not in rates:
                    rates[dtype] = run(measure_rates, dtype, method.device)[0]
                reports = run(run_case, item.spec, method, rates[dtype])
                yield make_rows(item, rates[dtype], reports)


def _write(folder: Path, lines: str, mode: str) -> None:
    path = folder / "bench.jsonl"
    with writing(path), path.open(mode) as file:
        file.write(lines)


def _parse_worlds(tp: Many) -> list[int]:
    """Return the world sizes of --tp. Under torchrun they must equal WORLD_SIZE."""
    ranks = launched_ranks()
    worlds = options.numbers("tp", tp) or [ranks or 2]
    for world in worlds:
        check_workers(tp=world)
        if ranks not in (None, world):
            raise UsageError(
                f"--tp is {world} but torchrun started {pluralize(ranks or 0, 'rank')} "
                "(WORLD_SIZE); leave --tp out"
            )
    return worlds
