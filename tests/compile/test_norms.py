"""All-reduces with the residual and the RMS norm that follow them, in a block like Llama's: what
becomes one op, and what stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache

import tpkernels
from tests.planning.test_table import measured
from tests.support.cases import RanksFixture
from tests.support.compiled import graph_runner, ops_in, reduce, rewritten
from tests.support.ranked import check_job, fresh_group
from tpkernels import groups
from tpkernels.bench.specs import Spec
from tpkernels.compile import FusionReport
from tpkernels.compile import graph as compile_graph
from tpkernels.planning.table import Table

EPS, WIDTH, HIDDEN, BATCH, TOKENS = 1e-5, 32, 24, 2, 3
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MATMUL, ALONE = "matmul_all_reduce_rms_norm", "all_reduce_rms_norm"


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As transformers' LlamaRMSNorm writes it."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return weight * x.to(dtype)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, [x.shape[-1]], weight, EPS)


def squared_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With a product in place of a power, and the weight first."""
    wide = x.float()
    rows = wide * torch.rsqrt((wide * wide).mean(-1, True) + EPS)
    return (rows * weight.float()).to(x.dtype)


Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Layer = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
LAYERS: dict[str, Layer] = {
    "functional": lambda x, w, group: reduce(x @ w, group),
    "ours": tpkernels.matmul_all_reduce,
    "no matmul": lambda x, w, group: reduce(torch.relu(x @ w), group),
    "our sum": lambda x, w, group: tpkernels.all_reduce(torch.relu(x @ w), group),
}


