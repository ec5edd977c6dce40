"""Gradients of the ops against the gradients of their definitions: exact for integers, within the
derived bound for random data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import (
    QUICK_WORLDS,
    Case,
    RanksFixture,
    exact_cases,
    expand_cases,
    uneven_splits,
)
from tests.support.gradients import run_cases
from tests.support.nn_reference import find_mismatch
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels.ops.column_matmul import column_matmul

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


@pytest.mark.parametrize("save_gathered", sweep([False, True]))
def test_all_gather_matmul(ranks: RanksFixture, world: int, save_gathered: bool) -> None:
    """One weight and several, with and without biases, with and without a gradient of the gathered
    x. Rows, blocks and columns are gathered."""
    single = Case(op="all_gather_matmul", shape=(6 * world, 9), n=(5,), weight_layout="linear")
    several = replace(single, n=(6, 4), n_by_rank=True, biases=(None, F32), weight_layout="plain")
    blocks = replace(several, shape=(2, 4 * world, 3, 9), dim=1, return_gathered=True)
    along_k = replace(several, shape=(7, 4 * world), dim=1)
    cases = expand_cases(single, several, blocks)
    cases += expand_cases(along_k, algorithms=("unfused", "direct", "auto"))
    run_cases(ranks, world, cases, save_gathered)


def test_matmul_reduce_scatter(ranks: RanksFixture, world: int) -> None:
    op = "matmul_reduce_scatter"
    rows = Case(op=op, shape=(6 * world, 5), k=(9, 7), weight_layout="linear", biases=(F32,))
    blocks = replace(rows, shape=(2, 4 * world, 3, 5), dim=1, residual=F32)
    in_columns = replace(rows, shape=(7, 4 * world), dim=1)
    run_cases(ranks, world, [*expand_cases(rows, in_columns), *expand_cases(blocks, dtypes=(F32,))])


def test_matmul_all_reduce(ranks: RanksFixture, world: int) -> None:
    op = "matmul_all_reduce"
    rows = Case(op=op, shape=(7, 5), k=(9, 6), weight_layout="linear", biases=(F32,))
    blocks = replace(rows, shape=(2, 4, 3, 5), residual=F32)
    run_cases(ranks, world, [*expand_cases(rows), *expand_cases(blocks, dtypes=(F32,))])


def test_collectives(ranks: RanksFixture, world: int) -> None:
    gather = Case(op="all_gather", shape=(3 * world, 5))
    scatter = replace(gather, op="reduce_scatter")
    cases = [
        *(replace(case, shape=(2, 3 * world, 4), dim=1) for case in (gather, scatter)),
        *(replace(case, shape=(3, 2 * world), dim=1) for case in (gather, scatter)),
        Case(op="all_reduce", shape=(3, 5)),
    ]
    run_cases(ranks, world, expand_cases(gather, scatter, *cases))


def test_normalised_sums(ranks: RanksFixture, world: int) -> None:
    rows = Case(op="matmul_all_reduce_rms_norm", shape=(3, 5), k=(4, 2), residual=F64)
    full = replace(rows, biases=(F64,), norm=F64, weight_layout="linear")
    reduce = Case(op="all_reduce_rms_norm", shape=(2, 3, 4))
    cases = expand_cases(
        rows, full, reduce, replace(reduce, residual=F64), dtypes=(F64,), integers=(False,)
    )
    run_cases(ranks, world, cases)


@on_ranks()
def test_column_matmul() -> None:
    """All ranks pass the same x to `column_matmul`. Only some arguments need a gradient, and one of
    three results is unused."""
    with fresh_group() as group:
        rank, world = group.rank(), group.size()
        torch.manual_seed(5)
        x, weights = torch.randn(2, 3, 4, dtype=F64), torch.randn(world, 3, 4, 5, dtype=F64)
        biases = torch.randn(world, 5, dtype=F64)
        for needed in ("xwb", "x", "w", "b"):
            reference = [value.clone().requires_grad_() for value in (x, weights, biases)]
            first, second = (
                torch.einsum("abk,rkn->abrn", reference[0], reference[1][:, i]) for i in (0, 1)
            )
            total = (first + reference[2]).pow(2).sum() + second.sum()
            expected_x, expected_w, expected_b = torch.autograd.grad(total, reference)
            expected = {"x": expected_x, "w": expected_w[rank], "b": expected_b[rank]}
            local = {"x": x, "w": weights[rank], "b": biases[rank]}
            leaves = {
                name: value.clone().requires_grad_(name in needed) for name, value in local.items()
            }
            outs = column_matmul(leaves["x"], list(leaves["w"]), group, [leaves["b"], None, None])
            (outs[0].pow(2).sum() + outs[1].sum()).backward()  # the third result is unused
            for name, leaf in leaves.items():
                wrong = (
                    find_mismatch(leaf.grad, expected[name])
                    if name in needed
                    else leaf.grad is not None
                )
                assert not wrong, f"{needed}: {name}: {wrong}"


def test_uneven_shards(ranks: RanksFixture, world: int) -> None:
    cases = []
    for sizes in uneven_splits(11, world):
        gather = Case(op="all_gather_matmul", shape=(11, 8), n=(5, 3), sizes=sizes)
        scatter = Case(op="matmul_reduce_scatter", shape=(11, 8), k=(6,), sizes=sizes)
        matmuls = [gather, scatter, replace(scatter, shape=(3, 11), dim=1, biases=(F32,))]
        matmuls += [replace(case, shape=(2, 11, 3, 4), dim=1) for case in (gather, scatter)]
        cases += exact_cases(*matmuls, dtypes=(F32,))
        collectives = [
            Case(op=op, shape=(11, 4), sizes=sizes) for op in ("all_gather", "reduce_scatter")
        ]
        cases += exact_cases(*collectives, dtypes=(F32,))
    run_cases(ranks, world, cases)


def test_no_rows(ranks: RanksFixture, world: int) -> None:
    gather = Case(op="all_gather_matmul", shape=(0, 8), n=(5,), biases=(F32,))
    scatter = Case(op="matmul_reduce_scatter", shape=(0, 5), k=(8,), biases=(F32,))
    run_cases(ranks, world, exact_cases(gather, scatter))


def test_dtypes_of_outputs_and_partials(ranks: RanksFixture, world: int) -> None:
    gather = Case(op="all_gather_matmul", shape=(4 * world, 9), n=(6, 4), biases=(F32,))
    scatter = Case(op="matmul_reduce_scatter", shape=(4 * world, 5), k=(9,), biases=(F32,))
    reduce = replace(scatter, op="matmul_all_reduce")
    fp32_cases = [replace(case, out_dtype=F32) for case in (gather, scatter, reduce)]
    fp32_cases += [replace(case, wire_dtype=F32, residual=F32) for case in fp32_cases[1:]]
    fp32_cases += [
        Case(op="reduce_scatter", shape=(4 * world, 3), out_dtype=F32),
        Case(op="all_reduce", shape=(4, 3), out_dtype=F32),
    ]
    bf16_cases = [replace(case, out_dtype=BF16) for case in (gather, scatter, reduce)]
    cases = expand_cases(*fp32_cases, dtypes=(BF16, F16)) + expand_cases(*bf16_cases, dtypes=(F32,))
    run_cases(ranks, world, cases)


def test_many_rows(ranks: RanksFixture, world: int) -> None:
    """Several steps through the workspace, the choice of ``auto`` for many rows, and 16-bit sums
    over many rows, rounded only at the end."""
    gather = Case(op="all_gather_matmul", shape=(300 * world, 40), n=(24,), biases=(F32,))
    scatter = Case(op="matmul_reduce_scatter", shape=(300 * world, 24), k=(40,), biases=(F32,))
    cases = [gather, scatter, replace(scatter, op="matmul_all_reduce", weight_layout="linear")]
    algorithms = ("auto", "pipelined")
    many = expand_cases(*cases, dtypes=(F32, BF16), algorithms=algorithms, integers=(False,))
    run_cases(ranks, world, many)
