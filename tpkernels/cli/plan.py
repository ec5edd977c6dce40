"""``tpkernels plan``: the ways to compute a product on a mesh, and a layer for many TP sizes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.markup import escape
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from typer import Option

from tpkernels import validation
from tpkernels.bench.probes import machine_by_name
from tpkernels.bench.sweep import LAYER, MODELS, Model, projection
from tpkernels.cli import options
from tpkernels.integers import ceil_div
from tpkernels.launch.terminal import (
    UsageError,
    at_least,
    byte_size,
    check_known,
    console,
    dtype_named,
    milliseconds,
    number_in,
    table,
)
from tpkernels.mesh.layout import Placements, placements_text
from tpkernels.mesh.planner import Estimate, MatmulProblem, ranked
from tpkernels.planning.cost import (
    MEASURED,
    Profile,
    all_to_all_seconds,
    collective_seconds,
    fused_seconds,
    machines,
    matmul_seconds,
)

_HELPS = 0.98  # of the time without overlap; less is within the spread of a measurement
_MOST_MESH_RANKS = 1 << 20
_PLACEMENTS: dict[str, Placement] = {
    "S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial(),
}  # fmt: skip
_LEGEND = (
    "MiB moved: received by all ranks together. ms: predicted. Exposed: the part of it in which a "
    "rank does not multiply. Steps in brackets are one op with the product."
)


def plan(
    m: Annotated[int | None, Option(help="Rows of x.")] = None,
    k: Annotated[int | None, Option(help="Columns of x, rows of w.")] = None,
    n: Annotated[int | None, Option(help="Columns of w.")] = None,
    mesh: Annotated[str | None, Option(help="Ranks along each mesh dim: 8 or 2x4.")] = None,
    x: Annotated[
        str, Option(help="Placement of x on each mesh dim: S0, S1, R, P; such as S0,S1.")
    ] = "R",
    w: Annotated[str, Option(help="The same of w.")] = "R",
    out: Annotated[
        str | None, Option(help="The same of the result. Default: the cheapest without P.")
    ] = None,
    model: Annotated[
        str | None, Option(help=f"Predict a layer of a model instead: {', '.join(MODELS)}.")
    ] = None,
    tp: Annotated[str, Option(help="Numbers of ranks for --model.")] = "1,2,4,8",
    prefill: Annotated[int, Option(help="Tokens of a prefill for --model.")] = 8192,
    decode: Annotated[int, Option(help="Sequences of a decode step for --model.")] = 64,
    machine: Annotated[
        str | None,
        Option(
            "--machine",
            "--gpu",
            help=f"{', '.join(machines())}, or {MEASURED} as measured by tpkernels tune --machine. "
            "Default: this one.",
        ),
    ] = None,
    dtype: options.Dtype = "bf16",
    wire_dtype: Annotated[
        str | None, Option(help="Dtype in which partial results travel: --dtype (default) or fp32.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Rank the ways to compute a product on a mesh, or predict a model's layer for many TP sizes.

    Times are those of a cost model, from the rates of a machine. Starts no ranks and needs no GPU.
    """
    itemsize = dtype_named(dtype).itemsize
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model is not None:
        if (m, k, n, mesh) != (None,) * 4:
            raise UsageError("pass --model, or --m, --k, --n and --mesh, not both")
        if wire_dtype is not None:
            raise UsageError("--wire-dtype is for a product; leave out --model")
        check_known("model", [model], MODELS)
        phases, tps = {"prefill": prefill, "decode": decode}, list(map(number_in, tp.split(",")))
        at_least(1, **phases)
        heads = MODELS[model].heads
        if not all(1 <= ranks <= heads for ranks in tps):
            raise UsageError(
                f"--tp is '{tp}'; pass numbers of ranks such as 1,2,8, at most the {heads} heads "
                f"of {model}, which are not split"
            )
        profile = machine_by_name(machine, max(tps), device)
        layers = layer_times(MODELS[model], tps, profile, phases, itemsize)
        if as_json:
            _print_json(profile, layers=[layer._asdict() for layer in layers])
            return
        title = f"{model}, a layer on {profile.title}, {prefill} tokens and {decode} sequences"
        _show_layers(layers, profile, title)
        return
    try:
        wire = validation.wire_dtype(
            None if wire_dtype is None else dtype_named(wire_dtype), dtype_named(dtype)
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if m is None or k is None or n is None or mesh is None:
        raise UsageError("pass --m, --k, --n and --mesh, or --model")
    at_least(1, m=m, k=k, n=n)
    shape = tuple(number_in(part) for part in mesh.lower().split("x"))
    if len(shape) > 2 or not all(1 <= size <= _MOST_MESH_RANKS for size in shape):
        raise UsageError(f"--mesh is '{mesh}'; pass one or two numbers of ranks, such as 8 or 2x4")
    problem = MatmulProblem(
        m=m,
        k=k,
        n=n,
        mesh_shape=shape,
        x=_placements("x", x, len(shape)),
        w=_placements("w", w, len(shape)),
        out=None if out is None else _placements("out", out, len(shape)),
        itemsize=itemsize,
        partial_itemsize=wire.itemsize,
    )
    _show_product(problem, machine_by_name(machine, torch.Size(shape).numel(), device), as_json)


def _print_json(profile: Profile, **content: list[dict[str, Any]]) -> None:
    typer.echo(json.dumps({"machine": profile.title, **content}, indent=2))


def _placements(option: str, text: str, dims: int) -> Placements:
    """Return the placements in ``"S0"`` or ``"S0,R"``. On a mesh of two dims one name stands for
    the first dim, and the second is R."""
    names = [part.strip().upper() for part in text.split(",")]
    names += ["R"] * (dims - len(names)) if len(names) == 1 else []
    for name in names:
        if name not in _PLACEMENTS:
            raise UsageError(
                f"unknown placement '{name}' in --{option}; choose from {', '.join(_PLACEMENTS)}"
            )
    if len(names) != dims:
        raise UsageError(
            f"--{option} is '{text}' with {len(names)} placements; the mesh has {dims} dims"
        )
    return tuple(_PLACEMENTS[name] for name in names)


def _show_product(problem: MatmulProblem, profile: Profile, as_json: bool) -> None:
    """Show the strategies, the fastest first."""
    pairs = ranked(problem, profile)
    plans: list[dict[str, Any]] = [
        {
            "strategy": plan.strategy,
            "result": placements_text(plan.out),
            "steps": str(plan),
            "bytes": plan.nbytes,
            "flops": plan.flops,
            "seconds": cost.seconds,
            "product_seconds": cost.product,
            "communication_seconds": cost.communication,
            "exposed_seconds": cost.exposed,
            "memory_bytes": cost.memory,
            "reason": _reason(cost, pairs[0][1], profile),
        }
        for plan, cost in pairs
    ]
    if as_json:
        _print_json(profile, plans=plans)
        return
    columns = ("result", "MiB moved", "ms", "exposed ms", "memory/rank")
    grid = table("strategy", columns, "steps")
    grid.add_column("reason")
    for i, row in enumerate(plans):
        grid.add_row(
            row["strategy"] if i else f"[bold green]{row['strategy']}[/]",
            row["result"],
            f"{row['bytes'] / 2**20:.4g}",
            milliseconds(1e3 * row["seconds"]),
            milliseconds(1e3 * row["exposed_seconds"]),
            byte_size(row["memory_bytes"]),
            escape(row["steps"]),
            escape(row["reason"]),
        )
    screen = console()
    screen.print(
        f"[{problem.m}, {problem.k}] {placements_text(problem.x)} @ [{problem.k}, {problem.n}] "
        f"{placements_text(problem.w)} on a mesh of {' x '.join(map(str, problem.mesh_shape))}, "
        f"{profile.title}",
        markup=False,
    )
    screen.print(grid)
    screen.print(_LEGEND, markup=False)


def _reason(cost: Estimate, best: Estimate, profile: Profile) -> str:
    if not cost.fits(profile):
        return f"needs more than the device's {profile.memory / 1e9:.4g} GB"
    if cost is best:
        hidden = cost.communication - cost.exposed
        if not cost.communication:
            return "the fastest: nothing to communicate"
        if hidden > 0.01 * cost.communication:
            return f"the fastest: hides {hidden / cost.communication:.0%} of its communication"
        return "the fastest"
    multiplies, moves = cost.product - best.product, cost.exposed - best.exposed
    if max(multiplies, moves) < 0.005 * best.seconds:
        return "as fast, with no fewer bytes"
    if multiplies > moves:
        return f"computes {cost.product / best.product:.3g}x as long"
    return f"exposes {1e3 * moves:.3g} ms more of communication"


# A layer of a model.


class LayerTime(NamedTuple):
    """Predicted seconds of a layer: of its products and of its collectives alone, and with each
    collective as one op with the product next to it. ``split``: of the MLP's weights, or of a
    mixture's experts, "width" or "experts"; ``imbalance``: rows of the rank with the most over the
    mean, expected of a router that takes each expert as often."""

    phase: str
    tp: int
    split: str
    imbalance: float
    product: float
    communication: float
    overlapped: float


def layer_times(
    model: Model, tps: Sequence[int], profile: Profile, phases: dict[str, int], itemsize: int
) -> Iterator[LayerTime]:
    """Predict a layer on each number of ranks, of a mixture by either split. ``phases``: rows of
    the activations, over all ranks, by phase."""
    for (phase, rows), tp in itertools.product(phases.items(), tps):
        dense = [name for name in LAYER if not (model.experts and name in ("gate_up", "down"))]
        times = [
            _projection_seconds(model, name, phase, rows, tp, profile, itemsize) for name in dense
        ]
        product, communication, overlapped = map(sum, zip(*times, strict=True))
        if not model.experts:
            yield LayerTime(phase, tp, "width", 1.0, product, communication, overlapped)
            continue
        for split in ("width", "experts") if 1 < tp <= model.experts else ("width",):
            imbalance, multiply, move = _expert_seconds(
                model, split, phase, rows, tp, profile, itemsize
            )
            more = product + multiply, communication + move, overlapped + multiply + move
            yield LayerTime(phase, tp, split, imbalance, *more)


def _projection_seconds(
    model: Model, name: str, phase: str, rows: int, tp: int, profile: Profile, itemsize: int
) -> tuple[float, float, float]:
    """Return the seconds of a projection's product, of its collective, and of both as one op."""
    matmul = projection(model, name, tp)
    k, n = matmul.k, matmul.n
    shape = (rows, k, ceil_div(n, tp)) if matmul.column else (rows, ceil_div(k, tp), n)
    move = 0.0
    if phase == "prefill" or not matmul.column:
        nbytes = rows * (k if matmul.column else n) * itemsize
        move = collective_seconds(profile, nbytes, tp, passes=1 if phase == "prefill" else 2)
    fused = fused_seconds(profile, shape, 0, move, tp, itemsize)
    return matmul_seconds(profile, *shape, itemsize), move, fused


def _expert_seconds(
    model: Model, split: str, phase: str, rows: int, tp: int, profile: Profile, itemsize: int
) -> tuple[float, float, float]:
    """Return the imbalance of a mixture's experts, and the seconds of their products on the rank
    with the most rows and of their collectives.

    A split of the width gathers all tokens and sums partials, as a dense MLP; a split of the
    experts sends a row for each route, and back. Of rows that go to one of W ranks at random the
    largest share is about mean + sqrt(2 mean ln W).
    """
    routes, by_expert = rows * model.top_k, split == "experts"
    held = ceil_div(model.experts, tp) if by_expert else model.experts
    mean = routes / tp if by_expert else float(routes)
    imbalance = 1.0
    if by_expert and tp > 1:
        imbalance = min(float(tp), 1 + math.sqrt(2 * math.log(tp) / mean))
    used = held * (1 - (1 - model.top_k / model.experts) ** rows)  # of those that a rank holds
    used = min(held, used * imbalance)  # on the rank with the most rows
    busiest = max(1, round(mean * imbalance / used))  # rows of an expert
    width = model.ffn if by_expert else ceil_div(model.ffn, tp)
    gates = 2 if model.gated else 1
    multiply = used * (
        matmul_seconds(profile, busiest, model.hidden, gates * width, itemsize)
        + matmul_seconds(profile, busiest, width, model.hidden, itemsize)
    )
    if by_expert:
        nbytes = mean * imbalance * model.hidden * itemsize
        return imbalance, multiply, 2 * all_to_all_seconds(profile, nbytes, tp)
    nbytes = rows * model.hidden * itemsize  # a gather and a scatter, or an all-reduce
    return imbalance, multiply, collective_seconds(profile, nbytes, tp, passes=2)


def _show_layers(layers: Iterable[LayerTime], profile: Profile, title: str) -> None:
    rows = list(layers)
    mixture = any(layer.split == "experts" for layer in rows)
    times = ("nodes", "products", "communication", "unfused", "overlapped", "exposed")
    columns = ("TP", *(("split", "imbalance") if mixture else ()), *times)
    grid = table("phase", columns, "overlap")
    for phase, tp, split, imbalance, product, communication, overlapped in rows:
        unfused = product + communication
        seconds = (product, communication, unfused, overlapped, overlapped - product)
        helps = overlapped < _HELPS * unfused
        grid.add_row(
            *(phase, str(tp), *([split, f"{imbalance:.2f}x"] if mixture else [])),
            str(ceil_div(tp, profile.node)),
            *(milliseconds(1e3 * one) for one in seconds),
            f"{unfused / overlapped:.2f}x" if helps else "no gain",
        )
    screen = console()
    screen.print(title, markup=False)
    screen.print(grid)
    screen.print("ms per layer, predicted; attention itself and norms are left out.", markup=False)
    if mixture:
        screen.print(
            "Split by experts, each rank keeps its own tokens, and the time is that of the rank "
            "with the most rows: imbalance, expected if all experts are as likely.",
            markup=False,
        )
