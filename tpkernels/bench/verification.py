"""Verifies results against float64, within a bound derived from the op's contract.

The error of an element may be as large as torch's own on the same inputs, plus the smaller of

    sqrt(K) * eps * (|A| @ |B|)                           the contract of all ops
    eps/2 * (|y| + sum_r |p_r|) + K * 2^-24 * |A| @ |B|   products and sums in fp32, one rounding of
                                                          the result y and of each partial p_r

A and B are scaled operands times their scales, which is exact in float64; products and scales are
then two more roundings in fp32.

The first alone is too weak for 16-bit dtypes: on random data in bf16 it exceeds the result itself
from about K = 256. A residual is one more term of the sum. On CUDA tensors NCCL may sum, and the
bound has eps/2 * (W - 1) * sum_r |p_r| more. Each rank checks its own rows; all ranks get the same
verdict.

Normalised rows are compared with what float64 makes of the op's own sum, within
eps/2 + (N/128 + 8) * 2^-24 of the result. On CUDA tensors torch may add up the squares in any
order: eps/2 + (N/2 + 8) * 2^-24.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

from tpkernels.bench.cases import Case, Outputs
from tpkernels.bench.specs import EXPERTS, NORM_EPS, TOP_K
from tpkernels.launch.session import all_gather_objects, all_gather_tensors
from tpkernels.shards import shard_sizes

_PANEL_ELEMENTS = 1 << 21  # of the result, compared at a time
_SECOND_ORDER = 1.01  # allows for products of roundings, which the second bound ignores


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

# One summand of the result: rows of A and B, or the summand itself and None.
Term = tuple[torch.Tensor, torch.Tensor | None]


def verify(
    case: Case, baseline: Outputs | None, candidates: Mapping[str, Outputs]
) -> dict[str, Verdict]:
    """Compare results for ``case`` with float64. Collective.

    Args:
        baseline: torch's result, whose error is added to the bound; None: the bound stays as it is.
        candidates: results by name.
    """
    verdicts = {
        name: max(_same_everywhere(case, outputs), _normalised(case, outputs))
        for name, outputs in candidates.items()
    }
    for i, terms in enumerate(_terms(case)):
        shape, dtype = _shape(case, i), case.out_dtype
        for name, outputs in candidates.items():
            if outputs[i].shape != shape or outputs[i].dtype != dtype:
                verdicts[name] = WRONG
        results = {name: _mine(case, outputs[i]) for name, outputs in candidates.items()}
        residual = None if case.residual is None else _mine(case, case.residual)
        for columns, exact, bound in _panels(case, terms, residual):
            allowed = bound
            if baseline is not None:
                allowed = bound + (_mine(case, baseline[i])[:, columns] - exact).abs()
            for name, result in results.items():
                if verdicts[name] != WRONG:
                    worst = _worst(result[:, columns], exact, allowed)
                    verdicts[name] = max(verdicts[name], worst)
    return {
        name: max(everyone[name] for everyone in all_gather_objects(verdicts)) for name in verdicts
    }


def _shape(case: Case, i: int) -> torch.Size:
    """Return the shape of this rank's result ``i``."""
    rows, rank = case.x.shape[0], dist.get_rank()
    if case.topk_weights is not None:
        tokens = case.topk_weights.shape[0]
        rows = _rows_here(case).numel() if case.spec.dispatches else tokens
    elif case.spec.exchanges:
        return torch.Size([sum(case.sizes), case.columns[rank]])
    elif case.spec.gathers:
        rows = sum(case.sizes)
    elif case.spec.scatters:
        rows = case.sizes[rank]
    return torch.Size([rows, *(case.weights[i] if case.weights else case.x).shape[1:]])


def _terms(case: Case) -> list[list[Term]]:
    """Gather, for each output, the summands of the rows that this rank checks."""
    rank = dist.get_rank()
    x, weights = case.x, list(case.weights)
    if case.scales:
        # What scaled elements stand for, exactly.
        x, *weights = [elements.double() * scale.double() for elements, scale in case.operands]
    everyone = all_gather_tensors(x)
    if case.topk_weights is not None:
        return [_routed_terms(case, torch.cat(everyone), case.topk_weights)]
    if not case.spec.reduces:
        whole = torch.cat(everyone)
        if weights:
            return [[(whole, w)] for w in weights]
        if case.spec.exchanges:
            whole = whole.split(case.columns, 1)[rank]
        return [[(_matrix(whole), None)]]
    shards = [_matrix(x.split(list(case.sizes))[rank]) for x in everyone]
    if not weights:
        return [[(shard, None) for shard in shards]]
    return [list(zip(shards, all_gather_tensors(weights[0]), strict=True))]


