"""The cases of ops on scaled operands, and of the all-to-all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import RanksFixture
from tpkernels.bench.cases import random_case, run_torch, run_tpkernels
from tpkernels.bench.specs import Spec, square_of
from tpkernels.bench.sweep import Settings, plan_sweep
from tpkernels.bench.verification import verify
from tpkernels.op_spec import OPS, Options
from tpkernels.planning.problem import ORDERED, Problem

BF16, F32 = torch.bfloat16, torch.float32

SCALED = tuple(op for op, spec in OPS.items() if spec.scaled)


def test_costs() -> None:
    """Rank 0 of 4: fp8 operands, a scale of 4 bytes for each row and column, bf16 results."""
    gather = Spec("all_gather_scaled_matmul", (64, 32, 28), BF16).cost(4)
    assert (gather.flops, gather.traffic) == (2 * 64 * 8 * 28, 48 * (28 + 4))
    operands = 64 * 28 + 28 * 8 + 4 * (64 + 8)
    assert gather.touched == operands + 2 * 64 * 8 + gather.traffic
    reduce = Spec("scaled_matmul_reduce_scatter", (64, 32, 16), BF16).cost(4)
    assert (reduce.flops, reduce.traffic) == (2 * 64 * 32 * 4, 48 * 32 * 2)
    exchange = Spec("all_to_all", (64,), F32).cost(4)
    assert (exchange.flops, exchange.traffic) == (0, 3 * 4 * 4)
    assert exchange.touched == 2 * 64 + exchange.traffic


def test_a_model_has_scaled_products() -> None:
    given = Settings(model=("llama3-8b",), m=("16",), op=SCALED)
    names = [
        (item.spec.op, item.labels[0]) for item in plan_sweep(given, ranks=None, device="cpu").items
    ]
    row_parallel = ["scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"]
    assert names == [
        *[("all_gather_scaled_matmul", "llama3-8b qkv")],
        *[(op, "llama3-8b out") for op in row_parallel],
        *[("all_gather_scaled_matmul", "llama3-8b gate_up")],
        *[(op, "llama3-8b down") for op in row_parallel],
    ]


@pytest.mark.parametrize("elements", [1, 2048, 4002, 1 << 24])
def test_a_square_of_elements(elements: int) -> None:
    rows, columns = square_of(elements)
    assert rows * columns == elements and (elements % 2 or columns > 1)
    assert elements & (elements - 1) or rows in (columns, 2 * columns, columns // 2)


@pytest.mark.parametrize("op", OPS)
def test_every_case_can_be_tuned(op: str) -> None:
    spec = Spec(op, (33, 48, 96) if "matmul" in op else (4096,), BF16)
    assert spec.problem(3).tuning_key is not None


@pytest.mark.parametrize("op", SCALED)
def test_scaled_products_are_summed_in_order(op: str) -> None:
    """On GPUs too, as the ops plan them."""
    assert Spec(op, (33, 48, 96), BF16).problem(2, "cuda").numerics == ORDERED


def exchange(
    shape: tuple[int, ...],
    dim: int,
    sizes: tuple[int, ...],
    scattered: tuple[int, tuple[int, ...]],
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


def scales_job(op: str) -> dict[str, bool]:
    """What verification says of results with the scales of other rows, or of other columns."""
    case = random_case(Spec(op, (24, 32, 64), BF16))
    of_x, of_w = case.scales
    swapped = {
        "right": case,
        "x": replace(case, scales=(of_x.roll(1, 0), of_w)),
        "w": replace(case, scales=(of_x, of_w.roll(1, 1).contiguous())),
    }
    outputs = {name: run_tpkernels(each) for name, each in swapped.items()}
    verdicts = verify(case, run_torch(case), outputs)
    return {name: verdict.right for name, verdict in verdicts.items()}


@pytest.mark.parametrize("op", SCALED)
def test_scales_are_verified(ranks: RanksFixture, op: str) -> None:
    for right in ranks(2).run(scales_job, op):
        assert right == {"right": True, "x": False, "w": False}
