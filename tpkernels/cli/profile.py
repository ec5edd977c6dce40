"""``tpkernels profile``."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from numpy.typing import NDArray
from torch import profiler
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function
from typer import Option

from tpkernels.bench.cases import random_case, run_planned
from tpkernels.bench.specs import Spec, check_spec, make_spec
from tpkernels.cli import options
from tpkernels.common.text import pluralize
from tpkernels.launch.ranks import loopback_store
from tpkernels.launch.session import is_leader, open_session, under_torchrun, world_size
from tpkernels.launch.terminal import (
    UsageError,
    check_workers,
    console,
    make_output_folder,
    milliseconds,
    parse_dtype,
    require_at_least,
    table,
    writable,
    writing,
)
from tpkernels.local import ranges
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.torch_private import PROFILED_COPIES

_CALL = "tpkernels profile: call"  # the range around each call of `tpkernels profile --op`
_FUSED = ("all_gather_matmul_kernel", "matmul_reduce_scatter_kernel", "matmul_all_reduce_kernel")
# ATen ops that move data without computing.
_NO_COMPUTE = ("copy_", "to", "clone", "contiguous", "item", *PROFILED_COPIES)
_WARM_UP = 3
_LEGEND = """\
data moves: copies, messages in flight, and matmuls that read peer memory. overlapped: fraction of
that time during which the rank also computes. wait: waiting without computing."""


def profile(
    script: Annotated[
        list[str] | None, typer.Argument(help="Python script and its arguments.")
    ] = None,
    op: Annotated[
        str | None, Option(help="Op to profile instead of a script; tpkernels info lists the ops.")
    ] = None,
    shape: Annotated[
        str, Option(help="Shape M,N,K of a matmul op, over all ranks.")
    ] = "1024,2048,2048",
    size: options.Sizes = "1M",
    nproc: options.Ranks = None,
    dtype: options.Dtype = "bf16",
    algorithm: Annotated[
        str, Option(help=f"Algorithm of the op: auto, {', '.join(ALGORITHMS)}.")
    ] = "auto",
    calls: Annotated[int, Option(help="Number of profiled calls of the op.")] = 3,
    out: Annotated[
        Path | None,
        Option(help="Folder for trace.json, a Perfetto trace of all ranks."),
    ] = None,
    threads: options.Threads = 1,
    timeout: options.Timeout = 600,
) -> None:
    """Profile an op or a script on all ranks with torch.profiler.

    Shows how each rank spends its time. --out writes one trace of all ranks. Options must precede
    the script; arguments after it are passed to the script. The ranks of a script run on this
    machine with the environment variables of torchrun, and the script must create the process
    group.
    """
    if (op is None) == (not script):
        raise UsageError("pass either --op or a script")
    world = world_size(nproc, 2)
    require_at_least(1, calls=calls, timeout=timeout)
    check_workers(threads=threads)
    if op is not None:
        spec = make_spec(op, shape, size, parse_dtype(dtype))
        check_spec(spec, world, [algorithm])
    elif under_torchrun():
        raise UsageError(
            "`tpkernels profile SCRIPT` launches its own ranks; run it without torchrun"
        )
    elif script and not Path(script[0]).is_file():
        raise UsageError(f"the script '{script[0]}' does not exist")
    trace_file = None
    if out is not None and is_leader():
        make_output_folder(out)
        trace_file = writable(out / "trace.json")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # hide begin and end messages of torch.profiler
    with open_session(world, threads=threads, timeout=timeout) as run:
        if op is not None:
            title = f"{op} {spec}"
            recordings = run(record_op, spec, algorithm, calls)
        else:
            assert script  # checked above: either --op or a script
            title, store = " ".join(script), loopback_store()
            recordings = run(record_script, script[0], script[1:], store.port)
    if not any(recording.times[1:] > (0.0,) * 4 for recording in recordings):
        raise UsageError(
            f"the profile is empty: {title} ran no torch op and moved no data on any rank"
        )
    if not is_leader():
        return
    grid = table("rank", ("ms", "compute", "wait", "data moves"), "overlapped")
    for rank, recording in enumerate(recordings):
        *shown, moved, overlapped = recording.times
        share = f"{overlapped / moved:.0%}" if moved else "no data moved"
        grid.add_row(str(rank), *map(milliseconds, (*shown, moved)), share)
    screen = console()
    screen.print(f"{title}, {pluralize(world, 'rank')}{recordings[0].plan}", markup=False)
    screen.print(grid)
    screen.print(_LEGEND)
    if trace_file is not None:
        events = [event for recording in recordings for event in recording.events]
        with writing(trace_file):
            trace_file.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
        screen.print(f"{trace_file} (ui.perfetto.dev)", markup=False)


# On a rank.


@dataclass(frozen=True)
class Recording:
    """Recording of a rank: its `times`, the events of its Chrome trace and, for an op, a
    description of the plan."""

    times: tuple[float, ...]
    events: list[dict[str, Any]]
    plan: str = ""


def record_op(spec: Spec, algorithm: str, calls: int) -> Recording:
    """Profile calls of an op, with a barrier before each call. Collective."""
    case = random_case(spec)
    _, plan = run_planned(case, algorithm)
    for _ in range(_WARM_UP):
        case.run(algorithm)
    with _profiler() as recorder:
        for _ in range(calls):
            dist.barrier()
            with record_function(_CALL):
                case.run(algorithm)
    return _recording(recorder, dist.get_rank(), f", {plan.algorithm}: {plan.reason}")


def record_script(path: str, arguments: Sequence[str], port: int) -> Recording:
    """Profile a script with the environment variables of torchrun. ``port``: port of a running
    store.

    Raises:
        SystemExit: the script exited with a code other than 0.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()  # the script creates a process group
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
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
    return _recording(recorder, int(rank))


