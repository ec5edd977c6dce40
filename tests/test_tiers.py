"""`make test` runs every op with every algorithm, and every kind of fault. Higher tiers add
cases."""

from __future__ import annotations

import importlib
from types import FunctionType

import pytest

from tests.ops import test_all_to_all, test_moe, test_results, test_scaled
from tests.support.cases import COLLECTIVE_ALGORITHMS, MATMUL_ALGORITHMS
from tests.support.paths import ROOT
from tpkernels.algorithms.backends import TABLES
from tpkernels.planning.op_spec import OPS

LEFT_OUT = {"slow", "thorough"}


def is_left_out(case: object) -> bool:
    return any(mark.name in LEFT_OUT for mark in getattr(case, "marks", ()))


def in_default_tier(test: FunctionType) -> bool:
    """Return True if the test is not marked, and each of its parameters has a value that is not
    marked."""
    marks = getattr(test, "pytestmark", [])
    sweeps = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    return not LEFT_OUT & {mark.name for mark in marks} and all(
        not all(map(is_left_out, list(values))) for values in sweeps
    )


def test_every_op_by_every_algorithm() -> None:
    for module in (test_results, test_scaled, test_all_to_all, test_moe):
        assert in_default_tier(module.test_every_dtype_by_every_algorithm)
    elsewhere = {s.name for s in OPS.values() if s.scaled or s.exchanges or s.routed}
    assert {*test_results.NAMES, *elsewhere} == set(OPS)
    # algorithms/test_fused.py covers `fused` under the interpreter, and
    # algorithms/test_hierarchical.py covers several hosts.
    for op, spec in OPS.items():
        tested = MATMUL_ALGORITHMS if spec.has_matmul else COLLECTIVE_ALGORITHMS
        tested = test_moe.ALGORITHMS if spec.routed else tested
        implemented = {algorithm for name, algorithm in TABLES["cpu"] if name == op}
        assert set(tested) == implemented - {"fused", "hierarchical"} | {"auto"}, op


def test_every_op_across_hosts() -> None:
    module = importlib.import_module("tests.algorithms.test_hierarchical")
    assert in_default_tier(module.test_every_op_and_dtype)


@pytest.mark.parametrize(
    "name",
    [
        "failures.test_faults.test_a_fault_of_each_kind",
        "failures.test_faults.test_a_fault_at_its_moment",
        "failures.test_mismatch.test_a_mismatch_reaches_all",
        "failures.test_memory.test_no_memory_anywhere_in_an_op",
        "failures.test_left.test_a_fork_is_not_a_rank",
        "failures.test_mismatch.test_a_mismatch_reaches_the_ranks_of_several_hosts",
        "cuda.test_failures.test_an_absent_rank_is_a_timeout",
        "cuda.test_ops.test_a_killed_rank_ends_the_wait",
        "nccl.test_native.test_a_call_that_never_ends_is_given_up",
        "bench.test_results.test_a_damaged_file_is_refused_in_one_line",
    ],
)
def test_every_kind_of_fault(name: str) -> None:
    module, _, test = f"tests.{name}".rpartition(".")
    assert in_default_tier(getattr(importlib.import_module(module), test))


def test_every_layer() -> None:
    """Every subpackage has a test folder with tests that `make test` runs."""
    folders = [path.parent.name for path in (ROOT / "tpkernels").glob("*/__init__.py")]
    assert "ops" in folders
    for folder in folders:
        files = [path.stem for path in (ROOT / "tests" / folder).glob("test_*.py")]
        tests = [test for file in files for test in _collect_tests(f"tests.{folder}.{file}")]
        assert any(map(in_default_tier, tests)), f"nothing in make test is in tests/{folder}"


def _collect_tests(name: str) -> list[FunctionType]:
    try:
        module = importlib.import_module(name)
    except pytest.skip.Exception:  # a dependency is not installed
        return []
    marks = getattr(module, "pytestmark", [])
    if LEFT_OUT & {mark.name for mark in (marks if isinstance(marks, list) else [marks])}:
        return []
    named = [value for key, value in vars(module).items() if key.startswith("test_")]
    return [test for test in named if isinstance(test, FunctionType)]
