"""``tpkernels explain``: what ``auto`` takes for a problem, beside what else, and why."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from tpkernels.bench.cases import MATMUL_OPS, Spec
from tpkernels.bench.device import device_known, unsupported_kernels
from tpkernels.bench.options import (
    DTYPES,
    UsageError,
    at_least,
    check_workers,
    dtype_named,
    ops_named,
)
from tpkernels.bench.output import console, milliseconds, table
from tpkernels.bench.specs import check_split, spec_of
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Means, Plan, choose, unsupported_algorithms
from tpkernels.planning.machine import Machine, this_machine
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement, Table

_NEITHER = "not measured"


def explain(
    op: Annotated[str, typer.Option(help="The op.")],
    m: Annotated[int | None, typer.Option(help="Rows, over all ranks.")] = None,
    n: Annotated[int | None, typer.Option(help="Columns of the result, over all ranks.")] = None,
    k: Annotated[int | None, typer.Option(help="What the matmul sums over, in all.")] = None,
    nbytes: Annotated[
        str | None, typer.Option("--bytes", help="Instead of these: size of a collective alone.")
    ] = None,
    world: Annotated[int, typer.Option("--tp", "--nproc", help="Ranks.")] = 2,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "bf16",
    device: Annotated[str, typer.Option(help="cpu | cuda")] = "cpu",
    hosts: Annotated[
        int, typer.Option(help="How many hosts the ranks are on; of several they share no memory.")
    ] = 1,
    threads: Annotated[int, typer.Option(help="Threads of a rank.")] = 1,
) -> None:
    """Show what auto takes for a problem, and why, with the times that `tpkernels tune` has taken
    here. Starts no ranks."""
    with exit_codes():
        check_workers(tp=world, threads=threads)
        at_least(1, hosts=hosts)
        device_known(device)
        spec = _spec(op, (m, n, k), nbytes, dtype, world)
        shared = hosts == 1
        problem = spec.problem(world, device)
        machine, measured = None, Table()
        if device == "cpu" or torch.cuda.is_available():
            machine = this_machine(device, world, hosts, shared, threads=threads)
            measured = store.load_or_warn(machine)
        missing = unsupported_kernels(device)
        means = Means(shared_memory=shared, unsupported=missing)
        found = unsupported_algorithms(problem, means)
        plan = choose(problem, means, tuned=measured)
        _show(spec, problem, found, plan, measured, machine, console())


def _spec(
    op: str, extents: tuple[int | None, ...], nbytes: str | None, dtype: str, world: int
) -> Spec:
    ops_named([op])
    matmul = op in MATMUL_OPS
    needed, given = ("--m, --n and --k", "--bytes") if matmul else ("--bytes", "--m, --n and --k")
    if matmul and (None in extents or nbytes is not None):
        raise UsageError(f"{op} takes {needed}, and no {given}")
    if not matmul and (nbytes is None or any(one is not None for one in extents)):
        raise UsageError(f"{op} takes {needed}, and no {given}")
    spec = spec_of(op, ",".join(map(str, extents)), nbytes or "", dtype_named(dtype))
    check_split(spec, world)
    return spec


def _show(
    spec: Spec,
    problem: Problem,
    found: dict[str, str | None],
    plan: Plan,
    measured: Table,
    machine: Machine | None,
    out: Console,
) -> None:
    cases = measured.at(*problem.tuning_key) if problem.tuning_key is not None else []
    shown = table("algorithm", ("ms",), "why not")
    for name in ALGORITHMS:
        chosen = f"[bold green]{name}[/]" if name == plan.algorithm else name
        why = found[name]
        shown.add_row(chosen, _times(name, cases) if why is None else "", escape(why or ""))
    out.print(f"{spec.op} {spec}, {problem.world} ranks, {problem.device}")
    out.print(shown)
    out.print(f"auto takes [bold]{plan.algorithm}[/]: {escape(plan.reason)}")
    if machine is None:
        return
    count, where = len(measured.measurements), f"{problem.world} ranks x {machine.threads} threads"
    out.print(
        f"Measured here with {where}: {count} cases, {store.path_for(machine)}"
        if count
        else f"Nothing was measured here with {where}: see tpkernels tune",
        markup=False,
    )


def _times(name: str, cases: list[Measurement]) -> str:
    """One time for each measured size of the extent that is not part of the problem."""
    told = [
        milliseconds(case.ms[name]) + (f" ({case.other})" if len(cases) > 1 else "")
        for case in cases
        if name in case.ms
    ]
    return ", ".join(told) or _NEITHER
