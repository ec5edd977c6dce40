"""``tpkernels explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from tpkernels.bench.probes import machine_by_name
from tpkernels.bench.specs import Spec, check_split, ops_named, spec_of, unsupported_kernels
from tpkernels.cli import options
from tpkernels.launch.session import device_known
from tpkernels.op_spec import OPS
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Means, Plan, candidates, choose, unsupported_algorithms
from tpkernels.planning.cost import DEFAULTS, all_reduce_way, predicted
from tpkernels.planning.machine import Machine, instructions, this_machine
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement, Table
from tpkernels.shards import shard_sizes
from tpkernels.symm.node import why_not_hierarchical
from tpkernels.terminal import (
    UsageError,
    at_least,
    check_workers,
    console,
    dtype_named,
    milliseconds,
    table,
)
from tpkernels.tuning.contest import ELIGIBLE, is_eligible


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
    check_workers(tp=world, threads=threads)
    at_least(1, hosts=hosts)
    device_known(device)
    spec = _spec_of_extents(op, (m, n, k), nbytes, dtype_named(dtype))
    check_split(spec, world)
    explanation = explanation_of(spec, world, device, hosts=hosts, threads=threads, gpu=gpu)
    _show(f"{op} {spec}, {world} ranks, {device}", explanation, console())


def _spec_of_extents(
    op: str, extents: tuple[int | None, ...], sizes: str | None, dtype: torch.dtype
) -> Spec:
    """Return the spec given by either --m, --n, --k (``extents``) or --bytes, whichever ``op``
    needs."""
    ops_named([op])
    needed, unused = "--m, --n and --k", "--bytes"
    complete, excluded = None not in extents, sizes is not None
    if not OPS[op].has_matmul:
        needed, unused = unused, needed
        complete, excluded = excluded, any(extent is not None for extent in extents)
    if excluded or not complete:
        raise UsageError(f"{op} takes {needed}, not {unused}")
    return spec_of(op, ",".join(map(str, extents)), sizes or "", dtype)


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
    """Return the time for each measured extent that is not part of the problem."""
    times = [
        milliseconds(case.ms[name]) + (f" ({case.other})" if len(cases) > 1 else "")
        for case in cases
        if name in case.ms
    ]
    return ", ".join(times) or "not measured"


@dataclass(frozen=True)
class Explanation:
    """Why ``auto`` chooses its algorithm for a case.

    Attributes:
        plan: the choice.
        unsupported: for each algorithm, why it cannot run; None: it can.
        cases: the measurements of this very problem.
        machine: None if this machine does not have the device.
        table: everything measured for the machine.
        tries: what ``auto`` tries in the first calls; empty: it keeps to the plan.
        ways: how `direct` sums on GPUs, where NVLink connects all of them and where not; None: not
            at all, or on CPUs.
        predicted: seconds by the model of GPUs, by algorithm; empty for CPUs.
        model: the GPUs of that model.
    """

    plan: Plan
    unsupported: dict[str, str | None]
    cases: list[Measurement]
    machine: Machine | None
    table: Table
    tries: list[str]
    ways: tuple[str, str] | None
    predicted: Mapping[str, float]
    model: str


def explanation_of(
    spec: Spec, world: int, device: str, *, hosts: int, threads: int, gpu: str | None = None
) -> Explanation:
    """Plan a case for ranks on this machine, without starting any. ``gpu`` names the GPUs for the
    predictions; None: this machine's, or those of `cost.DEFAULTS`."""
    shared_memory = hosts == 1
    problem = spec.problem(world, device)
    means = Means(
        shared_memory,
        instructions=instructions(),
        unsupported=unsupported_kernels(device),
        why_no_node=why_not_hierarchical(shard_sizes(world, hosts)),
    )
    machine, table = None, Table()
    if device == "cpu" or torch.cuda.is_available():
        machine = this_machine(device, world, hosts, shared_memory, threads=threads)
        table = store.load_or_warn(machine)
    key = problem.tuning_key
    predicted, model = _predicted(spec, world, gpu) if device == "cuda" else ({}, "")
    return Explanation(
        plan=choose(problem, means, tuned=table),
        unsupported=unsupported_algorithms(problem, means),
        cases=[] if key is None else table.at(*key),
        machine=machine,
        table=table,
        tries=[name for name in candidates(problem, means) if name in ELIGIBLE]
        if is_eligible(problem, shared_memory, table)
        else [],
        ways=_ways(problem) if device == "cuda" else None,
        predicted=predicted,
        model=model,
    )


def _ways(problem: Problem) -> tuple[str, str] | None:
    if problem.op not in ("all_reduce", "matmul_all_reduce"):
        return None
    lines, words = (all_reduce_way(problem.nbytes, problem.world, each) for each in (True, False))
    return lines, words


def _predicted(spec: Spec, world: int, gpu: str | None) -> tuple[Mapping[str, float], str]:
    """Predict the times of algorithms by the model of GPUs, and name it; nothing of several
    nodes."""
    if gpu is None:
        there = torch.cuda.is_available()
        gpu = store.name_of_own("cuda") if there else DEFAULTS["cuda"]
    profile = machine_by_name(gpu, world, "cuda")
    if profile.device != "cuda":
        raise UsageError(f"--gpu is '{gpu}', {profile.title}, which is no GPU")
    problem = spec.problem(world, "cuda")
    # The model knows none of these.
    if world > profile.node or problem.spec.scaled or problem.spec.exchanges:
        return {}, profile.title
    return predicted(problem, spec.other, profile), profile.title
