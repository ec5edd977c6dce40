"""Memory for results and large temporaries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import _C


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Call ``torch.empty``, with huge pages for a large tensor on the CPU."""
    if device.type == "cpu":
        return _C.calls.empty(tuple(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)
