"""Memory for results and large temporaries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import _C
from tpkernels.defaults import result_pool_bytes

_C.calls.limit_result_pool(result_pool_bytes())


def empty(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    results: _C.host.SharedResults | None = None,
) -> torch.Tensor:
    """``torch.empty``; a large tensor on the CPU is in memory from the pool (csrc/host/pool.h), and
    in that of ``results`` while there is room."""
    if device.type == "cpu":
        return _C.calls.empty(tuple(shape), dtype, results)
    return torch.empty(shape, dtype=dtype, device=device)
