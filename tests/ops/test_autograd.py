"""Gradients of the ops against those of their definitions: integers exactly, random numbers within
the derived bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import QUICK_WORLDS, Case, RanksFixture, each, exact, uneven_splits
from tests.support.gradients import run_cases
from tests.support.nn_reference import far
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels.ops.column_matmul import column_matmul

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


@pytest.mark.parametrize("save_gathered", sweep([False, True]))
def test_all_gather_matmul(ranks: RanksFixture, world: int, save_gathered: bool) -> None:
    """One weight and several, with a bias or not, a gradient of the gathered x or none; rows,
    blocks and columns gathered."""
    one = Case(op="all_gather_matmul", shape=(6 * world, 9), n=(5,), weight_layout="linear")
    two = replace(one, n=(6, 4), n_by_rank=True, biases=(None, F32), weight_layout="plain")
    blocks = replace(two, shape=(2, 4 * world, 3, 9), dim=1, return_gathered=True)
    along_k = replace(two, shape=(7, 4 * world), dim=1)
    cases = each(one, two, blocks)
    cases += each(along_k, algorithms=("unfused", "direct", "auto"))
    run_cases(ranks, world, cases, save_gathered)


def test_matmul_reduce_scatter(ranks: RanksFixture, world: int) -> None:
    op = "matmul_reduce_scatter"
    rows = Case(op=op, shape=(6 * world, 5), k=(9, 7), weight_layout="linear", biases=(F32,))
    blocks = replace(rows, shape=(2, 4 * world, 3, 5), dim=1, residual=F32)
    in_columns = replace(rows, shape=(7, 4 * world), dim=1)
    run_cases(ranks, world, [*each(rows, in_columns), *each(blocks, dtypes=(F32,))])


def test_matmul_all_reduce(ranks: RanksFixture, world: int) -> None:
    op = "matmul_all_reduce"
    rows = Case(op=op, shape=(7, 5), k=(9, 6), weight_layout="linear", biases=(F32,))
    blocks = replace(rows, shape=(2, 4, 3, 5), residual=F32)
    run_cases(ranks, world, [*each(rows), *each(blocks, dtypes=(F32,))])


def test_collectives(ranks: RanksFixture, world: int) -> None:
    gather = Case(op="all_gather", shape=(3 * world, 5))
    scatter = replace(gather, op="reduce_scatter")
    cases = [
        *(replace(one, shape=(2, 3 * world, 4), dim=1) for one in (gather, scatter)),
        *(replace(one, shape=(3, 2 * world), dim=1) for one in (gather, scatter)),
        Case(op="all_reduce", shape=(3, 5)),
    ]
    run_cases(ranks, world, each(gather, scatter, *cases))


def test_normalised_sums(ranks: RanksFixture, world: int) -> None:
    rows = Case(op="matmul_all_reduce_rms_norm", shape=(3, 5), k=(4, 2), residual=F64)
    full = replace(rows, biases=(F64,), norm=F64, weight_layout="linear")
    alone = Case(op="all_reduce_rms_norm", shape=(2, 3, 4))
    cases = each(rows, full, alone, replace(alone, residual=F64), dtypes=(F64,), integers=(False,))
    run_cases(ranks, world, cases)


@on_ranks()
def test_column_products() -> None:
    """`column_matmul` of an x that all ranks have, where only some arguments need a gradient, and
    one of three results has none."""
    with fresh_group() as group:
        rank, world = group.rank(), group.size()
        torch.manual_seed(5)
        x, wide = torch.randn(2, 3, 4, dtype=F64), torch.randn(world, 3, 4, 5, dtype=F64)
        biases = torch.randn(world, 5, dtype=F64)
        for asked in ("xwb", "x", "w", "b"):
            whole = [value.clone().requires_grad_() for value in (x, wide, biases)]
            first, second = (
                torch.einsum("abk,rkn->abrn", whole[0], whole[1][:, i]) for i in (0, 1)
            )
            total = (first + whole[2]).pow(2).sum() + second.sum()
            want_x, want_w, want_b = torch.autograd.grad(total, whole)
            wants = {"x": want_x, "w": want_w[rank], "b": want_b[rank]}
            mine = {"x": x, "w": wide[rank], "b": biases[rank]}
            leaves = {name: one.clone().requires_grad_(name in asked) for name, one in mine.items()}
            outs = column_matmul(leaves["x"], list(leaves["w"]), group, [leaves["b"], None, None])
            (outs[0].pow(2).sum() + outs[1].sum()).backward()  # the third is not used
            for name, leaf in leaves.items():
                wrong = far(leaf.grad, wants[name]) if name in asked else leaf.grad is not None
                assert not wrong, f"{asked}: {name}: {wrong}"


def test_uneven_shards(ranks: RanksFixture, world: int) -> None:
    cases = []
    for sizes in uneven_splits(11, world):
        gather = Case(op="all_gather_matmul", shape=(11, 8), n=(5, 3), sizes=sizes)
        scatter = Case(op="matmul_reduce_scatter", shape=(11, 8), k=(6,), sizes=sizes)
        both = [gather, scatter, replace(scatter, shape=(3, 11), dim=1, biases=(F32,))]
        both += [replace(one, shape=(2, 11, 3, 4), dim=1) for one in (gather, scatter)]
        cases += exact(*both, dtypes=(F32,))
        alone = [Case(op=op, shape=(11, 4), sizes=sizes) for op in ("all_gather", "reduce_scatter")]
        cases += exact(*alone, dtypes=(F32,))
    run_cases(ranks, world, cases)


def test_no_rows_at_all(ranks: RanksFixture, world: int) -> None:
    gather = Case(op="all_gather_matmul", shape=(0, 8), n=(5,), biases=(F32,))
    scatter = Case(op="matmul_reduce_scatter", shape=(0, 5), k=(8,), biases=(F32,))
    run_cases(ranks, world, exact(gather, scatter))


def test_dtypes_of_outputs_and_partials(ranks: RanksFixture, world: int) -> None:
    gather = Case(op="all_gather_matmul", shape=(4 * world, 9), n=(6, 4), biases=(F32,))
    scatter = Case(op="matmul_reduce_scatter", shape=(4 * world, 5), k=(9,), biases=(F32,))
    reduce = replace(scatter, op="matmul_all_reduce")
    wide = [replace(one, out_dtype=F32) for one in (gather, scatter, reduce)]
    wide += [replace(one, wire_dtype=F32, residual=F32) for one in wide[1:]]
    wide += [
        Case(op="reduce_scatter", shape=(4 * world, 3), out_dtype=F32),
        Case(op="all_reduce", shape=(4, 3), out_dtype=F32),
    ]
    narrow = [replace(one, out_dtype=BF16) for one in (gather, scatter, reduce)]
    cases = each(*wide, dtypes=(BF16, F16)) + each(*narrow, dtypes=(F32,))
    run_cases(ranks, world, cases)


def test_many_rows(ranks: RanksFixture, world: int) -> None:
    """Several steps through the workspace, what ``auto`` chooses for many rows, and sums over many
    rows in 16 bits, which round once."""
    gather = Case(op="all_gather_matmul", shape=(300 * world, 40), n=(24,), biases=(F32,))
    scatter = Case(op="matmul_reduce_scatter", shape=(300 * world, 24), k=(40,), biases=(F32,))
    cases = [gather, scatter, replace(scatter, op="matmul_all_reduce", weight_layout="linear")]
    algorithms = ("auto", "pipelined")
    many = each(*cases, dtypes=(F32, BF16), algorithms=algorithms, integers=(False,))
    run_cases(ranks, world, many)
