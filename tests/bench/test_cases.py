"""Benchmark cases: the cases that the options of `tpkernels bench` select, their costs, and
verification of every element."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.cli.test_cli import invoke, one_element_off
from tests.support.ranked import on_ranks
from tpkernels.bench.cases import random_case, run_torch
from tpkernels.bench.measuring import check
from tpkernels.bench.specs import Spec, get_square_shape
from tpkernels.bench.sweep import LAYER, MODELS, PROJECTIONS, Item, Method, projection
from tpkernels.cli import bench as command
from tpkernels.launch import Ranks
from tpkernels.planning.cost import Rates
from tpkernels.planning.op_spec import OPS, ExchangeOptions
from tpkernels.planning.problem import ORDERED, Problem
from tpkernels.qualification.op_case import Outputs

BF16, F32 = torch.bfloat16, torch.float32
SCALED = tuple(op for op, spec in OPS.items() if spec.scaled)
Sweep = Callable[[str], tuple[list[Item], Method]]


def test_matmuls_of_a_model() -> None:
    """N and K of llama3-8b before sharding: 32 heads and 8 KV heads of size 128."""
    projections = {name: projection(MODELS["llama3-8b"], name, 2) for name in PROJECTIONS}
    assert {name: (layer.column, layer.n, layer.k) for name, layer in projections.items()} == {
        "qkv": (True, 6144, 4096),
        "out": (False, 4096, 4096),
        "gate_up": (True, 28672, 4096),
        "down": (False, 4096, 14336),
        "lm_head": (True, 128256, 4096),
    }
    # With 16 ranks, two ranks hold a copy of each KV head.
    assert projection(MODELS["llama3-8b"], "qkv", 16).n == 4096 + 2 * 16 * 128
    assert projection(MODELS["qwen3-32b"], "out", 2).k == 64 * 128 != MODELS["qwen3-32b"].hidden
    assert projection(MODELS["gpt3-175b"], "gate_up", 2).n == 49152  # not gated
    for name, model in MODELS.items():  # every model can be sharded
        assert model.heads % model.kv_heads == 0
        world = 3 if name == "smollm2-135m" else 8
        for layer in LAYER:
            matmul = projection(model, layer, world)
            assert (matmul.n if matmul.column else matmul.k) % world == 0


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Return a function that parses the options of `tpkernels bench` into items and the method."""
    calls: list[tuple[list[Item], Method]] = []
    monkeypatch.setattr(command, "measure_all", lambda *args: calls.append(args[:2]) or [])

    def planned(options: str) -> tuple[list[Item], Method]:
        result = invoke("bench", *options.split())
        assert result.exit_code == 0, result.output
        return calls.pop()

    return planned


def test_a_sweep_combines_all_options(sweep: Sweep) -> None:
    items, _ = sweep(
        "--model llama3-8b --m 16,256 --tp 2 --tp 4 --dtype bf16,fp32 --projection out"
    )
    assert [item.key for item in items] == [
        f"matmul_reduce_scatter {m}x4096x4096 {dtype} tp{world}"
        for world in (2, 4)
        for dtype in ("bfloat16", "float32")
        for m in (16, 256)
    ]
    items, method = sweep("")
    assert len(items) == 7 * 2 + 7 * 3  # matmul ops by shapes, collectives by sizes
    assert {item.world for item in items} == {2} and method.algorithms == ["auto"]
    (item,), _ = sweep("--shape 9,32,64 --op all_gather_matmul --tp 2")  # uneven rows
    assert item.spec.shape == (9, 32, 64)
    items, _ = sweep("--bytes 4K,1M --op all_reduce --dtype fp32")
    assert [item.spec.shape for item in items] == [(1024,), (262144,)]


