"""`tpkernels profile`: an op or a script under torch's profiler on every rank, in one trace."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import profiler
from torch.profiler import ProfilerActivity, record_function

from tpkernels.bench import plots
from tpkernels.bench.cases import planned, random_case, run_tpkernels
from tpkernels.bench.specs import Spec
from tpkernels.bench.trace import CALL, RankTime, merge, times
from tpkernels.terminal import make_output_folder, writable, writing

_WARM_UP = 3


@dataclass(frozen=True)
class Recording:
    """One rank's compressed trace and its host; for an op also the plan in words."""

    trace: bytes
    host: str
    plan: str = ""


@dataclass(frozen=True)
class Profile:
    """The recordings of all ranks, merged.

    Attributes:
        trace: a Chrome trace on one clock.
        spent: what each rank spent its time on.
        hosts: distinct host names; clocks of different hosts are not aligned.
        plan: of an op, in words.
    """

    trace: dict[str, Any]
    spent: list[RankTime]
    hosts: list[str]
    plan: str

    @classmethod
    def of(cls, recordings: Sequence[Recording], what: str) -> Profile:
        """``what``: a name for the op or script, recorded in the trace."""
        trace = merge([json.loads(gzip.decompress(each.trace)) for each in recordings])
        hosts = sorted({each.host for each in recordings})
        trace["otherData"] = {"what": what, "ranks": len(recordings), "hosts": hosts}
        return cls(trace, times(trace, len(recordings)), hosts, recordings[0].plan)

    @property
    def moved(self) -> float:
        """Milliseconds during which data moved, summed over the ranks."""
        return sum(each.moved for each in self.spent)

    @property
    def overlapped(self) -> float:
        """The fraction of `moved` during which the rank also computed."""
        return sum(each.overlapped for each in self.spent) / self.moved if self.moved else 0.0


@dataclass(frozen=True)
class Files:
    """Where a profile is written."""

    trace: Path
    timeline: Path

    @classmethod
    def within(cls, folder: Path) -> Files:
        """The files in a folder, which is created. ``UsageError`` if they cannot be written."""
        make_output_folder(folder)
        return cls(writable(folder / "trace.json"), writable(folder / "timeline.png"))

    def write(self, profile: Profile, title: str) -> None:
        """Writes the trace and, with matplotlib, the timeline."""
        with writing(self.trace):
            self.trace.write_text(json.dumps(profile.trace))
        if plots.unsupported() is None:
            with writing(self.timeline):
                plots.timeline(profile.trace, self.timeline, title)


def record_op(spec: Spec, algorithm: str, calls: int) -> Recording:
    """Profiles calls of an op, with a barrier before each. Collective."""
    case = random_case(spec)
    _, plan = planned(case, algorithm)
    for _ in range(_WARM_UP):
        run_tpkernels(case, algorithm)
    with _profiler() as recorder:
        for i in range(calls):
            dist.barrier()
            with record_function(f"{CALL} {i}"):
                run_tpkernels(case, algorithm)
    return _recording(recorder, f"{plan.algorithm}: {plan.reason}")


def record_script(path: str, arguments: Sequence[str], port: int) -> Recording:
    """Profiles a script in an environment like torchrun's. ``port`` belongs to a running store.

    Raises:
        SystemExit: the script exited with a code other than 0.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # the script creates its own
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is already running
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    with _profiler() as recorder:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    sys.stdout.flush()
    return _recording(recorder)


def _profiler() -> profiler.profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profiler.profile(activities=activities)


def _recording(recorder: profiler.profile, plan: str = "") -> Recording:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorder.export_chrome_trace(str(file))
        return Recording(gzip.compress(file.read_bytes(), 1), socket.gethostname(), plan)
