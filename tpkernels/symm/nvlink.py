"""Whether stores of 128 bytes arrive whole at the GPUs of a group: where NVLink connects all pairs.

PTX does not promise it (csrc/cuda/ll128.cuh). NCCL relies on it: its protocol LL128 is on by
default over NVLink from compute capability 7.0 on, and "other cases are not tested and may cause
silent data corruption" (NVIDIA/nccl, src/graph/tuning.cc). So any doubt is a no. A value of
NCCL_PROTO that turns LL128 off in NCCL turns it off here, too. No GPU has confirmed the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tpkernels import nvml
from tpkernels.symm.exchange import Participant


def why_lines_may_tear(participant: Participant, device: torch.device) -> str | None:
    """Return why stores of 128 bytes may not arrive whole at all ranks' GPUs, this rank's being
    ``device``; None: they do. The same on all ranks. Collective."""
    reason = _why_not(participant.exchange("GPUs", _uuid(device)), participant.rank)
    reasons = participant.exchange("links between GPUs", reason)
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), None)


def _uuid(device: torch.device) -> str | None:
    """Return the name of a GPU, whatever other processes see of it."""
    if device.type != "cuda":
        return None
    return nvml.uuid_of(device)


def _why_not(gpus: Sequence[str | None], rank: int) -> str | None:
    this_gpu = gpus[rank]
    if this_gpu is None:
        return "no GPU"
    if gpus.count(this_gpu) > 1:
        return f"shares {this_gpu} with another rank"
    if not _allows_ll128(text := os.environ.get("NCCL_PROTO")):
        return f"NCCL_PROTO is '{text}'"
    peers = [gpu for gpu in gpus if gpu is not None and gpu != this_gpu]
    try:
        unlinked = nvml.unlinked(this_gpu, peers)
    except nvml.ERRORS as error:
        return f"NVML says nothing about links: {error}"
    return f"no NVLink from {this_gpu} to {', '.join(unlinked)}" if unlinked else None


def _allows_ll128(protocols: str | None) -> bool:
    """Return whether a value of NCCL_PROTO leaves LL128 on: a list of protocols, or of those that
    are off after ``^``. What else NCCL may understand counts as no."""
    if protocols is None:
        return True
    names = {name.strip().lower() for name in protocols.removeprefix("^").split(",")}
    known = names <= {"ll", "ll128", "simple"}
    return known and ("ll128" in names) != protocols.startswith("^")
