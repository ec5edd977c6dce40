"""``tpkernels demo``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.demo import LayerReport, LayerShape, TimedOp, run_layer
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.launch.session import open_session, world_size
from tpkernels.local.native import native
from tpkernels.terminal import at_least, check_workers, console, dtype_named, milliseconds, table
from tpkernels.timing import summary


def demo(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "--tp", help="Number of ranks; default 4, or torchrun's."),
    ] = None,
    m: Annotated[int, typer.Option(help="Tokens, over all ranks.")] = 1024,
    hidden: Annotated[int, typer.Option(help="Width of the layer.")] = 768,
    ffn: Annotated[int, typer.Option(help="Inner width of the MLP, over all ranks.")] = 2048,
    dtype: options.Dtype = "bf16",
    repeat: Annotated[
        int, typer.Option(help="Maximum number of repetitions; slow ops get three.")
    ] = 7,
    threads: options.Threads = 1,
    timeout: options.Timeout = 300,
) -> None:
    """Run a tensor-parallel transformer layer: verify every op, and time it against its baseline.

    Results on random data are compared with float64; the exit code is 1 if one is wrong. Also under
    torchrun: torchrun --nproc-per-node 2 -m -- tpkernels demo
    """
    with exit_codes():
        world = world_size(nproc, 4)
        at_least(1, m=m, repeat=repeat, timeout=timeout)
        check_workers(threads=threads)
        shape = LayerShape(m=m, hidden=hidden, ffn=ffn, dtype=dtype_named(dtype))
        shape.check(world)
        out = console()
        with open_session(world, threads=threads, timeout=timeout) as session:
            if session.leader:
                out.print(f"Layer of width {hidden}, MLP {ffn}, {m} tokens, {dtype}, {world} ranks")
            with out.status("verifying and timing"):
                reports = session.run(run_layer, shape, repeat)
            if session.leader:
                _show(reports, shape, out)
        if reports[0].wrong:
            raise typer.Exit(1)


def _show(reports: list[LayerReport], shape: LayerShape, out: Console) -> None:
    """The table, its legend, and PASS or FAIL."""
    out.print(_table(reports))
    layer, wrong = reports[0].layer, reports[0].wrong
    out.print(
        f"The layer as a whole, relative to float64 on one rank: error {layer.error:.2g}, "
        f"bound {layer.bound:.2g}.\n"
        "error/bound: the maximum over all elements; at most 1 is right. ms: the slowest rank's "
        "median, interleaved.\n"
        "baseline: a torch.distributed collective (gloo) and torch.matmul; torch.matmul: its "
        "matmul alone.\n"
        "unfused: nothing overlapped, but with the local matmul of tpkernels, so the speed-up over "
        "it is due to communication alone."
    )
    if not native(shape.dtype):
        out.print(
            "This processor has no instructions for this dtype: torch.matmul is slow, and "
            "tpkernels multiplies in float32."
        )
    if wrong:
        out.print(f"[bold red]FAIL[/]: wrong: {', '.join(wrong)}")
    else:
        out.print("[bold green]PASS[/]: every result is right")


def _table(reports: list[LayerReport]) -> Table:
    numbers = (
        "error/\nbound",
        "baseline\nms",
        "torch.\nmatmul\nms",
        "unfused\nms",
        "tpkernels\nms",
        "speed-up",
        "speed-up\nover\nunfused",
    )
    grid = table("op\nM, N, K", numbers, "algorithm: reason")
    for calls in zip(*(report.calls for report in reports), strict=True):
        grid.add_row(*_row(calls))
    return grid


def _row(calls: tuple[TimedOp, ...]) -> list[str]:
    """One op, from the calls of all ranks, which differ only in their times."""
    call = calls[0]
    times = {name: summary([each.samples[name] for each in calls]) for name in call.samples}
    ours = times["tpkernels"].median
    ratio = f"{call.verdict.ratio:.2f}"
    return [
        f"[bold]{call.name}[/]\n{call.op}\n[dim]{call.shape}[/]",
        f"[green]{ratio}[/]" if call.verdict.right else f"[red]{ratio} WRONG[/]",
        *(milliseconds(times[name].median) for name in ("torch", "matmul", "unfused", "tpkernels")),
        f"{times['torch'].median / ours:.2f}x",
        f"{times['unfused'].median / ours:.2f}x",
        escape(f"{call.algorithm}: {call.reason}"),
    ]