def _rows_here(case: Case) -> torch.Tensor:
    """Return the routes to this rank's experts, in the order of its rows."""
    assert case.routes is not None  # a routed case has some
    held, rank = shard_sizes(EXPERTS, len(case.sizes)), dist.get_rank()
    counts = torch.bincount(case.routes.flatten(), minlength=EXPERTS).split(held)
    return case.sorted_routes().split([int(count.sum()) for count in counts])[rank]


def _routed_terms(case: Case, whole: torch.Tensor, weights: torch.Tensor) -> list[Term]:
    """Return the rows of ``whole``, of all ranks, that each of this rank's rows is a sum of."""
    if case.spec.dispatches:
        return [(whole[_rows_here(case) // TOP_K], None)]
    place = case.sorted_routes().argsort().view(-1, TOP_K).split(list(case.sizes))[dist.get_rank()]
    terms = [whole[place[:, slot]].double() * weights[:, slot, None] for slot in range(TOP_K)]
    return [(term, None) for term in terms]


def _mine(case: Case, whole: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank checks, as a matrix: all its rows, or its part of an
    all-reduce."""
    if case.spec.keeps_sum:
        whole = whole.split(list(case.sizes))[dist.get_rank()]
    return _matrix(whole)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.view(1, -1) if x.dim() == 1 else x


def _panels(
    case: Case, terms: list[Term], residual: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield panels of columns: the columns, the exact result, and the bound without torch's
    error."""
    first, factor = terms[0]
    rows, width = first.shape[0], (first if factor is None else factor).shape[1]
    step = max(1, _PANEL_ELEMENTS // max(rows, 1))
    # Rounded before they travel.
    partials = factor is not None and not case.spec.gathers
    depth = sum(1 if b is None else a.shape[1] for a, b in terms)
    for begin in range(0, width if rows else 0, step):
        columns = slice(begin, min(begin + step, width))
        total = first.new_zeros(rows, columns.stop - begin, dtype=torch.float64)
        rounded, magnitude = torch.zeros_like(total), torch.zeros_like(total)
        summands = list(terms) if residual is None else [*terms, (residual, None)]
        for a, b in summands:
            if b is None:
                part = a[:, columns].double()
                magnitude += part.abs()
            else:
                part = a.double() @ b[:, columns].double()
                magnitude += a.float().abs() @ b[:, columns].float().abs()
                rounded += part.abs() if partials else 0
            total += part
        yield columns, total, _bound(case, total, rounded, magnitude, depth)


def _bound(
    case: Case, total: torch.Tensor, rounded: torch.Tensor, magnitude: torch.Tensor, depth: int
) -> torch.Tensor:
    if not (case.spec.reduces or case.spec.combines or case.weights):
        return torch.zeros_like(total)
    eps = torch.finfo(case.out_dtype).eps
    contract = math.sqrt(depth) * eps * magnitude
    world = len(case.sizes)
    additions = depth + world + 1 + len(case.scales)
    rounding = eps / 2 * (total.abs() + rounded) + additions * 2.0**-24 * magnitude
    if case.x.is_cuda and case.spec.reduces:  # NCCL rounds each addition
        rounding += (world - 1) * eps / 2 * (rounded if case.weights else magnitude)
    return torch.minimum(contract, _SECOND_ORDER * rounding)


def _worst(result: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> Verdict:
    error = (result - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(ratio.argmax())
    return Verdict(*(float(values.view(-1)[at]) for values in (ratio, error, allowed)))


def _same_everywhere(case: Case, outputs: Outputs) -> Verdict:
    """Check that an all-reduce produces the same bits on every rank."""
    if not case.spec.keeps_sum:
        return Verdict()
    same = True
    for output in outputs:
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
    columns = total.shape[1]
    exact = rms_norm(total.double(), [columns], case.norm_weight.double(), NORM_EPS)
    eps, depth = torch.finfo(total.dtype).eps, columns / (2 if total.is_cuda else 128)
    return _worst(normed.double(), exact, (eps / 2 + (depth + 8) * 2.0**-24) * exact.abs())
