"""The benchmark is honest: it reports what is slow, serial, free or wrong as such."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tpkernels.bench import measuring
from tpkernels.bench.cases import Case, Outputs, planned
from tpkernels.bench.measuring import CaseReport, run_case
from tpkernels.bench.results import Result, result
from tpkernels.bench.specs import Spec
from tpkernels.bench.statistics import FEWEST
from tpkernels.bench.sweep import Effort, Item
from tpkernels.launch import Ranks
from tpkernels.planning.choose import Plan
from tpkernels.planning.cost import Rates

SPEC = Spec("matmul_reduce_scatter", (8, 16, 32), torch.float32)
RATES = Rates(flops=1e10, torch_flops=1e10, copy_bytes=1e10, copy_over_cache=8.0)
EFFORT = Effort(repeat=FEWEST, seconds=None, cold=False, baselines=False)
COMPUTE, TRAVEL = 0.04, 0.04


@dataclass(frozen=True)
class Sleeps:
    """Seconds that the op sleeps instead of working."""

    op: float

    def call(self, case: Case, algorithm: str = "auto") -> Outputs:
        time.sleep(COMPUTE + TRAVEL if algorithm == "unfused" else self.op)
        return []

    def product(self, case: Case) -> Outputs:
        time.sleep(COMPUTE)
        return []


def asleep(sleeps: Sleeps) -> CaseReport:
    """On a rank: results are verified as usual; only the times are fake."""
    with (
        mock.patch.object(measuring, "run_tpkernels", sleeps.call),
        mock.patch.object(measuring, "run_local_matmul", sleeps.product),
    ):
        return run_case(SPEC, ["auto"], EFFORT, RATES, "cpu")


def measured(ranks: Callable[[int], Ranks], sleeps: Sleeps) -> Result:
    return result(Item(SPEC, 2), RATES, ranks(2).run(asleep, sleeps))


@pytest.mark.thorough
def test_serialised_communication_hides_nothing(ranks: Callable[[int], Ranks]) -> None:
    case = measured(ranks, Sleeps(op=COMPUTE + TRAVEL))
    hidden = case.algorithms["auto"].e_overlap
    assert hidden is not None and abs(hidden.value) < 0.25, hidden
    assert case.algorithms["auto"].ect == pytest.approx(1e3 * TRAVEL, rel=0.3)


@pytest.mark.thorough
def test_free_communication_is_hidden_altogether(ranks: Callable[[int], Ranks]) -> None:
    case = measured(ranks, Sleeps(op=COMPUTE))
    hidden = case.algorithms["auto"].e_overlap
    assert hidden is not None and abs(hidden.value - 1) < 0.25, hidden
    speedup = case.algorithms["auto"].speedup["unfused"]
    assert speedup.verdict == "faster" and speedup.value == pytest.approx(2, rel=0.25)


def spoiled(case: Case, algorithm: str) -> tuple[Outputs, Plan]:
    (y,), plan = planned(case, algorithm)
    if algorithm == "auto" and dist.get_rank() == 1:
        y.view(-1)[0] += 0.1 * y.abs().max()
    return [y], plan


def sabotaged() -> CaseReport:
    with mock.patch.object(measuring, "planned", spoiled):
        return run_case(SPEC, ["auto", "direct"], EFFORT, RATES, "cpu")


def test_a_wrong_op_is_not_timed(ranks: Callable[[int], Ranks]) -> None:
    """One element on one rank is wrong; the other algorithms are unaffected."""
    case = result(Item(SPEC, 2), RATES, ranks(2).run(sabotaged))
    wrong = case.algorithms["auto"]
    assert not wrong.right and not case.is_right
    assert wrong.ect is None and wrong.e_overlap is None and wrong.speedup == {}
    assert set(case.times) == {"direct", "unfused", "local_matmul"}
    assert case.algorithms["direct"].right


def nothing_right() -> CaseReport:
    def spoiled_everywhere(case: Case, algorithm: str) -> tuple[Outputs, Plan]:
        (y,), plan = planned(case, algorithm)
        return [y + 1], plan

    with mock.patch.object(measuring, "planned", spoiled_everywhere):
        return run_case(Spec("all_reduce", (64,), torch.float32), ["auto"], EFFORT, RATES, "cpu")


def test_where_everything_is_wrong_nothing_is_timed(ranks: Callable[[int], Ranks]) -> None:
    spec = Spec("all_reduce", (64,), torch.float32)
    case = result(Item(spec, 2), RATES, ranks(2).run(nothing_right))
    assert not case.is_right and case.times == {}


def slow_torch() -> CaseReport:
    effort = Effort(repeat=1, seconds=3.0, cold=False, baselines=True)
    rates = replace(RATES, torch_flops=1.0)
    return run_case(SPEC, ["auto"], effort, rates, "cpu")


def test_baselines_beyond_the_budget_are_left_out_with_the_reason(
    ranks: Callable[[int], Ranks],
) -> None:
    case = result(Item(SPEC, 2), RATES, ranks(2).run(slow_torch))
    assert case.left_out.keys() == {"torch", "matmul"}
    assert "torch.matmul would take about 4.1e+03 s a call" in case.left_out["torch"]
    assert set(case.times) == {"auto", "unfused", "local_matmul"} and case.is_right
