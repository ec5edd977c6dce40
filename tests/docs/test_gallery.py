"""The gallery of ParallelKernelBench: its problems are right, its functions are short, and a wrong
result is reported."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from examples.parallel_kernel_bench import __main__ as command
from examples.parallel_kernel_bench import gallery
from examples.parallel_kernel_bench.gallery import PROBLEMS, Case, ProblemResult, Setup, examine
from tests.support.cases import RanksFixture
from tests.support.paths import ROOT
from tests.support.processes import python
from tests.support.tiers import thorough

FOLDER = ROOT / "examples/parallel_kernel_bench"
TABLE = ROOT / "benchmarks/results/cpu-2core-gallery.md"
MAX_LINES = 10
DEFAULT = {13, 20, 31, 42, 54, 82}
CASES = [(2, n) if n in DEFAULT else thorough(2, n) for n in sorted(PROBLEMS)]
CASES += [thorough(4, n) for n in sorted(PROBLEMS)]


@pytest.mark.parametrize(("world", "number"), CASES)
def test_a_problem(ranks: RanksFixture, world: int, number: int) -> None:
    errors = [result.error for result in ranks(world).run(examine, number, False, 0)]
    assert max(errors) <= 1, errors


def planted_job(damage: float, depth: int) -> ProblemResult:
    """Examine a matmul in which rank 1 gets one element wrong."""

    def planted(setup: Setup) -> Case:
        x = setup.normal(64, 64, shared=True)

        def ours() -> torch.Tensor:
            y = x @ x
            y[5, 7] += damage * setup.rank
            return y

        return Case(lambda: x @ x, ours, depth)

    with mock.patch.dict(PROBLEMS):
        gallery.problem(0, "a product with a wrong element")(planted)
        return examine(0, False, 1)


def test_a_wrong_element_is_reported(ranks: RanksFixture, tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    planted = gallery.Problem(0, "planted", "a product with a wrong element", lambda setup: Case)
    with mock.patch.dict(PROBLEMS, {0: planted}):
        for damage, depth, wrong in ((1e-3, 64, True), (1e-5, 0, True), (1e-5, 64, False)):
            cells = command.row(ranks(2).run(planted_job, damage, depth))
            assert command.report([cells], "One problem.", file) == int(wrong)
            assert ("| WRONG |" in file.read_text()) == wrong


def test_our_functions_are_short() -> None:
    count = 0
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "ours":
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno <= MAX_LINES, f"{path}:{node.lineno}"
                count += 1
    assert count > 20


def test_problems_are_selected_by_number_and_name() -> None:
    for name in ("13", "gemm_allreduce", "13_gemm_allreduce"):
        assert [problem.number for problem in command.select_problems([name])] == [13]
    assert len(command.select_problems([])) == len(PROBLEMS)
    for name in ("99", "nothing", "12_gemm_allreduce", "_", ""):
        with pytest.raises(
            ValueError, match=rf"--only {name} matches no problem; expected numbers or names of 1_"
        ):
            command.select_problems([name])


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    module = ("-m", "examples.parallel_kernel_bench")
    options = ("--size", "small", "--repeat", 3, "--out", file)
    result = python(*module, "--only", 13, "1_allreduce", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"^\| (\d+) .*\d+\.\d\dx \| 0 \|", file.read_text(), re.M) == ["13", "1"]
    assert "Median speed-up" in result.stdout
    for wrong in (("--only", "nothing"), ("--tp", 3), ("--repeat", 0)):
        assert python(*module, *wrong).returncode == 2


def test_the_page_lists_every_problem() -> None:
    listed = re.findall(r"^\| (\d+) (\w+) \|", TABLE.read_text(), re.M)
    assert sorted(listed) == sorted((str(p.number), p.name) for p in PROBLEMS.values())
