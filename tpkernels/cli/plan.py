"""``tpkernels plan``: the ways to compute a product on a mesh, and a layer for many TP sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpkernels import validation
from tpkernels.bench.probes import machine_by_name
from tpkernels.bench.report import unsupported
from tpkernels.bench.sweep import LAYER, MODELS, Model, projection
from tpkernels.cli import options
from tpkernels.integers import ceil_div
from tpkernels.mesh.layout import Placements, text_of
from tpkernels.mesh.planner import Estimate, MatmulProblem, ranked
from tpkernels.planning.cost import (
    MEASURED,
    Profile,
    collective_seconds,
    fused_seconds,
    machines,
    product_seconds,
)
from tpkernels.terminal import (
    UsageError,
    at_least,
    byte_size,
    check_known,
    console,
    dtype_named,
    milliseconds,
    number_in,
    table,
    writing,
)

_PHASES = ("prefill", "decode")
_HELPS = 0.98  # of the time without overlap; less is within the spread of a measurement
_MOST_RANKS = 1024
_FORMATS = (".png", ".svg", ".pdf")
_NAMES: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
_LEGEND = (
    "MiB moved: received by all ranks together. ms: predicted. Exposed: the part of it in which a "
    "rank does not multiply. Steps in brackets are one op with the product."
)
_MOST_MESH_RANKS = 1 << 20


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
    dtype: options.Dtype = "bf16",
    wire_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype in which partial results travel: --dtype (default) or fp32."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the times of --model to this file.")
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
        tps = tps_of(tp)
        if nodes is not None:
            at_least(1, nodes=nodes)
        if plot is not None:
            _check_plot(plot)
        profile = machine_by_name(machine, tps[-1], device)
        times = layer_times(
            model, tps, profile, nodes=nodes, prefill=prefill, decode=decode, itemsize=itemsize
        )
        title = f"{model}, a layer on {profile.title}, {prefill} tokens and {decode} sequences"
        if plot is not None:
            _draw(times, plot, title)
        if as_json:
            _print_json(profile, "layers", [time.to_json() for time in times])
        else:
            _show_layers(times, title)
        return
    try:
        wire = validation.wire_dtype(
            None if wire_dtype is None else dtype_named(wire_dtype), dtype_named(dtype)
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if m is None or k is None or n is None or mesh is None:
        raise UsageError("pass --m, --k, --n and --mesh, or --model")
    if plot is not None:
        raise UsageError("--plot needs --model")
    at_least(1, m=m, k=k, n=n)
    shape = _mesh(mesh)
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


def _print_json(profile: Profile, name: str, content: list[dict[str, Any]]) -> None:
    typer.echo(json.dumps({"machine": profile.title, name: content}, indent=2))


# A product on a mesh.


def _mesh(text: str) -> tuple[int, ...]:
    """Parse the shape of a mesh, ``"8"`` or ``"2x4"``."""
    sizes = tuple(number_in(part) for part in text.lower().split("x"))
    if len(sizes) > 2 or not all(1 <= size <= _MOST_MESH_RANKS for size in sizes):
        raise UsageError(f"--mesh is '{text}'; pass one or two numbers of ranks, such as 8 or 2x4")
    return sizes


def _placements(option: str, text: str, dims: int) -> Placements:
    """Return the placements in ``"S0"`` or ``"S0,R"``. On a mesh of two dims one name stands for
    the first dim, and the second is R."""
    names = [part.strip().upper() for part in text.split(",")]
    names += ["R"] * (dims - len(names)) if len(names) == 1 else []
    for name in names:
        if name not in _NAMES:
            raise UsageError(
                f"unknown placement '{name}' in --{option}; choose from {', '.join(_NAMES)}"
            )
    if len(names) != dims:
        raise UsageError(
            f"--{option} is '{text}' with {len(names)} placements; the mesh has {dims} dims"
        )
    return tuple(_NAMES[name] for name in names)


def _show_product(problem: MatmulProblem, profile: Profile, as_json: bool) -> None:
    """Show the strategies, the fastest first."""
    pairs = ranked(problem, profile)
    rows = [(plan, cost, _reason(cost, pairs[0][1], profile)) for plan, cost in pairs]
    if as_json:
        plans = [
            {
                "strategy": plan.strategy,
                "result": text_of(plan.out),
                "steps": str(plan),
                "bytes": plan.nbytes,
                "flops": plan.flops,
                "seconds": cost.seconds,
                "product_seconds": cost.product,
                "communication_seconds": cost.communication,
                "exposed_seconds": cost.exposed,
                "memory_bytes": cost.memory,
                "reason": reason,
            }
            for plan, cost, reason in rows
        ]
        _print_json(profile, "plans", plans)
        return
    columns = ("result", "MiB moved", "ms", "exposed ms", "memory/rank")
    grid = table("strategy", columns, "steps")
    grid.add_column("reason")
    for i, (plan, cost, reason) in enumerate(rows):
        grid.add_row(
            plan.strategy if i else f"[bold green]{plan.strategy}[/]",
            text_of(plan.out),
            f"{plan.nbytes / 2**20:.4g}",
            milliseconds(1e3 * cost.seconds),
            milliseconds(1e3 * cost.exposed),
            byte_size(cost.memory),
            escape(str(plan)),
            escape(reason),
        )
    screen = console()
    screen.print(
        f"[{problem.m}, {problem.k}] {text_of(problem.x)} @ [{problem.k}, {problem.n}] "
        f"{text_of(problem.w)} on a mesh of {' x '.join(map(str, problem.mesh_shape))}, "
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


@dataclass(frozen=True)
class LayerTime:
    """A layer in one phase on so many ranks, in seconds.

    Attributes:
        product: the products alone.
        communication: the collectives alone.
        overlapped: both, each collective as one op with the product next to it.
    """

    tp: int
    nodes: int
    phase: str
    product: float
    communication: float
    overlapped: float

    @property
    def unfused(self) -> float:
        """Return the time of products and collectives one after the other."""
        return self.product + self.communication

    @property
    def exposed(self) -> float:
        """Return what overlap leaves of the communication."""
        return self.overlapped - self.product

    @property
    def helps(self) -> bool:
        """Return whether overlap makes the layer faster."""
        return self.overlapped < _HELPS * self.unfused

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "unfused": self.unfused,
            "exposed": self.exposed,
            "overlap_helps": self.helps,
        }


def tps_of(text: str) -> list[int]:
    """Parse numbers of ranks: ``"1..64"`` for the powers of two from 1 to 64, or ``"1,2,6"``."""
    span = re.fullmatch(r"(\d{1,4})\.\.(\d{1,4})", text.strip())
    if span is not None:
        first, last = int(span[1]), int(span[2])
        tps = [1 << i for i in range(_MOST_RANKS.bit_length()) if first <= 1 << i <= last]
    else:
        tps = sorted({number_in(part) for part in text.split(",")})
    if not tps or not 1 <= tps[0] <= tps[-1] <= _MOST_RANKS:
        raise UsageError(
            f"--tp is '{text}'; pass numbers from 1 to {_MOST_RANKS}, such as 1,2,8, or 1..64 for "
            "the powers of two between"
        )
    return tps


def layer_times(
    model: str,
    tps: Sequence[int],
    profile: Profile,
    *,
    nodes: int | None,
    prefill: int,
    decode: int,
    itemsize: int,
) -> list[LayerTime]:
    """Predict both phases on each number of ranks.

    Args:
        nodes: how many there are; None: as many as the ranks need.
        prefill, decode: rows of the activations, over all ranks.

    Raises:
        UsageError: an unknown model, or more ranks than heads or than the nodes have.
    """
    check_known("model", [model], MODELS)
    at_least(1, prefill=prefill, decode=decode)
    heads = MODELS[model].heads
    for tp in tps:
        if tp > heads:
            raise UsageError(f"--tp {tp}: {model} has {heads} heads, which are not split")
        if nodes is not None and tp > nodes * profile.node:
            raise UsageError(
                f"--tp {tp}: {nodes} nodes of {profile.node} have {nodes * profile.node} devices; "
                "pass more --nodes"
            )
    return [
        _layer(MODELS[model], tp, profile, phase, rows, itemsize)
        for phase, rows in zip(_PHASES, (prefill, decode), strict=True)
        for tp in tps
    ]


def _layer(
    model: Model, tp: int, profile: Profile, phase: str, rows: int, itemsize: int
) -> LayerTime:
    product = communication = overlapped = 0.0
    for name in LAYER:
        matmul = projection(model, name, tp)
        k, n = matmul.k, matmul.n
        shape = (rows, k, ceil_div(n, tp)) if matmul.column else (rows, ceil_div(k, tp), n)
        multiply = product_seconds(profile, *shape, itemsize)
        move = 0.0
        if phase == "prefill" or not matmul.column:
            nbytes = rows * (k if matmul.column else n) * itemsize
            move = collective_seconds(profile, nbytes, tp, passes=1 if phase == "prefill" else 2)
        product += multiply
        communication += move
        overlapped += fused_seconds(profile, shape, 0, move, tp, itemsize)
    return LayerTime(tp, ceil_div(tp, profile.node), phase, product, communication, overlapped)


def _show_layers(times: list[LayerTime], title: str) -> None:
    columns = ("TP", "nodes", "products", "communication", "unfused", "overlapped", "exposed")
    grid = table("phase", columns, "overlap")
    for time in times:
        parts = (time.product, time.communication, time.unfused, time.overlapped, time.exposed)
        numbers = [milliseconds(1e3 * seconds) for seconds in parts]
        speedup = f"{time.unfused / time.overlapped:.2f}x" if time.helps else "no gain"
        grid.add_row(time.phase, str(time.tp), str(time.nodes), *numbers, speedup)
    screen = console()
    screen.print(title, markup=False)
    screen.print(grid)
    screen.print("ms per layer, predicted; attention itself and norms are left out.", markup=False)


def _check_plot(path: Path) -> None:
    """Raise ``UsageError`` if no picture can be drawn, or not in this format."""
    missing = unsupported()
    if missing is not None:
        raise UsageError(f"--plot: {missing}")
    if path.suffix not in _FORMATS:
        raise UsageError(f"--plot is '{path}'; it must end in {', '.join(_FORMATS)}")


def _draw(times: Sequence[LayerTime], path: Path, title: str) -> None:
    """Draw a panel for each phase: lines of the products, the communication, and both with and
    without overlap."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(10, 3.6), layout="constrained")
    canvas.suptitle(title, fontsize="medium", parse_math=False)
    for axes, phase in zip(canvas.subplots(1, len(_PHASES)), _PHASES, strict=True):
        layers = [time for time in times if time.phase == phase]
        tps = [layer.tp for layer in layers]
        for label, style, name in (
            ("products", "b:", "product"),
            ("communication", "r:", "communication"),
            ("without overlap", "k--o", "unfused"),
            ("with overlap", "g-o", "overlapped"),
        ):
            # A log scale has no 0.
            ms = [1e3 * getattr(layer, name) or float("nan") for layer in layers]
            axes.plot(tps, ms, style, label=label, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(tps, labels=list(map(str, tps)))
        axes.set_xlabel("ranks")
        axes.set_ylabel("ms per layer")
        axes.set_title(phase, fontsize="medium")
        axes.legend(fontsize="small")
    with writing(path):
        canvas.savefig(path, dpi=150)
