"""Selections from a table of measured times, as pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.cuda_rehearsal import ALL_QUALIFIED
from tpkernels.bench.specs import Spec
from tpkernels.planning.choose import Capabilities, Plan, choose
from tpkernels.planning.op_spec import GatherOptions
from tpkernels.planning.problem import ORDERED, VENDOR, Problem
from tpkernels.planning.table import Measurement, Table

QUALIFIED_CAPABILITIES = Capabilities(shared_memory=True, qualification=ALL_QUALIFIED)


def spec(m: int, n: int = 512, op: str = "all_gather_matmul") -> Spec:
    return Spec(op, (m, n, 512), torch.bfloat16)


def measured(spec: Spec, device: str = "cpu", **ms: float) -> Measurement:
    """Return the times of a case on two ranks."""
    tuning_key = spec.problem(2, device).tuning_key
    assert tuning_key is not None
    return Measurement(*tuning_key, ms=ms, date="2026-11-21")


def plan(spec: Spec, *times: Measurement, shared_memory: bool = True, **changes: Any) -> Plan:
    problem = replace(spec.problem(2), **changes)
    return choose(problem, Capabilities(shared_memory), tuned=Table(times))


def test_the_fastest_is_selected_with_a_reason() -> None:
    times = measured(spec(64), unfused=1.52, direct=1.6, pipelined=1.31)
    assert choose(spec(64).problem(2), QUALIFIED_CAPABILITIES).algorithm == "direct"
    chosen = plan(spec(64), times)
    assert chosen.algorithm == "pipelined"
    assert chosen.reason == "tuned: 1.31 ms, unfused 1.52 ms, 2026-11-21"
    slower = measured(spec(64), unfused=1.0, direct=1.6, pipelined=1.31)
    assert plan(spec(64), slower).reason == "tuned: 1 ms, pipelined 1.31 ms, 2026-11-21"


def test_unsupported_algorithms_are_skipped() -> None:
    times = measured(spec(64), unfused=3.0, direct=1.0, pipelined=1.2, ring=2.0, fused=0.1)
    assert plan(spec(64), times).algorithm == "direct"  # on CPUs, fused is for tests only
    assert plan(spec(64), times, shared_memory=False).algorithm == "ring"
    shared_memory_times = measured(spec(64), direct=1.0, pipelined=0.5)
    assert "do not share memory" in plan(spec(64), shared_memory_times, shared_memory=False).reason
    assert (
        "1024" in plan(spec(64), measured(spec(64), direct=1.0)).reason
    )  # a single time is not compared


def test_the_default_rules_break_ties() -> None:
    """Close times do not override the default rule, because a single run would decide by chance."""
    for m, default in ((64, "direct"), (2048, "pipelined")):
        close_times = {"direct": 1.0, "pipelined": 1.0, "unfused": 0.99, default: 1.009}
        assert plan(spec(m), measured(spec(m), **close_times)).algorithm == default
        clear = {**close_times, default: 1.02}
        assert plan(spec(m), measured(spec(m), **clear)).algorithm == "unfused"


def test_sizes_between_the_measured_sizes() -> None:
    """Between two measured sizes, the winner at both sizes is selected, otherwise the winner at the
    nearer size. Beyond the last measured size, its winner is selected. A measured size must not be
    too far away."""
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


def test_similar_numbers_of_rows_are_not_measured_again() -> None:
    """Prompts have arbitrary numbers of tokens."""
    table = Table((measured(spec(400), direct=1.0, pipelined=2.0),))

    def is_near(problem: Problem) -> bool:
        assert problem.tuning_key is not None
        return table.has_close_extent(*problem.tuning_key)

    for m, expected in {266: False, 268: True, 400: True, 600: True, 602: False}.items():
        assert is_near(spec(m).problem(2)) == expected
    assert not is_near(replace(spec(400).problem(2), dtype=torch.float32))


def test_times_apply_only_to_similar_problems() -> None:
    times = measured(spec(512), unfused=1.0, direct=9.0, pipelined=9.0)
    assert plan(spec(512), times).algorithm == "unfused"
    requested_plan = choose(
        spec(512).problem(2), Capabilities(True), requested="pipelined", tuned=Table((times,))
    )
    assert (requested_plan.algorithm, requested_plan.reason) == ("pipelined", "requested")
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
        assert not plan(spec(512), times, **change).reason.startswith("tuned"), change
    same = plan(spec(512), times, shape=(256, 2, 512), sizes=(128, 128))
    assert same.reason.startswith("tuned")
    total = spec(512, op="matmul_reduce_scatter")
    epilogue = replace(total.problem(2).options, bias=True, residual=True)  # type: ignore[call-arg]
    times = measured(total, unfused=1.0, direct=9.0, pipelined=9.0)
    assert plan(total, times, options=epilogue).reason.startswith("tuned")


def test_times_apply_only_to_their_numerics() -> None:
    """An `unfused` reduction in order is slower, so the fastest algorithm may differ."""
    reduction = spec(64, op="matmul_reduce_scatter").problem(2, "cuda")
    assert reduction.numerics == VENDOR
    times = measured(spec(64, op="matmul_reduce_scatter"), "cuda", unfused=2.0, direct=1.0)
    ordered = replace(reduction, numerics=ORDERED)
    capabilities, tuned = QUALIFIED_CAPABILITIES, Table((times,))
    assert choose(reduction, capabilities, tuned=tuned).algorithm == "direct"
    assert choose(ordered, capabilities, tuned=tuned).algorithm == "unfused"


def test_numerics_of_each_algorithm() -> None:
    """Only `unfused` leaves the order to the vendor library. A gather has no numerics."""
    reduction = spec(64, op="matmul_all_reduce").problem(2, "cuda")
    capabilities = QUALIFIED_CAPABILITIES
    plans = [
        choose(reduction, capabilities, requested=algorithm)
        for algorithm in ("unfused", "direct", "ring")
    ]
    plans.append(choose(replace(reduction, numerics=ORDERED), capabilities, requested="unfused"))
    assert [p.numerics for p in plans] == [VENDOR, ORDERED, ORDERED, ORDERED]
    assert all(f"numerics '{p.numerics}'" in p.reason for p in plans)
    assert len({p.signature for p in plans}) == len(plans)
    gather = choose(spec(64).problem(2, "cuda"), capabilities)
    assert "numerics" not in gather.reason and gather.description.endswith("[unfused]")
