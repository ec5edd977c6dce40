"""``tpkernels plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from tpkernels.bench import layer_plan, layer_plot, mesh_plan
from tpkernels.bench.machine import engines_of, machine_by_name
from tpkernels.bench.models import MODELS
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.mesh.engines import ENGINES, engine_on, faster
from tpkernels.mesh.layout import text_of
from tpkernels.mesh.planner import MatmulProblem
from tpkernels.planning.machines import MEASURED, Profile, machines
from tpkernels.terminal import (
    UsageError,
    at_least,
    byte_size,
    check_known,
    console,
    dtype_named,
    milliseconds,
    table,
)


def plan(
    m: Annotated[int | None, typer.Option(help="Rows of x.")] = None,
    k: Annotated[int | None, typer.Option(help="Columns of x, rows of w.")] = None,
    n: Annotated[int | None, typer.Option(help="Columns of w.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Ranks along each mesh dim: 8 or 2x4.")] = None,
    x: Annotated[
        str, typer.Option(help="Placement of x on each mesh dim: S0, S1, R, P; such as S0,S1.")
    ] = "R",
    w: Annotated[str, typer.Option(help="The same of w.")] = "R",
    out: Annotated[
        str | None, typer.Option(help="The same of the result. Default: the cheapest without P.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Predict a layer of a model instead: {', '.join(MODELS)}."),
    ] = None,
    tp: Annotated[
        str, typer.Option(help="Ranks for --model: 1,2,8, or 1..64 for powers of two.")
    ] = "1..8",
    nodes: Annotated[
        int | None, typer.Option(help="Nodes for --model. Default: as many as --tp needs.")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Tokens of a prefill for --model.")] = 8192,
    decode: Annotated[int, typer.Option(help="Sequences of a decode step for --model.")] = 64,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            "--gpu",
            help=f"{', '.join(machines())}, or {MEASURED} as measured by tpkernels tune --machine. "
            "Default: this one.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="cpu, gpu or auto, the faster of the two for operands on the host. Default: the "
            "GPU if there is one, without copies."
        ),
    ] = None,
    cpu: Annotated[
        str | None, typer.Option(help="The CPU for --engine, by the names of --machine.")
    ] = None,
    dtype: options.Dtype = "bf16",
    wire_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype in which partial results travel: --dtype (default) or fp32."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the times of --model to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """Rank the ways to compute a product on a mesh, or predict a model's layer for many TP sizes.

    Times are those of a cost model, from the rates of a machine. Starts no ranks and needs no GPU.
    """
    with exit_codes():
        itemsize = dtype_named(dtype).itemsize
        partial_itemsize = mesh_plan.partial_itemsize(wire_dtype, dtype_named(dtype))
        if model is not None:
            if (m, k, n, mesh) != (None,) * 4:
                raise UsageError("pass --model, or --m, --k, --n and --mesh, not both")
            if engine is not None:
                raise UsageError("--engine is for a product; leave out --model")
            if wire_dtype is not None:
                raise UsageError("--wire-dtype is for a product; leave out --model")
            _plan_layers(model, tp, nodes, (prefill, decode), machine, itemsize, plot, as_json)
            return
        if m is None or k is None or n is None or mesh is None:
            raise UsageError("pass --m, --k, --n and --mesh, or --model")
        if plot is not None:
            raise UsageError("--plot needs --model")
        problem = mesh_plan.problem_of((m, k, n), mesh, x, w, out, itemsize, partial_itemsize)
        _plan_product(problem, *_engine(problem, engine, cpu, machine), as_json)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _engine(
    problem: MatmulProblem, engine: str | None, cpu: str | None, gpu: str | None
) -> tuple[Profile, str | None]:
    """The machine to plan for; and, if an engine was asked for, which it is and why."""
    ranks = torch.Size(problem.mesh_shape).numel()
    if engine is None:
        if cpu is not None:
            raise UsageError("--cpu needs --engine")
        return machine_by_name(gpu, ranks, _device()), None
    check_known("engine", [engine], ("auto", *ENGINES))
    if engine == "cpu":
        gpu = None
    on_cpu, on_gpu = engines_of(cpu, gpu, ranks)
    if engine == "cpu":
        return on_cpu, "cpu: asked for"
    if on_gpu is None:
        if engine == "gpu":
            raise UsageError("--engine is 'gpu', and this machine has none; name one with --gpu")
        return on_cpu, "cpu: this machine has no GPU; name one with --gpu to compare with it"
    if engine == "gpu":
        return on_gpu, "gpu: asked for"
    best, reason = faster(engine_on(problem, on_cpu), engine_on(problem, on_gpu))
    return best.profile, f"{best.name}: {reason}"


def _plan_product(
    problem: MatmulProblem, profile: Profile, engine: str | None, as_json: bool
) -> None:
    rows = mesh_plan.rows(problem, profile)
    if as_json:
        plans = [row.to_json() for row in rows]
        content = {"machine": profile.title, "engine": engine, "plans": plans}
        typer.echo(json.dumps(content, indent=2))
        return
    columns = ("result", "MiB moved", "ms", "exposed ms", "memory/rank")
    grid = table("strategy", columns, "steps")
    grid.add_column("reason")
    for i, row in enumerate(rows):
        name = f"[bold green]{row.plan.strategy}[/]" if i == 0 else row.plan.strategy
        grid.add_row(
            name,
            text_of(row.plan.out),
            f"{row.plan.nbytes / 2**20:.4g}",
            milliseconds(1e3 * row.cost.seconds),
            milliseconds(1e3 * row.cost.exposed),
            byte_size(row.cost.memory),
            escape(str(row.plan)),
            escape(row.reason),
        )
    screen = console()
    screen.print(
        f"[{problem.m}, {problem.k}] {text_of(problem.x)} @ [{problem.k}, {problem.n}] "
        f"{text_of(problem.w)} on a mesh of {' x '.join(map(str, problem.mesh_shape))}, "
        f"{profile.title}",
        markup=False,
    )
    if engine is not None:
        screen.print(f"Engine {engine}", markup=False)
    screen.print(grid)
    screen.print(_LEGEND, markup=False)


_LEGEND = (
    "MiB moved: received by all ranks together. ms: predicted. Exposed: the part of it in which a "
    "rank does not multiply. Steps in brackets are one op with the product."
)


def _plan_layers(
    model: str,
    tp: str,
    nodes: int | None,
    tokens: tuple[int, int],
    machine: str | None,
    itemsize: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    tps = layer_plan.tps_of(tp)
    if nodes is not None:
        at_least(1, nodes=nodes)
    if plot is not None:
        layer_plot.check_plot(plot)
    profile = machine_by_name(machine, tps[-1], _device())
    prefill, decode = tokens
    times = layer_plan.layer_times(
        model, tps, profile, nodes=nodes, prefill=prefill, decode=decode, itemsize=itemsize
    )
    title = f"{model}, a layer on {profile.title}, {prefill} tokens and {decode} sequences"
    if plot is not None:
        layer_plot.plot(times, plot, title)
    summaries = [layer_plan.summary(times, phase) for phase in layer_plan.PHASES]
    if as_json:
        layers = [each.to_json() for each in times]
        content = {"machine": profile.title, "layers": layers, "summary": summaries}
        typer.echo(json.dumps(content, indent=2))
        return
    columns = ("TP", "nodes", "products", "communication", "unfused", "overlapped", "exposed")
    grid = table("phase", columns, "overlap")
    for each in times:
        parts = (each.product, each.communication, each.unfused, each.overlapped, each.exposed)
        numbers = [milliseconds(1e3 * seconds) for seconds in parts]
        helps = f"{each.unfused / each.overlapped:.2f}x" if each.helps else "no gain"
        grid.add_row(each.phase, str(each.tp), str(each.nodes), *numbers, helps)
    screen = console()
    screen.print(title, markup=False)
    screen.print(grid)
    for line in ("ms per layer, predicted; attention itself and norms are left out.", *summaries):
        screen.print(line, markup=False)
