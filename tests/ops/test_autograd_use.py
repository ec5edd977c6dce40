"""Gradients in use: computed only if needed, under autocast, in fp32 on request. Also refusals and
failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import Case, RanksFixture, expand_cases
from tests.support.gradients import run_cases
from tests.support.ranked import fresh_group, on_ranks, record_calls

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
VICTIM = 1


@on_ranks(2)
def test_needed_gradients() -> None:
    """A backward pass communicates only for the gradients that are needed, and gathers once."""
    ag, mrs, mar, gather = (
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "all_gather",
    )
    cases: list[tuple[str, str, bool, list[str]]] = [
        (ag, "x", False, [mrs]),
        (ag, "w", False, [gather]),
        (ag, "w", True, []),
        (ag, "xw", False, [mrs, gather]),
        (ag, "xw", True, [mrs]),
        (ag, "b", False, []),
        (mrs, "x", False, [ag]),
        (mrs, "w", False, [gather]),
        (mrs, "xwb", False, [ag]),
        (mrs, "b", False, [gather]),
        (mrs, "r", False, []),
        (mar, "xwbr", False, []),
    ]
    with record_calls() as calls, fresh_group() as group:
        for op, needed, save, expected in cases:
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
            calls.clear()
            y.sum().backward()
            assert calls == expected and not any(
                (name in needed) != (t[name].grad is not None) for name in t
            ), f"{op} for {needed}, {save}: {calls}, not {expected}"


@on_ranks(2)
def test_unused_outputs() -> None:
    """First, one of two outputs has no gradient. Then only the gathered x has one."""
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
    """Operands are cast as in torch.matmul, and gradients are in fp32."""
    with fresh_group() as group:
        torch.manual_seed(0)
        x, w, bias = torch.randn(4, 6), torch.randn(6, 8), torch.randn(8)
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            function = getattr(tpkernels, op)
            rows = 4 // group.size() if op == "matmul_reduce_scatter" else 4
            args = [x, w, bias] + ([] if op == "all_gather_matmul" else [torch.randn(rows, 8)])
            results, grads = [], []
            for autocast in (True, False):
                leaves = [value.clone().requires_grad_() for value in args]
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
            for grad, expected in zip(*grads, strict=True):
                assert grad is not None and grad.dtype == F32 and torch.equal(grad, expected), (
                    op,
                    grad,
                )
        with torch.autocast("cpu", dtype=BF16):
            fp32_result = tpkernels.matmul_all_reduce(
                x, w, group, residual=w[:4] * 0, out_dtype=F32
            )
            fp64_result = tpkernels.matmul_all_reduce(x.double(), w.double(), group)
            collective_result = tpkernels.all_reduce(x, group)
        assert (fp32_result.dtype, fp64_result.dtype, collective_result.dtype) == (F32, F64, F32)


@on_ranks(2)
def test_backward_under_autocast() -> list[str]:
    """The backward of an fp32 call is in fp32, even if autocast is enabled only in the backward."""
    with fresh_group() as group:
        x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        grads = []
        for autocast in (True, False):
            loss = (tpkernels.matmul_reduce_scatter(x, w, group) ** 2).sum()
            with torch.autocast("cpu", dtype=BF16, enabled=autocast):
                grads.append(torch.autograd.grad(loss, [x, w]))
        return [] if all(map(torch.equal, *grads)) else ["other bits"]


@on_ranks(2)
def test_grad_dtype() -> list[str]:
    """A leaf that requests fp32 gradients receives the accumulator of the matmul without
    rounding."""
    with fresh_group() as group:
        x, w = torch.randn(64, 8).to(BF16), torch.randn(8, 5).to(BF16).requires_grad_()
        grad = torch.randn(64 * group.size(), 5).to(BF16)
        w.grad_dtype = F32
        full = tpkernels.all_gather(x, group).double()
        for _ in range(2):
            tpkernels.all_gather_matmul(x, w, group).backward(grad)
        assert w.grad is not None and w.grad.dtype == F32
        wrong = (w.grad.double() - 2 * full.t() @ grad.double()).abs().max()
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
        tpkernels.all_reduce(x.detach(), group)  # the group remains usable


@pytest.mark.thorough
def test_fused(interpreter_ranks: RanksFixture) -> None:
    """The backward of all_gather_matmul is matmul_reduce_scatter and vice versa. Both run as Triton
    kernels."""
    gather = Case(op="all_gather_matmul", shape=(40, 24), n=(16, 8), biases=(F32, None))
    scatter = Case(op="matmul_reduce_scatter", shape=(40, 16), k=(24,), biases=(F32,))
    cases = expand_cases(
        gather, scatter, dtypes=(F32, BF16), algorithms=("fused",), integers=(False,)
    )
    run_cases(interpreter_ranks, 2, cases)


# Failures.


def differing_job() -> str:
    group = faults.new_group()
    x, w = torch.ones(4, 6), torch.ones(6, 8, requires_grad=True)
    x.requires_grad_(dist.get_rank() == 0)
    loss = tpkernels.all_gather_matmul(x, w, group).sum()
    return faults.record_ending(loss.backward).error


def test_a_gradient_needed_on_one_rank_only_is_an_error() -> None:
    with faults.watched_ranks(2) as ranks:
        assert ranks.run(differing_job) == ["CollectiveMismatchError"] * 2
