"""Ranks for a command: spawned here, or, under torchrun, this process as one of them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

import tpkernels
from tpkernels.bench.options import UsageError, check_workers
from tpkernels.launch import Ranks

# For ranks that share a GPU: torch's symmetric memory; NCCL from 2.30.3 on, which then cannot use
# NVLS.
_SHARED_GPU = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


class Session(Protocol):
    """A group of ranks that run functions together. ``leader``: this process does the talking."""

    leader: bool

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(*args)`` on every rank; the results by rank."""


@dataclass
class _Spawned:
    ranks: Ranks
    timeout: float
    leader: bool = True

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        results: list[Any] = self.ranks.run(function, *args, timeout=self.timeout)
        return results


@dataclass
class _Joined:
    leader: bool

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return gather_objects(function(*args))


def under_torchrun() -> bool:
    """Whether a launcher has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_ranks() -> int | None:
    """How many a launcher has started; None where there is none."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def is_leader() -> bool:
    """Whether this process does the talking: rank 0, or the one that starts the ranks."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def world_size(nproc: int | None, default: int) -> int:
    """The number of ranks: the launcher's, or what was asked for."""
    if nproc is not None:
        check_workers(nproc=nproc)
    if not under_torchrun():
        return default if nproc is None else nproc
    world = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world):
        raise UsageError(
            f"--nproc is {nproc} but WORLD_SIZE from torchrun is {world}; leave it out"
        )
    return world


def ranks_share_gpus(world: int) -> bool:
    """Whether there are more ranks on this machine than GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) > torch.cuda.device_count()


def _backend(world: int, device: str) -> str:
    """NCCL takes no two ranks on a GPU."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" and not ranks_share_gpus(world) else "gloo"


@contextmanager
def open_session(
    world: int, *, threads: int, timeout: float, device: str = "cpu"
) -> Iterator[Session]:
    """``world`` ranks of ``threads`` threads each. One `Session.run` may take ``timeout`` seconds;
    when it takes longer, or the block is left, no process stays behind."""
    backend = _backend(world, device)
    if not under_torchrun():
        env = _SHARED_GPU if device == "cuda" and backend == "gloo" else None
        with Ranks(world, threads=threads, backend=backend, env=env) as ranks:
            yield _Spawned(ranks, timeout)
        return
    torch.set_num_threads(threads)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield _Joined(leader=dist.get_rank() == 0)
        dist.barrier()
    finally:
        tpkernels.finalize()
        dist.destroy_process_group()


def gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, by rank. (torch's own function for this needs numpy.)"""
    data = pickle.dumps(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(int(length) for length in lengths)
    mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine)
    return [
        pickle.loads(bytes(got[: int(length)].tolist()))
        for got, length in zip(everyone, lengths, strict=True)
    ]


def tensors_of_all(mine: torch.Tensor) -> list[torch.Tensor]:
    """``mine`` of every rank, by rank; shapes may differ."""
    result = []
    for rank, shape in enumerate(gather_objects(tuple(mine.shape))):
        own = rank == dist.get_rank()
        tensor = mine.contiguous() if own else mine.new_empty(shape)
        if tensor.numel():
            dist.broadcast(tensor, src=rank)
        result.append(tensor)
    return result
