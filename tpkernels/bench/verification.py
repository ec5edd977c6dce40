"""Verify results against float64, within a bound derived from the op's contract.

The error of an element may be as large as torch's own on the same inputs, plus the smaller of

    sqrt(K) * eps * (|A| @ |B|)                           the contract of all ops
    eps/2 * (|y| + sum_r |p_r|) + K * 2^-24 * |A| @ |B|   fp32 accumulation, then one rounding of
                                                          the result y and of each partial p_r

In 16-bit dtypes the first bound exceeds the result itself from about K = 256. A and B are scaled
operands times their scales, which is exact in float64 and costs two roundings in fp32. A residual
is one more term of the sum. On CUDA tensors NCCL may sum: eps/2 * (W - 1) * sum_r |p_r| more.
Normalised rows are compared with rms_norm in float64 of the op's own sum, within
eps/2 + (N/128 + 8) * 2^-24 of the result; on CUDA tensors, where torch adds up the squares in any
order, within eps/2 + (N/2 + 8) * 2^-24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

from tpkernels.bench.cases import Case, Outputs
from tpkernels.bench.specs import EXPERTS, NORM_EPS, TOP_K
from tpkernels.common.shards import shard_sizes
from tpkernels.launch.session import all_gather_objects, all_gather_tensors

_SECOND_ORDER = 1.01  # products of roundings, which the second bound leaves out

# One summand of a result: x and w of a matmul, or the summand itself and None.
Term = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, order=True)
class Verdict:
    """The largest ``error / bound`` over all elements, and both values of that element."""

    ratio: float = 0.0
    error: float = 0.0
    bound: float = 0.0

    @property
    def right(self) -> bool:
        return self.ratio <= 1


WRONG = Verdict(math.inf, math.inf, 0.0)


def check(
    case: Case, results: Mapping[str, Outputs], torch_outputs: Outputs | None = None
) -> dict[str, Verdict]:
    """Compare results of ``case``, by name, with float64. Collective: each rank checks its rows,
    and all ranks return the verdict on all rows.

    Args:
        torch_outputs: torch's result, whose error is added to the bound.
    """
    verdicts = {
        name: max(_same_on_all_ranks(case, outputs), _normalised(case, outputs))
        for name, outputs in results.items()
    }
    for i, terms in enumerate(_terms(case)):
        exact, bound = _expected(case, terms)
        if torch_outputs is not None:
            bound += (_mine(case, torch_outputs[i]) - exact).abs()
        shape = exact.shape[1:] if case.x.dim() == 1 else exact.shape
        if case.spec.keeps_sum:  # this rank checks its shard only
            shape = torch.Size([sum(case.sizes), *shape[1:]])
        for name, outputs in results.items():
            y = outputs[i]
            if (y.shape, y.dtype) != (shape, case.out_dtype):
                verdicts[name] = WRONG
            elif exact.numel():
                verdicts[name] = max(verdicts[name], _worst(_mine(case, y), exact, bound))
    ranks = all_gather_objects(verdicts)
    return {name: max(rank[name] for rank in ranks) for name in verdicts}


def _mine(case: Case, y: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank checks, as a matrix: its shard of an all-reduce, else all."""
    if case.spec.keeps_sum:
        y = y.split(list(case.sizes))[dist.get_rank()]
    return y.view(1, -1) if y.dim() == 1 else y


def _terms(case: Case) -> list[list[Term]]:
    """Gather, for each output, the summands of the rows that this rank checks."""
    x, weights, rank = case.x, list(case.weights), dist.get_rank()
    if case.scales:
        x, *weights = (elements.double() * scale.double() for elements, scale in case.operands)
    shards = all_gather_tensors(x)
    if case.topk_weights is not None:
        return [_routed_terms(case, torch.cat(shards), case.topk_weights)]
    if not case.spec.reduces:
        gathered = torch.cat(shards)
        if case.spec.exchanges:
            gathered = gathered.split(case.columns, 1)[rank]
        gathered = gathered.view(1, -1) if gathered.dim() == 1 else gathered
        return [[(gathered, w)] for w in weights] or [[(gathered, None)]]
    mine = [shard.split(list(case.sizes))[rank] for shard in shards]
    mine = [rows.view(1, -1) if rows.dim() == 1 else rows for rows in mine]
    factors = all_gather_tensors(weights[0]) if weights else [None] * len(mine)
    residual = [] if case.residual is None else [(_mine(case, case.residual), None)]
    return [[*zip(mine, factors, strict=True), *residual]]