def block(h: torch.Tensor, x: torch.Tensor, w: Any, norm: Norm, layer: Layer, group: str) -> Any:
    """A row-parallel layer, the residual and a norm, twice, and a residual stream that goes on."""
    h = h + layer(x, w["out"], group)
    y = norm(h, w["first"])
    h = layer(torch.relu(y @ w["up"]), w["down"], group) + h
    return norm(h, w["second"]), h


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """h is the same on all ranks."""
    same = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + dist.get_rank())

    def drawn(draw: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    w = {"out": drawn(own, HIDDEN, WIDTH), "up": drawn(own, WIDTH, HIDDEN)}
    w |= {"down": drawn(own, HIDDEN, WIDTH)}
    w |= {name: drawn(same, WIDTH) for name in ("first", "second")}
    return drawn(same, BATCH, TOKENS, WIDTH), drawn(own, BATCH, TOKENS, HIDDEN), w


def traced(
    function: Callable[..., Any], given: Any, norms: bool = True, symbolic: bool = False
) -> tuple[Any, Counter[str], FusionReport]:
    """The results of the graph after the pass, its ops, and the report."""
    with torch.no_grad():
        module, told = rewritten(function, given, symbolic=symbolic, norms=norms)
        return module(*given), ops_in(module), told


def compiled(function: Callable[..., Any], given: Any, norms: bool) -> Any:
    """The same by the compiler."""
    torch._dynamo.reset()
    seen: list[Counter[str]] = []
    fusion = tpkernels.compile.fuse_collectives(norms=norms)
    with fresh_cache(), fusion as told:
        results = torch.compile(function, backend=graph_runner(seen), fullgraph=True)(*given)
    return results, sum(seen, Counter()), told


def block_failures(layer: str, norm: Norm, dtype: torch.dtype, name: str, run: Any) -> list[str]:
    given = h, x, w = inputs(dtype)

    def function(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
        return block(h, x, w, norm, LAYERS[layer], name)

    op, plainly = MATMUL, LAYERS["functional"]
    if layer not in ("functional", "ours"):
        op, plainly = ALONE, LAYERS["no matmul"]
    with torch.no_grad():
        plain, before, _ = run(function, given, False)
        fused, after, told = run(function, given, True)
        wide = {key: each.double() for key, each in w.items()}
        exact = block(h.double(), x.double(), wide, torch_norm, plainly, name)
    failures = []
    if told.counts != {op: 2} or told.left_alone:
        failures.append(str(told))
    left = [key for key in after if "pow" in key or "rsqrt" in key or "add" in key]
    if after[f"tpkernels::_{op}"] != 2 or before[f"tpkernels::_{op}"] or left:
        failures.append(f"{before} -> {after}")
    eps = torch.finfo(dtype).eps
    for got, without, right in zip(fused, plain, exact, strict=True):
        error, scale = (without - right).abs().max(), right.abs().max()
        bound = float(error + HIDDEN**0.5 * eps * scale)
        off = float((got - right).abs().max())
        if not off <= bound or error > 0.1 * scale or got.stride() != without.stride():
            failures.append(f"off by {off}, without the pass by {error}, of {scale}")
    return [f"{layer}, {norm.__name__} {dtype}: {failure}" for failure in failures]


# Every norm, every dtype, and every layer.
BLOCKS: list[tuple[str, Norm, torch.dtype]] = [
    ("functional", llama_norm, BF16),
    ("no matmul", squared_norm, F32),
    ("ours", torch_norm, F16),
    ("our sum", llama_norm, BF16),
]


def blocks_job() -> list[str]:
    failures = []
    with fresh_group() as group:
        for number, (layer, norm, dtype) in enumerate(BLOCKS):
            # Torch's own norm writes in place until the compiler has made its graph functional.
            run = compiled if number == 0 or norm is torch_norm else traced
            failures += block_failures(layer, norm, dtype, group.group_name, run)
    return failures


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


FAST, SLOW = {"unfused": 2.0, "direct": 1.0}, {"unfused": 1.0, "direct": 2.0}


def more_job() -> None:
    """Without a residual, with one and a bias in the op, read by others, of symbolic sizes; with no
    ``norms`` on a CPU; and of tensors that are taken for CUDA tensors, given times."""
    why = compile_graph.why_left_to_torch
    with fresh_group() as group:
        name, given = group.group_name, inputs(F32)

        def plain(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            y = reduce(x @ w["out"], name)
            return squared_norm(y, w["first"]), y * 2

        def full(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            y = tpkernels.matmul_all_reduce(
                x, w["out"], name, bias=w["second"], residual=h, algorithm="unfused"
            )
            return llama_norm(y, w["first"]), torch.relu(y)

        for function, symbolic in ((plain, False), (full, False), (plain, True)):
            got, ops, told = traced(function, given, symbolic=symbolic)
            assert ops[f"tpkernels::_{MATMUL}"] == 1 and told.counts == {MATMUL: 1}, (ops, told)
            assert all(map(close, got, function(*given))), got
        fusion = tpkernels.compile.fuse_collectives()
        with fusion, torch.no_grad():
            torch.compile(plain, backend=graph_runner([]))(*given)
        assert MATMUL not in fusion.report.counts, f"by default: {fusion.report}"

        def twice(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            return block(h, x, w, llama_norm, LAYERS["ours"], name)

        spec = Spec(MATMUL, (BATCH * TOKENS, WIDTH, 2 * HIDDEN), F32)
        on_gpus = lambda own, op, _, **more: why(own, op, "cuda", **more)  # noqa: E731
        with mock.patch.object(compile_graph, "why_left_to_torch", on_gpus):
            for ms, count in ((FAST, {MATMUL: 2}), (SLOW, {})):
                groups.get(name).measured.tables["cuda"] = Table((measured(spec, "cuda", **ms),))
                _, _, told = traced(twice, given)
                assert told.counts == count, f"{ms}: {told}"


def our_layer(h: torch.Tensor, x: torch.Tensor, w: Any, group: str, **options: Any) -> torch.Tensor:
    return tpkernels.matmul_all_reduce(x, w["out"], group, **options)


def after_residual(norm: Callable[..., Any]) -> Callable[..., Any]:
    """A norm of the residual sum, given that sum and the weights."""
    return lambda h, x, w, group: norm(h + our_layer(h, x, w, group), w)


def factor_of(total: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.rsqrt(total.float().pow(2).mean(dim, keepdim=True) + EPS)


def scaled(total: torch.Tensor, w: Any, factor: torch.Tensor) -> torch.Tensor:
    return w["first"] * (total.float() * factor).to(BF16)


def read_twice(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = our_layer(h, x, w, group)
    return llama_norm(h + y, w["first"]), y


def its_square(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = our_layer(h, x, w, group)
    return llama_norm(y + y.relu(), w["first"])


def its_rows(total: torch.Tensor, w: Any) -> Any:
    factor = factor_of(total)
    return scaled(total, w, factor), factor


def wide_result(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    return llama_norm(our_layer(h, x, w, group, out_dtype=F32) + h.float(), w["first"].float())


# A gradient needs the norm's factor.
A_GRADIENT = after_residual(lambda total, w: llama_norm(total, w["first"]))
KEPT: dict[str, Callable[..., Any]] = {
    "the op's result is read by others": read_twice,
    "rounded twice": lambda h, *g: llama_norm(
        (h.float() + our_layer(h, *g).float()).relu().to(h.dtype), g[1]["first"]
    ),
    "a sum with itself": its_square,
    "the norm's factor is read by others": after_residual(its_rows),
    "another dim": after_residual(lambda total, w: scaled(total, w, factor_of(total, dim=-2))),
    "a weight made of it": after_residual(lambda total, w: llama_norm(total, total[0, 0] * 2)),
    "a sum with a factor": lambda h, *g: llama_norm(
        torch.add(h, our_layer(h, *g), alpha=2), g[1]["first"]
    ),
    "a sum that broadcasts": lambda h, *g: llama_norm(
        our_layer(h, *g) + h[:1, :1], g[1]["first"]
    ),
    "transposed": lambda h, *g: llama_norm(
        h.transpose(0, 1) + our_layer(h, *g).transpose(0, 1), g[1]["first"]
    ),
    "a wide result": wide_result,
    "two residuals": lambda h, *g: llama_norm(
        our_layer(h, *g, residual=h) + h, g[1]["first"]
    ),
    "a mean": lambda h, x, w, group: llama_norm(
        reduce(torch.relu(x @ w["out"]), group, "avg") + h, w["first"]
    ),
    "a gradient": A_GRADIENT,
}  # fmt: skip


def kept_job() -> None:
    """Graphs in which the norm stays outside the all-reduce."""
    with fresh_group() as group:
        h, x, w = inputs(BF16)
        for name, function in KEPT.items():
            needs_grad = function is A_GRADIENT
            by, given = (compiled if needs_grad else traced), (h, x, w)
            if needs_grad:
                given = h.clone().requires_grad_(), x, w
            run = _in_group(function, group.group_name)
            _, before, _ = by(run, given, False)
            _, after, told = by(run, given, True)
            assert before == after and not any("rms_norm" in op for op in told.counts), (name, told)


def _in_group(function: Callable[..., Any], group: str) -> Callable[..., Any]:
    return lambda h, x, w: function(h, x, w, group)


@pytest.mark.parametrize("job", [blocks_job, more_job, kept_job])
def test_norms(ranks: RanksFixture, job: Callable[[], list[str]]) -> None:
    check_job(ranks(2), job)


def test_graphs_with_and_without_norms_are_kept_apart() -> None:
    keys = {tpkernels.compile.fuse_collectives(norms=norms).uuid() for norms in (None, True, False)}
    assert len(keys) == 3
