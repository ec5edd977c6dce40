"""What the gradient tests run in the ranks, and what they compare with: the gradients of the ops'
definitions in float64, within the bound of support/reference.py.

The gradient that reaches an output is made from the case alone, like its inputs. A gradient of an
op is again a sum of products over the ranks, so it has the same bound.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tests.support import reference
from tests.support.cases import Case, RanksFixture
from tests.support.ranked import check_job, difference, fresh_group, place
from tests.support.reference import Expected, draw
from tpkernels import groups

Pair = tuple[torch.Tensor, torch.Tensor]


def columns(case: Case, rank: int) -> list[int]:
    return [n + rank * case.n_by_rank for n in case.n]


def output_grads(case: Case, rank: int, world: int) -> list[torch.Tensor]:
    """The gradients that reach a rank's outputs, the gathered x first. Their values are exact in
    both x's dtype and the output's."""
    case = case.values()

    def made(shape: Sequence[int], *what: object) -> torch.Tensor:
        return draw(case, tuple(shape), case.dtype, 1, "grad", *what).to(case.out).to(case.dtype)

    if case.op == "all_gather":
        return [made(case.shape, rank)]
    if case.op == "all_gather_matmul":
        outs = [made((*case.shape[:-1], n), rank, i) for i, n in enumerate(columns(case, rank))]
        return [made(case.shape, rank), *outs] if case.return_gathered else outs
    whole = made(case.shape)
    return [case.shard(whole, rank, world) if case.scattered else whole]


def _sum_of_products(
    case: Case, pairs: Sequence[Pair], dtype: torch.dtype, extra: Sequence[torch.Tensor] = ()
) -> Expected:
    """``sum(a @ b) + sum(extra)`` in ``dtype``, one pair and one extra for each partial that
    travels."""
    case = replace(case, out_dtype=dtype, wire_dtype=case.dtype)
    wide = [a.double() @ b.double() for a, b in pairs]
    sizes = [a.double().abs() @ b.double().abs() for a, b in pairs]
    unfused = [torch.matmul(a, b) for a, b in pairs]
    for i, one in enumerate(extra):
        wide[i], sizes[i] = wide[i] + one.double(), sizes[i] + one.double().abs()
        unfused[i] = unfused[i] + one

    def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return functools.reduce(torch.add, parts)

    k = sum(a.shape[-1] for a, _ in pairs) + len(extra)
    partials = add([part.abs() for part in wide]) if len(pairs) > 1 else None
    return reference.bounded(case, add(wide), add(unfused).to(dtype), add(sizes), k, partials)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight(case: Case, x: torch.Tensor, grad: torch.Tensor) -> Expected:
    return _sum_of_products(case, [(_rows(x).t(), _rows(grad))], case.dtype)


def _bias(case: Case, grad: torch.Tensor, dtype: torch.dtype) -> Expected:
    ones = torch.ones(1, _rows(grad).shape[0], dtype=case.dtype)
    row = _sum_of_products(case, [(ones, _rows(grad))], dtype)
    return replace(row, exact=row.exact[0], bound=row.bound[0])


def _exactly(value: torch.Tensor, dtype: torch.dtype) -> Expected:
    return Expected(value.double(), torch.zeros_like(value, dtype=torch.float64), dtype)


def _share(case: Case, whole: Expected, rank: int, world: int) -> Expected:
    exact, bound = (case.shard(part, rank, world) for part in (whole.exact, whole.bound))
    return replace(whole, exact=exact, bound=bound)


def _gather(case: Case, rank: int, world: int) -> list[Expected]:
    x = reference.gathered_x(case)
    grads = [output_grads(case, r, world) for r in range(world)]
    if case.op == "all_gather":
        eye = torch.eye(case.shape[-1], dtype=case.dtype)
        sum_ = _sum_of_products(case, [(grad[0], eye) for grad in grads], case.dtype)
        return [_share(case, sum_, rank, world)]
    extra = [grad[0] for grad in grads] if case.return_gathered else []
    products = [grad[1:] if case.return_gathered else grad for grad in grads]
    factors = [
        (
            torch.cat(products[r], -1),
            torch.cat([w.t() for w, _ in reference.column_weights(case, r)]),
        )
        for r in range(world)
    ]
    grad_x = _share(case, _sum_of_products(case, factors, case.dtype, extra), rank, world)
    mine = reference.column_weights(case, rank)
    weights = [_weight(case, x, grad) for grad in products[rank]]
    biases = [
        _bias(case, grad, b.dtype)
        for grad, (_, b) in zip(products[rank], mine, strict=True)
        if b is not None
    ]
    return [grad_x, *weights, *biases]


def _reduce(case: Case, rank: int, world: int) -> list[Expected]:
    x, w = reference.partial_factors(case, rank, world)
    scattered = [output_grads(case, r, world)[0] for r in range(world)]
    whole = torch.cat(scattered, case.dim) if case.scattered else scattered[rank]
    if w is None:
        return [_exactly(whole, case.dtype)]
    grads = [_sum_of_products(case, [(whole, w.t())], case.dtype), _weight(case, x, whole)]
    bias, residual = reference.reduction_bias(case), reference.reduction_residual(case)
    if bias is not None:
        grads.append(_bias(case, whole, bias.dtype))
    if residual is not None:
        grads.append(_exactly(scattered[rank], residual.dtype))
    return grads


def expected(case: Case, rank: int, world: int) -> list[Expected]:
    """The gradients of a rank's inputs: x, weights, biases, residual."""
    return (_gather if "all_gather" in case.op else _reduce)(case.values(), rank, world)


