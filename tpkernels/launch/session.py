"""Sessions: the ranks of a command, and their devices.

The command starts the ranks. Under torchrun, this process is one of the ranks.
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
from tpkernels.launch.terminal import UsageError, check_known, check_workers, warn_oversubscription

DEVICES = ("cpu", "cuda")

# Environment in which ranks can share a GPU. The first variable is for torch symmetric memory, the
# second for NCCL 2.30.3 or newer. NCCL then cannot use NVLS.
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
    """Return the number of ranks that the launcher started, or None without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def is_leader() -> bool:
    """Return whether this process prints and writes files: rank 0, or the parent of the ranks."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def world_size(nproc: int | None, default: int) -> int:
    """Return the number of ranks: from the launcher, or the requested number."""
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
    """Return whether all ranks are on this host. Several launchers may span hosts."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) >= world


def choose_backend(world: int, device: str) -> str:
    """Return the backend: NCCL for CUDA tensors, or gloo on CPUs and if ranks share a GPU. NCCL
    before 2.30.3 does not support shared GPUs (`SHARED_GPU`)."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" and not ranks_share_gpus(world) else "gloo"


@contextmanager
def open_session(world: int, *, threads: int, timeout: float, device: str = "cpu") -> Iterator[Run]:
    """Start or join ``world`` ranks with ``threads`` threads each.

    Yields ``run(function, *args)``. It calls a function on every rank and returns the results by
    rank. A call fails after ``timeout`` seconds. Started processes end with the block, also after a
    failure.
    """
    backend = choose_backend(world, device)
    if not under_torchrun():
        if device == "cpu":
            warn_oversubscription(world, threads)
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
    """Gather ``value`` from all ranks, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def resolve_device(name: str | None) -> str:
    """Return ``name`` after checking that such a device is present. The default is cuda if torch
    sees a GPU, else cpu."""
    has_gpu = torch.cuda.is_available()
    if name is None:
        return "cuda" if has_gpu else "cpu"
    if check_device(name) == "cuda" and not has_gpu:
        raise UsageError("--device is cuda, but torch sees no GPU")
    return name


def check_device(name: str) -> str:
    """Return ``name`` after checking that it is a supported device type, present or not."""
    check_known("device", [name], DEVICES)
    return name


def rank_device(device: str) -> torch.device:
    """Set the current device of this rank and return it. Ranks share GPUs if the machine has fewer
    GPUs than ranks. A process without a process group is rank 0."""
    if device == "cpu":
        return torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    local = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def synchronizer(device: str) -> Callable[[], object] | None:
    """Return a function that waits for queued work, or None for CPUs."""
    return torch.cuda.synchronize if device == "cuda" else None
