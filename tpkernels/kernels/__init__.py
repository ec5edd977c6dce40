"""Triton kernels. Only this folder imports Triton, so import kernel modules lazily, at the call
site."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

import torch

OLDEST = (8, 0)  # compute capability
NO_GPU = "needs a GPU that is visible to torch"


def release_of(package: ModuleType) -> tuple[int, ...]:
    """Return the major and minor version of a module."""
    return tuple(map(int, package.__version__.split(".")[:2]))


def interpreter_unsupported() -> str | None:
    """Return why Triton's interpreter does not work with the versions that are installed, or None
    if it does. Imports Triton."""
    import numpy
    import triton

    # NumPy 2.4 no longer converts an array with one element and a dimension to a number.
    if release_of(triton) < (3, 7) and release_of(numpy) >= (2, 4):
        return (
            f"needs an older NumPy: the interpreter of Triton {triton.__version__} does not work "
            f"with NumPy {numpy.__version__}; run pip install 'numpy<2.4', or install Triton 3.7"
        )
    return None


@functools.lru_cache
def unsupported(device: str) -> str | None:
    """Return why the kernels cannot run on tensors of a device type, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton (pip install triton)"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "needs a GPU, because it runs Triton kernels; to test it on a CPU in the Triton "
            "interpreter, set TRITON_INTERPRET=1 before triton is first imported"
        )
    if device == "cpu":
        return interpreter_unsupported()
    if device == "cuda":
        if not torch.cuda.is_available():
            return NO_GPU
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < OLDEST:
            name = torch.cuda.get_device_name()
            return f"needs compute capability 8.0 or higher; {name} has {major}.{minor}"
    return None