def leaf(x: torch.Tensor, layout: str = "plain") -> torch.Tensor:
    return place(x, layout).requires_grad_()


def call(
    case: Case, group: dist.ProcessGroup, save_gathered: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(inputs that require a gradient, outputs) of one call."""
    rank, world = group.rank(), group.size()
    options: dict[str, Any] = {"algorithm": case.algorithm}
    linear = "transposed" if case.weight_layout == "linear" else case.weight_layout
    if "all_gather" in case.op:
        options["shard_sizes"] = case.sizes
        x = leaf(case.shard(reference.gathered_x(case), rank, world), case.layout)
        if not case.n:
            return [x], [tpkernels.all_gather(x, group, case.dim, **options)]
        pairs = reference.column_weights(case, rank)
        weights = [leaf(w, linear) for w, _ in pairs]
        biases = [None if b is None else leaf(b) for _, b in pairs]
        outs = tpkernels.all_gather_matmul(
            x,
            weights,
            group,
            case.dim,
            biases=biases if case.biases else None,
            out_dtype=case.out_dtype,
            return_gathered=case.return_gathered,
            save_gathered=save_gathered,
            **options,
        )
        inputs = [x, *weights, *(b for b in biases if b is not None)]
        return inputs, [outs[0], *outs[1]] if case.return_gathered else outs
    mine, w = reference.partial_factors(case, rank, world)
    if case.scattered:
        options |= {"scatter_dim": case.dim, "shard_sizes": case.sizes}
    options["out_dtype"] = case.out_dtype
    inputs = [leaf(mine, case.layout)]
    if w is None:
        return inputs, [getattr(tpkernels, case.op)(*inputs, group, **options)]
    inputs.append(leaf(w, linear))
    factors = list(inputs)
    bias, residual = reference.reduction_bias(case), reference.reduction_residual(case)
    if residual is not None and case.scattered:
        residual = case.shard(residual, rank, world)
    for name, extra in (("bias", bias), ("residual", residual)):
        if extra is not None:
            inputs.append(leaf(extra))
            options[name] = inputs[-1]
    options["wire_dtype"] = case.wire_dtype
    return inputs, [getattr(tpkernels, case.op)(*factors, group, **options)]


def check(case: Case, group: dist.ProcessGroup, save_gathered: bool) -> list[str]:
    """What is wrong with the gradients of one call, as text."""
    rank, world = group.rank(), group.size()
    inputs, outputs = call(case, group, save_gathered)
    grads = [grad.to(case.out) for grad in output_grads(case, rank, world)]
    if case.return_gathered:
        grads[0] = grads[0].to(case.dtype)
    results = torch.autograd.grad(outputs, inputs, grads)
    where = f"rank {rank} of {world}: {case} save_gathered={save_gathered}"
    wrong = []
    wants = expected(case, rank, world)
    for i, (x, got, want) in enumerate(zip(inputs, results, wants, strict=True)):
        error = difference(got.contiguous(), want)
        if error is not None:
            wrong.append(f"{where}: gradient {i}: {error}")
        if x.dim() == 2 and i and x.stride() != got.stride() and x.t().is_contiguous():
            wrong.append(
                f"{where}: gradient {i} has strides {got.stride()}, the weight {x.stride()}"
            )
    return wrong


def cases_job(cases: Sequence[Case], save_gathered: bool) -> list[str]:
    failures: list[str] = []
    with fresh_group() as group:
        for case in cases:
            try:
                failures += check(case, group, save_gathered)
            except Exception as error:
                # So that no peer waits for this rank.
                groups.get(group.group_name).mark_broken(error)
                raise
    return failures


def run_cases(
    ranks: RanksFixture, world: int, cases: Sequence[Case], save_gathered: bool = False
) -> None:
    """Runs the cases on ``world`` ranks and fails with the failures of all ranks."""
    assert cases
    check_job(ranks(world), cases_job, list(cases), save_gathered, timeout=240)
