"""``tpkernels profile``."""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import socket
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
from torch.profiler import ProfilerActivity, record_function
from typer import Option

from tpkernels.bench.cases import planned, random_case, run_tpkernels
from tpkernels.bench.specs import (
    Spec,
    algorithms_named,
    check_algorithm,
    check_split,
    spec_of,
)
from tpkernels.cli import options
from tpkernels.launch.ranks import loopback_store
from tpkernels.launch.session import is_leader, open_session, under_torchrun, world_size
from tpkernels.launch.terminal import (
    UsageError,
    at_least,
    check_known,
    check_workers,
    console,
    dtype_named,
    make_output_folder,
    milliseconds,
    table,
    writable,
    writing,
)
from tpkernels.local import ranges
from tpkernels.op_spec import OPS
from tpkernels.text import counted

Event = dict[str, Any]
Spans = dict[str, list[tuple[float, float]]]  # [begin, end) in microseconds, by kind of time

CALL = "tpkernels profile: call"  # the range around each call of `tpkernels profile --op`
# COPY: the rank itself copies, excluding waits within the copy. MOVE: data moves without the rank.
# QUEUED: a host's ops, which count as compute unless the rank runs kernels on a GPU.
COMPUTE, QUEUED, COPY, MOVE, WAIT = "compute", "queued", "copy", "transfer", "wait"
_KERNEL = "kernel"  # of a GPU, whatever it does
_FUSED = ("all_gather_matmul_kernel", "matmul_reduce_scatter_kernel", "matmul_all_reduce_kernel")
# ATen ops that create, move or view tensors and compute nothing.
_NO_COMPUTE = frozenset(
    re.findall(
        r"\w+",
        "empty empty_strided empty_like resize_ copy_ to _to_copy clone contiguous item "
        "_local_scalar_dense is_nonzero view _unsafe_view as_strided slice select narrow split "
        "chunk unbind t transpose permute reshape flatten expand squeeze unsqueeze detach alias",
    )
)
PIDS = 100  # process ids reserved for each rank in the merged trace
_WARM_UP = 3
_LEGEND = """\
Each moment of a rank counts once: as compute, else copy, else wait. overlapped: the fraction of the
time in which data moves (copies, messages in flight, matmuls that read a peer's memory) during
which the rank also computes."""


def profile(
    script: Annotated[
        list[str] | None, typer.Argument(help="A Python script and its arguments, as for torchrun.")
    ] = None,
    op: Annotated[str | None, Option(help="An op, instead of a script.")] = None,
    shape: Annotated[str, Option(help="M,N,K of a matmul op, over all ranks.")] = "1024,2048,2048",
    size: options.Sizes = "1M",
    nproc: options.Ranks = None,
    dtype: options.Dtype = "bf16",
    algorithm: Annotated[str, Option(help="auto or an algorithm.")] = "auto",
    calls: Annotated[int, Option(help="Number of calls of the op.")] = 3,
    out: Annotated[Path, Option(help="Folder for trace.json.")] = Path("tpkernels-profile"),
    threads: options.Threads = 1,
    timeout: options.Timeout = 600,
) -> None:
    """Profile an op or a script on all ranks: one trace for Perfetto or chrome://tracing, and
    a table of how each rank spends its time.

    Options precede the script; everything after it belongs to the script. Its ranks run on this
    machine, in an environment like torchrun's, and create their process group themselves.
    """
    if (op is None) == (not script):
        raise UsageError("give either --op or a script")
    world = world_size(nproc, 2)
    at_least(1, calls=calls, timeout=timeout)
    check_workers(threads=threads)
    if op is not None:
        check_known("op", [op], OPS)
        spec = spec_of(op, shape, size, dtype_named(dtype))
        check_split(spec, world)
        algorithms_named([algorithm])
        check_algorithm(spec, world, algorithm)
    elif under_torchrun():
        raise UsageError("a script's ranks are started here: run this command without torchrun")
    elif script and not Path(script[0]).is_file():
        raise UsageError(f"no script '{script[0]}'")
    file: Path | None = None
    if is_leader():
        make_output_folder(out)
        file = writable(out / "trace.json")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler reports begin and end itself
    with open_session(world, threads=threads, timeout=timeout) as run:
        if op is not None:
            what = f"{op} {spec}"
            recordings = run(record_op, spec, algorithm, calls)
        else:
            assert script  # one of the two is given
            what = " ".join(script)
            store = loopback_store()
            recordings = run(record_script, script[0], script[1:], store.port)
        if file is not None:
            _report(recordings, what, file)


