"""Regions of the Triton kernels in torch's symmetric memory: GPUs that can address each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from tpkernels.symm.device import DeviceWorkspace, region_bytes


@dataclass(frozen=True)
class _Region:
    address: int
    memory: Any  # what keeps it mapped


def make_workspace(
    pg: dist.ProcessGroup, words: int, buffer_bytes: int, timeout: float, device: torch.device
) -> DeviceWorkspace:
    """The workspace of a group whose ranks' GPUs can address each other. Collective; waits for the
    device.

    Raises:
        NotImplementedError: they cannot: no peer access, no virtual memory management, ranks that
            share a GPU without TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
    """
    nbytes = region_bytes(pg.size(), words, buffer_bytes)
    try:
        memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(memory, pg.group_name)
    except RuntimeError as error:
        raise NotImplementedError(
            f"the GPUs of group '{pg.group_name}' share no symmetric memory: {error}"
        ) from error
    dist.barrier(pg)  # no peer writes before all is zero
    regions = [_Region(address, (memory, handle)) for address in handle.buffer_ptrs]
    return DeviceWorkspace(
        regions, pg.rank(), words, buffer_bytes, timeout, device, handle.multicast_ptr
    )
