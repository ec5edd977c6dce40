"""Where the rows of routed tokens come from and go to, as each rank finds from the routes of all.

A route is one of a token's k choices of an expert. Ranks hold consecutive experts. A rank has a row
for each route to them: by expert, and within one by token, in rank order, and slot.
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


def experts_of(problem: Problem) -> list[int]:
    """Return how many experts each rank holds."""
    return shard_sizes(problem.options_as(RoutedOptions).experts, problem.world)


def most_rows(problem: Problem) -> int:
    """Return how many rows a rank may have; the same on all ranks."""
    options = problem.options_as(RoutedOptions)
    return options.max_rows or sum(problem.sizes) * options.top_k


def routing_of(problem: Problem, routes: torch.Tensor) -> _C.calls.Routing:
    """Return the extension's form of ``routes`` [tokens of all ranks, k]; `RoutingError` if one
    leads to an expert that there is not."""
    try:
        return _C.calls.Routing(routes.contiguous(), problem.sizes, experts_of(problem))
    except ValueError as error:
        raise RoutingError(str(error)) from None


def places_of(order: torch.Tensor) -> torch.Tensor:
    """Return at which place of ``order``, a permutation of int64, each route is."""
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def weigh_rows(
    x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Set ``out = sum_j(weights[:, j] * x[places[:, j]])``, in the order of j, each product and sum
    rounded to the dtype of the weights: the same bits on any device. (Those of ``torch.sum`` over j
    depend on the column.) x [rows, H], places and weights [tokens, k], out [tokens, H]."""
    if not x.is_cuda:
        _C.calls.weigh_rows(x.contiguous(), places.contiguous(), weights.contiguous(), out)
        return
    total = weights.new_zeros(out.shape)
    for place, weight in zip(places.t(), weights.t(), strict=True):
        total += x.index_select(0, place).to(total.dtype) * weight.unsqueeze(1)
    out.copy_(total)


def check_room(problem: Problem, rows: Sequence[int]) -> None:
    """Raise `RoutingError` if a rank, of which each gets ``rows``, gets more than there may be."""
    most = problem.options_as(RoutedOptions).max_rows
    if most is not None and max(rows) > most:
        raise RoutingError(
            f"{max(rows)} (token, expert) assignments go to the experts of rank "
            f"{rows.index(max(rows))}, but max_rows is {most}; {sum(rows)} (tokens x top_k) is "
            "always enough"
        )


def filled(problem: Problem, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first ``rows`` of the experts' results, one for each route. ``ValueError`` if x
    has another number than it must have."""
    most = problem.options_as(RoutedOptions).max_rows
    if most is not None and x.shape[0] != most:
        raise ValueError(f"x has {x.shape[0]} rows, but max_rows is {most}; they must be equal")
    if most is None and x.shape[0] != rows:
        raise ValueError(
            f"x has {x.shape[0]} rows, but {rows} (token, expert) assignments go to the experts of "
            "this rank; x must have one row per assignment"
        )
    return x[:rows]


@dataclass(frozen=True, eq=False)
class RowExchange:
    """Rows in the order in which they travel: by token and slot.

    Attributes:
        leaving: this rank's routes, token * k + slot, by the rank that has the expert.
        left: how many of them lead to each rank.
        arrived: how many routes of each rank lead to this one.
        order: for each row of this rank, by expert, which one it is in the order of arrival.
        counts: rows of each of this rank's experts.
        nowhere: routes to experts that there are not, if no host has looked.
    """

    leaving: torch.Tensor
    left: list[int]
    arrived: list[int]
    order: torch.Tensor
    counts: torch.Tensor
    nowhere: torch.Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, rank: int, routes: torch.Tensor) -> RowExchange:
        """Find them from ``routes`` [tokens of all ranks, k]. Raises `RoutingError`. On CUDA
        tensors the host waits for the counts, unless one rank has ``max_rows``."""
        held = experts_of(problem)
        experts, k = routes.flatten(), routes.shape[1]
        nowhere = (experts < 0) | (experts >= sum(held))
        most = problem.options_as(RoutedOptions).max_rows
        if problem.world == 1 and problem.device == "cuda" and most is not None:
            check_room(problem, all_rows := [routes.numel()])
            found = Places.of(problem, 0, experts.masked_fill(nowhere, sum(held)))
            leaving = torch.arange(all_rows[0], device=routes.device)
            return cls(leaving, all_rows, all_rows, found.order, found.counts, nowhere)
        _refuse_capture(routes.device)
        if bool(nowhere.any()):
            routing_of(problem, routes.cpu())  # says which
        edges = [0, *itertools.accumulate(held)]
        holders = torch.bucketize(experts, experts.new_tensor(edges[1:]), right=True)
        by_rank = holders.split([size * k for size in problem.sizes])
        left = torch.bincount(by_rank[rank], minlength=problem.world)
        rows = torch.bincount(holders, minlength=problem.world)
        arrived = torch.stack([(part == rank).sum() for part in by_rank])
        left_counts, arrived_counts, all_rows = torch.stack([left, arrived, rows]).tolist()
        check_room(problem, all_rows)
        here = experts[(holders == rank).nonzero().flatten()] - edges[rank]
        return cls(
            leaving=by_rank[rank].argsort(stable=True),
            left=left_counts,
            arrived=arrived_counts,
            order=here.argsort(stable=True),
            counts=torch.bincount(here, minlength=held[rank]),
        )


@dataclass(frozen=True, eq=False)
class Places:
    """Rows of all ranks, sorted by expert; in device memory, for which no host waits. Routes to
    experts that there are not come before the first rank's rows and after the last's.

    Attributes:
        order: the route, token * k + slot, of each place.
        edges: the place at which each rank's rows begin, and the end of the last's.
        ends: the same of each of this rank's experts.
    """

    order: torch.Tensor
    edges: torch.Tensor
    ends: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """Return how many rows each of this rank's experts has."""
        return self.ends.diff()

    @classmethod
    def of(cls, problem: Problem, rank: int, routes: torch.Tensor) -> Places:
        """Find them from ``routes`` [tokens of all ranks, k]."""
        if problem.options_as(RoutedOptions).max_rows is None:
            _refuse_capture(routes.device)
        held = experts_of(problem)
        experts, order = routes.flatten().sort(stable=True)
        each, more = divmod(sum(held), problem.world)
        numbers = functools.partial(torch.arange, dtype=experts.dtype, device=experts.device)
        ranks, first = numbers(problem.world + 1), sum(held[:rank])
        firsts = ranks.clamp(max=more).add(ranks, alpha=each)  # experts, as of `shard_sizes`
        edges = torch.searchsorted(experts, firsts)
        ends = torch.searchsorted(experts, numbers(first, first + held[rank] + 1))
        return cls(order, edges, ends)

    def rows(self, problem: Problem, rank: int, routes: torch.Tensor) -> int:
        """Return how many rows this rank has: ``max_rows``; without, the host waits for the number
        of routes to its experts. Raises `RoutingError` if it knows of a reason."""
        if (most := problem.options_as(RoutedOptions).max_rows) is not None:
            return most
        edges = self.edges.tolist()
        if edges[-1] - edges[0] < self.order.numel():
            routing_of(problem, routes.cpu())  # says which
        return int(edges[rank + 1] - edges[rank])


def _refuse_capture(device: torch.device) -> None:
    if streams.is_captured(device):
        raise CaptureError(
            "a MoE call without max_rows cannot be captured in a CUDA graph, because the host must "
            "read the token counts; pass max_rows and, on more than one rank, algorithm='direct'"
        )
