"""Verify results against the references of `tpkernels.ops.reference`, which derives the bound.

The unfused program of the bound is `cases.run_torch`, where it runs. On CUDA tensors NCCL may sum,
which rounds each of the W - 1 additions to the wire dtype, and torch adds up the squares of a norm
in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from tpkernels.launch.session import all_gather_objects
from tpkernels.ops.reference import Expected, rms_norm
from tpkernels.qualification.op_case import NORM_EPS, Operands, Outputs


def check(
    case: Operands, results: Mapping[str, Outputs], torch_outputs: Outputs | None = None
) -> dict[str, float]:
    """Compare results of ``case``, by name, with float64. Return the largest ``error / bound`` of
    each, see `Expected.worst`. Collective: each rank checks its rows, and all ranks return the
    largest of all rows.

    Args:
        torch_outputs: torch's result, whose error is added to the bound.
    """
    # Roundings to the wire dtype: one of a matmul's partial, and one of each sum by NCCL.
    on_wire = case.spec.has_matmul + (len(case.of.sizes) - 1 if case.x.is_cuda else 0)
    expected = case.expected(case.of.rows(case.rank), on_wire)
    if torch_outputs is not None:
        torch_error = (_mine(case, torch_outputs[0]) - expected[0].exact).abs()
        expected[0] = replace(expected[0], bound=expected[0].bound + torch_error)
    worst = {}
    for name, outputs in results.items():
        errors = [_worst(case, y, want) for y, want in zip(outputs, expected, strict=False)]
        if case.norm_weight is not None and errors[0] <= 1:  # normalised rows of a right sum
            total = _mine(case, outputs[0])
            normed = rms_norm(total, case.norm_weight, NORM_EPS, any_order=total.is_cuda)
            errors.append(_worst(case, outputs[1], normed))
        worst[name] = max(errors) if _same_on_all_ranks(case, outputs) else math.inf
    ranks = all_gather_objects(worst)
    return {name: max(rank[name] for rank in ranks) for name in worst}


def _mine(case: Operands, y: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank checks: its shard of an all-reduce, else all."""
    return y[case.of.rows(case.rank)] if case.spec.keeps_sum else y


def _worst(case: Operands, y: torch.Tensor, expected: Expected) -> float:
    """Return the largest ``error / bound`` of the rows that this rank checks."""
    shape = [sum(case.of.sizes), *expected.exact.shape[1:]]
    if case.spec.keeps_sum and y.shape != torch.Size(shape):
        return math.inf
    return expected.worst(_mine(case, y))


def _same_on_all_ranks(case: Operands, outputs: Outputs) -> bool:
    """Return whether an all-reduce produced the same bits on every rank."""
    same = True
    for output in outputs if case.spec.keeps_sum else []:
        bits = output.contiguous().view(torch.uint8)
        first = bits.clone()
        dist.broadcast(first, src=0)
        same = same and torch.equal(first, bits)
    return same
