"""``plan.choose``: what it chooses and why, what it refuses, and that calls that differ are told
apart. It is pure, so nothing here needs ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tpkernels.algorithms.backends import TABLES
from tpkernels.planning import cost
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import (
    PIPELINED_MIN_ROWS,
    RING_MIN_BYTES,
    RING_MIN_ROWS,
    Means,
    Plan,
    choose,
    unsupported_algorithms,
)
from tpkernels.planning.cost import all_reduce_variant, hop_seconds
from tpkernels.planning.op_spec import NO_OPTIONS, OPS, ReduceOptions
from tpkernels.planning.problem import Problem

LARGE = 4 * PIPELINED_MIN_ROWS
SUM = ReduceOptions(x_dtype=torch.bfloat16, out_dtype=torch.bfloat16)


def problem(op: str, **changes: Any) -> Problem:
    """A large problem on four ranks."""
    reduces_all = "all_reduce" in op
    plain = Problem(
        op=op,
        device="cpu",
        world=4,
        shape=(LARGE, 512),
        dim=None if reduces_all else 0,
        sizes=() if reduces_all else (PIPELINED_MIN_ROWS,) * 4,
        dtype=torch.bfloat16,
        options=SUM,
    )
    return replace(plain, **changes)


def small(op: str) -> Problem:
    """One row a rank less than what is worth splitting."""
    sizes = (PIPELINED_MIN_ROWS, PIPELINED_MIN_ROWS - 1, PIPELINED_MIN_ROWS, 0)
    if "all_reduce" in op:
        return problem(op, shape=(LARGE - 1, 512))
    return problem(op, shape=(sum(sizes), 512), sizes=sizes)


PLAIN_OPS = [op for op, spec in OPS.items() if spec.gathers or spec.reduces if not spec.scaled]
TWO_LEVELS = [op for op, spec in OPS.items() if spec.gathers or spec.reduces]
MATMULS = [op for op in PLAIN_OPS if OPS[op].has_matmul]


def across_hosts(op: str, nbytes: int, rows: int = LARGE, node: bool = False) -> Plan:
    """The plan for a tensor of ``nbytes`` whose parts have a quarter of ``rows`` each. ``node``:
    the ranks of each host share memory."""
    shape = (rows, nbytes // rows // 2)
    sizes = () if "all_reduce" in op else (rows // 4,) * 4
    means = Means(shared_memory=False, why_no_node=None if node else "needs two ranks on a host")
    return choose(problem(op, shape=shape, sizes=sizes), means)


@pytest.mark.parametrize("op", OPS)
def test_the_rules(op: str) -> None:
    """In shared memory many rows are split, few are one matmul, and a collective alone is direct;
    one rank communicates nothing."""
    spec = OPS[op]
    one = problem(op, world=1, sizes=() if "all_reduce" in op else (LARGE,))
    for shared, algorithm in ((True, "direct"), (False, "unfused")):
        plan = choose(one, Means(shared_memory=shared))
        assert plan.algorithm == algorithm and "one rank" in plan.reason
    large, few = (choose(each, Means(shared_memory=True)) for each in (problem(op), small(op)))
    if not spec.has_matmul:
        assert large.algorithm == "direct" and "no matmul" in large.reason
        with pytest.raises(NotImplementedError, match=f"'fused' of {op} overlaps communication"):
            choose(problem(op), Means(shared_memory=True), requested="fused")
    elif spec.scaled:  # it converts the weight once for each part
        apart = choose(problem(op), Means(shared_memory=False))
        assert (large.algorithm, apart.algorithm) == ("direct", "unfused")
        assert all("would convert the weight again" in plan.reason for plan in (large, apart))
        with pytest.raises(NotImplementedError, match=f"'fused' of {op} does not support oper"):
            choose(problem(op), Means(shared_memory=True), requested="fused")
    else:
        by_rule = "direct" if "all_reduce" in op else "pipelined"
        assert (large.algorithm, few.algorithm) == (by_rule, "direct")
        assert "before an all-reduce" in large.reason or f"{PIPELINED_MIN_ROWS} r" in large.reason
        assert f"{PIPELINED_MIN_ROWS - 1} rows per rank" in few.reason


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_the_rules_without_shared_memory(op: str) -> None:
    """Few bytes are unfused, many go round the ring, or by two levels, if they are rows enough."""
    matmul, limit = op in MATMULS, f"{RING_MIN_BYTES} bytes >="
    for node in (False, True):
        few_bytes = across_hosts(op, RING_MIN_BYTES - 2 * LARGE, node=node)
        assert few_bytes.algorithm == "unfused" and f"bytes < {RING_MIN_BYTES}" in few_bytes.reason
        few_rows = across_hosts(op, 4 * RING_MIN_BYTES, 4 * RING_MIN_ROWS - 4, node)
        assert few_rows.algorithm == ("unfused" if matmul else "ring")
        assert not matmul or f"{RING_MIN_ROWS - 1} rows per rank" in few_rows.reason
        large = across_hosts(op, RING_MIN_BYTES, node=node)
        assert "do not share memory" in few_bytes.reason and "do not share memory" in large.reason
        if node and matmul:
            assert large.algorithm == "hierarchical" and limit in large.reason
        elif op == "matmul_reduce_scatter":
            assert large.algorithm == "unfused" and "was not faster" in large.reason
        else:
            assert large.algorithm == "ring" and limit in large.reason


@pytest.mark.parametrize("op", OPS)
def test_what_algorithms_need(op: str) -> None:
    for algorithm in ("unfused",) if OPS[op].routed else ("unfused", "ring"):
        plan = choose(problem(op), Means(shared_memory=False), requested=algorithm)
        assert plan.algorithm == algorithm
    for algorithm in ("direct",) if OPS[op].routed else ("direct", "pipelined"):
        need = f"'{algorithm}' of {op} needs shared memory, but the ranks"
        with pytest.raises(NotImplementedError, match=need):
            choose(problem(op), Means(shared_memory=False), requested=algorithm)
    if op not in TWO_LEVELS:
        return
    across = Means(shared_memory=False)
    assert choose(problem(op), across, requested="hierarchical").algorithm == "hierarchical"
    alone = replace(across, why_no_node="needs a host with two or more ranks")
    for means, need in [
        (alone, "needs a host with two or more ranks"),
        (Means(shared_memory=True), "is for groups that span hosts"),
    ]:
        with pytest.raises(NotImplementedError, match=f"'hierarchical' of {op} {need}"):
            choose(problem(op), means, requested="hierarchical")
    instead = (
        f"does not support {op} on cuda tensors, only on cpu tensors; across hosts use 'unfused' or"
    )
    with pytest.raises(NotImplementedError, match=f"'hierarchical' of {op} {instead}"):
        choose(problem(op, device="cuda"), across, requested="hierarchical")
    assert choose(problem(op, device="cuda"), across).algorithm == "unfused"
    wide = problem(op, shape=(LARGE, 1 << 20))
    means = Means(shared_memory=False, workspace_bytes=1 << 16)
    if "matmul" in op:
        with pytest.raises(NotImplementedError, match="bytes for one row of each rank"):
            choose(wide, means, requested="hierarchical")
    else:
        assert choose(wide, means, requested="hierarchical").algorithm == "hierarchical"


def test_a_gather_of_k_is_never_split() -> None:
    along_k = problem("all_gather_matmul", shape=(LARGE, 8192), dim=1, sizes=(2048,) * 4)
    for shared_memory, algorithm in [(True, "direct"), (False, "unfused")]:
        assert choose(along_k, Means(shared_memory=shared_memory)).algorithm == algorithm
    for variant in ("ring", "pipelined"):
        with pytest.raises(
            NotImplementedError, match=f"'{variant}' of all_gather_matmul cannot gath"
        ):
            choose(along_k, Means(shared_memory=True), requested=variant)


def test_buffers_hold_the_largest_shard() -> None:
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        uneven, even = (
            problem(op, shape=(sum(sizes), 512), sizes=sizes)
            for sizes in ((1, 2, 3, 4), (4, 4, 4, 4))
        )
        needed = ALGORITHMS["pipelined"].workspace_bytes
        assert needed(uneven, 1 << 30) == needed(even, 1 << 30)


def test_what_is_refused() -> None:
    for device, shared, requested in [("cpu", False, "hierarchical"), ("cuda", True, "direct")]:
        with pytest.raises(
            NotImplementedError, match=f"does not support all_to_all on {device} tens"
        ):
            choose(problem("all_to_all", device=device), Means(shared), requested=requested)
    for name in ("tree", "Direct", "", "auto "):
        with pytest.raises(ValueError, match=f"'{name}'; choose from auto, unfused, ring, direct"):
            choose(problem("all_gather"), Means(shared_memory=True), requested=name)


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
        replace(base, options=replace(SUM, bias=True)),
        replace(base, options=replace(SUM, out_dtype=torch.float32)),
    ]
    if base.dim is not None:
        changed.append(replace(base, shape=(LARGE, LARGE), dim=0))
        changed.append(replace(base, shape=(LARGE, LARGE), dim=1))
        sizes = (PIPELINED_MIN_ROWS - 1, PIPELINED_MIN_ROWS + 1, *base.sizes[2:])
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
        assert asked.reason == "requested"
        for one, shared in itertools.product([problem(op), small(op)], [True, False]):
            assert choose(one, Means(shared_memory=shared)).reason.strip()


def test_rows_count_in_all_dims_of_the_matrix_but_those_before_the_split() -> None:
    """Blocks before the split dim are separate products. Columns are split if there are many
    rows."""
    many = PIPELINED_MIN_ROWS
    for op, shape, dim, size, algorithm in [
        ("all_gather_matmul", (8, many // 2, 512), 0, 2, "pipelined"),
        ("all_gather_matmul", (many, 8, 512), 1, 2, "direct"),
        ("matmul_reduce_scatter", (many, 512), 1, 128, "pipelined"),
        ("matmul_reduce_scatter", (many - 1, 512), 1, 128, "direct"),
    ]:
        one = problem(op, shape=shape, dim=dim, sizes=(size,) * 4)
        assert choose(one, Means(shared_memory=True)).algorithm == algorithm, shape


# The number of hops of a small all-reduce on GPUs, by the model of hops.


ONE, TWO, FENCED = "ll", "ll_two_shot", "two_shot"
KIB, WORDS = 1 << 10, frozenset({ONE, TWO, FENCED})


def test_one_hop_up_to_a_size_that_depends_on_the_ranks() -> None:
    """What 0.6 us at 450 GB/s carry, 270 KB, over the bytes that two hops save."""
    for world, most in ((3, 202_500), (4, 90_000), (8, 25_714), (16, 10_285)):
        assert all_reduce_variant(most, world, WORDS) == ONE
        assert all_reduce_variant(most + 2, world, WORDS) == TWO
    # Alone nothing is sent. Between two, words in one hop are as many as in two.
    assert all_reduce_variant(1 << 19, 1, WORDS) == all_reduce_variant(1 << 19, 2, WORDS) == ONE


def test_the_fastest_by_the_model() -> None:
    most = cost.WITHOUT_FENCES[TWO]
    for world in (2, 3, 4, 5, 8, 16, 72):
        for nbytes in (*range(0, 256 * KIB, 8 * KIB), most):
            variants = {
                variant: hop_seconds(variant, nbytes, world) for variant in (ONE, TWO, FENCED)
            }
            variant = all_reduce_variant(nbytes, world, WORDS)
            assert variant == min(variants, key=variants.__getitem__), (nbytes, world)
        assert all_reduce_variant(most + 1, world, WORDS) == FENCED


def test_only_what_is_qualified() -> None:
    for nbytes in (1 << 10, 1 << 22):
        for variant in (ONE, TWO, FENCED):
            assert all_reduce_variant(nbytes, 4, frozenset({variant})) == variant
    assert all_reduce_variant(1 << 10, 4, frozenset({TWO, FENCED})) == TWO
