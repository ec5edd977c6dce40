"""Plain DTensor code within ``fused_dtensor``: DTensor's results, gradients and placements, also
where a gathered tensor or a sum is used otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.fused import AG, AR, RS, Results, differences, gradients
from tests.support.meshes import S0, S1, Placements, R, make_mesh
from tests.support.ranked import recorded_calls, report

ROWS, HIDDEN, INNER = 7, 8, 12


class _Scale(torch.autograd.Function):
    """Not a torch function: the context does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.by * grad, None


def _changed_before(x: DTensor, w: DTensor, b: DTensor) -> DTensor:
    x = x * 1
    y = F.linear(x, w.detach())
    x.mul_(2)
    return y.redistribute(placements=[R])


def _used_twice(x: DTensor, w: DTensor, b: DTensor) -> DTensor:
    y = F.linear(x, w)
    return y.redistribute(placements=[R]) + 2 * y


def _gathered_and_changed(x: DTensor, w: DTensor, b: DTensor) -> DTensor:
    w, b = w.detach(), b.detach()
    x = x.redistribute(placements=[R])
    y = F.linear(x, w, b)
    x = torch.relu_(x)
    return y * F.linear(x, w, b)


def _gathered_for_others(x: DTensor, w: DTensor, b: DTensor) -> DTensor:
    x = x.redistribute(placements=[R])
    y = F.linear(x, w, b)
    return (y * F.linear(x, w, b)).redistribute(placements=[R]) + x.sum()


def _first_gathered_then_used(x: DTensor, w: DTensor, b: DTensor) -> DTensor:
    x = x.redistribute(placements=[R])
    return F.linear(2 * x, w, b)


def _under_autocast(x: DTensor, w: DTensor, b: DTensor) -> DTensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w).redistribute(placements=[R])


# Code of x [ROWS, HIDDEN], w and b, their placements, and the ops that run forward and backward.
ROW, COLUMN = ((S1,), (S1,), (R,)), ((S0,), (S0,), (S0,))
ROW_T, COLUMN_T = ((S1,), (S0,), (R,)), ((S0,), (S1,), (S0,))
Code = Callable[[Any, Any, Any], Any]
CODE: Mapping[str, tuple[Code, tuple[Placements, Placements, Placements], list[str]]] = (
    MappingProxyType(
        {
            "linear, scattered rows": (
                lambda x, w, b: F.linear(x, w, b).redistribute(placements=[S0]), ROW, [RS, AG],
            ),
            "linear, scattered columns": (
                lambda x, w, b: F.linear(x, w, b).redistribute(placements=[S1]), ROW, [RS, AG],
            ),
            "linear, replicated": (
                lambda x, w, b: F.linear(x, w, b).redistribute(placements=[R]), ROW, [AR],
            ),
            "@": (lambda x, w, b: (x @ w).redistribute(placements=[S0]), ROW_T, [RS, AG]),
            "matmul": (
                lambda x, w, b: torch.matmul(x, w).redistribute(placements=[R]), ROW_T, [AR],
            ),
            "addmm": (
                lambda x, w, b: torch.addmm(b, x, w).redistribute(placements=[S0]), ROW_T, [RS, AG],
            ),
            "gather, mm": (
                lambda x, w, b: x.redistribute(placements=[R]).mm(w), COLUMN_T, [AG, RS],
            ),
            "gather, addmm": (
                lambda x, w, b: b.addmm(x.redistribute(placements=[R]), w), COLUMN_T, [AG, RS],
            ),
            "gather for two products": (
                _gathered_for_others, COLUMN, [AG, "reduce_scatter"],
            ),
            "sum used before and after": (_used_twice, ROW, [AR]),
            "gathered tensor changed": (_gathered_and_changed, COLUMN, [AG, RS]),
            "operand changed": (_changed_before, ROW, []),
            "gathered tensor used otherwise": (_first_gathered_then_used, COLUMN, []),
            "sum used otherwise": (lambda x, w, b: F.linear(x, w, b) * 2, ROW, []),
            "sum not used": (F.linear, ROW, []),
            "gather not used": (lambda x, w, b: x.redistribute(placements=[R]), COLUMN, []),
            "local part of the sum": (lambda x, w, b: F.linear(x, w).to_local(), ROW, []),
            "whole": (lambda x, w, b: F.linear(x, w, b).full_tensor(), ROW, [AR]),
            "seen by autograd alone": (lambda x, w, b: _Scale.apply(F.linear(x, w, b), 2), ROW, []),
            "autocast": (_under_autocast, ROW, []),
            "gather of a sum's dim": (
                lambda x, w, b: F.linear(x.redistribute(placements=[R]), w, b),
                ((S1,), (S0,), (S0,)), [],
            ),
            "options": (
                lambda x, w, b: torch.addmm(b, x, w, beta=2).redistribute(placements=[R]),
                ROW_T, [],
            ),
            "another type": (
                lambda x, w, b: F.linear(x, w).redistribute(
                    placements=[R], forward_dtype=torch.float64
                ), ROW, [],
            ),
        }
    )
)  # fmt: skip


