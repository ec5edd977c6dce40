"""``tpkernels explain``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tpkernels.bench.specs import check_split, spec_of_extents
from tpkernels.bench.tune import Explanation
from tpkernels.bench.tune import explain as explanation_of
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.launch.session import device_known
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.table import Measurement
from tpkernels.terminal import at_least, check_workers, console, dtype_named, milliseconds, table


def explain(
    op: Annotated[str, typer.Option(help="The op.")],
    m: Annotated[int | None, typer.Option(help="Rows, over all ranks.")] = None,
    n: Annotated[int | None, typer.Option(help="Columns of the result, over all ranks.")] = None,
    k: Annotated[int | None, typer.Option(help="Contraction extent, over all ranks.")] = None,
    nbytes: Annotated[
        str | None,
        typer.Option("--bytes", help="Size of a collective's tensor, instead of --m, --n, --k."),
    ] = None,
    world: Annotated[int, typer.Option("--tp", "--nproc", help="Number of ranks.")] = 2,
    dtype: options.Dtype = "bf16",
    device: Annotated[str, typer.Option(help="cpu | cuda")] = "cpu",
    hosts: Annotated[
        int, typer.Option(help="Number of hosts; ranks on several hosts share no memory.")
    ] = 1,
    threads: options.Threads = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --device cuda: the GPUs to predict times of, such as h100. Default: this "
            "machine's, else h100."
        ),
    ] = None,
) -> None:
    """Show which algorithm auto chooses for a problem and why, with the times that `tpkernels tune`
    measured here. For GPUs also the times predicted from their data sheets, by which nothing is
    chosen. Starts no ranks."""
    with exit_codes():
        check_workers(tp=world, threads=threads)
        at_least(1, hosts=hosts)
        device_known(device)
        spec = spec_of_extents(op, (m, n, k), nbytes, dtype_named(dtype))
        check_split(spec, world)
        explanation = explanation_of(spec, world, device, hosts=hosts, threads=threads, gpu=gpu)
        _show(f"{op} {spec}, {world} ranks, {device}", explanation, console())


def _show(title: str, explanation: Explanation, out: Console) -> None:
    plan, machine = explanation.plan, explanation.machine
    predicted = explanation.predicted
    grid = table("algorithm", ("ms", *(["predicted ms"] if predicted else [])), "why not")
    for name in ALGORITHMS:
        label = f"[bold green]{name}[/]" if name == plan.algorithm else name
        reason = explanation.unsupported[name]
        grid.add_row(
            label,
            _times(name, explanation.cases) if reason is None else "",
            *([milliseconds(1e3 * predicted[name]) if name in predicted else ""] * bool(predicted)),
            escape(reason or ""),
        )
    out.print(title)
    out.print(grid)
    if predicted:
        out.print(f"Predicted for {explanation.model} by data sheets; not measured", markup=False)
    if explanation.ways is not None:
        lines, words = explanation.ways
        out.print(
            f"direct sums by {lines}"
            + (f" where NVLink connects all GPUs, else by {words}" if words != lines else "")
            + ", for these bytes and ranks by the model of hops",
            markup=False,
        )
    out.print(f"auto chooses [bold]{plan.algorithm}[/]: {escape(plan.reason)}")
    if explanation.tries:
        out.print(
            f"In the first calls it tries {', '.join(explanation.tries)}, and keeps the fastest "
            "(tpkernels.init(autotune=False): it does not)",
            markup=False,
        )
    if machine is None:
        return
    count, where = len(explanation.table.measurements), f"{machine.ranks} ranks x {machine.threads}"
    out.print(
        f"Measured here with {where} threads: {count} cases, {store.path_for(machine)}"
        if count
        else f"Nothing was measured here with {where} threads: see tpkernels tune",
        markup=False,
    )


def _times(name: str, cases: list[Measurement]) -> str:
    """The time for each measured extent that is not part of the problem."""
    times = [
        milliseconds(case.ms[name]) + (f" ({case.other})" if len(cases) > 1 else "")
        for case in cases
        if name in case.ms
    ]
    return ", ".join(times) or "not measured"
