"""Collectives of torch.distributed that return their result, for the references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
# Renamed in torch 2.13.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_stacked(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Gather ``x`` of all ranks along a new first dim."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(out), x.contiguous(), group=group)
    return out


def all_gather(x: torch.Tensor, dim: int = 0, group: Group = None) -> torch.Tensor:
    """Gather ``x`` of all ranks along ``dim``."""
    return torch.cat(all_gather_stacked(x, group).unbind(), dim)


def all_gather_uneven(x: torch.Tensor) -> torch.Tensor:
    """Gather different numbers of rows from all ranks. Pads them, as gloo requires."""
    counts = all_gather_stacked(torch.tensor(len(x))).tolist()
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: len(x)] = x
    return torch.cat([rows[:n] for rows, n in zip(all_gather_stacked(padded), counts, strict=True)])


def all_reduce(x: torch.Tensor, group: Group = None, op: dist.ReduceOp = dist.ReduceOp.SUM):
    """Reduce ``x`` over the ranks, by default to the sum."""
    total = x.clone()
    dist.all_reduce(total, op, group=group)
    return total


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Return the local rows of the sum of ``x`` over the ranks."""
    rows = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
    _reduce_scatter(rows, x.contiguous())
    return rows


def broadcast(x: torch.Tensor, source: int = 0) -> torch.Tensor:
    """Return ``x`` of rank ``source``."""
    received = x.clone()
    dist.broadcast(received, source)
    return received


def all_to_all(x: torch.Tensor, gather_dim: int, scatter_dim: int) -> torch.Tensor:
    """Convert shards along ``gather_dim`` to shards along ``scatter_dim``."""
    chunks = torch.stack(x.chunk(dist.get_world_size(), scatter_dim))
    return torch.cat(all_to_all_single(chunks).unbind(), gather_dim)


def all_to_all_single(x: torch.Tensor) -> torch.Tensor:
    """Send ``x[r]`` to rank r. Returns the tensors from all ranks, stacked."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def send_rows(x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Send ``counts[r]`` rows of ``x`` to rank r. Returns the received rows and their counts."""
    received = all_to_all_single(counts).tolist()
    return send_rows_with_counts(x, counts.tolist(), received), received


def send_rows_with_counts(
    x: torch.Tensor, counts: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send ``counts[r]`` rows of ``x`` to rank r, and receive ``received[r]`` rows from it."""
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), list(received), list(counts))
    return rows


def ring_shift(*tensors: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """Send tensors to the next rank of the ring. Returns the tensors of the previous rank."""
    ranks, index = dist.get_process_group_ranks(group), dist.get_rank(group)
    following, previous = ranks[(index + 1) % len(ranks)], ranks[index - 1]
    sends = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sends]
    ops = [dist.P2POp(dist.isend, x, following, group) for x in sends]
    ops += [dist.P2POp(dist.irecv, x, previous, group) for x in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received
