"""All-reduces followed by a residual and an RMS norm, in a Llama-like block: graphs that become one
op, and graphs that stay unchanged."""

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
from tests.support.compiled import graph_runner, ops_in, reduce, trace_and_fuse
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
    """RMS norm as in LlamaRMSNorm of transformers."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return weight * x.to(dtype)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, [x.shape[-1]], weight, EPS)


def squared_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm with a multiplication instead of a power, weighted before the cast."""
    x32 = x.float()
    rows = x32 * torch.rsqrt((x32 * x32).mean(-1, True) + EPS)
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
    """Run two row-parallel layers, each with a residual and a norm. Return the last norm and the
    residual stream."""
    h = h + layer(x, w["out"], group)
    y = norm(h, w["first"])
    h = layer(torch.relu(y @ w["up"]), w["down"], group) + h
    return norm(h, w["second"]), h


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return h, x and the weights. h and the norm weights are equal on all ranks."""
    shared = torch.Generator().manual_seed(0)
    local = torch.Generator().manual_seed(1 + dist.get_rank())

    def draw_tensor(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    w = {"out": draw_tensor(local, HIDDEN, WIDTH), "up": draw_tensor(local, WIDTH, HIDDEN)}
    w |= {"down": draw_tensor(local, HIDDEN, WIDTH)}
    w |= {name: draw_tensor(shared, WIDTH) for name in ("first", "second")}
    return draw_tensor(shared, BATCH, TOKENS, WIDTH), draw_tensor(local, BATCH, TOKENS, HIDDEN), w


def run_traced(
    function: Callable[..., Any], args: Any, norms: bool = True, symbolic: bool = False
) -> tuple[Any, Counter[str], FusionReport]:
    """Rewrite the graph with the pass. Return its results, its ops and the report."""
    with torch.no_grad():
        module, report = trace_and_fuse(function, args, symbolic=symbolic, norms=norms)
        return module(*args), ops_in(module), report


def run_compiled(function: Callable[..., Any], args: Any, norms: bool) -> Any:
    """Compile with the pass. Return the results, the ops and the report."""
    torch._dynamo.reset()
    seen: list[Counter[str]] = []
    fusion = tpkernels.compile.fuse_collectives(norms=norms)
    with fresh_cache(), fusion as report:
        results = torch.compile(function, backend=graph_runner(seen), fullgraph=True)(*args)
    return results, sum(seen, Counter()), report


def block_failures(layer: str, norm: Norm, dtype: torch.dtype, name: str, run: Any) -> list[str]:
    args = h, x, w = inputs(dtype)

    def function(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
        return block(h, x, w, norm, LAYERS[layer], name)

    op, reference_layer = MATMUL, LAYERS["functional"]
    if layer not in ("functional", "ours"):
        op, reference_layer = ALONE, LAYERS["no matmul"]
    with torch.no_grad():
        plain, before, _ = run(function, args, False)
        fused, after, report = run(function, args, True)
        weights64 = {key: weight.double() for key, weight in w.items()}
        exact = block(h.double(), x.double(), weights64, torch_norm, reference_layer, name)
    failures = []
    if report.counts != {op: 2} or report.left_alone:
        failures.append(str(report))
    leftovers = [key for key in after if "pow" in key or "rsqrt" in key or "add" in key]
    if after[f"tpkernels::_{op}"] != 2 or before[f"tpkernels::_{op}"] or leftovers:
        failures.append(f"{before} -> {after}")
    eps = torch.finfo(dtype).eps
    for got, unfused, want in zip(fused, plain, exact, strict=True):
        error, scale = (unfused - want).abs().max(), want.abs().max()
        bound = float(error + HIDDEN**0.5 * eps * scale)
        off = float((got - want).abs().max())
        if not off <= bound or error > 0.1 * scale or got.stride() != unfused.stride():
            failures.append(f"off by {off}, without the pass by {error}, of {scale}")
    return [f"{layer}, {norm.__name__} {dtype}: {failure}" for failure in failures]


# Every norm, dtype and layer occurs.
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
            # The torch norm writes in place until the compiler functionalizes the graph.
            run = run_compiled if number == 0 or norm is torch_norm else run_traced
            failures += block_failures(layer, norm, dtype, group.group_name, run)
    return failures


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


FAST, SLOW = {"unfused": 2.0, "direct": 1.0}, {"unfused": 1.0, "direct": 2.0}


def variants_job() -> None:
    """Fuse without a residual, with a residual and bias in the op, and with symbolic sizes, while
    further nodes read the result. By default CPU graphs are not fused. For tensors that count as
    CUDA tensors, timings decide."""
    find_reason = compile_graph.reason_against_replacement
    with fresh_group() as group:
        name, args = group.group_name, inputs(F32)

        def plain(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            y = reduce(x @ w["out"], name)
            return squared_norm(y, w["first"]), y * 2

        def full(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            y = tpkernels.matmul_all_reduce(
                x, w["out"], name, bias=w["second"], residual=h, algorithm="unfused"
            )
            return llama_norm(y, w["first"]), torch.relu(y)

        for function, symbolic in ((plain, False), (full, False), (plain, True)):
            got, ops, report = run_traced(function, args, symbolic=symbolic)
            assert ops[f"tpkernels::_{MATMUL}"] == 1 and report.counts == {MATMUL: 1}, (ops, report)
            assert all(map(close, got, function(*args))), got
        fusion = tpkernels.compile.fuse_collectives()
        with fusion, torch.no_grad():
            torch.compile(plain, backend=graph_runner([]))(*args)
        assert MATMUL not in fusion.report.counts, f"by default: {fusion.report}"

        def twice(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            return block(h, x, w, llama_norm, LAYERS["ours"], name)

        spec = Spec(MATMUL, (BATCH * TOKENS, WIDTH, 2 * HIDDEN), F32)
        on_gpus = lambda g, op, _, **options: find_reason(g, op, "cuda", **options)  # noqa: E731
        with mock.patch.object(compile_graph, "reason_against_replacement", on_gpus):
            for ms, count in ((FAST, {MATMUL: 2}), (SLOW, {})):
                groups.get(name).planner_inputs.tables["cuda"] = Table(
                    (measured(spec, "cuda", **ms),)
                )
                _, _, report = run_traced(twice, args)
                assert report.counts == count, f"{ms}: {report}"


def fused_layer(
    h: torch.Tensor, x: torch.Tensor, w: Any, group: str, **options: Any
) -> torch.Tensor:
    return tpkernels.matmul_all_reduce(x, w["out"], group, **options)


def after_residual(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies ``norm`` to the residual sum and the weights."""
    return lambda h, x, w, group: norm(h + fused_layer(h, x, w, group), w)


