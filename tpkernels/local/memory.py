"""Memory for results and large temporaries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import _C
from tpkernels.defaults import result_pool_bytes

_C.calls.limit_result_pool(result_pool_bytes())


empty_on_host = _C.calls.empty  # (shape, dtype)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Call ``torch.empty``, but take a large tensor on the CPU from the pool (csrc/host/pool.h)."""
    if device.type == "cpu":
        return _C.calls.empty(tuple(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)
