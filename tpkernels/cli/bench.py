"""``tpkernels bench``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from typer import Option

from tpkernels.bench import charts, sweep
from tpkernels.bench.measuring import run_case
from tpkernels.bench.probes import measure_rates
from tpkernels.bench.report import show
from tpkernels.bench.results import Row, line, new_run, rows_of
from tpkernels.cli import options
from tpkernels.common.text import counted
from tpkernels.launch.session import is_leader, launched_ranks, open_session, resolve_device
from tpkernels.launch.terminal import (
    DTYPES,
    UsageError,
    at_least,
    check_workers,
    console,
    dtype_named,
    make_output_folder,
    writing,
)
from tpkernels.planning.op_spec import OPS

_REPEAT, _QUICK_REPEAT, _QUICK_SECONDS = 20, 10, 2.0
Many = list[str] | None


def _many(text: str, *names: str) -> Any:
    return Option(*names, help=f"{text} Repeatable, or comma-separated.")


def bench(
    op: Annotated[Many, _many(f"{', '.join(OPS)}; default: all.")] = None,
    model: Annotated[
        Many, _many(f"Measure the matmuls of a model's layers: {', '.join(sweep.MODELS)}.")
    ] = None,
    projection: Annotated[
        Many, _many(f"{', '.join(sweep.PROJECTIONS)} of --model; default: those of a layer.")
    ] = None,
    m: Annotated[Many, _many(f"Tokens for --model, over all ranks; default: {sweep.ROWS}.")] = None,
    shape: Annotated[
        Many,
        Option(
            help="M,N,K of a matmul op, over all ranks; repeatable. Default without --model: "
            f"{' and '.join(sweep.SHAPES)}."
        ),
    ] = None,
    bytes: Annotated[
        Many, _many(f"Sizes of a collective's tensor, over all ranks; default: {sweep.BYTES}.")
    ] = None,
    tp: Annotated[
        Many, _many("Number of ranks; default 2, or torchrun's.", "--tp", "--nproc")
    ] = None,
    dtype: Annotated[Many, _many(f"{' | '.join(DTYPES)}; default: bf16.")] = None,
    algorithm: Annotated[Many, _many("auto (default) or an algorithm.")] = None,
    repeat: Annotated[
        int | None, Option(help=f"Maximum number of repetitions per case; default: {_REPEAT}.")
    ] = None,
    seconds: Annotated[
        float | None,
        Option(
            help="Start no further repetition of a case after this time, once there are three; "
            "leave out torch.matmul if it needs longer for three."
        ),
    ] = None,
    threads: options.Threads = 1,
    quick: Annotated[
        bool,
        Option("--quick", help=f"Same as --repeat {_QUICK_REPEAT} --seconds {_QUICK_SECONDS:g}."),
    ] = False,
    warm: Annotated[bool, Option("--warm", help="Allow inputs in the cache.")] = False,
    baselines: Annotated[
        bool, Option(help="Run baselines that use torch.matmul, slow in 16 bits on old CPUs.")
    ] = True,
    device: options.Device = None,
    out: Annotated[
        Path | None, Option(help="Write bench.jsonl and report.html, with charts, to this folder.")
    ] = None,
    timeout: options.Timeout = 1800,
) -> None:
    """Verify ops on random data, then time them against baselines.

    Each case is timed interleaved with its baselines: the unfused op, torch.distributed with
    torch.matmul, and the local matmul alone; on GPUs also torch.ops.symm_mem. Times are medians of
    the slowest rank. Wrong results are not timed, and the exit code is 1. An interrupted run (exit
    code 130) keeps the finished cases. Also under torchrun:
    torchrun --nproc-per-node 2 -m -- tpkernels bench
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
    at_least(1, repeat=method.repeat, timeout=timeout)
    check_workers(threads=threads)
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--seconds is {seconds:g}; it must be positive and finite")
    items = sweep.plan_sweep(
        method,
        worlds=_worlds(tp),
        types=list(dict.fromkeys(dtype_named(name) for name in options.split(dtype) or ["bf16"])),
        ops=options.split(op),
        models=options.split(model),
        projections=options.split(projection),
        rows=options.numbers("m", m),
        shapes=shape or (),
        sizes=",".join(bytes or [sweep.BYTES]),
    )
    run, rows, leader, screen = new_run(method), list[Row](), is_leader(), Console(stderr=True)
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
                typer.echo(f"{len(measured)} of {len(items)} cases are measured.", err=True)
        if out is not None and leader:
            with writing(out / "report.html"):
                missing = charts.write(run, rows, out / "report.html")
            typer.echo("\n".join([f"Written: {out}/bench.jsonl, {out}/report.html", *missing]))
    if any(row.status == "wrong" for row in rows):
        raise typer.Exit(1)


def measure_all(items: list[sweep.Item], method: sweep.Method, timeout: int) -> Iterator[list[Row]]:
    """Measure the cases one by one; yield the rows of each.

    Raises:
        RankError: ranks failed. Like an interrupt, this loses the case being measured.
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
                yield rows_of(item, rates[dtype], reports)


def _write(folder: Path, text: str, mode: str) -> None:
    path = folder / "bench.jsonl"
    with writing(path), path.open(mode) as file:
        file.write(text)


def _worlds(tp: Many) -> list[int]:
    """Return the numbers of ranks, which under torchrun are torchrun's."""
    ranks = launched_ranks()
    worlds = options.numbers("tp", tp) or [ranks or 2]
    for world in worlds:
        check_workers(tp=world)
        if ranks not in (None, world):
            raise UsageError(
                f"--tp is {world} but torchrun started {counted(ranks or 0, 'rank')} (WORLD_SIZE); "
                "leave --tp out"
            )
    return worlds
