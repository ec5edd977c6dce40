"""Device memory that NCCL allocates, as tensors, and windows on it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpkernels import _C


@dataclass(frozen=True)
class Window:
    """Memory that all ranks have registered with `Communicator.register_window`."""

    handle: int  #: NCCL's ``ncclWindow_t``
    tensor: torch.Tensor  #: the memory of this rank


class _Memory:
    """An array for torch, freed with the last tensor that uses it."""

    def __init__(self, library: _C.nccl.Library, nbytes: int) -> None:
        address = library.mem_alloc(nbytes)
        weakref.finalize(self, library.mem_free, address)
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "stream": None,
        }


def empty(
    library: _C.nccl.Library, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised tensor on a CUDA device, in memory that can be registered as a window.

    Raises:
        ValueError: ``shape`` has no elements.
        NotImplementedError: NCCL is older than 2.19.
        TpkernelsError: NCCL has no memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if any(size < 1 for size in shape):
        raise ValueError(f"shape {list(shape)} has no elements")
    with torch.cuda.device(device):
        memory = _Memory(library, nbytes)
        return torch.as_tensor(memory, device=device).view(dtype).view(*shape)