def _profiler() -> profiler.profile:
    gpu = (ProfilerActivity.CUDA,) if torch.cuda.is_available() else ()
    return profiler.profile(activities=(ProfilerActivity.CPU, *gpu))


def _recording(recorder: profiler.profile, rank: int, plan: str = "") -> Recording:
    with tempfile.TemporaryDirectory() as folder:
        recorder.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    for event in events:  # unique process and flow ids per rank
        if event["name"] == "process_name":
            event["args"] = {"name": f"rank {rank}, process or GPU {event['pid']}"}
        event |= {key: f"rank {rank}: {event[key]}" for key in ("pid", "id") if key in event}
    return Recording(times(recorder.events() or []), events, plan)


def times(events: Iterable[FunctionEvent]) -> tuple[float, ...]:
    """Return milliseconds: total, compute, wait without compute, data movement, and data movement
    overlapped with compute.

    The total is the duration of the profiled calls of an op or, for a script, the time between its
    first and last event.
    """
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        for kind in ("all", *kinds(event)):
            spans[kind].append((event.time_range.start, event.time_range.end))
    edges = np.unique(np.array(spans["all"]))

    def during(kind: str) -> NDArray[np.bool_]:
        """Return a mask of the intervals between edges that contain an event of this kind."""
        covered = np.zeros(max(0, len(edges) - 1), bool)
        for begin, end in np.searchsorted(edges, np.array(spans[kind]).reshape(-1, 2)):
            covered[begin:end] = True
        return covered

    # If a rank runs GPU kernels, only these count as compute, because its host ops only queue them.
    compute, waits = during("kernel" if spans["gpu"] else "op"), during(ranges.WAIT)
    moves = (during(ranges.COPY) & ~waits) | during(ranges.TRANSFER)
    within = during(_CALL) if spans[_CALL] else during("all") | True
    masks = (within, compute, waits & ~compute, moves, moves & compute)
    return tuple(float(np.diff(edges)[mask & within].sum()) / 1e3 for mask in masks)


def kinds(event: FunctionEvent) -> tuple[str, ...]:
    """Return the kinds of time of an event."""
    name = event.name
    namespace, _, op = name.partition("::")
    if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
        if name.startswith(("Memcpy", "Memset")):
            return (ranges.TRANSFER,)
        moves = (ranges.TRANSFER,) if name.startswith("nccl") or name in _FUSED else ()
        return ("gpu", *moves, *(() if name.startswith("nccl") else ("kernel",)))
    if name.startswith("cuda") and "Synchronize" in name:
        return (ranges.WAIT,)
    if name == ranges.MATMUL or (namespace == "aten" and op not in _NO_COMPUTE):
        return ("op",)
    return (name,) if name in (_CALL, ranges.WAIT, ranges.COPY, ranges.TRANSFER) else ()
