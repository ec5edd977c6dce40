"""How long torch lets the collectives of a process group take on GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import constants

from tpkernels import defaults

_NCCL = timedelta(minutes=10)  # torch's default, where this torch was built without NCCL


def of_process_group(pg: dist.ProcessGroup) -> float:
    """Seconds: the timeout of the group's backend for CUDA tensors, or torch's default for NCCL
    where there is none."""
    try:
        limit = pg._get_backend(torch.device("cuda")).options._timeout
    except (RuntimeError, AttributeError):  # no such backend, or one without options
        limit = constants.default_pg_nccl_timeout or _NCCL
    return min(limit.total_seconds(), defaults.LONGEST_TIMEOUT)
