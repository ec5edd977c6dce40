"""Verify results against the references of `tpkernels.ops.reference`, which derives the bound.

A is x and B the weight; scaled operands are multiplied by their scales, which is exact in float64
and costs two roundings in fp32. The unfused program of the bound is `cases.run_torch`, where it
runs. On CUDA tensors NCCL may sum, which rounds each of the W - 1 additions to the wire dtype, and
torch adds up the squares of a norm in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from tpkernels.bench.cases import Case, Outputs
from tpkernels.bench.specs import EXPERTS, NORM_EPS, TOP_K
from tpkernels.launch.session import all_gather_objects, all_gather_tensors
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
    worst = {
        name: 0.0 if _same_on_all_ranks(case, outputs) else math.inf
        for name, outputs in results.items()
    }
    for i, derived in enumerate(_expected(case)):
        bound = derived.bound
        if torch_outputs is not None:
            bound = bound + (_mine(case, torch_outputs[i]) - derived.exact).abs()
        expected = replace(derived, bound=bound)
        for name, outputs in results.items():
            worst[name] = max(worst[name], _worst(case, outputs[i], expected))
    for name, outputs in results.items():
        if case.norm_weight is not None and worst[name] <= 1:  # normalised rows of a right sum
            total, normed = outputs
            total = _mine(case, total)
            expected = rms_norm(total, case.norm_weight, NORM_EPS, any_order=total.is_cuda)
            worst[name] = max(worst[name], _worst(case, normed, expected))
    ranks = all_gather_objects(worst)
    return {name: max(rank[name] for rank in ranks) for name in worst}


def _mine(case: Case, y: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank checks: its shard of an all-reduce, else all."""
    return y.split(list(case.sizes))[dist.get_rank()] if case.spec.keeps_sum else y


def _expected(case: Case) -> Iterator[Expected]:
    """Yield the reference of each output, for the rows that this rank checks."""
    x, weights, rank = case.x, list(case.weights), dist.get_rank()
    if case.scales:
        x, *weights = (elements.double() * scale.double() for elements, scale in case.operands)
    shards = all_gather_tensors(x)
    if case.routes is not None:
        yield _routed(case, torch.cat(shards))
    elif case.spec.reduces:
        mine = [shard.split(list(case.sizes))[rank] for shard in shards]
        factors = all_gather_tensors(weights[0]) if weights else [None] * len(mine)
        # Roundings to the wire dtype: one of a matmul's partial, and one of each sum by NCCL.
        on_wire = len(weights) + (len(mine) - 1 if x.is_cuda else 0)
        yield summed(
            zip(mine, factors, strict=True),
            dtype=case.x.dtype,
            out=case.out_dtype,
            wire=case.out_dtype if on_wire else None,
            unfused=False,
            roundings=len(case.scales),
            sum_roundings=on_wire - 1,
        )
    elif case.spec.exchanges:
        yield moved(torch.cat(shards).split(case.columns, 1)[rank])
    elif not weights:
        yield moved(torch.cat(shards))
    for w in weights if case.spec.gathers else ():
        yield summed(
            [(torch.cat(shards), w)],
            dtype=case.x.dtype,
            out=case.out_dtype,
            unfused=False,
            roundings=len(case.scales),
        )


def _routed(case: Case, x: torch.Tensor) -> Expected:
    """Return the reference of routed tokens; ``x`` has the rows of all ranks."""
    assert case.routes is not None and case.topk_weights is not None  # a routed case has both
    rows, rank = assignments(case.routes, EXPERTS, len(case.sizes))[0], dist.get_rank()
    if case.spec.dispatches:
        return moved(x[rows[rank] // TOP_K])
    places = torch.cat(rows).argsort().view(-1, TOP_K).split(list(case.sizes))[rank]
    return moe_combine(x[places], case.topk_weights, dtype=case.x.dtype)


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
