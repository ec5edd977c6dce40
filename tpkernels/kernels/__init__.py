"""Triton kernels. Only this folder imports Triton, so import kernel modules lazily, at the call
site."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

OLDEST = (8, 0)  # compute capability
NO_GPU = "needs a GPU that torch sees"


@functools.lru_cache
def unsupported(device: str) -> str | None:
    """Return why the kernels cannot run on tensors of a device type, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton (pip install triton)"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "runs Triton kernels, on a CPU under their interpreter only: for tests, set "
            "TRITON_INTERPRET=1 before the first import of triton"
        )
    if device == "cuda":
        if not torch.cuda.is_available():
            return NO_GPU
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < OLDEST:
            name = torch.cuda.get_device_name()
            return f"needs compute capability 8.0; {name} has {major}.{minor}"
    return None