def _report(recordings: list[Recording], what: str, trace_file: Path) -> None:
    """Write the trace and print the summary."""
    trace = merge([json.loads(gzip.decompress(recording.trace)) for recording in recordings])
    hosts = sorted({recording.host for recording in recordings})  # whose clocks are not aligned
    trace["otherData"] = {"what": what, "ranks": len(recordings), "hosts": hosts}
    spent = times(trace, len(recordings))
    if not any(time.compute or time.copy or time.wait or time.moved for time in spent):
        raise UsageError(f"{what} computed and moved nothing with torch on any rank")
    moved = sum(time.moved for time in spent)
    overlapped = sum(time.overlapped for time in spent) / moved if moved else 0.0
    with writing(trace_file):
        trace_file.write_text(json.dumps(trace))
    out = console()
    plan = f", {recordings[0].plan}" if recordings[0].plan else ""
    out.print(f"{what}, {counted(len(spent), 'rank')}{plan}", markup=False)
    columns = ("ms", "compute", "copy", "wait", "other", "data\nmoves, ms")
    grid = table("rank", columns, "overlapped")
    for rank, time in enumerate(spent):
        parts = time.compute, time.copy, time.wait
        total = time.total or 1.0  # nothing was recorded
        shares = [f"{part / total:.1%}" for part in (*parts, time.total - sum(parts))]
        share = f"{time.overlapped / time.moved:.0%}" if time.moved else "nothing moves"
        grid.add_row(str(rank), milliseconds(time.total), *shares, milliseconds(time.moved), share)
    out.print(grid)
    out.print(_LEGEND)
    out.print(f"Overlapped: {overlapped:.0%} of {milliseconds(moved)} ms in which data moves.")
    if len(hosts) > 1:
        out.print(f"Ranks are on {len(hosts)} hosts, whose clocks are not aligned.")
    out.print(f"{trace_file} (ui.perfetto.dev)", markup=False)


# On a rank.


@dataclass(frozen=True)
class Recording:
    """One rank's compressed trace and its host; for an op also the plan in words."""

    trace: bytes
    host: str
    plan: str = ""


def record_op(spec: Spec, algorithm: str, calls: int) -> Recording:
    """Profile calls of an op, with a barrier before each. Collective."""
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
    """Profile a script in an environment like torchrun's. ``port`` belongs to a running store.

    Raises:
        SystemExit: the script exited with a code other than 0.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()  # the script creates its own
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


# Traces.


def merge(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge traces, given by rank, into one Chrome trace that starts at its first event. Each rank
    has its own processes, such as "rank 0" and "rank 0, GPU 0"; flows stay within a rank."""
    base = min(trace["baseTimeNanoseconds"] for trace in traces)
    events: list[Event] = []
    for rank, trace in enumerate(traces):
        shift = (trace["baseTimeNanoseconds"] - base) / 1e3
        events += _of_rank(rank, trace["traceEvents"], shift)
    begin = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        event["ts"] = max(0.0, event["ts"] - begin)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _of_rank(rank: int, events: Iterable[Event], shift: float) -> Iterable[Event]:
    pids: dict[int, int] = {}
    labels = {e["pid"]: e["args"]["labels"] for e in events if e["name"] == "process_labels"}
    for event in events:
        if not isinstance(event.get("pid"), int):  # bookkeeping of the profiler
            continue
        old = event["pid"]
        new = dict(event, ts=event["ts"] + shift)
        new["pid"] = pids.setdefault(old, rank * PIDS + len(pids))
        if "id" in event:
            new["id"] = f"{rank}:{event['id']}"
        if event["name"] == "process_name":
            label = labels.get(old, "CPU")
            new["args"] = {"name": f"rank {rank}" if label == "CPU" else f"rank {rank}, {label}"}
        elif event["name"] == "process_sort_index":
            new["args"] = {"sort_index": new["pid"]}
        yield new


