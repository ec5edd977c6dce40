"""``tpkernels tune``: measures the algorithms on this machine, for ``auto`` to choose by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels.backends import OPS
from tpkernels.bench.cases import Spec
from tpkernels.bench.device import device_named
from tpkernels.bench.inputs import warm_cases
from tpkernels.bench.options import (
    DTYPES,
    UsageError,
    at_least,
    check_workers,
    dtype_named,
    ops_named,
    writable,
    writing,
)
from tpkernels.bench.output import console, milliseconds, table
from tpkernels.bench.session import is_leader, open_session, ranks_share_gpus, world_size
from tpkernels.bench.specs import check_split, specs_of
from tpkernels.bench.timing import summary
from tpkernels.bench.tuning import TuneReport, measurement, tune_case
from tpkernels.cache import cache_folder, check_folder, make_folder
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Means, Plan, choose

_SHAPES = [f"{m},4096,4096" for m in (1, 16, 64, 256, 1024, 4096)]
_BYTES = "4K,64K,1M,16M,64M"


def tune(
    op: Annotated[
        list[str] | None, typer.Option(help="An op; may be repeated. All by default.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K of a matmul op, over all ranks; may be repeated. By default M from 1 to "
            "4096 of M,4096,4096. Between two M that were measured auto follows from both."
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--bytes", help="Sizes for the collectives alone, over all ranks.")
    ] = _BYTES,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "--tp", help="Ranks; 2 by default. torchrun's under torchrun."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "bf16",
    device: Annotated[
        str | None, typer.Option(help="cpu | cuda; cuda by default where there is a GPU.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Timed repetitions at the most.")] = 40,
    budget: Annotated[
        int, typer.Option(help="Seconds after which a case starts no further repetition.")
    ] = 20,
    threads: Annotated[
        int, typer.Option(help="Threads of a rank, here and where it will be used.")
    ] = 1,
    timeout: Annotated[int, typer.Option(help="Seconds that one case may take.")] = 1800,
) -> None:
    """Measure every algorithm for the given shapes, so that auto takes the fastest.

    Each is checked first, then all are timed by turns, on inputs that are in no cache; where memory
    does not allow that, the output tells. The times are kept in the cache folder
    ($XDG_CACHE_HOME/tpkernels, by default ~/.cache/tpkernels), case by case, for this device,
    number of ranks and threads, and these versions of tpkernels, torch and Triton; groups that are
    set up from then on use them. The exit code is 1 if a result is wrong; wrong ones are left out.
    """
    with exit_codes():
        world = world_size(nproc, 2)
        at_least(1, repeat=repeat, budget=budget, timeout=timeout)
        check_workers(threads=threads)
        if world == 1:
            raise UsageError("one rank has nothing to choose: it communicates with nobody")
        specs = _specs(op or list(OPS), shape or _SHAPES, sizes, dtype, world)
        device = device_named(device)
        _check_gpus(world, device)
        if is_leader():
            _check_cache()
        out, right, over_cache = console(), True, {}
        shown = table("op\nM, N, K", tuple(ALGORITHMS), "auto before, and from now on")
        with open_session(world, threads=threads, timeout=timeout, device=device) as session:
            for spec in specs:
                with out.status(f"{spec.op} {spec}"):
                    reports = session.run(tune_case, spec, repeat, budget, device)
                right = right and all(one.right for one in reports[0].verdicts.values())
                if session.leader:
                    over_cache[f"{spec.op} {spec}"] = min(one.inputs_over_cache for one in reports)
                    path, after = _keep(spec, reports)
                    shown.add_row(*_cells(spec, reports, after))
            if session.leader:
                _show(shown, warm_cases(over_cache), path, out)
        if not right:
            raise typer.Exit(1)


def _specs(ops: list[str], shapes: list[str], sizes: str, dtype: str, world: int) -> list[Spec]:
    found = [
        spec for op in ops_named(ops) for spec in specs_of(op, shapes, sizes, dtype_named(dtype))
    ]
    for spec in found:
        check_split(spec, world)
    return found


def _check_gpus(world: int, device: str) -> None:
    if device == "cuda" and ranks_share_gpus(world):
        raise UsageError(
            f"{world} ranks on {torch.cuda.device_count()} GPUs: times of ranks that share a GPU "
            "say nothing about others; take fewer with --tp, or --device cpu"
        )


def _check_cache() -> None:
    """``UsageError`` if the cache could not be written after all the measuring, or would not be
    read."""
    try:
        folder = cache_folder()
        make_folder(folder)
        check_folder(folder)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"no cache folder: {error}; set XDG_CACHE_HOME to one") from error
    except ValueError as error:
        raise UsageError(f"the cache folder '{folder}' is not used: {error}") from error
    writable(folder / "tuning")


def _medians(reports: list[TuneReport]) -> dict[str, float]:
    """Milliseconds of the slowest rank."""
    names = reports[0].samples
    return {name: summary([each.samples[name] for each in reports]).median for name in names}


def _keep(spec: Spec, reports: list[TuneReport]) -> tuple[Path, Plan]:
    """Adds the times to the machine's table; where it is, and what ``auto`` is with it."""
    machine = reports[0].machine
    config = reports[0].config
    new = measurement(spec, machine.ranks, _medians(reports), machine.kind, config)
    with writing(store.path_for(machine)):
        path, tuned = store.update(machine, new)
    problem = spec.problem(machine.ranks, machine.kind)
    return path, choose(problem, Means(shared_memory=machine.shared_memory), tuned=tuned)


def _cells(spec: Spec, reports: list[TuneReport], after: Plan) -> list[str]:
    report, times = reports[0], _medians(reports)
    best = min(times, key=times.__getitem__, default=None)
    cells = []
    for name in ALGORITHMS:
        if name in times:
            text = milliseconds(times[name])
            cells.append(f"[bold green]{text}[/]" if name == best else text)
        else:
            cells.append("[bold red]WRONG[/]" if name in report.verdicts else "")
    return [f"{spec.op}\n[dim]{spec}[/]", *cells, escape(_change(report.before, after))]


def _change(before: Plan, after: Plan) -> str:
    if before.algorithm == after.algorithm:
        return f"{after.algorithm}: {after.reason}"
    return f"{before.algorithm}, now {after.algorithm}: {after.reason}"


def _show(shown: Table, warm: str, path: Path, out: Console) -> None:
    out.print(shown)
    if warm:
        out.print(warm, markup=False)
    out.print(
        "ms: the slowest rank's median, by turns. An empty field: it cannot run this case, see "
        f"tpkernels explain.\nKept in {path}",
        markup=False,
    )
