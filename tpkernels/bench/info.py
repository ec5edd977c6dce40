"""The machine and the software here: for `tpkernels info`, and recorded in every result file."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import tpkernels
from tpkernels import _C, cuda, dtypes, kernels, nccl
from tpkernels.backends import TABLES
from tpkernels.bench.specs import Spec, unsupported_kernels
from tpkernels.local.native import native
from tpkernels.op_spec import OPS
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Means, unsupported_algorithms
from tpkernels.planning.machine import processor
from tpkernels.symm import colocation
from tpkernels.symm.limits import available_bytes
from tpkernels.terminal import DTYPES


def facts() -> dict[str, Any]:
    """Everything that `tpkernels info` shows."""
    return {
        "versions": versions(),
        "extension": {"file": _C.__file__, "holds": _public_names()},
        "vector_unit": vector_units(),
        "local_matmul": {
            dtypes.name(dtype): "native" if native(dtype) else "converted"
            for dtype in DTYPES.values()
        },
        "result_pool": _C.calls.result_pool(),
        "devices": devices(),
        "shared_memory": colocation.unsupported(),
        "cuda": {"kernels": cuda.image_status(), "driver": cuda.driver_status()},
        "nccl": nccl.facts(),
        "algorithms": {
            device: {op: unsupported_here(device, op, shared_memory=True) for op in OPS}
            for device in TABLES
        },
        "algorithms_across_hosts": {
            device: {op: unsupported_here(device, op, shared_memory=False) for op in OPS}
            for device in TABLES
        },
    }


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


def unsupported_here(device: str, op: str, *, shared_memory: bool) -> dict[str, str | None]:
    """For each algorithm, why it cannot run ``op`` on this machine; None: it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return dict.fromkeys(ALGORITHMS, kernels.NO_GPU)
    shape = (1024, 1024, 1024) if OPS[op].has_matmul else (1024,)
    problem = Spec(op, shape, torch.float32).problem(2, device)
    means = Means(shared_memory=shared_memory, unsupported=unsupported_kernels(device))
    reasons = unsupported_algorithms(problem, means)
    for name in ALGORITHMS:
        if reasons[name] is None and (op, name) not in TABLES[device]:
            reasons[name] = f"is not built for {device}"
    return reasons


def _public_names() -> list[str]:
    """Public names of the extension, by submodule."""
    parts = {"calls": _C.calls, "host": _C.host, "nccl": _C.nccl, "cuda": _C.cuda}
    return [
        f"{part}.{name}"
        for part, module in parts.items()
        for name in dir(module)
        if not name.startswith("_")
    ]
