"""MoE assignments: the rows that each rank sends, receives and multiplies.

An assignment is a (token, slot) pair: one of the k experts that the router selects for a token. Its
index is ``token * k + slot``. Ranks hold consecutive experts. A rank has one row per assignment to
its experts, sorted by expert, then by token in rank order, then by slot. Every rank derives this
order from the expert ids of all tokens.

Example: 4 tokens, k = 2, 3 experts. Rank 0 holds experts 0 and 1, rank 1 holds expert 2.

    topk_ids          [[0, 2], [1, 0], [2, 1], [0, 2]]
    permutation       [0, 3, 6, 2, 5, 1, 4, 7]    assignments sorted by expert
    rank_offsets      [0, 5, 8]
    expert_offsets    [0, 3, 5] on rank 0, [5, 8] on rank 1
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels import _C
from tpkernels.common.shards import shard_sizes
from tpkernels.errors import CaptureError, RoutingError
from tpkernels.planning.op_spec import RoutedOptions
from tpkernels.planning.problem import Problem
from tpkernels.symm import streams


def experts_per_rank(problem: Problem) -> list[int]:
    """Return the number of experts of each rank."""
    return shard_sizes(problem.options_as(RoutedOptions).experts, problem.world)


def row_capacity(problem: Problem) -> int:
    """Return the maximum number of rows of a rank. Identical on all ranks."""
    options = problem.options_as(RoutedOptions)
    return options.max_rows or sum(problem.sizes) * options.top_k


def make_routing(problem: Problem, topk_ids: torch.Tensor) -> _C.calls.Routing:
    """Return the C++ routing table of ``topk_ids`` [tokens of all ranks, k].

    Raises:
        RoutingError: an expert id is out of range.
    """
    try:
        return _C.calls.Routing(topk_ids.contiguous(), problem.sizes, experts_per_rank(problem))
    except ValueError as error:
        raise RoutingError(str(error)) from None


def invert_permutation(permutation: torch.Tensor) -> torch.Tensor:
    """Return the inverse of an int64 permutation."""
    positions = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, positions)


def sum_weighted_rows(
    x: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Add the rows of each token, multiplied by the router weights::

        out = sum(weights[:, j, None] * x[row_ids[:, j]] for j in range(k))

    Terms are added in the order of j. Each multiplication and each addition is rounded to the
    dtype of the weights, so results are bitwise identical on all devices. (The rounding of
    ``torch.sum`` over j depends on the column.)

    Args:
        x: [rows, H].
        row_ids: [tokens, k].
        weights: [tokens, k].
        out: [tokens, H].
    """
    if not x.is_cuda:
        _C.calls.weigh_rows(x.contiguous(), row_ids.contiguous(), weights.contiguous(), out)
        return
    total = weights.new_zeros(out.shape)
    for ids, weight in zip(row_ids.t(), weights.t(), strict=True):
        total += x.index_select(0, ids).to(total.dtype) * weight.unsqueeze(1)
    out.copy_(total)


def check_capacity(problem: Problem, rows: Sequence[int]) -> None:
    """Raise `RoutingError` if ``rows[r]``, the row count of a rank r, exceeds ``max_rows``."""
    max_rows = problem.options_as(RoutedOptions).max_rows
    if max_rows is not None and max(rows) > max_rows:
        raise RoutingError(
            f"{max(rows)} (token, expert) assignments go to the experts of rank "
            f"{rows.index(max(rows))}, but max_rows is {max_rows}; {sum(rows)} (tokens x top_k) is "
            "always enough"
        )


