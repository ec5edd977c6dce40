"""The device that a command is for, as each rank has it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from tpkernels.backends import unsupported
from tpkernels.bench.options import UsageError
from tpkernels.kernels import NO_GPU
from tpkernels.planning.algorithms import ALGORITHMS

DEVICES = ("cpu", "cuda")


def device_named(name: str | None) -> str:
    """``name``, if this machine has such a device; by default cuda where there is a GPU."""
    found = torch.cuda.is_available()
    if name is None:
        return "cuda" if found else "cpu"
    if device_known(name) == "cuda" and not found:
        raise UsageError("--device is cuda, but torch sees no GPU")
    return name


def device_known(name: str) -> str:
    """``name``, if there are such devices, here or not."""
    if name not in DEVICES:
        raise UsageError(f"unknown device '{name}'; there are {', '.join(DEVICES)}")
    return name


def unsupported_kernels(device: str) -> dict[str, str]:
    """The algorithms whose kernels cannot run here, and why."""
    if device == "cuda" and not torch.cuda.is_available():
        return {name: NO_GPU for name, each in ALGORITHMS.items() if each.kernels.get(device)}
    reasons = {name: unsupported(name, device, torch.device(device)) for name in ALGORITHMS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def own_device(device: str) -> torch.device:
    """This rank's, which is made current; ranks share GPUs where there are fewer."""
    if device == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def synchronizer(device: str) -> Callable[[], object] | None:
    """Waits for what has only been queued; None where nothing is."""
    return torch.cuda.synchronize if device == "cuda" else None
