"""Gradients in use: computed only where needed, under autocast, in fp32 if asked for; what is
refused, and what fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import Case, RanksFixture, each
from tests.support.gradients import run_cases
from tests.support.ranked import fresh_group, on_ranks, recorded_calls

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
VICTIM = 1


@on_ranks(2)
def test_needs() -> None:
    """A backward communicates for those who need it only, and gathers once."""
    ag, mrs, mar, again = (
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "all_gather",
    )
    wanted: list[tuple[str, str, bool, list[str]]] = [
        (ag, "x", False, [mrs]),
        (ag, "w", False, [again]),
        (ag, "w", True, []),
        (ag, "xw", False, [mrs, again]),
        (ag, "xw", True, [mrs]),
        (ag, "b", False, []),
        (mrs, "x", False, [ag]),
        (mrs, "w", False, [again]),
        (mrs, "xwb", False, [ag]),
        (mrs, "b", False, [again]),
        (mrs, "r", False, []),
        (mar, "xwbr", False, []),
    ]
    with recorded_calls() as made, fresh_group() as group:
        for op, needed, save, expected in wanted:
            t = {
                "x": torch.randn(4, 6),
                "w": torch.randn(6, 8),
                "b": torch.randn(8),
                "r": torch.randn(4 // group.size() if op == mrs else 4, 8),
            }
            for name in needed:
                t[name].requires_grad_()
            options: dict[str, Any] = {"bias": t["b"], "residual": t["r"]}
            if op == ag:
                options = {"biases": t["b"], "save_gathered": save}
            y = getattr(tpkernels, op)(t["x"], t["w"], group, **options)
            made.clear()
            y.sum().backward()
            assert made == expected and not any(
                (name in needed) != (t[name].grad is not None) for name in t
            ), f"{op} for {needed}, {save}: {made}, not {expected}"


@on_ranks(2)
def test_unused_outputs() -> None:
    """An output without a gradient, and the gathered x alone with one."""
    with fresh_group() as group:
        world = group.size()
        x, w, v = (torch.randn(*shape) for shape in ((4, 6), (6, 8), (6, 3)))
        for leaf in (x, w, v):
            leaf.requires_grad_()
        _, (_, y) = tpkernels.all_gather_matmul(x, [w, v], group, return_gathered=True)
        y.sum().backward()
        assert w.grad is None and v.grad is not None and x.grad is not None, "one of two outputs"
        x.grad = v.grad = None
        gathered, _ = tpkernels.all_gather_matmul(x, [w, v], group, return_gathered=True)
        gathered.sum().backward()
        assert w.grad is None and x.grad is not None and x.grad.eq(world).all(), x.grad


@on_ranks(2)
def test_autocast() -> None:
    """Operands are cast as torch.matmul casts them, and gradients come back in fp32."""
    with fresh_group() as group:
        torch.manual_seed(0)
        x, w, bias = torch.randn(4, 6), torch.randn(6, 8), torch.randn(8)
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            function = getattr(tpkernels, op)
            rows = 4 // group.size() if op == "matmul_reduce_scatter" else 4
            given = [x, w, bias] + ([] if op == "all_gather_matmul" else [torch.randn(rows, 8)])
            results, grads = [], []
            for autocast in (True, False):
                leaves = [value.clone().requires_grad_() for value in given]
                a, b, c, *residual = leaves
                if not autocast:
                    a, b, *residual = (value.to(BF16) for value in (a, b, *residual))
                options: dict[str, Any] = {"residual": residual[0]} if residual else {}
                options["biases" if op == "all_gather_matmul" else "bias"] = c
                with torch.autocast("cpu", dtype=BF16, enabled=autocast):
                    results.append(function(a, b, group, **options))
                    (results[-1].float() ** 2).sum().backward()
                grads.append([leaf.grad for leaf in leaves])
            assert results[0].dtype == BF16 and torch.equal(*results), (op, results[0].dtype)
            for got, want in zip(*grads, strict=True):
                assert got is not None and got.dtype == F32 and torch.equal(got, want), (op, got)
        with torch.autocast("cpu", dtype=BF16):
            wide = tpkernels.matmul_all_reduce(x, w, group, residual=w[:4] * 0, out_dtype=F32)
            double = tpkernels.matmul_all_reduce(x.double(), w.double(), group)
            alone = tpkernels.all_reduce(x, group)
        assert (wide.dtype, double.dtype, alone.dtype) == (F32, F64, F32)


@on_ranks(2)
def test_backward_under_autocast() -> list[str]:
    """The backward of a call in fp32 is in fp32 where autocast is on only then."""
    with fresh_group() as group:
        x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        found = []
        for autocast in (True, False):
            loss = (tpkernels.matmul_reduce_scatter(x, w, group) ** 2).sum()
            with torch.autocast("cpu", dtype=BF16, enabled=autocast):
                found.append(torch.autograd.grad(loss, [x, w]))
        return [] if all(map(torch.equal, *found)) else ["other bits"]


@on_ranks(2)
def test_grad_dtype() -> list[str]:
    """A leaf that asks for fp32 gradients gets the product's accumulator, not its rounding."""
    with fresh_group() as group:
        x, w = torch.randn(64, 8).to(BF16), torch.randn(8, 5).to(BF16).requires_grad_()
        grad = torch.randn(64 * group.size(), 5).to(BF16)
        w.grad_dtype = F32
        whole = tpkernels.all_gather(x, group).double()
        for _ in range(2):
            tpkernels.all_gather_matmul(x, w, group).backward(grad)
        assert w.grad is not None and w.grad.dtype == F32
        wrong = (w.grad.double() - 2 * whole.t() @ grad.double()).abs().max()
        return [f"off by {wrong}"] if wrong > 1e-3 else []


@on_ranks(2)
def test_refusals() -> None:
    with fresh_group() as group:
        x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        calls: list[Callable[[], torch.Tensor]] = [
            lambda: tpkernels.all_gather_matmul(x, w, group),
            lambda: tpkernels.matmul_reduce_scatter(x, w, group),
            lambda: tpkernels.matmul_all_reduce(x, w, group),
            lambda: tpkernels.all_gather(x, group),
            lambda: tpkernels.reduce_scatter(x, group),
            lambda: tpkernels.all_reduce(x, group),
        ]
        for call in calls:
            y = call()
            with pytest.raises(
                NotImplementedError, match="has no second derivative; call backward"
            ):
                torch.autograd.grad(y.sum(), x, create_graph=True)
        tpkernels.all_reduce(x.detach(), group)  # the group goes on


@pytest.mark.thorough
def test_fused(interpreting: RanksFixture) -> None:
    """The backward of a Triton kernel is the other Triton kernel."""
    gather = Case(op="all_gather_matmul", shape=(40, 24), n=(16, 8), biases=(F32, None))
    scatter = Case(op="matmul_reduce_scatter", shape=(40, 16), k=(24,), biases=(F32,))
    cases = each(gather, scatter, dtypes=(F32, BF16), algorithms=("fused",), integers=(False,))
    run_cases(interpreting, 2, cases)


# Failures.


def differing_job() -> str:
    group = faults.new_group()
    x, w = torch.ones(4, 6), torch.ones(6, 8, requires_grad=True)
    x.requires_grad_(dist.get_rank() == 0)
    loss = tpkernels.all_gather_matmul(x, w, group).sum()
    return faults.ending_of(loss.backward).error


def test_gradients_that_one_rank_alone_needs_are_an_error() -> None:
    with faults.watched_ranks(2) as ranks:
        assert ranks.run(differing_job) == ["CollectiveMismatchError"] * 2
