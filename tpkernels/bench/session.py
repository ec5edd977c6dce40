"""The ranks that a command runs on, and their devices.

The command starts the ranks itself or, under torchrun, this process is one of them.
"""

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
from tpkernels.backends import unsupported
from tpkernels.bench.options import UsageError, check_known, check_workers
from tpkernels.kernels import NO_GPU
from tpkernels.launch import Ranks
from tpkernels.planning.algorithms import ALGORITHMS

DEVICES = ("cpu", "cuda")

# For ranks that share a GPU: torch's symmetric memory, and NCCL 2.30.3 or newer, which then cannot
# use NVLS.
_SHARED_GPU = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


class Session(Protocol):
    """Ranks that run functions together. ``leader``: this process prints and writes files."""

    leader: bool

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(*args)`` on every rank; returns the results by rank."""


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
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_ranks() -> int | None:
    """How many ranks the launcher started; None without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def is_leader() -> bool:
    """Whether this process prints and writes files: rank 0, or the one that starts the ranks."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def world_size(nproc: int | None, default: int) -> int:
    """The number of ranks: the launcher's, or what the user asked for."""
    if nproc is not None:
        check_workers(nproc=nproc)
    if not under_torchrun():
        return default if nproc is None else nproc
    world = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world):
        raise UsageError(
            f"--nproc is {nproc} but torchrun set WORLD_SIZE to {world}; leave --nproc out"
        )
    return world


def ranks_share_gpus(world: int) -> bool:
    """Whether this machine has more ranks than GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) > torch.cuda.device_count()


def on_one_host(world: int) -> bool:
    """Whether all ranks are on this host; with several launchers they need not be."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) >= world


def backend_of(world: int, device: str) -> str:
    """gloo if ranks share a GPU, which NCCL does not support."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" and not ranks_share_gpus(world) else "gloo"


@contextmanager
def open_session(
    world: int, *, threads: int, timeout: float, device: str = "cpu"
) -> Iterator[Session]:
    """``world`` ranks of ``threads`` threads each. A `Session.run` that exceeds ``timeout`` seconds
    fails. No process is left behind after the block, or after a failure."""
    backend = backend_of(world, device)
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
    """Every rank's ``value``, by rank. (torch's all_gather_object needs numpy.)"""
    data = pickle.dumps(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(int(length) for length in lengths)
    mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine)
    return [
        pickle.loads(bytes(theirs[: int(length)].tolist()))
        for theirs, length in zip(everyone, lengths, strict=True)
    ]


def tensors_of_all(mine: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's ``mine``, by rank; shapes may differ."""
    result = []
    for rank, shape in enumerate(gather_objects(tuple(mine.shape))):
        own = rank == dist.get_rank()
        tensor = mine.contiguous() if own else mine.new_empty(shape)
        if tensor.numel():
            dist.broadcast(tensor, src=rank)
        result.append(tensor)
    return result


def device_named(name: str | None) -> str:
    """``name`` if this machine has that device; the default is cuda if there is a GPU."""
    has_gpu = torch.cuda.is_available()
    if name is None:
        return "cuda" if has_gpu else "cpu"
    if device_known(name) == "cuda" and not has_gpu:
        raise UsageError("--device is cuda, but torch sees no GPU")
    return name


def device_known(name: str) -> str:
    """``name`` if it is a known kind of device, present or not."""
    check_known("device", [name], DEVICES)
    return name


def unsupported_kernels(device: str) -> dict[str, str]:
    """The algorithms whose kernels cannot run here, with the reasons."""
    if device == "cuda" and not torch.cuda.is_available():
        return {name: NO_GPU for name, each in ALGORITHMS.items() if each.kernels.get(device)}
    reasons = {name: unsupported(name, device, torch.device(device)) for name in ALGORITHMS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def own_device(device: str) -> torch.device:
    """This rank's device, which becomes the current one. Ranks share GPUs if there are fewer."""
    if device == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def synchronizer(device: str) -> Callable[[], object] | None:
    """Waits for queued work; None for a device without a queue."""
    return torch.cuda.synchronize if device == "cuda" else None
