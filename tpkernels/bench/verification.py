"""Verify results against the references of `tpkernels.ops.reference`, which derives the bound.

A is x and B the weight; scaled operands are multiplied by their scales, which is exact in float64
and costs two roundings in fp32. The unfused program of the bound is `cases.run_torch`, where it
runs. On CUDA tensors NCCL may sum, which rounds each of the W - 1 additions to the wire dtype, and
torch adds up the squares of a norm in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from tpkernels.bench.cases import Case, Outputs, all_gather
from tpkernels.bench.specs import EXPERTS, NORM_EPS, TOP_K
from tpkernels.launch.session import all_gather_objects
from tpkernels.ops.reference import Expected, assignments, moe_combine, moved, rms_norm, summed


def check(
    case: Case, results: Mapping[str, Outputs], torch_outputs: Outputs | None = None
) -> dict[str, float]:
    """Compare results of ``case``, by name, with float64. Return the largest ``error / bound`` of
    each, see `Expected.worst`. Collective: each rank checks its rows, and all ranks return the
    largest of all rows.

    Args:
        torch_outputs: torch's result, whose error is added to the bound.
    """
    expected = _expected(case)
    if torch_outputs is not None:
        torch_error = (_mine(case, torch_outputs[0]) - expected.exact).abs()
        expected = replace(expected, bound=expected.bound + torch_error)
    worst = {}
    for name, outputs in results.items():
        worst[name] = _worst(case, outputs[0], expected)
        if case.norm_weight is not None and worst[name] <= 1:  # normalised rows of a right sum
            total = _mine(case, outputs[0])
            normed = rms_norm(total, case.norm_weight, NORM_EPS, any_order=total.is_cuda)
            worst[name] = max(worst[name], _worst(case, outputs[1], normed))
        if not _same_on_all_ranks(case, outputs):
            worst[name] = math.inf
    ranks = all_gather_objects(worst)
    return {name: max(rank[name] for rank in ranks) for name in worst}


def _mine(case: Case, y: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank checks: its shard of an all-reduce, else all."""
    return y.split(list(case.sizes))[dist.get_rank()] if case.spec.keeps_sum else y


def _expected(case: Case) -> Expected:
    """Return the reference of the first output, for the rows that this rank checks."""
    x, w, sizes, rank = case.x, case.w, case.sizes, dist.get_rank()
    if case.scales:
        x, w = (elements.double() * scale.double() for elements, scale in case.operands)
    if case.routes is not None:
        return _routed(case)
    derive = partial(
        summed,
        dtype=case.x.dtype,
        out=case.out_dtype,
        unfused=False,
        roundings=len(case.scales),
    )
    if not case.spec.reduces:
        rows = all_gather(x, sizes)
        if case.spec.exchanges:
            rows = rows.split(case.columns, 1)[rank]
        return moved(rows) if w is None else derive([(rows, w)])
    shards = [shard.split(list(sizes))[rank] for shard in _of_all_ranks(x)]
    factors = [None] * len(sizes) if w is None else _of_all_ranks(w)
    # Roundings to the wire dtype: one of a matmul's partial, and one of each sum by NCCL.
    on_wire = (w is not None) + (len(sizes) - 1 if x.is_cuda else 0)
    return derive(
        zip(shards, factors, strict=True),
        wire=case.out_dtype if on_wire else None,
        sum_roundings=on_wire - 1,
    )


def _of_all_ranks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather ``x``, whose shape is the same on all ranks."""
    rows = len(x)
    return all_gather(x.contiguous(), (rows,) * dist.get_world_size()).split(rows)


def _routed(case: Case) -> Expected:
    """Return the reference of routed tokens."""
    assert case.routes is not None and case.topk_weights is not None  # a routed case has both
    assigned, _ = assignments(case.routes, EXPERTS, len(case.sizes))
    if case.spec.dispatches:
        return moved(all_gather(case.x, case.sizes)[assigned[dist.get_rank()] // TOP_K])
    rows = all_gather(case.x, tuple(map(len, assigned)))
    places = torch.cat(assigned).argsort().view(-1, TOP_K).split(list(case.sizes))
    return moe_combine(rows[places[dist.get_rank()]], case.topk_weights, dtype=case.x.dtype)


def _worst(case: Case, y: torch.Tensor, expected: Expected) -> float:
    """Return the largest ``error / bound`` of the rows that this rank checks."""
    shape = [sum(case.sizes), *expected.exact.shape[1:]]
    if case.spec.keeps_sum and y.shape != torch.Size(shape):
        return math.inf
    return expected.worst(_mine(case, y))


def _same_on_all_ranks(case: Case, outputs: Outputs) -> bool:
    """Return whether an all-reduce produced the same bits on every rank."""
    same = True
    for output in outputs if case.spec.keeps_sum else []:
        bits = output.contiguous().view(torch.uint8)
        first = bits.clone()
        dist.broadcast(first, src=0)
        same = same and torch.equal(first, bits)
    return same