def test_ops_of_a_model(sweep: Sweep) -> None:
    """Without sequence parallelism, row-parallel matmuls end in an all-reduce. Models with equal
    matmuls share a case."""
    items, _ = sweep("--model llama3-8b --m 1 --op matmul_all_reduce")
    assert [item.spec.shape for item in items] == [(1, 4096, 4096), (1, 4096, 14336)]
    (item,), _ = sweep("--model llama3-8b,llama2-7b --m 16 --projection out")
    assert item.labels == ("llama3-8b out", "llama2-7b out")
    items, _ = sweep(f"--model llama3-8b --m 16 --op {','.join(SCALED)}")
    row_parallel = ["scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"]
    assert [(item.spec.op, item.labels[0]) for item in items] == [
        ("all_gather_scaled_matmul", "llama3-8b qkv"),
        *((op, "llama3-8b out") for op in row_parallel),
        ("all_gather_scaled_matmul", "llama3-8b gate_up"),
        *((op, "llama3-8b down") for op in row_parallel),
    ]


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        ("", (20, None)),
        ("--quick", (10, 2.0)),
        ("--quick --repeat 3", (3, 2.0)),
        ("--quick --seconds 9 --repeat 50", (50, 9.0)),
    ],
)
def test_quick_and_its_overrides(
    sweep: Sweep, options: str, effort: tuple[int, float | None]
) -> None:
    _, method = sweep(options)
    assert (method.repeat, method.seconds) == effort
    assert method.cold and method.baselines
    _, method = sweep("--warm --no-baselines")
    assert not method.cold and not method.baselines


def test_costs() -> None:
    """Costs on rank 0 of 4: flops, bytes received from peers, and bytes touched. Scaled ops have
    fp8 operands, a 4-byte scale per row and column, and bf16 results."""
    gather = Spec("all_gather_matmul", (64, 32, 16), BF16).cost(4)
    assert (gather.flops, gather.traffic) == (2 * 64 * 8 * 16, 3 * 16 * 16 * 2)
    assert gather.touched == 2 * (64 * 16 + 16 * 8 + 64 * 8) + gather.traffic
    reduce = Spec("matmul_reduce_scatter", (64, 32, 16), BF16).cost(4)
    assert (reduce.flops, reduce.traffic) == (2 * 64 * 32 * 4, 3 * 16 * 32 * 2)
    assert Spec("matmul_all_reduce", (64, 32, 16), BF16).cost(4).traffic == 2 * reduce.traffic
    single = Spec("all_reduce", (64,), F32).cost(1)
    assert (single.flops, single.traffic) == (0, 0)
    rates = Rates(flops=1e3, torch_flops=1.0, copy_bytes=1e9)
    assert rates.roofline_seconds(gather) == pytest.approx(gather.flops / 1e3)
    rates = Rates(flops=1e12, torch_flops=1.0, copy_bytes=1e2)
    assert rates.roofline_seconds(gather) == pytest.approx(gather.touched / 1e2)

    gather = Spec("all_gather_scaled_matmul", (64, 32, 28), BF16).cost(4)
    assert (gather.flops, gather.traffic) == (2 * 64 * 8 * 28, 48 * (28 + 4))
    operands = 64 * 28 + 28 * 8 + 4 * (64 + 8)
    assert gather.touched == operands + 2 * 64 * 8 + gather.traffic
    scaled = Spec("scaled_matmul_reduce_scatter", (64, 32, 16), BF16).cost(4)
    assert (scaled.flops, scaled.traffic) == (2 * 64 * 32 * 4, 48 * 32 * 2)
    exchange = Spec("all_to_all", (64,), F32).cost(4)
    assert (exchange.flops, exchange.traffic) == (0, 3 * 4 * 4)
    assert exchange.touched == 2 * 64 + exchange.traffic


