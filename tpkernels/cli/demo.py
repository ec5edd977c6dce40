"""``tpkernels demo``: the four matmuls of a transformer layer, checked and timed beside unfused."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from typer import Option

import tpkernels
from tpkernels.cli import options
from tpkernels.common.shards import shard_sizes
from tpkernels.common.text import counted
from tpkernels.launch.session import is_leader, open_session, world_size
from tpkernels.launch.terminal import (
    UsageError,
    at_least,
    check_workers,
    console,
    dtype_named,
    milliseconds,
    table,
)
from tpkernels.ops import reference
from tpkernels.timing import Samples, Variant, measure, summary

ALGORITHMS = ("unfused", "auto")
_SECONDS_PER_OP = 3.0  # of timing
_LEGEND = """\
error/bound: the largest of all elements, relative to float64; at most 1 is right. ms: median of the
slowest rank. unfused: a torch.distributed collective, then the same local matmul."""


def demo(
    nproc: Annotated[
        int | None, Option("--nproc", "--tp", help="Number of ranks; default 4, or torchrun's.")
    ] = None,
    m: Annotated[int, Option(help="Tokens, over all ranks.")] = 1024,
    hidden: Annotated[int, Option(help="Width of the layer.")] = 768,
    ffn: Annotated[int, Option(help="Inner width of the MLP, over all ranks.")] = 2048,
    dtype: options.Dtype = "bf16",
    repeat: Annotated[int, Option(help="Maximum number of repetitions; slow ops get three.")] = 7,
    threads: options.Threads = 1,
    timeout: options.Timeout = 300,
) -> None:
    """Check the all-gather + matmul and matmul + reduce-scatter of a transformer layer, and time
    them beside unfused.

    Results on random data are compared with float64; the exit code is 1 if one is wrong. Also under
    torchrun: torchrun --nproc-per-node 2 -m -- tpkernels demo
    """
    world = world_size(nproc, 4)
    at_least(1, m=m, repeat=repeat, timeout=timeout)
    check_workers(threads=threads)
    for name, width in {"hidden": hidden, "ffn": ffn}.items():
        if width < world:  # a rank would have no columns of a weight
            raise UsageError(f"--{name} is {width}: {world} ranks need at least {world}")
    layer = {
        "QKV": ("all_gather_matmul", (m, 3 * hidden, hidden)),
        "attention out": ("matmul_reduce_scatter", (m, hidden, hidden)),
        "gate and up": ("all_gather_matmul", (m, 2 * ffn, hidden)),
        "down": ("matmul_reduce_scatter", (m, hidden, ffn)),
    }
    grid = table("op", ("M, N, K", "error/\nbound", "unfused\nms", "tpkernels\nms"), "speed-up")
    wrong: list[str] = []
    out = console()
    if is_leader():
        what = "all-gather + matmul and matmul + reduce-scatter of a transformer layer"
        out.print(f"{what}, {counted(world, 'rank')}, {dtype}")
    with open_session(world, threads=threads, timeout=timeout) as run:
        for name, (op, shape) in layer.items():
            ranks = run(run_op, op, shape, dtype_named(dtype), repeat)
            errors = {of: max(error[of] for error, _ in ranks) for of in ALGORITHMS}
            unfused, ours = (
                summary([samples[of] for _, samples in ranks]).median for of in ALGORITHMS
            )
            wrong += [f"{name} ({of})" for of, error in errors.items() if not error <= 1]
            error = f"{errors['auto']:.2f}"
            grid.add_row(
                f"[bold]{name}[/]\n{op}",
                ", ".join(map(str, shape)),
                f"[green]{error}[/]" if errors["auto"] <= 1 else f"[red]{error} WRONG[/]",
                *map(milliseconds, (unfused, ours)),
                f"{unfused / ours:.2f}x",
            )
    if is_leader():
        out.print(grid)
        out.print(_LEGEND)
        passed = "[bold green]PASS[/]: every result is right"
        out.print(f"[bold red]FAIL[/]: wrong: {', '.join(wrong)}" if wrong else passed)
    if wrong:
        raise typer.Exit(1)


def run_op(
    op: str, shape: tuple[int, int, int], dtype: torch.dtype, repeat: int
) -> tuple[dict[str, float], dict[str, Samples]]:
    """Run an op with each algorithm on this rank; ``shape``: M, N, K over all ranks. Return the
    largest error over its bound, and the times. Collective."""
    rank, world, (m, n, k) = dist.get_rank(), dist.get_world_size(), shape
    generator = torch.Generator().manual_seed(n + k)  # the same full tensors on all ranks
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = (torch.randn(n, k, generator=generator) / math.sqrt(k)).to(dtype).t()
    rows = shard_sizes(m, world)
    if op == "all_gather_matmul":
        w = w.split(shard_sizes(n, world), 1)[rank]
        operands, blocks = (x.split(rows)[rank], w), [(x, w)]
    else:  # the result is the sum of a product of each rank
        split = shard_sizes(k, world)
        pairs = list(zip(x.split(split, 1), w.split(split), strict=True))
        operands = (pairs[rank][0].contiguous(), pairs[rank][1].t().contiguous().t())
        blocks = [(x.split(rows)[rank], w) for x, w in pairs]
    run = partial(getattr(tpkernels, op), *operands, dist.group.WORLD, shard_sizes=rows)
    runs = {of: partial(run, algorithm=of) for of in ALGORITHMS}
    wire = dtype if len(blocks) > 1 else None
    expected = reference.summed(blocks, dtype=dtype, wire=wire, unfused=False)
    errors = {of: expected.worst(run()) for of, run in runs.items()}
    variants = {of: Variant(run) for of, run in runs.items()}
    return errors, measure(variants, repeat=repeat, budget=_SECONDS_PER_OP)
