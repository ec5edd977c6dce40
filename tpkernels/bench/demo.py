"""`tpkernels demo`: a transformer layer, tensor-parallel with sequence parallelism, on each rank.

    x [M/W, hidden] -> norm -> QKV (all_gather_matmul, one gather) -> attention over local heads
      -> out (matmul_reduce_scatter, + x) -> norm -> gate, up (all_gather_matmul, one gather)
      -> SiLU(gate) * up -> down (matmul_reduce_scatter, + x)

and one decoding step through `down` (matmul_all_reduce). The layer is written once and takes the
implementation of its ops as a parameter: tpkernels, torch.distributed, or float64 on one rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

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
from tpkernels.integers import ceil_div
from tpkernels.launch.session import gather_objects, tensors_of_all
from tpkernels.terminal import UsageError
from tpkernels.timing import Samples, Variant, measure

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
        """``UsageError`` if a rank would have no columns of a weight."""
        for name, width in {"hidden": self.hidden, "ffn": self.ffn}.items():
            if width < world:
                raise UsageError(f"--{name} is {width}: {world} ranks need at least {world}")

    def heads(self, world: int) -> int:
        """The fewest that give every rank a head of at most 128 columns."""
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
        """Names of all results that are out of their bounds."""
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
        """The whole weights, the same on every rank."""
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
        """One rank's shard: whole heads, and columns of the MLP."""
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
        """In float64."""
        return Weights(
            qkv=tuple(w.double() for w in self.qkv),
            out=self.out.double(),
            gate_up=tuple(w.double() for w in self.gate_up),
            down=self.down.double(),
            heads=self.heads,
        )


def layer(x: torch.Tensor, w: Weights, sizes: tuple[int, ...], run: Runner) -> torch.Tensor:
    """The layer on this rank's tokens. x and the result are [sizes[rank], hidden]."""
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    q, k, v = run("QKV", Case(gather, _norm(x), sizes, w.qkv))
    attended = _attention(q, k, v, w.heads)
    (x,) = run("attention out", Case(scatter, attended, sizes, (w.out,), residual=x))
    gate, up = run("gate, up", Case(gather, _norm(x), sizes, w.gate_up))
    (x,) = run("down", Case(scatter, F.silu(gate) * up, sizes, (w.down,), residual=x))
    return x


def run_layer(shape: LayerShape, repeat: int) -> LayerReport:
    """Runs the layer, verifies it and times its ops. Collective."""
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
    """Verifies the op's result in the layer, and times the op on the same inputs."""
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
    """M, N of each weight, K."""
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
    """A few tokens through `down`, all of them on every rank."""
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
    """Causal attention over the heads of this rank. All [M, heads * width]."""
    q, k, v = (t.view(t.shape[0], heads, -1).transpose(0, 1)[None] for t in (q, k, v))
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return result[0].transpose(0, 1).flatten(1)