def kinds(event: Event) -> tuple[str, ...]:
    """Return the kinds of time an event counts as; possibly none or several."""
    name, category = event["name"], event.get("cat", "")
    if name == ranges.WAIT or (category == "cuda_runtime" and "Synchronize" in name):
        return (WAIT,)
    if name == ranges.COPY:
        return (COPY,)
    if name == ranges.TRANSFER or category in ("gpu_memcpy", "gpu_memset"):
        return (MOVE,)
    if category == "kernel":
        if name.startswith("nccl"):
            return (_KERNEL, MOVE)
        return (_KERNEL, COMPUTE, MOVE) if name in _FUSED else (_KERNEL, COMPUTE)
    namespace, _, op = name.partition("::")
    computes = name == ranges.MATMUL or (namespace == "aten" and op not in _NO_COMPUTE)
    return (QUEUED,) if computes else ()


@dataclass(frozen=True)
class RankTime:
    """What one rank spent its time on, in milliseconds.

    Attributes:
        total: all time considered.
        compute: at least one lane computes.
        copy: data moves and nothing is computed.
        wait: the rank waits, without computing or moving data.
        moved: data moves.
        overlapped: the part of ``moved`` during which something is computed.
    """

    total: float
    compute: float
    copy: float
    wait: float
    moved: float
    overlapped: float


def times(trace: dict[str, Any], ranks: int) -> list[RankTime]:
    """Return the times of all ranks in a merged trace, within calls if there are any."""
    by_rank: list[Spans] = [defaultdict(list) for _ in range(ranks)]
    for (pid, _), lane in lanes(trace).items():
        for kind, spans in lane.items():
            by_rank[pid // PIDS][kind] += spans
    return [_rank_time(spans) for spans in by_rank]


def _rank_time(spans: Spans) -> RankTime:
    """Cut time at every begin and end: each piece is of a kind as a whole, or not at all."""
    edges = np.unique([edge for every in spans.values() for span in every for edge in span])

    def covered(kind: str) -> NDArray[np.bool_]:
        """Return which pieces the spans of a kind cover."""
        pieces = np.searchsorted(edges, np.array(spans[kind]).reshape(-1, 2))
        changes = np.zeros(len(edges) + 1, int)
        np.add.at(changes, pieces[:, 0], 1)
        np.add.at(changes, pieces[:, 1], -1)
        return changes.cumsum()[: max(0, len(edges) - 1)] > 0

    within = covered("calls") if spans["calls"] else np.ones(max(0, len(edges) - 1), bool)
    compute = covered(COMPUTE if spans[_KERNEL] else QUEUED) & within
    wait = covered(WAIT) & within & ~compute
    moved = (covered(COPY) & ~wait | covered(MOVE)) & within
    copy = moved & ~compute
    parts = (within, compute, copy, wait & ~copy, moved, moved & compute)
    return RankTime(*(float(np.diff(edges)[part].sum()) / 1e3 for part in parts))


def lanes(trace: dict[str, Any]) -> dict[tuple[int, Any], Spans]:
    """Return the spans of each kind of time, of all events and of calls, by process and thread or
    stream."""
    found: dict[tuple[int, Any], Spans] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lane = found.setdefault((event["pid"], event["tid"]), defaultdict(list))
            called = ("calls",) if event["name"].startswith(CALL) else ()
            for kind in ("all", *called, *kinds(event)):
                lane[kind].append((event["ts"], event["ts"] + event["dur"]))
    return found