def norm_factor(total: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.rsqrt(total.float().pow(2).mean(dim, keepdim=True) + EPS)


def scaled(total: torch.Tensor, w: Any, factor: torch.Tensor) -> torch.Tensor:
    return w["first"] * (total.float() * factor).to(BF16)


def read_twice(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = fused_layer(h, x, w, group)
    return llama_norm(h + y, w["first"]), y


def sum_with_itself(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = fused_layer(h, x, w, group)
    return llama_norm(y + y.relu(), w["first"])


def returned_factor(total: torch.Tensor, w: Any) -> Any:
    factor = norm_factor(total)
    return scaled(total, w, factor), factor


def fp32_result(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    return llama_norm(fused_layer(h, x, w, group, out_dtype=F32) + h.float(), w["first"].float())


# The gradient needs the factor of the norm.
WITH_GRADIENT = after_residual(lambda total, w: llama_norm(total, w["first"]))
UNFUSED: dict[str, Callable[..., Any]] = {
    "the op's result is read by others": read_twice,
    "rounded twice": lambda h, *g: llama_norm(
        (h.float() + fused_layer(h, *g).float()).relu().to(h.dtype), g[1]["first"]
    ),
    "a sum with itself": sum_with_itself,
    "the norm's factor is read by others": after_residual(returned_factor),
    "another dim": after_residual(lambda total, w: scaled(total, w, norm_factor(total, dim=-2))),
    "a weight made of it": after_residual(lambda total, w: llama_norm(total, total[0, 0] * 2)),
    "a sum with a factor": lambda h, *g: llama_norm(
        torch.add(h, fused_layer(h, *g), alpha=2), g[1]["first"]
    ),
    "a sum that broadcasts": lambda h, *g: llama_norm(
        fused_layer(h, *g) + h[:1, :1], g[1]["first"]
    ),
    "transposed": lambda h, *g: llama_norm(
        h.transpose(0, 1) + fused_layer(h, *g).transpose(0, 1), g[1]["first"]
    ),
    "a wide result": fp32_result,
    "two residuals": lambda h, *g: llama_norm(
        fused_layer(h, *g, residual=h) + h, g[1]["first"]
    ),
    "a mean": lambda h, x, w, group: llama_norm(
        reduce(torch.relu(x @ w["out"]), group, "avg") + h, w["first"]
    ),
    "a gradient": WITH_GRADIENT,
}  # fmt: skip


def unfused_job() -> None:
    """Check graphs in which the norm stays outside the all-reduce."""
    with fresh_group() as group:
        h, x, w = inputs(BF16)
        for name, function in UNFUSED.items():
            needs_grad = function is WITH_GRADIENT
            run, args = (run_compiled if needs_grad else run_traced), (h, x, w)
            if needs_grad:
                args = h.clone().requires_grad_(), x, w
            grouped = _in_group(function, group.group_name)
            _, before, _ = run(grouped, args, False)
            _, after, report = run(grouped, args, True)
            assert before == after and not any("rms_norm" in op for op in report.counts), (
                name,
                report,
            )


def _in_group(function: Callable[..., Any], group: str) -> Callable[..., Any]:
    return lambda h, x, w: function(h, x, w, group)


@pytest.mark.parametrize("job", [blocks_job, variants_job, unfused_job])
def test_norms(ranks: RanksFixture, job: Callable[[], list[str]]) -> None:
    check_job(ranks(2), job)


def test_the_cache_key_depends_on_norms() -> None:
    keys = {tpkernels.compile.fuse_collectives(norms=norms).uuid() for norms in (None, True, False)}
    assert len(keys) == 3