def test_square_shapes() -> None:
    for elements in (1, 2048, 4002, 1 << 24):
        rows, columns = get_square_shape(elements)
        assert rows * columns == elements and (elements % 2 or columns > 1)
        assert elements & (elements - 1) or rows in (columns, 2 * columns, columns // 2)


def test_every_case_can_be_tuned() -> None:
    """Only MoE ops lack a tuning key. Scaled ops use ordered numerics, on GPUs as well."""
    for op in OPS:
        spec = Spec(op, (33, 48, 96) if "matmul" in op else (4096,), BF16)
        assert (spec.problem(3).tuning_key is None) == OPS[op].routed, op
        assert op not in SCALED or spec.problem(2, "cuda").numerics == ORDERED, op


def test_exchanges_with_a_tuning_key() -> None:
    """Only even exchanges between the first two dims are tuned: all their rows have equal
    length."""

    def key(
        shape: tuple[int, ...],
        dim: int,
        sizes: tuple[int, int],
        scatter_dim: int,
        scatter_sizes: tuple[int, int],
    ) -> tuple[object, int] | None:
        options = ExchangeOptions(dim=scatter_dim, sizes=scatter_sizes)
        return Problem("all_to_all", "cpu", 2, shape, dim, sizes, F32, options).tuning_key  # type: ignore[return-value]

    even = key((6, 8, 5), 0, (3, 3), 1, (4, 4))
    second = key((4, 6, 10), 0, (2, 2), 1, (3, 3))
    assert even is not None and second is not None
    assert even[1] == 6 * 8 * 5 and second[0] == even[0]
    assert key((6, 8, 5), 0, (2, 4), 1, (4, 4)) is None
    assert key((6, 8, 5), 0, (3, 3), 1, (5, 3)) is None
    assert key((6, 8), 1, (4, 4), 0, (3, 3)) is None
    assert key((6, 8, 4), 0, (3, 3), 2, (2, 2)) is None


# Verification.


def corruptions(op: str, outputs: Outputs) -> dict[str, Outputs]:
    """Return wrong results of ``op`` of the kinds that a faulty fused op may produce."""
    y, *normed = outputs
    last = dist.get_rank() == dist.get_world_size() - 1
    wrong = {
        "nothing written": torch.zeros_like(y),
        "rows in another order": y.flip(0),
        "rows missing": y[:-1],
        "not a number in one element of one rank": y.clone(),
        "one element of one rank": one_element_off(y) if last else y,
        "another dtype": y.double(),
    }
    if last:
        wrong["not a number in one element of one rank"].view(-1)[-1] = math.nan
    if "reduce" in op and dist.get_world_size() > 1:
        wrong["a partial left out"] = y - y / dist.get_world_size()
    results = {name: [value, *normed] for name, value in wrong.items()}
    if normed:
        del results["rows missing"]
        results["wrong rows"] = [y, one_element_off(normed[0])]
        results["no rows"] = [y, torch.zeros_like(y)]
    return results


def judge(specs: list[Spec]) -> list[dict[str, bool]]:
    """Return the verdict of the verification on each result, on this rank."""
    judged = []
    for spec in specs:
        case = random_case(spec)
        outputs = case.copy().run()
        expected = None if case.spec.routed else run_torch(case.copy())
        results = {"right": outputs, **corruptions(spec.op, outputs)}
        worst = check(case, results, expected)
        judged.append({name: error <= 1 for name, error in worst.items()})
    return judged


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_check_accepts_only_right_results(
    ranks: Callable[[int], Ranks], dtype: torch.dtype
) -> None:
    # K is so large that sqrt(K) * eps * (|A| @ |B|) exceeds the result in bf16. An all-to-all needs
    # columns for every rank.
    specs = [
        Spec(op, (33, 16, 1024) if "matmul" in op else (4002 - (op != "all_to_all"),), dtype)
        for op in OPS
    ]
    for judged in ranks(2).run(judge, specs):
        for spec, verdicts in zip(specs, judged, strict=True):
            assert [name for name in verdicts if verdicts[name]] == ["right"], spec


@on_ranks(2)
def test_scales_are_verified() -> None:
    """Results with the scales of other rows, or of other columns, are wrong."""
    verdicts = []
    for op in SCALED:
        case = random_case(Spec(op, (24, 32, 64), BF16))
        assert case.w is not None and case.w.shape == ((64, 16) if OPS[op].gathers else (32, 32))
        x_scales, w_scales = case.scales
        swapped = {
            "right": case,
            "x": replace(case, scales=(x_scales.roll(1, 0), w_scales)),
            "w": replace(case, scales=(x_scales, w_scales.roll(1, 1).contiguous())),
        }
        outputs = {name: variant.run() for name, variant in swapped.items()}
        worst = check(case, outputs, run_torch(case))
        verdicts.append({name: error <= 1 for name, error in worst.items()})
    assert verdicts == [{"right": True, "x": False, "w": False}] * len(SCALED)


@on_ranks(2)
def test_all_ranks_must_have_the_same_sum() -> None:
    """A sum that differs on rank 1 in the shard that rank 0 checks is wrong."""
    case = random_case(Spec("all_reduce", (64,), F32))
    (y,) = case.copy().run()
    if dist.get_rank() == 1:
        y[0] += 1
    assert check(case, {"sum": [y]})["sum"] == math.inf
