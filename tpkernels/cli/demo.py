"""``tpkernels demo``: verify the four matmuls of a transformer layer and time them against
unfused."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from typer import Option

from tpkernels.bench.measuring import run_case
from tpkernels.bench.specs import Spec
from tpkernels.bench.sweep import Method
from tpkernels.cli import options
from tpkernels.common.text import pluralize
from tpkernels.launch.session import is_leader, open_session, world_size
from tpkernels.launch.terminal import (
    UsageError,
    check_workers,
    console,
    milliseconds,
    parse_dtype,
    require_at_least,
    table,
)
from tpkernels.timing import summary

_SECONDS_PER_OP = 3.0  # time budget
_HEADER = """\
The all-gather + matmul and matmul + reduce-scatter of a transformer layer on {} ({}).
Each result is compared with float64. Then each op is timed against the unfused op."""
_LEGEND = """\
error/bound: largest error against float64, over its bound; correct if at most 1. ms: median of the
slowest rank. unfused: the torch.distributed collective, then the same local matmul."""


def demo(
    nproc: Annotated[
        int | None,
        Option(
            "--nproc",
            "--tp",
            help="Number of ranks. Default: the number of usable cores (at least 2, at most 4), or "
            "WORLD_SIZE under torchrun.",
        ),
    ] = None,
    m: Annotated[int, Option(help="Number of tokens, over all ranks.")] = 1024,
    hidden: Annotated[int, Option(help="Hidden size of the layer.")] = 768,
    ffn: Annotated[int, Option(help="Intermediate size of the MLP, over all ranks.")] = 2048,
    dtype: options.Dtype = "bf16",
    repeat: Annotated[
        int, Option(help="Maximum number of repetitions. Slow ops run three times.")
    ] = 7,
    threads: options.Threads = 1,
    timeout: options.Timeout = 300,
) -> None:
    """Verify and time the all-gather + matmul and matmul + reduce-scatter of a transformer layer.

    Each op runs on random data. Its result is compared with float64, and its time with the time of
    the unfused op. The exit code is 1 if a result is wrong. To run under torchrun:
    torchrun --nproc-per-node 2 -m -- tpkernels demo
    """
    world = world_size(nproc, min(4, max(2, len(os.sched_getaffinity(0)))))
    require_at_least(1, m=m, repeat=repeat, timeout=timeout)
    check_workers(threads=threads)
    for name, width in {"hidden": hidden, "ffn": ffn}.items():
        if width < world:  # a rank would have no columns of a weight
            raise UsageError(
                f"--{name} is {width}; it must be at least {world}, the number of ranks"
            )
    layer = {
        "QKV": ("all_gather_matmul", (m, 3 * hidden, hidden)),
        "attention out": ("matmul_reduce_scatter", (m, hidden, hidden)),
        "gate and up": ("all_gather_matmul", (m, 2 * ffn, hidden)),
        "down": ("matmul_reduce_scatter", (m, hidden, ffn)),
    }
    method = Method(
        algorithms=["unfused", "auto"],
        repeat=repeat,
        seconds=_SECONDS_PER_OP,
        cold=False,
        baselines=False,
    )
    grid = table("op", ("M, N, K", "error/\nbound", "unfused\nms", "tpkernels\nms"), "speed-up")
    wrong: list[str] = []
    out = console()
    if is_leader():
        out.print(_HEADER.format(pluralize(world, "rank"), dtype))
    with open_session(world, threads=threads, timeout=timeout) as run:
        for name, (op, shape) in layer.items():
            ranks = run(run_case, Spec(op, shape, parse_dtype(dtype)), method)
            errors = {
                algorithm: choice.error_over_bound for algorithm, choice in ranks[0].choices.items()
            }
            wrong += [
                f"{name} ({algorithm})" for algorithm, error in errors.items() if not error <= 1
            ]
            error = f"{errors['auto']:.2f}"
            ms = {
                algorithm: summary([rank.samples[algorithm] for rank in ranks]).median
                for algorithm in method.algorithms
                if errors[algorithm] <= 1
            }
            grid.add_row(
                f"[bold]{name}[/]\n{op}",
                ", ".join(map(str, shape)),
                f"[green]{error}[/]" if errors["auto"] <= 1 else f"[red]{error} WRONG[/]",
                *(
                    milliseconds(ms[algorithm]) if algorithm in ms else ""
                    for algorithm in method.algorithms
                ),
                f"{ms['unfused'] / ms['auto']:.2f}x" if len(ms) == 2 else "",
            )
    if is_leader():
        out.print(grid)
        out.print(_LEGEND)
        passed = "[bold green]PASS[/]: all results are correct"
        out.print(f"[bold red]FAIL[/]: wrong results: {', '.join(wrong)}" if wrong else passed)
    if wrong:
        raise typer.Exit(1)