def _check(
    name: str,
    code: Code,
    shapes: tuple[tuple[int, ...], ...],
    placements: tuple[Placements, ...],
    expected: list[str],
    mesh: DeviceMesh,
) -> list[str]:
    """What is wrong with x, w and b of these shapes, as text."""
    torch.manual_seed(1)
    operands = [
        distribute_tensor(torch.randn(shape), mesh, one)
        for shape, one in zip(shapes, placements, strict=True)
    ]
    results: list[Results] = []
    layouts = []
    for context in (contextlib.nullcontext(), tpkernels.fused_dtensor()):
        given = [one.detach().requires_grad_() for one in operands]
        with recorded_calls() as calls:
            with context:
                y = code(*given)
            y.square().sum().backward()
        used = [one for one in given if one.grad is not None]
        layouts.append(
            [type(y), *(one.placements for one in (y, *used) if isinstance(one, DTensor))]
        )
        layouts[-1] += [one.grad.placements for one in used]
        whole = y.full_tensor() if isinstance(y, DTensor) else y
        results.append([whole.detach(), *gradients(given)])
    failures = differences(name, *results)
    if calls != expected:
        failures.append(f"{name}: ran {calls}, expected {expected}")
    if layouts[0] != layouts[1]:
        failures.append(f"{name}: {layouts[1]}, expected {layouts[0]}")
    return failures


def code_job() -> list[str]:
    mesh = make_mesh((2,), ["code"])
    failures = []
    for name, (code, placements, expected) in CODE.items():
        weight = (HIDDEN, INNER) if placements in (ROW_T, COLUMN_T) else (INNER, HIDDEN)
        shapes = (ROWS, HIDDEN), weight, (INNER,)
        failures += _check(name, code, shapes, placements, expected, mesh)
    return failures


def test_plain_code(ranks: RanksFixture) -> None:
    report(text for rank in ranks(2).run(code_job) for text in rank)


S2 = Shard(2)


def two_dims_job() -> list[str]:
    """The first mesh dim splits the batch."""
    mesh = make_mesh((2, 2), ["batch of code", "model of code"])
    failures = []
    for x_at, w_at, bias_at, target, expected in [
        ((S0, S2), (R, S1), (R, R), (S0, S1), [RS, AG]),
        ((S0, S2), (R, S1), (R, R), (S0, R), [AR]),
        ((S0, S1), (R, S0), (R, S0), (S0, R), [AG, RS]),
    ]:
        code = (
            (lambda x, w, b, to=target: F.linear(x, w, b).redistribute(placements=to))
            if x_at[1] == S2
            else (lambda x, w, b, to=target: F.linear(x.redistribute(placements=to), w, b))
        )
        shapes = (2, ROWS, HIDDEN), (INNER, HIDDEN), (INNER,)
        failures += _check(f"{x_at}", code, shapes, (x_at, w_at, bias_at), expected, mesh)
    return failures


@pytest.mark.thorough
def test_two_dims(ranks: RanksFixture) -> None:
    report(text for rank in ranks(4).run(two_dims_job) for text in rank)
