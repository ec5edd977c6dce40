"""What the references share: collectives of torch.distributed that return their result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
# torch 2.13 has renamed it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def stacked(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return all ranks' ``x`` along a new first dim."""
    whole = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(whole), x.contiguous(), group=group)
    return whole


def gathered(x: torch.Tensor, dim: int = 0, group: Group = None) -> torch.Tensor:
    """Return all ranks' ``x`` along ``dim``."""
    return torch.cat(stacked(x, group).unbind(), dim)


def gathered_uneven(x: torch.Tensor) -> torch.Tensor:
    """Return all ranks' rows, of which each has another number: gloo wants them padded."""
    counts = stacked(torch.tensor(len(x))).tolist()
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: len(x)] = x
    return torch.cat([rows[:n] for rows, n in zip(stacked(padded), counts, strict=True)])


def summed(x: torch.Tensor, group: Group = None, op: dist.ReduceOp = dist.ReduceOp.SUM):
    """Return the sum of all ranks' ``x``."""
    total = x.clone()
    dist.all_reduce(total, op, group=group)
    return total


def scattered_sum(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the sum of all ranks' ``x``."""
    rows = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
    _reduce_scatter(rows, x.contiguous())
    return rows


def broadcast(x: torch.Tensor, source: int = 0) -> torch.Tensor:
    """Return the source's ``x``."""
    received = x.clone()
    dist.broadcast(received, source)
    return received


def exchanged(x: torch.Tensor, gather_dim: int, scatter_dim: int) -> torch.Tensor:
    """Trade shards along ``gather_dim`` for shards along ``scatter_dim``."""
    parts = torch.stack(x.chunk(dist.get_world_size(), scatter_dim))
    return torch.cat(alltoall(parts).unbind(), gather_dim)


def alltoall(x: torch.Tensor) -> torch.Tensor:
    """Send ``x[r]`` to rank r, and return what all ranks sent here."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def sent(x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Send ``counts[r]`` rows of ``x`` to rank r; return the rows received, and their counts."""
    received = alltoall(counts).tolist()
    return sent_known(x, counts.tolist(), received), received


def sent_known(x: torch.Tensor, counts: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Send ``counts[r]`` rows of ``x`` to rank r, and receive ``received[r]`` from it."""
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), list(received), list(counts))
    return rows


def passed_on(*tensors: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """Send tensors to the next rank of the ring, and return those of the previous one."""
    ranks, at = dist.get_process_group_ranks(group), dist.get_rank(group)
    following, previous = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    sends = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sends]
    ops = [dist.P2POp(dist.isend, x, following, group) for x in sends]
    ops += [dist.P2POp(dist.irecv, x, previous, group) for x in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received
