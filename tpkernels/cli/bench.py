"""``tpkernels bench``: checks ops, then times them beside what they replace and consist of."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tpkernels import dtypes
from tpkernels.backends import OPS
from tpkernels.benchmarking import Timing
from tpkernels.cli import environment
from tpkernels.cli.cases import MATMUL_OPS, Spec
from tpkernels.cli.comparison import BASELINES, CaseReport, run_case
from tpkernels.cli.options import (
    DTYPES,
    UsageError,
    algorithms_named,
    at_least,
    dtype_named,
    exit_codes,
    ops_named,
    shape_of,
    sizes_of,
    writable,
)
from tpkernels.cli.output import byte_size, console, milliseconds, table
from tpkernels.cli.session import open_session, world_size
from tpkernels.cli.timing import summary
from tpkernels.plan import choose

_SHAPES = ["16,2048,2048", "1024,2048,2048"]
_BYTES = "64K,1M,32M"


def bench(
    op: Annotated[
        list[str] | None, typer.Option(help="An op; may be repeated. All by default.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K of a matmul op, over all ranks; may be repeated. By default "
            f"{' and '.join(_SHAPES)}."
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--bytes", help="Sizes for the collectives alone, over all ranks.")
    ] = _BYTES,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks; 2 by default. torchrun's under torchrun.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "bf16",
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help="auto (the default) or an algorithm; may be repeated."),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Timed repetitions of each variant.")] = 20,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write results and environment here.")
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="Time gloo and torch.matmul too; slow for 16-bit on old CPUs.")
    ] = True,
    threads: Annotated[int, typer.Option(help="Threads of a rank.")] = 1,
    timeout: Annotated[int, typer.Option(help="Seconds that one case may take.")] = 1800,
) -> None:
    """Check ops on random data, then time them: slowest rank, median of the repetitions.

    Beside each op: gloo (torch.matmul and a collective of torch.distributed), and the local matmul
    alone, torch's and that of tpkernels. All variants run by turns. The exit code is 1 if a result
    is wrong; wrong ones are not timed. Also: torchrun --nproc-per-node 2 -m -- tpkernels bench
    """
    with exit_codes():
        world = world_size(nproc, 2)
        at_least(1, repeat=repeat, threads=threads, timeout=timeout)
        specs = _specs(ops_named(op or list(OPS)), shape or _SHAPES, sizes, dtype, world)
        names = algorithms_named(algorithm or ["auto"])
        _runnable(specs, names, world)
        target = None if json_file is None else writable(json_file)
        results, header = [], _environment(world, threads, repeat)
        out = console()
        with open_session(world, threads=threads, timeout=timeout) as session:
            for spec in specs:
                with out.status(f"{spec.op} {spec.shape}"):
                    reports = session.run(run_case, spec, names, repeat, baselines)
                results += [_result(spec, name, reports) for name in names]
            if session.leader:
                _show(results, out)
                if target is not None:
                    report = {"environment": header, "results": results}
                    target.write_text(json.dumps(report, indent=2) + "\n")
        if not all(result["right"] for result in results):
            raise typer.Exit(1)


def _specs(
    ops: list[str], shapes: list[str], sizes: str, dtype_name: str, world: int
) -> list[Spec]:
    dtype = dtype_named(dtype_name)
    specs = []
    for op in ops:
        if op in MATMUL_OPS:
            for shape in map(shape_of, dict.fromkeys(shapes)):
                _, n, k = shape
                split, size = ("N", n) if op == "all_gather_matmul" else ("K", k)
                if size % world:
                    raise UsageError(
                        f"{split} of {','.join(map(str, shape))} is {size}: {op} splits it over "
                        f"{world} ranks, which do not divide it"
                    )
                specs.append(Spec(op, shape, dtype))
            continue
        for nbytes in dict.fromkeys(sizes_of(sizes)):
            if nbytes % dtype.itemsize:
                raise UsageError(f"{nbytes} bytes are no whole number of {dtypes.name(dtype)}")
            specs.append(Spec(op, (nbytes // dtype.itemsize,), dtype))
    return specs


def _runnable(specs: list[Spec], algorithms: list[str], world: int) -> None:
    for spec, name in itertools.product(specs, algorithms):
        try:
            choose(spec.problem(world), shared_memory=True, requested=name)
        except NotImplementedError as error:
            raise UsageError(str(error)) from error


def _environment(world: int, threads: int, repeat: int) -> dict[str, Any]:
    return {
        **environment.versions(),
        **environment.devices(),
        "vector_unit": environment.vector_units()["in_use"],
        "ranks": world,
        "threads": threads,
        "repeat": repeat,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["tpkernels", *sys.argv[1:]]),
        "load": os.getloadavg(),
    }


def _result(spec: Spec, requested: str, reports: list[CaseReport]) -> dict[str, Any]:
    """One row of the table and of the file."""
    choice = reports[0].choices[requested]
    ratio = choice.verdict.ratio
    times = {
        name: summary([report.samples[name] for report in reports]) for name in reports[0].samples
    }
    return {
        "op": spec.op,
        "shape": spec.shape if spec.op in MATMUL_OPS else None,
        "bytes": spec.problem(len(reports)).nbytes,
        "dtype": dtypes.name(spec.dtype),
        "requested": requested,
        "algorithm": choice.algorithm,
        "reason": choice.reason,
        "right": choice.verdict.right,
        "error_over_bound": ratio if math.isfinite(ratio) else None,
        "ms": {
            "tpkernels": _time(times.get(requested)),
            **{name: _time(times.get(name)) for name in BASELINES},
        },
    }


def _time(time: Timing | None) -> dict[str, float] | None:
    return None if time is None else asdict(time)


def _show(results: list[dict[str, Any]], out: Console) -> None:
    ratios = ("ms /\nmatmul", "ms /\nproduct", "gloo /\nms")
    result = table("op\nM, N, K", ("ms", "p95", *BASELINES, *ratios), "algorithm: reason")
    for row in results:
        result.add_row(*_cells(row))
    out.print(result)
    out.print(
        "ms: the slowest rank's median; p95: the 95th percentile of the repetitions. Measured by "
        "turns with it:\ngloo: torch.matmul and a collective of torch.distributed; matmul: "
        "torch.matmul of the local sizes alone; product: that of tpkernels.\n"
        "ms / matmul, ms / product: 1 is as fast as the product alone; gloo / ms: the speed-up "
        "over gloo."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    size = ", ".join(map(str, row["shape"])) if row["shape"] else byte_size(row["bytes"])
    cells = [f"{row['op']}\n[dim]{size} {row['dtype']}[/]"]
    chosen = f"{row['algorithm']}: {row['reason']}"
    medians = {name: time and time["median"] for name, time in row["ms"].items()}
    others = [milliseconds(medians[name]) if medians[name] else "" for name in BASELINES]
    ours = medians["tpkernels"]
    if ours is None:
        return [*cells, "[bold red]WRONG[/]", "", *others, "", "", "", chosen]
    ratios = [
        f"{ours / medians[name]:.2f}" if medians[name] else "" for name in ("matmul", "product")
    ]
    p95 = milliseconds(row["ms"]["tpkernels"]["p95"])
    speedup = f"{medians['gloo'] / ours:.2f}" if medians["gloo"] else ""
    return [*cells, f"[bold]{milliseconds(ours)}[/]", p95, *others, *ratios, speedup, chosen]
