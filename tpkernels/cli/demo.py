"""``tpkernels demo``: a tensor-parallel transformer layer, verified as a whole and op by op."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from tpkernels.bench.cases import (
    Case,
    Outputs,
    gathered,
    planned,
    run_matmul,
    run_torch,
    run_tpkernels,
)
from tpkernels.bench.verification import Verdict, check
from tpkernels.cli import options
from tpkernels.integers import ceil_div
from tpkernels.launch.session import (
    all_gather_objects,
    all_gather_tensors,
    is_leader,
    open_session,
    world_size,
)
from tpkernels.launch.terminal import (
    UsageError,
    at_least,
    check_workers,
    console,
    dtype_named,
    milliseconds,
    table,
)
from tpkernels.local.packed import native
from tpkernels.planning.choose import Plan
from tpkernels.shards import shard_sizes
from tpkernels.text import counted
from tpkernels.timing import Samples, Variant, measure, summary

_LARGEST_HEAD = 128
_DECODE_TOKENS = 8
_OPS = 4  # in the layer
_SECONDS_PER_OP = 3.0  # spent on timing
_BUSY = 0.5  # cores at work, from which times are disturbed
_LOOK_SECONDS = 0.2
_LEGEND = (
    "error/bound: the maximum over all elements; at most 1 is right. ms: the slowest rank's "
    "median, interleaved.\n"
    "baseline: a torch.distributed collective (gloo) and torch.matmul; torch.matmul: its "
    "matmul alone.\n"
    "unfused: nothing overlapped, but with the local matmul of tpkernels, so the speed-up over "
    "it is due to communication alone."
)
Run = Callable[[str, Case], Outputs]  # runs one op of the layer, given its name there
Weights = Mapping[str, tuple[torch.Tensor, ...]]  # [K, N], by the op's name in the layer


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
    """Run a tensor-parallel transformer layer: verify every op, and time it against its baseline.

    Results on random data are compared with float64; the exit code is 1 if one is wrong. Also under
    torchrun: torchrun --nproc-per-node 2 -m -- tpkernels demo
    """
    world = world_size(nproc, 4)
    at_least(1, m=m, repeat=repeat, timeout=timeout)
    check_workers(threads=threads)
    for name, width in {"hidden": hidden, "ffn": ffn}.items():
        if width < world:  # a rank would have no columns of a weight
            raise UsageError(f"--{name} is {width}: {world} ranks need at least {world}")
    of = dtype_named(dtype)
    out = console()
    with open_session(world, threads=threads, timeout=timeout) as run:
        if is_leader():
            of_ranks = counted(world, "rank")
            out.print(f"Layer of width {hidden}, MLP {ffn}, {m} tokens, {dtype}, {of_ranks}")
            busy = _busy_cores()
            if busy >= _BUSY:
                out.print(
                    f"Other work keeps {busy:.1f} of this machine's cores busy: the times below "
                    "are not the machine's, and neither are their ratios."
                )
        with out.status("verifying and timing"):
            ranks = run(run_layer, m, hidden, ffn, of, repeat)
        calls, verdict = ranks[0]
        wrong = [call.name for call in calls if not call.right]
        wrong += [f"{call.name} (unfused)" for call in calls if not call.unfused]
        wrong += [] if verdict.right else ["the layer as a whole"]
        if is_leader():
            _show([calls for calls, _ in ranks], verdict, wrong, native(of), out)
    if wrong:
        raise typer.Exit(1)


def _busy_cores() -> float:
    """Return how many cores are at work for others, for a moment in which this process sleeps."""

    def ticks() -> tuple[int, int]:
        first = Path("/proc/stat").read_text().splitlines()[0]
        user, nice, system, idle, waiting, *rest = map(int, first.split()[1:9])
        return user + nice + system + sum(rest), idle + waiting

    busy, idle = ticks()
    time.sleep(_LOOK_SECONDS)
    busy_then, idle_then = ticks()
    busy, idle = busy_then - busy, idle_then - idle
    return busy / max(1, busy + idle) * (os.cpu_count() or 1)


@dataclass(frozen=True)
class TimedOp:
    """One op of the layer on one rank. ``shape`` is global: M, N of each weight, K. ``ratio``: its
    error over the bound. ``unfused``: whether algorithm "unfused" is right."""

    name: str
    op: str
    shape: str
    plan: Plan
    ratio: float
    right: bool
    unfused: bool
    samples: dict[str, Samples]


def _show(
    ranks: list[list[TimedOp]], verdict: Verdict, wrong: list[str], fast: bool, out: Console
) -> None:
    """Print the table, its legend, and PASS or FAIL."""
    columns = (
        "error/\nbound",
        "baseline\nms",
        "torch.\nmatmul\nms",
        "unfused\nms",
        "tpkernels\nms",
    )
    grid = table(
        "op\nM, N, K", (*columns, "speed-up", "speed-up\nover\nunfused"), "algorithm: reason"
    )
    for calls in zip(*ranks, strict=True):
        call = calls[0]  # other ranks' differ only in their times
        torchs, matmul, unfused, ours = (
            summary([timed.samples[name] for timed in calls]).median
            for name in ("torch", "matmul", "unfused", "tpkernels")
        )
        grid.add_row(
            f"[bold]{call.name}[/]\n{call.op}\n[dim]{call.shape}[/]",
            f"[green]{call.ratio:.2f}[/]" if call.right else f"[red]{call.ratio:.2f} WRONG[/]",
            *map(milliseconds, (torchs, matmul, unfused, ours)),
            f"{torchs / ours:.2f}x",
            f"{unfused / ours:.2f}x",
            escape(f"{call.plan.algorithm}: {call.plan.reason}"),
        )
    out.print(grid)
    out.print(
        f"The layer as a whole, relative to float64 on one rank: error {verdict.error:.2g}, "
        f"bound {verdict.bound:.2g}."
    )
    out.print(_LEGEND)
    if not fast:
        out.print(
            "This processor has no instructions for this dtype: torch.matmul is slow, and "
            "tpkernels multiplies in float32."
        )
    passed = "[bold green]PASS[/]: every result is right"
    out.print(f"[bold red]FAIL[/]: wrong: {', '.join(wrong)}" if wrong else passed)


# On the ranks.


def layer(
    x: torch.Tensor, w: Weights, heads: int, sizes: tuple[int, ...], run: Run
) -> torch.Tensor:
    """Compute the layer on this rank's tokens and heads. x and the result are [sizes[rank],
    hidden]."""
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    qkv = run("QKV", Case(gather, _norm(x), sizes, w["QKV"]))
    q, k, v = (t.view(t.shape[0], heads, -1).transpose(0, 1)[None] for t in qkv)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
    (x,) = run("attention out", Case(scatter, attended, sizes, w["attention out"], residual=x))
    gate, up = run("gate, up", Case(gather, _norm(x), sizes, w["gate, up"]))
    (x,) = run("down", Case(scatter, F.silu(gate) * up, sizes, w["down"], residual=x))
    return x


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def run_layer(
    m: int, hidden: int, ffn: int, dtype: torch.dtype, repeat: int
) -> tuple[list[TimedOp], Verdict]:
    """Run the layer, verify it and time its ops; return them, and rank 0's verdict on the layer as
    a whole. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    # Whole weights, the same on every rank, in the layout of ``linear.weight.t()``.
    extents = {
        "QKV": (3, hidden, hidden),
        "attention out": (1, hidden, hidden),
        "gate, up": (2, hidden, ffn),
        "down": (1, ffn, hidden),
    }
    weights = {
        name: tuple(
            (torch.randn(n, k, generator=generator) / math.sqrt(k)).to(dtype).t()
            for _ in range(count)
        )
        for name, (count, k, n) in extents.items()
    }
    fewest = max(world, ceil_div(hidden, _LARGEST_HEAD))
    heads = next(n for n in range(fewest, hidden + 1) if hidden % n == 0)
    local_heads = shard_sizes(heads, world)
    attention, mlp = [count * hidden // heads for count in local_heads], shard_sizes(ffn, world)
    shard = {
        "QKV": tuple(w.split(attention, 1)[rank] for w in weights["QKV"]),
        "attention out": _rows(weights["attention out"], attention, rank),
        "gate, up": tuple(w.split(mlp, 1)[rank] for w in weights["gate, up"]),
        "down": _rows(weights["down"], mlp, rank),
    }
    tokens = torch.randn(m, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    sizes = tuple(shard_sizes(m, world))
    ran: list[tuple[str, Case, Outputs, Plan]] = []

    def fused(name: str, case: Case) -> Outputs:
        outputs, plan = planned(case, "auto")
        ran.append((name, case, outputs, plan))
        return outputs

    def on_one_rank(_: str, case: Case) -> Outputs:
        residual = 0 if case.residual is None else case.residual
        return [case.x @ w + residual for w in case.weights]

    x = tokens.split(list(sizes))[rank]
    y = layer(x, shard, local_heads[rank], sizes, fused)
    fused("down, decoding", _decoding(shard["down"], rank, world))
    by_torch = layer(x, shard, local_heads[rank], sizes, lambda _, case: run_torch(case))
    parts, expected, verdict = all_gather_tensors(y), all_gather_tensors(by_torch), Verdict()
    if rank == 0:
        double = {name: tuple(w.double() for w in ws) for name, ws in weights.items()}
        exact = layer(tokens.double(), double, heads, (m,), on_one_rank)
        # Relative, in the Frobenius norm. Allowed are torch's own error, and a unit in the last
        # place for each op.
        error, torchs_error = (
            float((torch.cat(shards) - exact).norm() / exact.norm()) for shards in (parts, expected)
        )
        allowed = torchs_error + _OPS * torch.finfo(dtype).eps
        verdict = Verdict(error / allowed, error, allowed)
    return [_examine(*op, repeat) for op in ran], verdict


def _rows(
    weights: tuple[torch.Tensor, ...], sizes: list[int], rank: int
) -> tuple[torch.Tensor, ...]:
    return tuple(w.split(sizes)[rank].t().contiguous().t() for w in weights)


def _decoding(weights: tuple[torch.Tensor, ...], rank: int, world: int) -> Case:
    """Make a case of a few tokens through `down`, all of them on every rank."""
    (k, n), dtype = weights[0].shape, weights[0].dtype
    residual, x = (
        torch.randn(_DECODE_TOKENS, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for width, seed in ((n, 3), (k, 4 + rank))
    )
    sizes = tuple(shard_sizes(_DECODE_TOKENS, world))
    return Case("matmul_all_reduce", x, sizes, weights, residual)


def _examine(name: str, case: Case, outputs: Outputs, plan: Plan, repeat: int) -> TimedOp:
    """Verify the op's result in the layer, and time the op on the same inputs."""
    unfused = run_tpkernels(case, "unfused")
    verdicts = check(case, {"tpkernels": outputs, "unfused": unfused}, run_torch(case))
    local = gathered(case)
    variants = {
        "torch": Variant(lambda: run_torch(case)),
        "matmul": Variant(lambda: run_matmul(local)),
        "unfused": Variant(lambda: run_tpkernels(case, "unfused")),
        "tpkernels": Variant(lambda: run_tpkernels(case)),
    }
    samples = measure(variants, repeat=repeat, budget=_SECONDS_PER_OP)
    shapes = [shapes[0] for shapes in all_gather_objects([tuple(w.shape) for w in case.weights])]
    k, n = shapes[0]
    if case.spec.gathers:
        shape = f"{sum(case.sizes)}, {len(case.weights)}x{sum(n for _, n in shapes)}, {k}"
    else:
        shape = f"{sum(case.sizes)}, {n}, {sum(k for k, _ in shapes)}"
    verdict, right = verdicts["tpkernels"], verdicts["unfused"].right
    return TimedOp(name, case.op, shape, plan, verdict.ratio, verdict.right, right, samples)
