"""What torch does at full speed on this processor."""

from __future__ import annotations

import functools

import torch


@functools.cache
def native(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies ``dtype`` at full speed on this processor."""
    if dtype in (torch.float32, torch.float64):
        return True
    probe = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }.get(dtype)
    if probe is None:
        return False
    try:
        return bool(getattr(torch.ops.mkldnn, probe)())
    except (AttributeError, RuntimeError):  # torch built without oneDNN
        return False