def assigned_rows(problem: Problem, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first ``rows`` expert outputs, one per assignment.

    Raises:
        ValueError: x has a wrong number of rows.
    """
    max_rows = problem.options_as(RoutedOptions).max_rows
    if max_rows is not None and x.shape[0] != max_rows:
        raise ValueError(f"x has {x.shape[0]} rows, but max_rows is {max_rows}; they must be equal")
    if max_rows is None and x.shape[0] != rows:
        raise ValueError(
            f"x has {x.shape[0]} rows, but {rows} (token, expert) assignments go to the experts of "
            "this rank; x must have one row per assignment"
        )
    return x[:rows]


@dataclass(frozen=True, eq=False)
class TokenExchange:
    """Send and receive order of assignments in an all-to-all. Rows are sent by token and slot.

    Attributes:
        send_order: local assignments, sorted by destination rank.
        send_counts: number of assignments to each rank.
        recv_counts: number of assignments from each rank.
        expert_order: for each local row, in expert order, its index among the received rows.
        expert_counts: number of rows of each local expert.
        invalid: mask of assignments with an out-of-range expert id. None if the host has checked
            them.
    """

    send_order: torch.Tensor
    send_counts: list[int]
    recv_counts: list[int]
    expert_order: torch.Tensor
    expert_counts: torch.Tensor
    invalid: torch.Tensor | None = None

    @classmethod
    def plan(cls, problem: Problem, rank: int, topk_ids: torch.Tensor) -> TokenExchange:
        """Derive the exchange from ``topk_ids`` [tokens of all ranks, k].

        On CUDA tensors the host waits for the counts, except on a single rank with ``max_rows``.

        Raises:
            RoutingError: a rank gets more than ``max_rows`` rows, or an expert id is out of range
                and the host waits. Otherwise ``invalid`` marks such ids.
        """
        rank_experts = experts_per_rank(problem)
        experts, k = topk_ids.flatten(), topk_ids.shape[1]
        invalid = (experts < 0) | (experts >= sum(rank_experts))
        max_rows = problem.options_as(RoutedOptions).max_rows
        if problem.world == 1 and problem.device == "cuda" and max_rows is not None:
            check_capacity(problem, rank_rows := [topk_ids.numel()])
            by_expert = ExpertPermutation.compute(
                problem, 0, experts.masked_fill(invalid, sum(rank_experts))
            )
            send_order = torch.arange(rank_rows[0], device=topk_ids.device)
            return cls(
                send_order, rank_rows, rank_rows, by_expert.permutation, by_expert.counts, invalid
            )
        _check_not_capturing(topk_ids.device)
        if bool(invalid.any()):
            make_routing(problem, topk_ids.cpu())  # raises with the invalid id
        first_experts = [0, *itertools.accumulate(rank_experts)]
        owners = torch.bucketize(experts, experts.new_tensor(first_experts[1:]), right=True)
        by_rank = owners.split([size * k for size in problem.sizes])
        sent = torch.bincount(by_rank[rank], minlength=problem.world)
        totals = torch.bincount(owners, minlength=problem.world)
        received = torch.stack([(destinations == rank).sum() for destinations in by_rank])
        send_counts, recv_counts, rank_rows = torch.stack([sent, received, totals]).tolist()
        check_capacity(problem, rank_rows)
        local_experts = experts[(owners == rank).nonzero().flatten()] - first_experts[rank]
        return cls(
            send_order=by_rank[rank].argsort(stable=True),
            send_counts=send_counts,
            recv_counts=recv_counts,
            expert_order=local_experts.argsort(stable=True),
            expert_counts=torch.bincount(local_experts, minlength=rank_experts[rank]),
        )


@dataclass(frozen=True, eq=False)
class ExpertPermutation:
    """Assignments of all ranks, sorted by expert, in device memory. The host does not wait.

    Assignments with an out-of-range expert id precede the rows of the first rank or follow the
    rows of the last rank.

    Attributes:
        permutation: assignment of each row.
        rank_offsets: first row of each rank, and the end of the last rank.
        expert_offsets: first row of each local expert, and the end of the last local expert.
    """

    permutation: torch.Tensor
    rank_offsets: torch.Tensor
    expert_offsets: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """Return the number of rows of each local expert."""
        return self.expert_offsets.diff()

    @classmethod
    def compute(cls, problem: Problem, rank: int, topk_ids: torch.Tensor) -> ExpertPermutation:
        """Sort ``topk_ids`` [tokens of all ranks, k]."""
        if problem.options_as(RoutedOptions).max_rows is None:
            _check_not_capturing(topk_ids.device)
        rank_experts = experts_per_rank(problem)
        experts, permutation = topk_ids.flatten().sort(stable=True)
        base, extra = divmod(sum(rank_experts), problem.world)
        arange = functools.partial(torch.arange, dtype=experts.dtype, device=experts.device)
        ranks, first_expert = arange(problem.world + 1), sum(rank_experts[:rank])
        first_experts = ranks.clamp(max=extra).add(ranks, alpha=base)  # see `shard_sizes`
        rank_offsets = torch.searchsorted(experts, first_experts)
        expert_offsets = torch.searchsorted(
            experts, arange(first_expert, first_expert + rank_experts[rank] + 1)
        )
        return cls(permutation, rank_offsets, expert_offsets)

    def num_rows(self, problem: Problem, rank: int, topk_ids: torch.Tensor) -> int:
        """Return the number of rows of this rank: ``max_rows`` if it is set.

        Without ``max_rows`` the host waits for the number of assignments.

        Raises:
            RoutingError: an expert id is out of range. Checked only without ``max_rows``.
        """
        if (max_rows := problem.options_as(RoutedOptions).max_rows) is not None:
            return max_rows
        offsets = self.rank_offsets.tolist()
        if offsets[-1] - offsets[0] < self.permutation.numel():
            make_routing(problem, topk_ids.cpu())  # raises with the invalid id
        return int(offsets[rank + 1] - offsets[rank])


def _check_not_capturing(device: torch.device) -> None:
    if streams.is_captured(device):
        raise CaptureError(
            "a MoE call without max_rows cannot be captured in a CUDA graph, because the host must "
            "read the token counts; pass max_rows and, on more than one rank, algorithm='direct'"
        )
