"""Triton kernels. Only this folder imports Triton. Import its modules inside the functions that use
them, because Triton is optional."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

import torch

MIN_CAPABILITY = (8, 0)  # compute capability
NO_GPU = "needs a GPU that is visible to torch"


def major_minor(package: ModuleType) -> tuple[int, ...]:
    """Return the (major, minor) version of a package."""
    return tuple(map(int, package.__version__.split(".")[:2]))


def interpreter_unsupported() -> str | None:
    """Return the reason why the Triton interpreter fails with the installed versions, or None.
    Imports Triton."""
    import numpy
    import triton

    # NumPy 2.4 no longer converts a 1-element array with a dimension to a scalar.
    if major_minor(triton) < (3, 7) and major_minor(numpy) >= (2, 4):
        return (
            f"needs an older NumPy: the interpreter of Triton {triton.__version__} does not work "
            f"with NumPy {numpy.__version__}; run pip install 'numpy<2.4', or install Triton 3.7"
        )
    return None


@functools.lru_cache
def unsupported(device: str) -> str | None:
    """Return the reason why the kernels cannot run on a device type, or None if they can."""
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
        if (major, minor) < MIN_CAPABILITY:
            name = torch.cuda.get_device_name()
            return f"needs compute capability 8.0 or higher; {name} has {major}.{minor}"
    return None
