"""``tpkernels demo``: a tensor-parallel transformer layer: is it right, and how fast?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels.bench.layer import LayerReport, LayerShape, TimedOp, run_layer
from tpkernels.bench.options import DTYPES, UsageError, at_least, check_workers, dtype_named
from tpkernels.bench.output import console, milliseconds, table
from tpkernels.bench.session import open_session, world_size
from tpkernels.bench.timing import summary
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.local.matmul import native


def demo(
    nproc: Annotated[
        int | None, typer.Option(help="Ranks; 4 by default. torchrun's under torchrun.")
    ] = None,
    m: Annotated[int, typer.Option(help="Tokens, over all ranks.")] = 1024,
    hidden: Annotated[int, typer.Option(help="Width of the layer.")] = 768,
    ffn: Annotated[int, typer.Option(help="Inner width of the MLP, over all ranks.")] = 2048,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "bf16",
    repeat: Annotated[int, typer.Option(help="Repetitions at the most; slow ops get three.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads of a rank.")] = 1,
    timeout: Annotated[int, typer.Option(help="Seconds after which it is given up.")] = 300,
) -> None:
    """Run a tensor-parallel transformer layer on several processes: right, and how fast?

    Every op is checked against float64 and timed beside the unfused way, on random data. The exit
    code is 1 if a result is wrong. Also: torchrun --nproc-per-node 2 -m -- tpkernels demo
    """
    with exit_codes():
        world = world_size(nproc, 4)
        at_least(1, m=m, repeat=repeat, timeout=timeout)
        check_workers(threads=threads)
        _fits(world, hidden=hidden, ffn=ffn)
        shape = LayerShape(m=m, hidden=hidden, ffn=ffn, dtype=dtype_named(dtype))
        out = console()
        with open_session(world, threads=threads, timeout=timeout) as session:
            if session.leader:
                out.print(f"A layer {hidden} wide, MLP {ffn}, {m} tokens, {dtype}, {world} ranks")
            with out.status("checking and timing"):
                reports = session.run(run_layer, shape, repeat)
            right = is_right(reports[0])
            if session.leader:
                show(reports, shape, out)
        if not right:
            raise typer.Exit(1)


def is_right(report: LayerReport) -> bool:
    """Every op within its bound, and the layer as a whole."""
    return all(call.verdict.right and call.unfused.right for call in report.calls) and (
        report.layer.right
    )


def show(reports: list[LayerReport], shape: LayerShape, out: Console) -> None:
    """The table, what it says, and PASS or FAIL."""
    out.print(_table(reports))
    layer = reports[0].layer
    out.print(
        f"The layer as a whole, relative to float64 on one rank: error {layer.error:.2g}, "
        f"allowed {layer.bound:.2g}.\n"
        "error/bound: the largest of all elements; 1 is the most that is right. ms: the slowest "
        "rank's median.\n"
        "unfused: torch.distributed (gloo) and torch.matmul one after the other; torch.matmul: "
        "that alone.\n"
        "same product: unfused too, but with the local product of tpkernels: the rest of the "
        "speed-up is the exchange's."
    )
    if not native(shape.dtype):
        out.print(
            "This processor has no instructions for this dtype: torch.matmul is slow, and "
            "tpkernels multiplies in float32."
        )
    if is_right(reports[0]):
        out.print("[bold green]PASS[/]: every result is right")
    else:
        wrong = [call.name for call in reports[0].calls if not call.verdict.right]
        wrong += [f"{c.name} (unfused)" for c in reports[0].calls if not c.unfused.right]
        wrong += [] if layer.right else ["the layer as a whole"]
        out.print(f"[bold red]FAIL[/]: wrong: {', '.join(wrong)}")


def _table(reports: list[LayerReport]) -> Table:
    numbers = (
        "error/\nbound",
        "unfused\nms",
        "torch.\nmatmul\nms",
        "same\nproduct\nms",
        "tpkernels\nms",
        "speed-up",
        "over\nsame\nproduct",
    )
    result = table("op\nM, N, K", numbers, "algorithm: reason")
    for calls in zip(*(report.calls for report in reports), strict=True):
        result.add_row(*_row(calls))
    return result


def _row(calls: tuple[TimedOp, ...]) -> list[str]:
    """One op; what it was is the same on all ranks, the times are not."""
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


def _fits(world: int, **widths: int) -> None:
    """A rank without columns has no weight to multiply by."""
    for name, width in widths.items():
        if width < world:
            raise UsageError(f"--{name} is {width}: {world} ranks need at least {world}")
