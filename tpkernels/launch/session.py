"""Sessions: the ranks that a command runs on, and their devices.

The command starts the ranks itself or, under torchrun, this process is one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from tpkernels import groups
from tpkernels.launch.ranks import Ranks
from tpkernels.launch.terminal import UsageError, check_known, check_workers, note_crowd

DEVICES = ("cpu", "cuda")

# For ranks that share a GPU: torch's symmetric memory, and NCCL 2.30.3 or newer, which then cannot
# use NVLS.
SHARED_GPU = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}

T = TypeVar("T")
Run: TypeAlias = Callable[..., list[Any]]


def under_torchrun() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_ranks() -> int | None:
    """Return how many ranks the launcher started; None without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def is_leader() -> bool:
    """Return whether this process prints and writes files: rank 0, or what starts the ranks."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def world_size(nproc: int | None, default: int) -> int:
    """Return the number of ranks: the launcher's, or what the user asked for."""
    if nproc is not None:
        check_workers(nproc=nproc)
    world = launched_ranks()
    if world is None:
        return default if nproc is None else nproc
    if nproc not in (None, world):
        raise UsageError(
            f"--nproc is {nproc} but torchrun set WORLD_SIZE to {world}; leave --nproc out"
        )
    return world


def ranks_share_gpus(world: int) -> bool:
    """Return whether this machine has more ranks than GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) > torch.cuda.device_count()


def on_one_host(world: int) -> bool:
    """Return whether all ranks are on this host; with several launchers they need not be."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) >= world


def backend_of(world: int, device: str) -> str:
    """Return the backend: NCCL for CUDA tensors, but gloo where ranks share a GPU, which NCCL
    refuses before 2.30.3 (`SHARED_GPU`)."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" and not ranks_share_gpus(world) else "gloo"


@contextmanager
def open_session(world: int, *, threads: int, timeout: float, device: str = "cpu") -> Iterator[Run]:
    """Start or join ``world`` ranks of ``threads`` threads each. Yield ``run(function, *args)``,
    which calls a function on every rank and returns the results by rank. A call that exceeds
    ``timeout`` seconds fails. No process is left behind after the block, or after a failure."""
    backend = backend_of(world, device)
    if not under_torchrun():
        if device == "cpu":
            note_crowd(world, threads)
        env = SHARED_GPU if device == "cuda" and backend == "gloo" else None
        with Ranks(world, threads=threads, backend=backend, env=env) as ranks:
            yield partial(ranks.run, timeout=timeout)
        return
    torch.set_num_threads(threads)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield lambda function, *args: all_gather_objects(function(*args))
        dist.barrier()
    finally:
        groups.finalize()
        dist.destroy_process_group()


def all_gather_objects(value: T) -> list[T]:
    """Gather every rank's ``value``, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def resolve_device(name: str | None) -> str:
    """Return ``name`` after checking that the machine has such a device; by default cuda if there
    is a GPU, else cpu."""
    has_gpu = torch.cuda.is_available()
    if name is None:
        return "cuda" if has_gpu else "cpu"
    if check_device(name) == "cuda" and not has_gpu:
        raise UsageError("--device is cuda, but torch sees no GPU")
    return name


def check_device(name: str) -> str:
    """Return ``name`` after checking that it is a known device type, present or not."""
    check_known("device", [name], DEVICES)
    return name


def rank_device(device: str) -> torch.device:
    """Make this rank's device the current one. Ranks share GPUs if there are fewer. A process
    without a process group is rank 0."""
    if device == "cpu":
        return torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    local = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def synchronizer(device: str) -> Callable[[], object] | None:
    """Return what waits for queued work; None for a device without a queue."""
    return torch.cuda.synchronize if device == "cuda" else None
