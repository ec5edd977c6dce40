"""What `tpkernels profile` runs on each rank: an op or a user's script under torch's profiler."""

from __future__ import annotations

import gzip
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from tpkernels.bench.cases import Spec, planned, random_case, run_tpkernels
from tpkernels.bench.trace import CALL

_WARM_UP = 3


@dataclass(frozen=True)
class Recording:
    """A rank's trace as torch writes it, compressed; on which host; for an op, what ran and why."""

    trace: bytes
    host: str
    plan: str = ""


def record_op(spec: Spec, algorithm: str, calls: int) -> Recording:
    """Profiles some calls of an op, each behind a barrier. Collective."""
    case = random_case(spec)
    _, plan = planned(case, algorithm)
    for _ in range(_WARM_UP):
        run_tpkernels(case, algorithm)
    with _profiler() as profiler:
        for i in range(calls):
            dist.barrier()
            with record_function(f"{CALL} {i}"):
                run_tpkernels(case, algorithm)
    return _recording(profiler, f"{plan.algorithm}: {plan.reason}")


def record_script(path: str, arguments: Sequence[str], port: int) -> Recording:
    """Profiles a script that finds itself started as by torchrun. ``port`` is that of a store.

    Raises:
        SystemExit: the script ended with a code other than 0.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # the script makes its own
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    with _profiler() as profiler:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    sys.stdout.flush()
    return _recording(profiler)


def _profiler() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _recording(profiler: profile, plan: str = "") -> Recording:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return Recording(gzip.compress(file.read_bytes(), 1), socket.gethostname(), plan)
