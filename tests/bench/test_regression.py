"""The ops are not grossly slower than their local matmul and the unfused op.

The ratios are interleaved within one run, so a slow machine slows both sides. A test fails only if
the whole interval is beyond a bound, and the bounds are several times the measured ratios (1.1 and
0.9 on AMD EPYC Zen 3, 2 ranks, 2026-11-21). A loss of 20 % passes: `tpkernels compare` detects it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from tests.support.tiers import sweep
from tpkernels.bench import measuring
from tpkernels.bench.cases import Case, Outputs, run_tpkernels
from tpkernels.bench.measuring import CaseReport, run_case
from tpkernels.bench.results import Result, result
from tpkernels.bench.specs import Spec
from tpkernels.bench.sweep import Effort, Item
from tpkernels.launch import Ranks
from tpkernels.op_spec import OPS
from tpkernels.planning.cost import Rates

BOUNDS = {"local_matmul": 4.0, "unfused": 2.5}  # maximum time relative to each
EFFORT = Effort(repeat=12, seconds=None, cold=False, baselines=False)
RATES = Rates(flops=1e10, torch_flops=1e10, copy_bytes=1e10, copy_over_cache=8.0)


def regressions(case: Result) -> list[str]:
    """The bounds that are exceeded by the whole interval."""
    speedups = case.algorithms["auto"].speedup
    lines = []
    for other, bound in BOUNDS.items():
        high = speedups[other].high
        assert high is not None
        if high < 1 / bound:
            lines.append(f"{case.case}: at best {1 / high:.2f} times as long as {other}")
    return lines


@pytest.mark.parametrize("op", sweep([op for op, spec in OPS.items() if spec.has_matmul]))
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


@pytest.mark.slow
def test_a_regression_is_found(ranks: Callable[[int], Ranks]) -> None:
    spec = Spec("matmul_all_reduce", (16, 64, 64), torch.float32)
    slow = regressions(result(Item(spec, 2), RATES, ranks(2).run(slowed, spec)))
    assert len(slow) == 2 and "times as long as unfused" in slow[1]
