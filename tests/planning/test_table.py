"""Choices that follow from a table of measured times. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.cuda_rehearsal import ALL_QUALIFIED
from tpkernels.bench.specs import Spec
from tpkernels.planning.choose import Means, Plan, choose
from tpkernels.planning.op_spec import GatherOptions
from tpkernels.planning.problem import ORDERED, VENDOR, Problem
from tpkernels.planning.table import Measurement, Table

QUALIFIED_MEANS = Means(shared_memory=True, qualification=ALL_QUALIFIED)


def spec(m: int, n: int = 512, op: str = "all_gather_matmul") -> Spec:
    return Spec(op, (m, n, 512), torch.bfloat16)


def measured(spec: Spec, device: str = "cpu", **ms: float) -> Measurement:
    """Times of a case on two ranks."""
    tuning_key = spec.problem(2, device).tuning_key
    assert tuning_key is not None
    return Measurement(*tuning_key, ms=ms, date="2026-11-21")


def plan(spec: Spec, *times: Measurement, shared_memory: bool = True, **changes: Any) -> Plan:
    problem = replace(spec.problem(2), **changes)
    return choose(problem, Means(shared_memory), tuned=Table(times))


def test_the_fastest_is_taken_and_the_reason_says_so() -> None:
    one = measured(spec(64), unfused=1.52, direct=1.6, pipelined=1.31)
    assert choose(spec(64).problem(2), QUALIFIED_MEANS).algorithm == "direct"
    chosen = plan(spec(64), one)
    assert chosen.algorithm == "pipelined"
    assert chosen.reason == "tuned: 1.31 ms, unfused 1.52 ms, 2026-11-21"
    slower = measured(spec(64), unfused=1.0, direct=1.6, pipelined=1.31)
    assert plan(spec(64), slower).reason == "tuned: 1 ms, pipelined 1.31 ms, 2026-11-21"


def test_what_cannot_run_is_passed_over() -> None:
    one = measured(spec(64), unfused=3.0, direct=1.0, pipelined=1.2, ring=2.0, fused=0.1)
    assert plan(spec(64), one).algorithm == "direct"  # fused is for tests on a CPU
    assert plan(spec(64), one, shared_memory=False).algorithm == "ring"
    alone = measured(spec(64), direct=1.0, pipelined=0.5)
    assert "do not share memory" in plan(spec(64), alone, shared_memory=False).reason
    assert (
        "1024" in plan(spec(64), measured(spec(64), direct=1.0)).reason
    )  # nothing to compare with


def test_between_equals_the_thresholds_decide() -> None:
    """A single run would decide by chance."""
    for m, by_rule in ((64, "direct"), (2048, "pipelined")):
        near = {"direct": 1.0, "pipelined": 1.0, "unfused": 0.99, by_rule: 1.009}
        assert plan(spec(m), measured(spec(m), **near)).algorithm == by_rule
        clear = {**near, by_rule: 1.02}
        assert plan(spec(m), measured(spec(m), **clear)).algorithm == "unfused"


def test_other_extents_than_the_measured_ones() -> None:
    """Between two, the winner of both is taken, else that of the nearer one; beyond the last, that
    one's; where it is near."""
    few = measured(spec(16), unfused=1.0, direct=0.5, pipelined=0.51)
    many = measured(spec(1024), unfused=9.0, direct=8.0, pipelined=5.0)
    chosen = plan(spec(600), few, many)
    assert chosen.algorithm == "pipelined"
    assert chosen.reason == "tuned: as fast as any at 16 and at 1024 rows"
    few = measured(spec(400), unfused=1.0, direct=0.5, pipelined=0.6)
    many = measured(spec(4000), unfused=9.0, direct=8.0, pipelined=5.0)
    for m, end, winner in [
        (268, 400, "direct"),
        (512, 400, "direct"),
        (800, 400, "direct"),
        (2000, 4000, "pipelined"),
        (6000, 4000, "pipelined"),
    ]:
        chosen = plan(spec(m), few, many)
        assert (chosen.algorithm, chosen.reason) == (winner, f"tuned: from the times at {end} rows")
    for m in (266, 802, 1998, 6002):
        assert plan(spec(m), few, many) == plan(spec(m)), "too far from both"


def test_nearly_the_same_number_of_rows_is_not_measured_again() -> None:
    """Prompts have any number of tokens."""
    table = Table((measured(spec(400), direct=1.0, pipelined=2.0),))

    def is_near(problem: Problem) -> bool:
        assert problem.tuning_key is not None
        return table.near(*problem.tuning_key)

    for m, near in {266: False, 268: True, 400: True, 600: True, 602: False}.items():
        assert is_near(spec(m).problem(2)) == near
    assert not is_near(replace(spec(400).problem(2), dtype=torch.float32))


def test_only_the_same_kind_of_problem_counts() -> None:
    one = measured(spec(512), unfused=1.0, direct=9.0, pipelined=9.0)
    assert plan(spec(512), one).algorithm == "unfused"
    asked = choose(spec(512).problem(2), Means(True), requested="pipelined", tuned=Table((one,)))
    assert (asked.algorithm, asked.reason) == ("pipelined", "requested")
    changes: list[dict[str, Any]] = [
        {"dtype": torch.float32},
        {"shape": (512, 1024)},
        {"sizes": (255, 257)},
        {"options": GatherOptions(out_dtype=torch.float32)},
        {"shape": (2, 256, 512), "dim": 1, "sizes": (128, 128)},
        {"shape": (512, 512), "dim": 1},
        {"shape": (0, 512), "sizes": (0, 0)},
    ]
    for change in changes:
        assert not plan(spec(512), one, **change).reason.startswith("tuned"), change
    same = plan(spec(512), one, shape=(256, 2, 512), sizes=(128, 128))
    assert same.reason.startswith("tuned")
    total = spec(512, op="matmul_reduce_scatter")
    added = replace(total.problem(2).options, bias=True, residual=True)  # type: ignore[call-arg]
    one = measured(total, unfused=1.0, direct=9.0, pipelined=9.0)
    assert plan(total, one, options=added).reason.startswith("tuned")


def test_times_hold_for_the_numerics_that_they_were_measured_with() -> None:
    """Where `unfused` sums in order it takes longer, so another algorithm may be faster there."""
    reduction = spec(64, op="matmul_reduce_scatter").problem(2, "cuda")
    assert reduction.numerics == VENDOR
    one = measured(spec(64, op="matmul_reduce_scatter"), "cuda", unfused=2.0, direct=1.0)
    ordered = replace(reduction, numerics=ORDERED)
    means, tuned = QUALIFIED_MEANS, Table((one,))
    assert choose(reduction, means, tuned=tuned).algorithm == "direct"
    assert choose(ordered, means, tuned=tuned).algorithm == "unfused"


def test_numerics_are_those_of_the_algorithm() -> None:
    """Only `unfused` leaves a sum to the vendor, and no gather has a choice."""
    reduction = spec(64, op="matmul_all_reduce").problem(2, "cuda")
    means = QUALIFIED_MEANS
    plans = [
        choose(reduction, means, requested=variant) for variant in ("unfused", "direct", "ring")
    ]
    plans.append(choose(replace(reduction, numerics=ORDERED), means, requested="unfused"))
    assert [each.numerics for each in plans] == [VENDOR, ORDERED, ORDERED, ORDERED]
    assert all(f"numerics '{each.numerics}'" in each.reason for each in plans)
    assert len({each.signature for each in plans}) == len(plans)
    gather = choose(spec(64).problem(2, "cuda"), means)
    assert "numerics" not in gather.reason and gather.text.endswith("[unfused]")
