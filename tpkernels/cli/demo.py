"""``tpkernels demo``: a tensor-parallel transformer layer, verified as a whole and op by op."""

from __future__ import annotations

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
from tpkernels.integers import ceil_div
from tpkernels.launch.session import gather_objects, open_session, tensors_of_all, world_size
from tpkernels.local.packed import native
from tpkernels.planning.choose import Plan
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

_LARGEST_HEAD = 128
_DECODE_TOKENS = 8
_OPS = 4  # in the layer
_SECONDS_PER_OP = 3.0  # spent on timing
_VARIANTS = ("torch", "matmul", "unfused", "tpkernels")  # by column of the table
_LEGEND = (
    "error/bound: the maximum over all elements; at most 1 is right. ms: the slowest rank's "
    "median, interleaved.\n"
    "baseline: a torch.distributed collective (gloo) and torch.matmul; torch.matmul: its "
    "matmul alone.\n"
    "unfused: nothing overlapped, but with the local matmul of tpkernels, so the speed-up over "
    "it is due to communication alone."
)
Run = Callable[[str, Case], Outputs]  # runs one op of the layer, given its name there


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
    world = world_size(nproc, 4)
    at_least(1, m=m, repeat=repeat, timeout=timeout)
    check_workers(threads=threads)
    for name, width in {"hidden": hidden, "ffn": ffn}.items():
        if width < world:  # a rank would have no columns of a weight
            raise UsageError(f"--{name} is {width}: {world} ranks need at least {world}")
    of = dtype_named(dtype)
    out = console()
    with open_session(world, threads=threads, timeout=timeout) as session:
        if session.leader:
            out.print(f"Layer of width {hidden}, MLP {ffn}, {m} tokens, {dtype}, {world} ranks")
        with out.status("verifying and timing"):
            reports = session.run(run_layer, m, hidden, ffn, of, repeat)
        if session.leader:
            _show(reports, of, out)
    if reports[0].wrong:
        raise typer.Exit(1)


@dataclass(frozen=True)
class TimedOp:
    """One op of the layer on one rank. ``shape`` is global: M, N of each weight, K. ``unfused`` is
    the verdict on the same op with algorithm "unfused"."""

    name: str
    op: str
    shape: str
    plan: Plan
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


def _show(reports: list[LayerReport], dtype: torch.dtype, out: Console) -> None:
    """Print the table, its legend, and PASS or FAIL."""
    columns = ("baseline", "torch.\nmatmul", "unfused", "tpkernels")
    speeds = ("speed-up", "speed-up\nover\nunfused")
    grid = table(
        "op\nM, N, K",
        ("error/\nbound", *(f"{c}\nms" for c in columns), *speeds),
        "algorithm: reason",
    )
    for calls in zip(*(report.calls for report in reports), strict=True):
        call = calls[0]  # other ranks' differ only in their times
        medians = {
            name: summary([timed.samples[name] for timed in calls]).median for name in _VARIANTS
        }
        ratio = f"{call.verdict.ratio:.2f}"
        grid.add_row(
            f"[bold]{call.name}[/]\n{call.op}\n[dim]{call.shape}[/]",
            f"[green]{ratio}[/]" if call.verdict.right else f"[red]{ratio} WRONG[/]",
            *map(milliseconds, medians.values()),
            f"{medians['torch'] / medians['tpkernels']:.2f}x",
            f"{medians['unfused'] / medians['tpkernels']:.2f}x",
            escape(f"{call.plan.algorithm}: {call.plan.reason}"),
        )
    out.print(grid)
    layer, wrong = reports[0].layer, reports[0].wrong
    out.print(
        f"The layer as a whole, relative to float64 on one rank: error {layer.error:.2g}, "
        f"bound {layer.bound:.2g}."
    )
    out.print(_LEGEND)
    if not native(dtype):
        out.print(
            "This processor has no instructions for this dtype: torch.matmul is slow, and "
            "tpkernels multiplies in float32."
        )
    if wrong:
        out.print(f"[bold red]FAIL[/]: wrong: {', '.join(wrong)}")
    else:
        out.print("[bold green]PASS[/]: every result is right")


