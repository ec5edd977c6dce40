"""A driver of the ranks that a command has: its own, or torchrun's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.launch.driver import Driver
from tpkernels.launch.executor import TIMEOUT, Executor
from tpkernels.launch.group_executor import GroupExecutor, serve_group


@contextlib.contextmanager
def driving(
    world: int,
    factory: str | Callable[..., Any],
    *args: Any,
    torchrun: bool,
    backend: str = "gloo",
    threads: int = 1,
    timeout: float = TIMEOUT,
    **kwargs: Any,
) -> Iterator[Driver | None]:
    """A driver of ``world`` ranks, each with an object. None on the ranks of torchrun that are
    driven: they have done their part when the block begins. No process is left behind.

    Args:
        factory, args, kwargs, backend, threads, timeout: as for `Executor`.
        torchrun: this process is a rank of torchrun.

    Raises:
        RankError, TypeError, ValueError: as `Executor` and `GroupExecutor` do.
        ConnectionError: rank 0 of torchrun is gone.
    """
    if not torchrun:
        executor = Executor(
            world, factory, *args, backend=backend, threads=threads, timeout=timeout, **kwargs
        )
        with executor as driver:
            yield driver
        return
    torch.set_num_threads(threads)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        if dist.get_rank() == 0:
            with GroupExecutor(factory, *args, timeout=timeout, **kwargs) as group_driver:
                yield group_driver
        else:
            serve_group(timeout=timeout)
            yield None
    finally:
        dist.destroy_process_group()
