"""``tpkernels demo``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tpkernels
from tpkernels.bench.cases import (
    Case,
    Outputs,
    gathered,
    planned,
    run_matmul,
    run_torch,
    run_tpkernels,
)
from tpkernels.bench.verification import Verdict, verify
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.integers import ceil_div
from tpkernels.launch.session import gather_objects, open_session, tensors_of_all, world_size
from tpkernels.local.packed import native
from tpkernels.terminal import (
    UsageError,
    at_least,
    check_workers,
    console,
    dtype_named,
    milliseconds,
    table,
)
from tpkernels.timing import Samples, Variant, measure, summary


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
    """Print the table, its legend, and PASS or FAIL."""
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
    """Format one op, from the calls of all ranks, which differ only in their times."""
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


_LARGEST_HEAD = 128
_DECODE_TOKENS = 8
_OPS = 4  # in the layer
_SECONDS_PER_OP = 3.0  # spent on timing

# Runs one op of the layer, given its name there.
Runner = Callable[[str, Case], Outputs]


@dataclass(frozen=True)
class LayerShape:
    """Global sizes, which need not be divisible by the number of ranks."""

    m: int
    hidden: int
    ffn: int
    dtype: torch.dtype

    def check(self, world: int) -> None:
        """Raise ``UsageError`` if a rank would have no columns of a weight."""
        for name, width in {"hidden": self.hidden, "ffn": self.ffn}.items():
            if width < world:
                raise UsageError(f"--{name} is {width}: {world} ranks need at least {world}")

    def heads(self, world: int) -> int:
        """Return the fewest that give every rank a head of at most 128 columns."""
        fewest = max(world, ceil_div(self.hidden, _LARGEST_HEAD))
        return next(n for n in range(fewest, self.hidden + 1) if self.hidden % n == 0)


@dataclass(frozen=True)
class TimedOp:
    """One op of the layer on one rank: its plan, verdict and times.

    ``shape`` is global: (M, N of each weight, K). ``unfused`` is the verdict on the same op with
    algorithm "unfused".
    """

    name: str
    op: str
    shape: str
    algorithm: str
    reason: str
    verdict: Verdict
    unfused: Verdict
    samples: dict[str, Samples]


@dataclass(frozen=True)
class LayerReport:
    """One rank's report. ``layer`` is rank 0's verdict on the layer as a whole."""

    calls: list[TimedOp]
    layer: Verdict

    @property
    def wrong(self) -> list[str]:
        """Return the names of all results that are out of their bounds."""
        names = [call.name for call in self.calls if not call.verdict.right]
        names += [f"{call.name} (unfused)" for call in self.calls if not call.unfused.right]
        return [*names, *([] if self.layer.right else ["the layer as a whole"])]


@dataclass(frozen=True)
class Weights:
    """Weights [K, N] in the layout of ``linear.weight.t()``, and the number of heads they hold."""

    qkv: tuple[torch.Tensor, ...]
    out: torch.Tensor
    gate_up: tuple[torch.Tensor, ...]
    down: torch.Tensor
    heads: int

    @classmethod
    def random(cls, shape: LayerShape, heads: int) -> Weights:
        """Draw the whole weights, the same on every rank."""
        generator = torch.Generator().manual_seed(1)

        def linear(k: int, n: int) -> torch.Tensor:
            weight = torch.randn(n, k, generator=generator) / math.sqrt(k)
            return weight.to(shape.dtype).t()

        hidden, ffn = shape.hidden, shape.ffn
        return cls(
            qkv=tuple(linear(hidden, hidden) for _ in range(3)),
            out=linear(hidden, hidden),
            gate_up=tuple(linear(hidden, ffn) for _ in range(2)),
            down=linear(ffn, hidden),
            heads=heads,
        )

    def shard(self, rank: int, world: int) -> Weights:
        """Cut out one rank's shard: whole heads, and columns of the MLP."""
        heads = tpkernels.shard_sizes(self.heads, world)
        width = self.out.shape[0] // self.heads
        attention = [count * width for count in heads]
        mlp = tpkernels.shard_sizes(self.down.shape[0], world)

        def columns(w: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            return w.split(sizes, 1)[rank]

        def rows(w: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            return w.split(sizes)[rank].t().contiguous().t()

        return Weights(
            qkv=tuple(columns(w, attention) for w in self.qkv),
            out=rows(self.out, attention),
            gate_up=tuple(columns(w, mlp) for w in self.gate_up),
            down=rows(self.down, mlp),
            heads=heads[rank],
        )

    def double(self) -> Weights:
        """Return the weights in float64."""
        return Weights(
            qkv=tuple(w.double() for w in self.qkv),
            out=self.out.double(),
            gate_up=tuple(w.double() for w in self.gate_up),
            down=self.down.double(),
            heads=self.heads,
        )


def layer(x: torch.Tensor, w: Weights, sizes: tuple[int, ...], run: Runner) -> torch.Tensor:
    """Compute the layer on this rank's tokens. x and the result are [sizes[rank], hidden]."""
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    q, k, v = run("QKV", Case(gather, _norm(x), sizes, w.qkv))
    attended = _attention(q, k, v, w.heads)
    (x,) = run("attention out", Case(scatter, attended, sizes, (w.out,), residual=x))
    gate, up = run("gate, up", Case(gather, _norm(x), sizes, w.gate_up))
    (x,) = run("down", Case(scatter, F.silu(gate) * up, sizes, (w.down,), residual=x))
    return x


def run_layer(shape: LayerShape, repeat: int) -> LayerReport:
    """Run the layer, verifies it and times its ops. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = Weights.random(shape, shape.heads(world))
    weights = whole.shard(rank, world)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(shape.m, shape.hidden, generator=generator).to(shape.dtype)
    sizes = tuple(tpkernels.shard_sizes(shape.m, world))
    calls: list[Callable[[], TimedOp]] = []

    def fused(name: str, case: Case) -> Outputs:
        outputs, plan = planned(case, "auto")
        examined = functools.partial(
            _examine, name, case, outputs, plan.algorithm, plan.reason, repeat
        )
        calls.append(examined)
        return outputs

    x = tokens.split(list(sizes))[rank]
    y = layer(x, weights, sizes, fused)
    fused("down, decoding", _decoding(weights, rank, world))
    expected = layer(x, weights, sizes, lambda _, case: run_torch(case))
    verdict = _verdict_on_layer(whole, tokens, y, expected)
    return LayerReport([examine() for examine in calls], verdict)


def _examine(
    name: str, case: Case, outputs: Outputs, algorithm: str, reason: str, repeat: int
) -> TimedOp:
    """Verify the op's result in the layer, and times the op on the same inputs."""
    unfused = run_tpkernels(case, "unfused")
    verdicts = verify(case, run_torch(case), {"tpkernels": outputs, "unfused": unfused})
    local = gathered(case)
    variants = {
        "torch": Variant(lambda: run_torch(case)),
        "matmul": Variant(lambda: run_matmul(local)),
        "unfused": Variant(lambda: run_tpkernels(case, "unfused")),
        "tpkernels": Variant(lambda: run_tpkernels(case)),
    }
    samples = measure(variants, repeat=repeat, budget=_SECONDS_PER_OP)
    shape = _global_shape(case)
    return TimedOp(
        name, case.op, shape, algorithm, reason, verdicts["tpkernels"], verdicts["unfused"], samples
    )


def _global_shape(case: Case) -> str:
    """Return M, N of each weight, K."""
    parts = [tuple(w.shape) for w in case.weights]
    everyone = gather_objects(parts)
    if case.op == "all_gather_matmul":
        widths = [sum(rank[i][1] for rank in everyone) for i in range(len(parts))]
        k = parts[0][0]
    else:
        widths, k = [parts[0][1]], sum(rank[0][0] for rank in everyone)
    n = f"{len(widths)}x{widths[0]}" if len(widths) > 1 else str(widths[0])
    return f"{sum(case.sizes)}, {n}, {k}"


def _decoding(weights: Weights, rank: int, world: int) -> Case:
    """Make a case of a few tokens through `down`, all of them on every rank."""
    w = weights.down
    tokens = torch.Generator().manual_seed(3)
    residual = torch.randn(_DECODE_TOKENS, w.shape[1], generator=tokens).to(w.dtype)
    mine = torch.Generator().manual_seed(4 + rank)
    x = torch.randn(_DECODE_TOKENS, w.shape[0], generator=mine).to(w.dtype)
    sizes = tuple(tpkernels.shard_sizes(_DECODE_TOKENS, world))
    return Case("matmul_all_reduce", x, sizes, (w,), residual)


def _verdict_on_layer(
    whole: Weights, tokens: torch.Tensor, y: torch.Tensor, expected: torch.Tensor
) -> Verdict:
    """Rank 0's verdict: the relative error, in the Frobenius norm, against the whole layer in
    float64. The bound is torch's own error plus one unit in the last place per op."""
    parts, expected_parts = tensors_of_all(y), tensors_of_all(expected)
    if dist.get_rank() != 0:
        return Verdict()

    def on_one_rank(_: str, case: Case) -> Outputs:
        residual = 0 if case.residual is None else case.residual
        return [case.x @ w + residual for w in case.weights]

    exact = layer(tokens.double(), whole.double(), (tokens.shape[0],), on_one_rank)

    def error(shards: list[torch.Tensor]) -> float:
        return float((torch.cat(shards) - exact).norm() / exact.norm())

    allowed = error(expected_parts) + _OPS * torch.finfo(tokens.dtype).eps
    return Verdict(error(parts) / allowed, error(parts), allowed)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Compute causal attention over the heads of this rank. All [M, heads * width]."""
    q, k, v = (t.view(t.shape[0], heads, -1).transpose(0, 1)[None] for t in (q, k, v))
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return result[0].transpose(0, 1).flatten(1)
