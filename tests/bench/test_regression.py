"""The ops are not grossly slower than what they consist of and replace.

Ratios within one run, by turns, so that a slow machine slows both sides; a failure takes the whole
interval, and the bounds are several times what is measured (1.1 and 0.9 on AMD EPYC Zen 3, 2 ranks,
2026-11-21). What passes here may still have lost 20 %: `tpkernels compare` is for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from tests.support.tiers import sweep
from tpkernels.bench import measuring
from tpkernels.bench.cases import MATMUL_OPS, Case, Outputs, Spec, run_tpkernels
from tpkernels.bench.measuring import CaseReport, run_case
from tpkernels.bench.results import Result, result
from tpkernels.bench.roofline import Rates
from tpkernels.bench.sweep import Effort, Item
from tpkernels.launch import Ranks

BOUNDS = {"local_matmul": 4.0, "unfused": 2.5}  # times as long as
EFFORT = Effort(repeat=12, seconds=None, cold=False, baselines=False)
RATES = Rates(flops=1e10, torch_flops=1e10, copy_bytes=1e10, copy_over_cache=8.0)


def regressions(found: Result) -> list[str]:
    """What is slower than its bound for all that the interval says."""
    speedups = found["algorithms"]["auto"]["speedup"]
    told = []
    for other, bound in BOUNDS.items():
        high = speedups[other]["high"]
        assert high is not None
        if high < 1 / bound:
            told.append(f"{found['case']}: at the best {1 / high:.2f} times as long as {other}")
    return told


@pytest.mark.parametrize("op", sweep(MATMUL_OPS))
def test_ops_keep_near_the_local_product(ranks: Callable[[int], Ranks], op: str) -> None:
    spec = Spec(op, (512, 1024, 1024), torch.float32)
    reports = ranks(2).run(run_case, spec, ["auto"], EFFORT, RATES, "cpu")
    assert not regressions(result(Item(spec, 2), RATES, reports))


def slowed(spec: Spec) -> CaseReport:
    def call(case: Case, algorithm: str) -> Outputs:
        if algorithm == "auto":
            time.sleep(1.0)
        return run_tpkernels(case, algorithm)

    with mock.patch.object(measuring, "run_tpkernels", call):
        return run_case(spec, ["auto"], Effort(6, None, False, False), RATES, "cpu")


def test_a_regression_is_found(ranks: Callable[[int], Ranks]) -> None:
    spec = Spec("matmul_all_reduce", (16, 64, 64), torch.float32)
    found = regressions(result(Item(spec, 2), RATES, ranks(2).run(slowed, spec)))
    assert len(found) == 2 and "times as long as unfused" in found[1]
