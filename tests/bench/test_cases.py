"""The cases of a benchmark: sweeps of models, options and YAML files; what a case costs; and that
verification looks at everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.damage import invoke
from tests.support.ranked import on_ranks
from tpkernels import dtypes
from tpkernels.bench.cases import random_case, run_torch, run_tpkernels
from tpkernels.bench.specs import Spec, square_of
from tpkernels.bench.sweep import (
    LAYER,
    MODELS,
    PROJECTIONS,
    Settings,
    Sweep,
    plan_sweep,
    projection,
)
from tpkernels.bench.verification import verify
from tpkernels.cli import bench as command
from tpkernels.op_spec import OPS, Options
from tpkernels.planning.cost import Rates
from tpkernels.planning.problem import ORDERED, Problem

BF16, F32 = torch.bfloat16, torch.float32
SCALED = tuple(op for op, spec in OPS.items() if spec.scaled)


def cases(**options: object) -> list[str]:
    sweep = plan_sweep(Settings(**options), ranks=None, device="cpu")  # type: ignore[arg-type]
    return [item.key for item in sweep.items]


def test_the_products_of_a_model() -> None:
    """N and K before the split, of llama3-8b: 32 heads and 8 KV heads of 128."""
    projections = {name: projection(MODELS["llama3-8b"], name, 2) for name in PROJECTIONS}
    assert {name: (each.column, each.n, each.k) for name, each in projections.items()} == {
        "qkv": (True, 6144, 4096),
        "out": (False, 4096, 4096),
        "gate_up": (True, 28672, 4096),
        "down": (False, 4096, 14336),
        "lm_head": (True, 128256, 4096),
    }
    # 16 ranks hold a copy of one of 8 KV heads each.
    assert projection(MODELS["llama3-8b"], "qkv", 16).n == 4096 + 2 * 16 * 128
    assert projection(MODELS["qwen3-32b"], "out", 2).k == 64 * 128 != MODELS["qwen3-32b"].hidden
    assert projection(MODELS["gpt3-175b"], "gate_up", 2).n == 49152  # not gated
    for name, model in MODELS.items():  # can be split
        assert model.heads % model.kv_heads == 0
        world = 3 if name == "smollm2-135m" else 8
        for each in LAYER:
            matmul = projection(model, each, world)
            assert (matmul.n if matmul.column else matmul.k) % world == 0


def test_a_sweep_is_a_product() -> None:
    names = cases(
        model=("llama3-8b",),
        m=("16,256",),
        tp=("2", "4"),
        dtype=("bf16,fp32",),
        projection=("out",),
    )
    assert names == [
        f"matmul_reduce_scatter {m}x4096x4096 {dtype} tp{world}"
        for world in (2, 4)
        for dtype in ("bfloat16", "float32")
        for m in (16, 256)
    ]
    assert len(cases()) == 7 * 2 + 7 * 3  # matmul ops by shapes, collectives by sizes
    assert cases(shape=("9,32,64",), op=("all_gather_matmul",), uneven=True)


def test_ops_of_a_model() -> None:
    """Without sequence parallelism the row-parallel products end in an all-reduce. Models that
    share a product share the case."""
    names = cases(model=("llama3-8b",), m=("1",), op=("matmul_all_reduce",))
    assert [each.split()[:2] for each in names] == [
        ["matmul_all_reduce", "1x4096x4096"],
        ["matmul_all_reduce", "1x4096x14336"],
    ]
    given = Settings(model=("llama3-8b,llama2-7b",), m=("16",), projection=("out",))
    (item,) = plan_sweep(given, ranks=None, device="cpu").items
    assert item.labels == ("llama3-8b out", "llama2-7b out")
    given = Settings(model=("llama3-8b",), m=("16",), op=SCALED)
    items = plan_sweep(given, ranks=None, device="cpu").items
    row_parallel = ["scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"]
    assert [(item.spec.op, item.labels[0]) for item in items] == [
        ("all_gather_scaled_matmul", "llama3-8b qkv"),
        *((op, "llama3-8b out") for op in row_parallel),
        ("all_gather_scaled_matmul", "llama3-8b gate_up"),
        *((op, "llama3-8b down") for op in row_parallel),
    ]


def test_quick_and_what_overrides_it() -> None:
    def effort(**options: object) -> tuple[int, float | None]:
        effort = plan_sweep(Settings(**options), ranks=None, device="cpu").method  # type: ignore[arg-type]
        return effort.repeat, effort.seconds

    assert effort() == (20, None)
    assert effort(quick=True) == (10, 2.0)
    assert effort(quick=True, repeat=3) == (3, 2.0)
    assert effort(quick=True, seconds=9.0, repeat=50) == (50, 9.0)


def sweep_of(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> Sweep:
    """What `tpkernels bench --config` would measure."""
    found: list[Sweep] = []
    monkeypatch.setattr(command, "run_sweep", lambda sweep, *_, **__: found.append(sweep))
    ended = invoke("bench", "--config", str(path), *options)
    assert ended.exit_code == 0, ended.output
    return found[0]


def test_a_yaml_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "op: [all_gather_matmul, all_reduce]\ntp: 2\nshape: [[16, 32, 64], '2,32,64']\n"
        "bytes: [4K, 1M]\ndtype: fp32\nseconds: 2\nquick: true\nwarm: true\n"
    )
    sweep = sweep_of(monkeypatch, path)
    assert [(item.spec.op, item.spec.shape) for item in sweep.items] == [
        ("all_gather_matmul", (16, 32, 64)),
        ("all_gather_matmul", (2, 32, 64)),
        ("all_reduce", (1024,)),
        ("all_reduce", (262144,)),
    ]
    assert {dtypes.name(item.spec.dtype) for item in sweep.items} == {"float32"}
    assert (sweep.method.repeat, sweep.method.seconds, sweep.method.cold) == (10, 2.0, False)
    sweep = sweep_of(monkeypatch, path, "--dtype", "bf16", "--cold", "--op", "all_gather")
    assert {(item.spec.op, dtypes.name(item.spec.dtype)) for item in sweep.items} == {
        ("all_gather", "bfloat16")
    }
    assert sweep.method.cold and sweep.method.seconds == 2.0


def test_costs() -> None:
    """Rank 0 of 4: flops, bytes received from peers, and bytes touched. Scaled: fp8 operands, a
    scale of 4 bytes for each row and column, bf16 results."""
    gather = Spec("all_gather_matmul", (64, 32, 16), BF16).cost(4)
    assert (gather.flops, gather.traffic) == (2 * 64 * 8 * 16, 3 * 16 * 16 * 2)
    assert gather.touched == 2 * (64 * 16 + 16 * 8 + 64 * 8) + gather.traffic
    reduce = Spec("matmul_reduce_scatter", (64, 32, 16), BF16).cost(4)
    assert (reduce.flops, reduce.traffic) == (2 * 64 * 32 * 4, 3 * 16 * 32 * 2)
    assert Spec("matmul_all_reduce", (64, 32, 16), BF16).cost(4).traffic == 2 * reduce.traffic
    alone = Spec("all_reduce", (64,), F32).cost(1)
    assert (alone.flops, alone.traffic) == (0, 0)
    rates = Rates(flops=1e3, torch_flops=1.0, copy_bytes=1e9, copy_over_cache=8.0)
    assert rates.least_seconds(gather) == pytest.approx(gather.flops / 1e3)
    rates = Rates(flops=1e12, torch_flops=1.0, copy_bytes=1e2, copy_over_cache=8.0)
    assert rates.least_seconds(gather) == pytest.approx(gather.touched / 1e2)

    gather = Spec("all_gather_scaled_matmul", (64, 32, 28), BF16).cost(4)
    assert (gather.flops, gather.traffic) == (2 * 64 * 8 * 28, 48 * (28 + 4))
    operands = 64 * 28 + 28 * 8 + 4 * (64 + 8)
    assert gather.touched == operands + 2 * 64 * 8 + gather.traffic
    scaled = Spec("scaled_matmul_reduce_scatter", (64, 32, 16), BF16).cost(4)
    assert (scaled.flops, scaled.traffic) == (2 * 64 * 32 * 4, 48 * 32 * 2)
    exchange = Spec("all_to_all", (64,), F32).cost(4)
    assert (exchange.flops, exchange.traffic) == (0, 3 * 4 * 4)
    assert exchange.touched == 2 * 64 + exchange.traffic


def test_a_square_of_elements() -> None:
    for elements in (1, 2048, 4002, 1 << 24):
        rows, columns = square_of(elements)
        assert rows * columns == elements and (elements % 2 or columns > 1)
        assert elements & (elements - 1) or rows in (columns, 2 * columns, columns // 2)


def test_every_case_can_be_tuned() -> None:
    """But of routed tokens. Scaled products are summed in order, on GPUs too, as the ops plan
    them."""
    for op in OPS:
        spec = Spec(op, (33, 48, 96) if "matmul" in op else (4096,), BF16)
        assert (spec.problem(3).tuning_key is None) == OPS[op].routed, op
        assert op not in SCALED or spec.problem(2, "cuda").numerics == ORDERED, op


def exchange(
    shape: tuple[int, ...], dim: int, sizes: tuple[int, ...], scattered: tuple[int, tuple[int, ...]]
) -> Problem:
    return Problem("all_to_all", "cpu", 2, shape, dim, sizes, F32, Options(scattered=scattered))


def test_which_exchanges_are_tuned() -> None:
    """Even ones of the first two dims, which all move rows of one length."""
    even = exchange((6, 8, 5), 0, (3, 3), (1, (4, 4)))
    key = even.tuning_key
    assert key is not None and key[1] == 6 * 8 * 5
    other = exchange((4, 6, 10), 0, (2, 2), (1, (3, 3))).tuning_key
    assert other is not None and other[0] == key[0]
    for sizes, columns in (((2, 4), (4, 4)), ((3, 3), (5, 3))):
        uneven = exchange((6, 8, 5), 0, sizes, (1, columns))
        assert uneven.tuning_key is None
    assert exchange((6, 8), 1, (4, 4), (0, (3, 3))).tuning_key is None
    assert exchange((6, 8, 4), 0, (3, 3), (2, (2, 2))).tuning_key is None


@on_ranks(2)
def test_scales_are_verified() -> None:
    """What verification says of results with the scales of other rows, or of other columns."""
    found = []
    for op in SCALED:
        case = random_case(Spec(op, (24, 32, 64), BF16))
        assert case.weights[0].shape == ((64, 16) if OPS[op].gathers else (32, 32))
        of_x, of_w = case.scales
        swapped = {
            "right": case,
            "x": replace(case, scales=(of_x.roll(1, 0), of_w)),
            "w": replace(case, scales=(of_x, of_w.roll(1, 1).contiguous())),
        }
        outputs = {name: run_tpkernels(each) for name, each in swapped.items()}
        verdicts = verify(case, run_torch(case), outputs)
        found.append({name: verdict.right for name, verdict in verdicts.items()})
    assert found == [{"right": True, "x": False, "w": False}] * len(SCALED)


@on_ranks(2)
def test_all_ranks_must_have_the_same_sum() -> None:
    """What verification says of a sum that differs on rank 1 where rank 0 compares."""
    case = random_case(Spec("all_reduce", (64,), F32))
    (y,) = run_tpkernels(case.copy())
    if dist.get_rank() == 1:
        y[0] += 1
    assert not verify(case, None, {"sum": [y]})["sum"].right