def _received(case: Case) -> torch.Tensor:
    """Return the assignments to this rank's experts, in the order of its rows."""
    assert case.routes is not None  # a routed case has some
    held = shard_sizes(EXPERTS, len(case.sizes))
    counts = torch.bincount(case.routes.flatten(), minlength=EXPERTS).split(held)
    return case.sorted_routes().split([int(count.sum()) for count in counts])[dist.get_rank()]


def _routed_terms(case: Case, x: torch.Tensor, weights: torch.Tensor) -> list[Term]:
    """Return the rows of ``x``, of all ranks, that each of this rank's rows is a sum of."""
    if case.spec.dispatches:
        return [(x[_received(case) // TOP_K], None)]
    place = case.sorted_routes().argsort().view(-1, TOP_K).split(list(case.sizes))[dist.get_rank()]
    return [(x[place[:, slot]].double() * weights[:, slot, None], None) for slot in range(TOP_K)]


def _expected(case: Case, terms: list[Term]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact result of the rows that this rank checks, and the bound without torch's
    error."""
    exact = magnitude = partials = torch.zeros((), dtype=torch.float64)
    for x, w in terms:
        if w is None:
            term = x.double()
            magnitude = magnitude + term.abs()
        else:
            term = x.double() @ w.double()
            magnitude = magnitude + x.float().abs() @ w.float().abs()
            if case.spec.reduces:  # partials are rounded before they are sent
                partials = partials + term.abs()
        exact = exact + term
    if not (case.spec.reduces or case.spec.combines or case.weights):
        return exact, torch.zeros_like(exact)  # rows are only moved
    depth, world = sum(1 if w is None else x.shape[1] for x, w in terms), len(case.sizes)
    eps, additions = torch.finfo(case.out_dtype).eps, depth + world + 1 + len(case.scales)
    rounding = eps / 2 * (exact.abs() + partials) + additions * 2.0**-24 * magnitude
    if case.x.is_cuda and case.spec.reduces:  # NCCL rounds each addition
        rounding += (world - 1) * eps / 2 * (partials if case.weights else magnitude)
    contract = math.sqrt(depth) * eps * magnitude
    return exact, torch.minimum(contract, _SECOND_ORDER * rounding)


def _worst(result: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> Verdict:
    error = (result - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(ratio.argmax())
    return Verdict(*(float(values.view(-1)[at]) for values in (ratio, error, bound)))


def _same_on_all_ranks(case: Case, outputs: Outputs) -> Verdict:
    """Check that an all-reduce produces the same bits on every rank."""
    same = True
    for output in outputs if case.spec.keeps_sum else []:
        bits = output.contiguous().view(torch.uint8)
        first = bits.clone()
        dist.broadcast(first, src=0)
        same = same and torch.equal(first, bits)
    return Verdict() if same else WRONG


def _normalised(case: Case, outputs: Outputs) -> Verdict:
    """Check the normalised rows, given their sum."""
    if case.norm_weight is None:
        return Verdict()
    total, normed = (_mine(case, output) for output in outputs)
    if normed.shape != total.shape or normed.dtype != total.dtype:
        return WRONG
    if not total.numel():
        return Verdict()
    columns, weight = total.shape[1], case.norm_weight.double()
    exact = rms_norm(total.double(), [columns], weight, NORM_EPS)
    eps, depth = torch.finfo(total.dtype).eps, columns / (2 if total.is_cuda else 128)
    return _worst(normed.double(), exact, (eps / 2 + (depth + 8) * 2.0**-24) * exact.abs())
