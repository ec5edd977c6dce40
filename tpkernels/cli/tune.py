"""``tpkernels tune``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from tpkernels.bench.inputs import warm_cases
from tpkernels.bench.specs import Spec, check_split, ops_named, specs_of
from tpkernels.bench.tune import (
    TuneReport,
    check_cache,
    check_gpus,
    keep,
    keep_machine,
    measure_machine,
    medians,
    rates_text,
    tune_case,
)
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.launch.session import device_named, is_leader, open_session, world_size
from tpkernels.op_spec import OPS
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Plan
from tpkernels.terminal import (
    UsageError,
    at_least,
    check_workers,
    console,
    dtype_named,
    milliseconds,
    table,
)

_SHAPES = [f"{m},4096,4096" for m in (1, 16, 64, 256, 1024, 4096)]
_BYTES = "4K,64K,1M,16M,64M"


def tune(
    op: Annotated[list[str] | None, typer.Option(help="An op; repeatable. Default: all.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K of a matmul op, over all ranks; repeatable. Default: M from 1 to 4096 of "
            "M,4096,4096. auto interpolates between two measured M."
        ),
    ] = None,
    sizes: options.Sizes = _BYTES,
    nproc: options.Ranks = None,
    dtype: options.Dtype = "bf16",
    device: options.Device = None,
    repeat: Annotated[int, typer.Option(help="Maximum number of timed repetitions.")] = 40,
    budget: Annotated[
        int, typer.Option(help="Start no further repetition of a case after this many seconds.")
    ] = 20,
    threads: Annotated[
        int, typer.Option(help="Threads per rank, here and in the job that uses the times.")
    ] = 1,
    timeout: options.Timeout = 1800,
    machine: Annotated[
        bool,
        typer.Option(
            "--machine",
            help="Measure this machine's rates instead, for tpkernels plan --machine this and for "
            "products on meshes.",
        ),
    ] = False,
) -> None:
    """Measure every algorithm for the given shapes, so that auto chooses the fastest.

    Each algorithm is verified first, then all are timed interleaved on inputs that are not in the
    cache; the output says where memory did not allow that. Times are kept in the cache folder
    ($XDG_CACHE_HOME/tpkernels, by default ~/.cache/tpkernels) for this device, number of ranks and
    threads, and these versions of tpkernels, torch and Triton. Groups that are set up afterwards
    use them. Wrong results are left out, and the exit code is 1. On CPUs an algorithm is also left
    out where its bits differ from those of the others.
    """
    with exit_codes():
        world = world_size(nproc, 2)
        at_least(1, repeat=repeat, budget=budget, timeout=timeout)
        check_workers(threads=threads)
        if world == 1:
            raise UsageError("one rank has nothing to choose: it does not communicate")
        if machine:
            _measure_machine(world, threads, timeout, device_named(device))
            return
        specs = [
            spec
            for name in ops_named(op or list(OPS))
            for spec in specs_of(name, shape or _SHAPES, sizes, dtype_named(dtype))
        ]
        for spec in specs:
            check_split(spec, world)
        device = device_named(device)
        check_gpus(world, device)
        if is_leader():
            check_cache()
        out, right, over_cache = console(), True, {}
        grid = table("op\nM, N, K", tuple(ALGORITHMS), "auto before, and from now on")
        with open_session(world, threads=threads, timeout=timeout, device=device) as session:
            for spec in specs:
                with out.status(f"{spec.op} {spec}"):
                    reports = session.run(tune_case, spec, repeat, budget, device)
                right = right and reports[0].right
                if session.leader:
                    over_cache[f"{spec.op} {spec}"] = min(one.inputs_over_cache for one in reports)
                    path, after = keep(spec, reports)
                    grid.add_row(*_cells(spec, reports, after))
            if session.leader:
                out.print(grid)
                for line in filter(None, [warm_cases(over_cache), _LEGEND, f"Kept in {path}"]):
                    out.print(line, markup=False)
        if not right:
            raise typer.Exit(1)


def _measure_machine(world: int, threads: int, timeout: int, device: str) -> None:
    check_gpus(world, device)
    if is_leader():
        check_cache()
    with open_session(world, threads=threads, timeout=timeout, device=device) as session:
        reports = session.run(measure_machine, device)
        if session.leader:
            path, profile = keep_machine(reports)
            console().print(f"{profile.title}: {rates_text(profile)}\nKept in {path}", markup=False)


_LEGEND = (
    "ms: the slowest rank's median, interleaved. Empty: the algorithm cannot run this case, see "
    "tpkernels explain, or it rounds differently."
)


def _cells(spec: Spec, reports: list[TuneReport], after: Plan) -> list[str]:
    report, times = reports[0], medians(reports)
    best = min(times, key=times.__getitem__, default=None)
    cells = []
    for name in ALGORITHMS:
        if name in times:
            text = milliseconds(times[name])
            cells.append(f"[bold green]{text}[/]" if name == best else text)
        else:
            verdict = report.verdicts.get(name)
            cells.append("[bold red]WRONG[/]" if verdict and not verdict.right else "")
    return [f"{spec.op}\n[dim]{spec}[/]", *cells, escape(_change(report.before, after))]


def _change(before: Plan, after: Plan) -> str:
    if before.algorithm == after.algorithm:
        return f"{after.algorithm}: {after.reason}"
    return f"{before.algorithm}, now {after.algorithm}: {after.reason}"
