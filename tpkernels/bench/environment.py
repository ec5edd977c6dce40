"""The machine and the software that a result belongs to."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import tpkernels
from tpkernels import _C
from tpkernels.planning.machine import processor
from tpkernels.symm.limits import available_bytes


def versions() -> dict[str, str]:
    """tpkernels, torch, Python and the kernel."""
    return {
        "tpkernels": tpkernels.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def vector_units() -> dict[str, Any]:
    """The instruction sets of the extension's loops."""
    return {"in_use": _C.host.vector_unit(), "available": _C.host.vector_units()}


def devices() -> dict[str, Any]:
    """Processor, memory in bytes, and the GPUs that torch sees."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_bytes(),
        "gpus": names,
    }
