"""``planning.choose``: selections and their reasons, refusals, and signatures of calls. It is pure,
so these tests need no ranks."""

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
    Capabilities,
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
    """Return a large problem on four ranks."""
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
    """Return a problem with one row per rank less than the minimum for a split."""
    sizes = (PIPELINED_MIN_ROWS, PIPELINED_MIN_ROWS - 1, PIPELINED_MIN_ROWS, 0)
    if "all_reduce" in op:
        return problem(op, shape=(LARGE - 1, 512))
    return problem(op, shape=(sum(sizes), 512), sizes=sizes)


PLAIN_OPS = [op for op, spec in OPS.items() if spec.gathers or spec.reduces if not spec.scaled]
TWO_LEVELS = [op for op, spec in OPS.items() if spec.gathers or spec.reduces]
MATMULS = [op for op in PLAIN_OPS if OPS[op].has_matmul]


def across_hosts(op: str, nbytes: int, rows: int = LARGE, node: bool = False) -> Plan:
    """Return the plan for a tensor of ``nbytes`` and ``rows`` rows, split over four ranks.

    ``node``: the ranks of each host share memory.
    """
    shape = (rows, nbytes // rows // 2)
    sizes = () if "all_reduce" in op else (rows // 4,) * 4
    capabilities = Capabilities(
        shared_memory=False, no_node_reason=None if node else "needs two ranks on a host"
    )
    return choose(problem(op, shape=shape, sizes=sizes), capabilities)


@pytest.mark.parametrize("op", OPS)
def test_default_rules(op: str) -> None:
    """With shared memory, many rows are split, few rows are one matmul, and collectives use
    `direct`. A single rank does not communicate."""
    spec = OPS[op]
    single = problem(op, world=1, sizes=() if "all_reduce" in op else (LARGE,))
    for shared, algorithm in ((True, "direct"), (False, "unfused")):
        plan = choose(single, Capabilities(shared_memory=shared))
        assert plan.algorithm == algorithm and "one rank" in plan.reason
    large, few = (choose(p, Capabilities(shared_memory=True)) for p in (problem(op), small(op)))
    if not spec.has_matmul:
        assert large.algorithm == "direct" and "no matmul" in large.reason
        with pytest.raises(NotImplementedError, match=f"'fused' of {op} overlaps communication"):
            choose(problem(op), Capabilities(shared_memory=True), requested="fused")
    elif spec.scaled:  # every chunk would convert the weight
        separate = choose(problem(op), Capabilities(shared_memory=False))
        assert (large.algorithm, separate.algorithm) == ("direct", "unfused")
        assert all("would convert the weight again" in plan.reason for plan in (large, separate))
        with pytest.raises(NotImplementedError, match=f"'fused' of {op} does not support oper"):
            choose(problem(op), Capabilities(shared_memory=True), requested="fused")
    else:
        default = "direct" if "all_reduce" in op else "pipelined"
        assert (large.algorithm, few.algorithm) == (default, "direct")
        assert "before an all-reduce" in large.reason or f"{PIPELINED_MIN_ROWS} r" in large.reason
        assert f"{PIPELINED_MIN_ROWS - 1} rows per rank" in few.reason


@pytest.mark.parametrize("op", PLAIN_OPS)
def test_default_rules_without_shared_memory(op: str) -> None:
    """Few bytes use `unfused`. Many bytes use `ring`, or `hierarchical` for matmuls if the ranks of
    a host share memory. Matmuls with few rows use `unfused`."""
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
def test_requirements_of_algorithms(op: str) -> None:
    for algorithm in ("unfused",) if OPS[op].routed else ("unfused", "ring"):
        plan = choose(problem(op), Capabilities(shared_memory=False), requested=algorithm)
        assert plan.algorithm == algorithm
    for algorithm in ("direct",) if OPS[op].routed else ("direct", "pipelined"):
        need = f"'{algorithm}' of {op} needs shared memory, but the ranks"
        with pytest.raises(NotImplementedError, match=need):
            choose(problem(op), Capabilities(shared_memory=False), requested=algorithm)
    if op not in TWO_LEVELS:
        return
    across = Capabilities(shared_memory=False)
    assert choose(problem(op), across, requested="hierarchical").algorithm == "hierarchical"
    no_node = replace(across, no_node_reason="needs a host with two or more ranks")
    for capabilities, need in [
        (no_node, "needs a host with two or more ranks"),
        (Capabilities(shared_memory=True), "is for groups that span hosts"),
    ]:
        with pytest.raises(NotImplementedError, match=f"'hierarchical' of {op} {need}"):
            choose(problem(op), capabilities, requested="hierarchical")
    message = (
        f"does not support {op} on cuda tensors, only on cpu tensors; across hosts use 'unfused' or"
    )
    with pytest.raises(NotImplementedError, match=f"'hierarchical' of {op} {message}"):
        choose(problem(op, device="cuda"), across, requested="hierarchical")
    assert choose(problem(op, device="cuda"), across).algorithm == "unfused"
    wide_rows = problem(op, shape=(LARGE, 1 << 20))
    capabilities = Capabilities(shared_memory=False, workspace_bytes=1 << 16)
    if "matmul" in op:
        with pytest.raises(NotImplementedError, match="bytes for one row of each rank"):
            choose(wide_rows, capabilities, requested="hierarchical")
    else:
        assert choose(wide_rows, capabilities, requested="hierarchical").algorithm == "hierarchical"


def test_a_gather_of_k_is_never_split() -> None:
    along_k = problem("all_gather_matmul", shape=(LARGE, 8192), dim=1, sizes=(2048,) * 4)
    for shared_memory, algorithm in [(True, "direct"), (False, "unfused")]:
        assert choose(along_k, Capabilities(shared_memory=shared_memory)).algorithm == algorithm
    for algorithm in ("ring", "pipelined"):
        with pytest.raises(
            NotImplementedError, match=f"'{algorithm}' of all_gather_matmul cannot gath"
        ):
            choose(along_k, Capabilities(shared_memory=True), requested=algorithm)


def test_buffers_hold_the_largest_shard() -> None:
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        uneven, even = (
            problem(op, shape=(sum(sizes), 512), sizes=sizes)
            for sizes in ((1, 2, 3, 4), (4, 4, 4, 4))
        )
        needed = ALGORITHMS["pipelined"].buffer_bytes
        assert needed(uneven, 1 << 30) == needed(even, 1 << 30)


def test_refusals() -> None:
    for device, shared, requested in [("cpu", False, "hierarchical"), ("cuda", True, "direct")]:
        with pytest.raises(
            NotImplementedError, match=f"does not support all_to_all on {device} tens"
        ):
            choose(problem("all_to_all", device=device), Capabilities(shared), requested=requested)
    for name in ("tree", "Direct", "", "auto "):
        with pytest.raises(ValueError, match=f"'{name}'; choose from auto, unfused, ring, direct"):
            choose(problem("all_gather"), Capabilities(shared_memory=True), requested=name)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_supported_algorithms_can_be_requested_and_exist(op: str, shared_memory: bool) -> None:
    reasons = unsupported_algorithms(problem(op), Capabilities(shared_memory=shared_memory))
    assert list(reasons) == list(ALGORITHMS)
    for algorithm, reason in reasons.items():
        if reason is None:
            plan = choose(
                problem(op), Capabilities(shared_memory=shared_memory), requested=algorithm
            )
            assert plan.algorithm == algorithm
            assert (op, algorithm) in TABLES["cpu"]
        else:
            assert reason.strip()
    assert choose(problem(op), Capabilities(shared_memory=shared_memory)).algorithm in [
        algorithm for algorithm, reason in reasons.items() if reason is None
    ]


def distinct_problems(op: str) -> list[Problem]:
    """Return problems that ranks must not mix. Each differs from the first in one property."""
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


def test_signatures_distinguish_calls() -> None:
    plans: dict[tuple[Problem, str], Plan] = {}
    for op in OPS:
        for p in distinct_problems(op):
            for algorithm, reason in unsupported_algorithms(
                p, Capabilities(shared_memory=True)
            ).items():
                if reason is None:
                    plan = choose(p, Capabilities(shared_memory=True), requested=algorithm)
                    plans[p, algorithm] = plan
    for first, second in itertools.combinations(plans.values(), 2):
        assert first.signature != second.signature, (first.description, second.description)
        assert first.description != second.description
    for (p, algorithm), plan in plans.items():
        assert (
            p.op in plan.description
            and algorithm in plan.description
            and str(list(p.shape)) in plan.description
        )
        assert 0 < plan.signature < 2**32


def test_the_choice_is_pure() -> None:
    """Equal problems get equal plans, independent of earlier calls. The reason of a choice is not
    in the signature, because ranks may differ in it."""
    for op in OPS:
        plan = choose(problem(op), Capabilities(shared_memory=True))
        choose(small(op), Capabilities(shared_memory=True))
        assert choose(problem(op), Capabilities(shared_memory=True)) == plan
        requested_plan = choose(
            problem(op), Capabilities(shared_memory=True), requested=plan.algorithm
        )
        assert (requested_plan.description, requested_plan.signature) == (
            plan.description,
            plan.signature,
        )
        assert requested_plan.reason == "requested"
        for p, shared in itertools.product([problem(op), small(op)], [True, False]):
            assert choose(p, Capabilities(shared_memory=shared)).reason.strip()


def test_rows_are_counted_from_the_split_dim_on() -> None:
    """Blocks before the split dim are separate matmuls. Columns are split if the number of rows is
    large."""
    many = PIPELINED_MIN_ROWS
    for op, shape, dim, size, algorithm in [
        ("all_gather_matmul", (8, many // 2, 512), 0, 2, "pipelined"),
        ("all_gather_matmul", (many, 8, 512), 1, 2, "direct"),
        ("matmul_reduce_scatter", (many, 512), 1, 128, "pipelined"),
        ("matmul_reduce_scatter", (many - 1, 512), 1, 128, "direct"),
    ]:
        p = problem(op, shape=shape, dim=dim, sizes=(size,) * 4)
        assert choose(p, Capabilities(shared_memory=True)).algorithm == algorithm, shape


# One-shot or two-shot for a small all-reduce on GPUs, by the cost model.


ONE_SHOT, TWO_SHOT, FENCED = "ll", "ll_two_shot", "two_shot"
KIB, ALL_VARIANTS = 1 << 10, frozenset({ONE_SHOT, TWO_SHOT, FENCED})


def test_one_shot_limit_by_world_size() -> None:
    """The limit is 270 KB, sent in 0.6 us at 450 GB/s, divided by the bytes that two-shot saves per
    byte of the tensor."""
    for world, limit in ((3, 202_500), (4, 90_000), (8, 25_714), (16, 10_285)):
        assert all_reduce_variant(limit, world, ALL_VARIANTS) == ONE_SHOT
        assert all_reduce_variant(limit + 2, world, ALL_VARIANTS) == TWO_SHOT
    # One rank sends no data. Between two ranks, one-shot sends as many bytes as two-shot.
    assert (
        all_reduce_variant(1 << 19, 1, ALL_VARIANTS)
        == all_reduce_variant(1 << 19, 2, ALL_VARIANTS)
        == ONE_SHOT
    )


def test_the_fastest_by_the_model() -> None:
    max_bytes = cost.MAX_LL_BYTES[TWO_SHOT]
    for world in (2, 3, 4, 5, 8, 16, 72):
        for nbytes in (*range(0, 256 * KIB, 8 * KIB), max_bytes):
            seconds = {
                variant: hop_seconds(variant, nbytes, world)
                for variant in (ONE_SHOT, TWO_SHOT, FENCED)
            }
            variant = all_reduce_variant(nbytes, world, ALL_VARIANTS)
            assert variant == min(seconds, key=seconds.__getitem__), (nbytes, world)
        assert all_reduce_variant(max_bytes + 1, world, ALL_VARIANTS) == FENCED


def test_only_qualified_variants() -> None:
    for nbytes in (1 << 10, 1 << 22):
        for variant in (ONE_SHOT, TWO_SHOT, FENCED):
            assert all_reduce_variant(nbytes, 4, frozenset({variant})) == variant
    assert all_reduce_variant(1 << 10, 4, frozenset({TWO_SHOT, FENCED})) == TWO_SHOT
