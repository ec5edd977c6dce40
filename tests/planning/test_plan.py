"""``plan.choose``: what it chooses and why, what it refuses, and that calls that differ are told
apart. It is pure, so nothing here needs ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tpkernels.backends import TABLES
from tpkernels.op_spec import NO_OPTIONS, OPS, Options
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Means, Plan, choose, unsupported_algorithms
from tpkernels.planning.problem import Problem
from tpkernels.planning.thresholds import RING_MIN_BYTES, RING_MIN_ROWS, pipeline_min_rows

PIPELINE_MIN_ROWS = pipeline_min_rows(torch.bfloat16, ())  # of a CPU that is not known
LARGE = 4 * PIPELINE_MIN_ROWS


def problem(op: str, **changes: Any) -> Problem:
    """A large problem on four ranks."""
    reduces_all = "all_reduce" in op
    plain = Problem(
        op=op,
        device="cpu",
        world=4,
        shape=(LARGE, 512),
        dim=None if reduces_all else 0,
        sizes=() if reduces_all else (PIPELINE_MIN_ROWS,) * 4,
        dtype=torch.bfloat16,
        options=Options(x_dtype=torch.bfloat16),
    )
    return replace(plain, **changes)


def small(op: str) -> Problem:
    """One row a rank less than what is worth splitting."""
    sizes = (PIPELINE_MIN_ROWS, PIPELINE_MIN_ROWS - 1, PIPELINE_MIN_ROWS, 0)
    if "all_reduce" in op:
        return problem(op, shape=(LARGE - 1, 512))
    return problem(op, shape=(sum(sizes), 512), sizes=sizes)


PLAIN_OPS = [op for op, spec in OPS.items() if not (spec.scaled or spec.exchanges)]
MATMULS = [op for op in PLAIN_OPS if OPS[op].has_matmul]
COLLECTIVES = [op for op, spec in OPS.items() if not spec.has_matmul]
TWO_LEVELS = [op for op in OPS if op != "all_to_all"]


@pytest.mark.parametrize("op", MATMULS)
def test_many_rows_are_pipelined(op: str) -> None:
    plan = choose(problem(op), Means(shared_memory=True))
    assert plan.algorithm == "pipelined"
    assert f"{PIPELINE_MIN_ROWS} rows a rank" in plan.reason


@pytest.mark.parametrize("op", MATMULS)
def test_few_rows_are_one_matmul(op: str) -> None:
    plan = choose(small(op), Means(shared_memory=True))
    assert plan.algorithm == "direct"
    assert f"{PIPELINE_MIN_ROWS - 1} rows a rank" in plan.reason


@pytest.mark.parametrize("way", ["ring", "pipelined"])
def test_a_gather_of_k_is_never_split(way: str) -> None:
    along_k = problem("all_gather_matmul", shape=(LARGE, 8192), dim=1, sizes=(2048,) * 4)
    for shared_memory, algorithm in [(True, "direct"), (False, "unfused")]:
        assert choose(along_k, Means(shared_memory=shared_memory)).algorithm == algorithm
    with pytest.raises(NotImplementedError, match=f"'{way}' of all_gather_matmul cannot gather"):
        choose(along_k, Means(shared_memory=True), requested=way)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_collective_alone_is_direct(op: str) -> None:
    plan = choose(problem(op), Means(shared_memory=True))
    assert plan.algorithm == "direct"
    assert "no matmul" in plan.reason
    with pytest.raises(NotImplementedError, match=f"'pipelined' of {op} overlaps a matmul"):
        choose(problem(op), Means(shared_memory=True), requested="pipelined")


@pytest.mark.parametrize("op", OPS)
def test_one_rank_has_nothing_to_communicate(op: str) -> None:
    sizes = () if "all_reduce" in op else (LARGE,)
    one = problem(op, world=1, sizes=sizes)
    plans = [choose(one, Means(shared_memory=shared)) for shared in (True, False)]
    assert [plan.algorithm for plan in plans] == ["direct", "unfused"]
    assert all("one rank" in plan.reason for plan in plans)


def across_hosts(op: str, nbytes: int, rows: int = LARGE, node: bool = False) -> Plan:
    """The plan for a tensor of ``nbytes`` whose parts have a quarter of ``rows`` each. ``node``:
    the ranks of each host share memory."""
    shape = (rows, nbytes // rows // 2)
    sizes = () if "all_reduce" in op else (rows // 4,) * 4
    means = Means(shared_memory=False, why_no_node=None if node else "needs two ranks on a host")
    return choose(problem(op, shape=shape, sizes=sizes), means)


@pytest.mark.parametrize("op", [op for op, spec in OPS.items() if spec.scaled])
def test_a_scaled_product_is_not_split(op: str) -> None:
    """Unless asked for: it converts the weight once for each part."""
    for shared_memory, algorithm in [(True, "direct"), (False, "unfused")]:
        plan = choose(problem(op), Means(shared_memory=shared_memory))
        assert plan.algorithm == algorithm and "converts its weight" in plan.reason
    with pytest.raises(NotImplementedError, match=f"'fused' of {op} has no kernel for operands"):
        choose(problem(op), Means(shared_memory=True), requested="fused")


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_without_shared_memory_few_bytes_are_unfused(op: str) -> None:
    plan = across_hosts(op, RING_MIN_BYTES - 2 * LARGE)
    assert plan.algorithm == "unfused"
    assert "share no memory" in plan.reason and f"bytes < {RING_MIN_BYTES}" in plan.reason


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_without_shared_memory_many_bytes_go_round_the_ring(op: str) -> None:
    plan = across_hosts(op, RING_MIN_BYTES)
    assert "share no memory" in plan.reason
    if op == "matmul_reduce_scatter":
        assert plan.algorithm == "unfused" and "no faster" in plan.reason
    else:
        assert plan.algorithm == "ring" and f"{RING_MIN_BYTES} bytes >=" in plan.reason


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_without_shared_memory_few_rows_are_one_matmul(op: str) -> None:
    plan = across_hosts(op, 4 * RING_MIN_BYTES, 4 * RING_MIN_ROWS - 4)
    assert plan.algorithm == ("unfused" if op in MATMULS else "ring")
    if op in MATMULS:
        assert f"{RING_MIN_ROWS - 1} rows a rank" in plan.reason


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_hosts_with_shared_memory_take_two_levels_for_large_matmuls(op: str) -> None:
    large = across_hosts(op, RING_MIN_BYTES, node=True)
    assert large.algorithm == ("hierarchical" if op in MATMULS else "ring")
    assert f"{RING_MIN_BYTES} bytes >=" in large.reason
    assert across_hosts(op, RING_MIN_BYTES - 2 * LARGE, node=True).algorithm == "unfused"
    few_rows = across_hosts(op, 4 * RING_MIN_BYTES, 4 * RING_MIN_ROWS - 4, node=True)
    assert few_rows.algorithm == ("unfused" if op in MATMULS else "ring")


@pytest.mark.parametrize("op", OPS)
def test_without_shared_memory_nothing_can_be_read_in_place(op: str) -> None:
    for algorithm in ("unfused", "ring"):
        plan = choose(problem(op), Means(shared_memory=False), requested=algorithm)
        assert plan.algorithm == algorithm
    for algorithm in ("direct", "pipelined"):
        need = f"'{algorithm}' of {op} needs memory that all ranks share"
        with pytest.raises(NotImplementedError, match=need):
            choose(problem(op), Means(shared_memory=False), requested=algorithm)


@pytest.mark.parametrize("op", TWO_LEVELS)
def test_two_levels_need_several_hosts_with_several_ranks(op: str) -> None:
    across = Means(shared_memory=False)
    plan = choose(problem(op), across, requested="hierarchical")
    assert plan.algorithm == "hierarchical"
    alone = replace(across, why_no_node="needs a host with two or more ranks")
    for means, need in [
        (alone, "needs a host with two or more ranks"),
        (Means(shared_memory=True), "is for groups that span hosts"),
    ]:
        for device in ("cpu", "cuda"):
            with pytest.raises(NotImplementedError, match=f"'hierarchical' of {op} {need}"):
                choose(problem(op, device=device), means, requested="hierarchical")


@pytest.mark.parametrize("op", TWO_LEVELS)
def test_two_levels_need_room_for_a_row_of_a_matmul(op: str) -> None:
    wide = problem(op, shape=(LARGE, 1 << 20))
    means = Means(shared_memory=False, workspace_bytes=1 << 16)
    if "matmul" in op:
        with pytest.raises(NotImplementedError, match="bytes for a row of each rank"):
            choose(wide, means, requested="hierarchical")
    else:
        assert choose(wide, means, requested="hierarchical").algorithm == "hierarchical"


def test_where_there_is_no_all_to_all() -> None:
    for device, shared, requested in [("cpu", False, "hierarchical"), ("cuda", True, "direct")]:
        with pytest.raises(NotImplementedError, match=f"has no all-to-all on {device} tensors"):
            choose(problem("all_to_all", device=device), Means(shared), requested=requested)


@pytest.mark.parametrize("requested", ["tree", "Direct", "", "auto "])
def test_an_unknown_algorithm_is_refused(requested: str) -> None:
    with pytest.raises(ValueError, match=f"'{requested}'; there are auto, unfused, ring, direct"):
        choose(problem("all_gather"), Means(shared_memory=True), requested=requested)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_what_is_possible_can_be_asked_for_and_exists(op: str, shared_memory: bool) -> None:
    found = unsupported_algorithms(problem(op), Means(shared_memory=shared_memory))
    assert list(found) == list(ALGORITHMS)
    for algorithm, reason in found.items():
        if reason is None:
            plan = choose(problem(op), Means(shared_memory=shared_memory), requested=algorithm)
            assert plan.algorithm == algorithm
            assert (op, algorithm) in TABLES["cpu"]
        else:
            assert reason.strip()
    assert choose(problem(op), Means(shared_memory=shared_memory)).algorithm in [
        algorithm for algorithm, reason in found.items() if reason is None
    ]


def variants(op: str) -> list[Problem]:
    """Problems that ranks must not mix, each different from the first in one thing."""
    base = problem(op)
    changed = [
        replace(base, dtype=torch.float16),
        replace(base, dtype=torch.float32),
        replace(base, shape=(LARGE, 511)),
        replace(base, shape=(1, LARGE, 512), dim=None if base.dim is None else 1),
        replace(base, options=NO_OPTIONS),
        replace(base, options=Options(x_dtype=torch.bfloat16, bias=True)),
        replace(base, options=Options(x_dtype=torch.bfloat16, out_dtype=torch.float32)),
    ]
    if base.dim is not None:
        changed.append(replace(base, shape=(LARGE, LARGE), dim=0))
        changed.append(replace(base, shape=(LARGE, LARGE), dim=1))
        sizes = (PIPELINE_MIN_ROWS - 1, PIPELINE_MIN_ROWS + 1, *base.sizes[2:])
        changed.append(replace(base, sizes=sizes))
        changed.append(replace(base, sizes=sizes[::-1]))
    return [base, *changed]


def test_signatures_tell_calls_apart() -> None:
    plans: dict[tuple[Problem, str], Plan] = {}
    for op in OPS:
        for one in variants(op):
            for algorithm, reason in unsupported_algorithms(one, Means(shared_memory=True)).items():
                if reason is None:
                    plan = choose(one, Means(shared_memory=True), requested=algorithm)
                    plans[one, algorithm] = plan
    for first, second in itertools.combinations(plans.values(), 2):
        assert first.signature != second.signature, (first.text, second.text)
        assert first.text != second.text
    for (one, algorithm), plan in plans.items():
        assert one.op in plan.text and algorithm in plan.text and str(list(one.shape)) in plan.text
        assert 0 < plan.signature < 2**32


def test_the_choice_is_pure() -> None:
    """Equal problems get equal plans, whatever was asked before; there is no process group to ask.
    How an algorithm came to be chosen is no part of the call's name: ranks may differ in that."""
    for op in OPS:
        plan = choose(problem(op), Means(shared_memory=True))
        choose(small(op), Means(shared_memory=True))
        assert choose(problem(op), Means(shared_memory=True)) == plan
        asked = choose(problem(op), Means(shared_memory=True), requested=plan.algorithm)
        assert (asked.text, asked.signature) == (plan.text, plan.signature)
        assert asked.reason == "asked for"
        for one, shared in itertools.product([problem(op), small(op)], [True, False]):
            assert choose(one, Means(shared_memory=shared)).reason.strip()