@dataclass(frozen=True)
class Weights:
    """Weights [K, N] in the layout of ``linear.weight.t()``, and the number of heads they hold."""

    qkv: tuple[torch.Tensor, ...]
    out: torch.Tensor
    gate_up: tuple[torch.Tensor, ...]
    down: torch.Tensor
    heads: int

    @classmethod
    def random(cls, hidden: int, ffn: int, dtype: torch.dtype, world: int) -> Weights:
        """Draw the whole weights, the same on every rank, with a head of at most 128 columns for
        every rank."""
        generator = torch.Generator().manual_seed(1)

        def linear(k: int, n: int) -> torch.Tensor:
            return (torch.randn(n, k, generator=generator) / math.sqrt(k)).to(dtype).t()

        fewest = max(world, ceil_div(hidden, _LARGEST_HEAD))
        return cls(
            qkv=tuple(linear(hidden, hidden) for _ in range(3)),
            out=linear(hidden, hidden),
            gate_up=tuple(linear(hidden, ffn) for _ in range(2)),
            down=linear(ffn, hidden),
            heads=next(n for n in range(fewest, hidden + 1) if hidden % n == 0),
        )

    def shard(self, rank: int, world: int) -> Weights:
        """Cut out one rank's shard: whole heads, and columns of the MLP."""
        heads = tpkernels.shard_sizes(self.heads, world)
        attention = [count * self.out.shape[0] // self.heads for count in heads]
        mlp = tpkernels.shard_sizes(self.down.shape[0], world)

        def rows(w: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            return w.split(sizes)[rank].t().contiguous().t()

        return Weights(
            qkv=tuple(w.split(attention, 1)[rank] for w in self.qkv),
            out=rows(self.out, attention),
            gate_up=tuple(w.split(mlp, 1)[rank] for w in self.gate_up),
            down=rows(self.down, mlp),
            heads=heads[rank],
        )

    def double(self) -> Weights:
        """Return the weights in float64."""
        qkv, gate_up = (tuple(w.double() for w in group) for group in (self.qkv, self.gate_up))
        return Weights(qkv, self.out.double(), gate_up, self.down.double(), self.heads)


def layer(x: torch.Tensor, w: Weights, sizes: tuple[int, ...], run: Run) -> torch.Tensor:
    """Compute the layer on this rank's tokens. x and the result are [sizes[rank], hidden]."""
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    q, k, v = run("QKV", Case(gather, _norm(x), sizes, w.qkv))
    attended = _attention(q, k, v, w.heads)
    (x,) = run("attention out", Case(scatter, attended, sizes, (w.out,), residual=x))
    gate, up = run("gate, up", Case(gather, _norm(x), sizes, w.gate_up))
    (x,) = run("down", Case(scatter, F.silu(gate) * up, sizes, (w.down,), residual=x))
    return x


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Compute causal attention over the heads of this rank. All [M, heads * width]."""
    q, k, v = (t.view(t.shape[0], heads, -1).transpose(0, 1)[None] for t in (q, k, v))
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return result[0].transpose(0, 1).flatten(1)


def run_layer(m: int, hidden: int, ffn: int, dtype: torch.dtype, repeat: int) -> LayerReport:
    """Run the layer, verify it and time its ops. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = Weights.random(hidden, ffn, dtype, world)
    shard = weights.shard(rank, world)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(m, hidden, generator=generator).to(dtype)
    sizes = tuple(tpkernels.shard_sizes(m, world))
    ran: list[tuple[str, Case, Outputs, Plan]] = []

    def fused(name: str, case: Case) -> Outputs:
        outputs, plan = planned(case, "auto")
        ran.append((name, case, outputs, plan))
        return outputs

    x = tokens.split(list(sizes))[rank]
    y = layer(x, shard, sizes, fused)
    fused("down, decoding", _decoding(shard.down, rank, world))
    expected = layer(x, shard, sizes, lambda _, case: run_torch(case))
    verdict = _verdict_on_layer(weights, tokens, y, expected)
    return LayerReport([_examine(*op, repeat) for op in ran], verdict)


def _decoding(w: torch.Tensor, rank: int, world: int) -> Case:
    """Make a case of a few tokens through `down`, all of them on every rank."""
    tokens = torch.Generator().manual_seed(3)
    residual = torch.randn(_DECODE_TOKENS, w.shape[1], generator=tokens).to(w.dtype)
    mine = torch.Generator().manual_seed(4 + rank)
    x = torch.randn(_DECODE_TOKENS, w.shape[0], generator=mine).to(w.dtype)
    sizes = tuple(tpkernels.shard_sizes(_DECODE_TOKENS, world))
    return Case("matmul_all_reduce", x, sizes, (w,), residual)


def _examine(name: str, case: Case, outputs: Outputs, plan: Plan, repeat: int) -> TimedOp:
    """Verify the op's result in the layer, and time the op on the same inputs."""
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
    return TimedOp(name, case.op, shape, plan, verdicts["tpkernels"], verdicts["unfused"], samples)


def _global_shape(case: Case) -> str:
    """Return M, N of each weight, K."""
    everyone = gather_objects([tuple(w.shape) for w in case.weights])
    k, n = everyone[0][0]
    if case.op == "all_gather_matmul":
        widths = sum(rank[0][1] for rank in everyone)
        shown = f"{len(case.weights)}x{widths}"
    else:
        k, shown = sum(rank[0][0] for rank in everyone), str(n)
    return f"{sum(case.sizes)}, {shown}, {k}"


def _verdict_on_layer(
    weights: Weights, tokens: torch.Tensor, y: torch.Tensor, expected: torch.Tensor
) -> Verdict:
    """Return rank 0's verdict: the relative error, in the Frobenius norm, against the whole layer
    in float64. The bound is torch's own error plus one unit in the last place per op."""
    parts, expected_parts = tensors_of_all(y), tensors_of_all(expected)
    if dist.get_rank() != 0:
        return Verdict()

    def on_one_rank(_: str, case: Case) -> Outputs:
        residual = 0 if case.residual is None else case.residual
        return [case.x @ w + residual for w in case.weights]

    exact = layer(tokens.double(), weights.double(), (tokens.shape[0],), on_one_rank)

    def error(shards: list[torch.Tensor]) -> float:
        return float((torch.cat(shards) - exact).norm() / exact.norm())

    allowed = error(expected_parts) + _OPS * torch.finfo(tokens.dtype).eps
    return Verdict(error(parts) / allowed, error(parts), allowed)
