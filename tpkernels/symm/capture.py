"""Whether a CUDA graph is being captured."""

from __future__ import annotations

import torch


def is_captured(device: torch.device) -> bool:
    """Return whether what this thread queues on ``device`` now goes into a graph."""
    if device.type != "cuda":
        return False
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
