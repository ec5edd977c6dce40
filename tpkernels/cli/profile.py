"""``tpkernels profile``."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import profiler
from torch.profiler import ProfilerActivity, record_function

from tpkernels.bench import report
from tpkernels.bench.cases import planned, random_case, run_tpkernels
from tpkernels.bench.specs import (
    Spec,
    algorithms_named,
    check_algorithm,
    check_split,
    ops_named,
    spec_of,
)
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.launch.ranks import loopback_store
from tpkernels.launch.session import is_leader, open_session, under_torchrun, world_size
from tpkernels.local import ranges
from tpkernels.terminal import (
    UsageError,
    at_least,
    check_workers,
    console,
    dtype_named,
    make_output_folder,
    milliseconds,
    table,
    writable,
    writing,
)

_LEGEND = """\
Each moment of a rank counts once: as compute, else copy, else wait. overlapped: the fraction of the
time in which data moves (copies, messages in flight, matmuls that read a peer's memory) during
which the rank also computes."""


def profile(
    script: Annotated[
        list[str] | None,
        typer.Argument(help="A Python script and its arguments, as for torchrun."),
    ] = None,
    op: Annotated[str | None, typer.Option(help="An op, instead of a script.")] = None,
    shape: Annotated[
        str, typer.Option(help="M,N,K of a matmul op, over all ranks.")
    ] = "1024,2048,2048",
    size: options.Sizes = "1M",
    nproc: options.Ranks = None,
    dtype: options.Dtype = "bf16",
    algorithm: Annotated[str, typer.Option(help="auto or an algorithm.")] = "auto",
    calls: Annotated[int, typer.Option(help="Number of calls of the op.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for trace.json and timeline.png.")] = Path(
        "tpkernels-profile"
    ),
    threads: options.Threads = 1,
    timeout: options.Timeout = 600,
) -> None:
    """Profile an op or a script on all ranks: one trace for Perfetto or chrome://tracing, and a
    picture with a lane for each rank and thread or stream.

    Options precede the script; everything after it belongs to the script. Its ranks run on this
    machine, in an environment like torchrun's, and create their process group themselves.
    """
    with exit_codes():
        if (op is None) == (not script):
            raise UsageError("give either --op or a script")
        world = world_size(nproc, 2)
        at_least(1, calls=calls, timeout=timeout)
        check_workers(threads=threads)
        if op is not None:
            ops_named([op])
            spec = spec_of(op, shape, size, dtype_named(dtype))
            check_split(spec, world)
            algorithms_named([algorithm])
            check_algorithm(spec, world, algorithm)
        else:
            _check_script(script or [])
        files = Files.within(out) if is_leader() else None
        with open_session(world, threads=threads, timeout=timeout) as session:
            if op is not None:
                what = f"{op} {spec}"
                recordings = session.run(record_op, spec, algorithm, calls)
            else:
                assert script  # one of the two is given
                what = " ".join(script)
                store = loopback_store()
                recordings = session.run(record_script, script[0], script[1:], store.port)
            if files is not None:
                _report(Profile.of(recordings, what), what, files, console())


def _check_script(script: list[str]) -> None:
    if under_torchrun():
        raise UsageError("a script's ranks are started here: run this command without torchrun")
    if not Path(script[0]).is_file():
        raise UsageError(f"no script '{script[0]}'")


def _report(recorded: Profile, what: str, files: Files, out: Console) -> None:
    """Write the files and prints the summary."""
    files.write(recorded, f"{what}: {recorded.overlapped:.0%} of the data movement overlapped")
    plan = f", {recorded.plan}" if recorded.plan else ""
    out.print(f"{what}, {len(recorded.spent)} ranks{plan}", markup=False)
    out.print(_table(recorded.spent))
    out.print(_LEGEND)
    moved = milliseconds(recorded.moved)
    out.print(f"Overlapped: {recorded.overlapped:.0%} of {moved} ms in which data moves.")
    if len(recorded.hosts) > 1:
        out.print(f"Ranks are on {len(recorded.hosts)} hosts, whose clocks are not aligned.")
    missing = report.unsupported()
    picture = f"no picture: {missing}" if missing else files.timeline
    out.print(f"{files.trace} (ui.perfetto.dev), {picture}", markup=False)


def _table(spent: list[RankTime]) -> Table:
    grid = table(
        "rank", ("ms", "compute", "copy", "wait", "other", "data\nmoves, ms"), "overlapped"
    )
    for rank, one in enumerate(spent):
        parts = one.compute, one.copy, one.wait
        whole = one.total or 1.0  # nothing was recorded
        shares = [f"{part / whole:.1%}" for part in (*parts, one.total - sum(parts))]
        overlapped = f"{one.overlapped / one.moved:.0%}" if one.moved else "nothing moves"
        grid.add_row(
            str(rank), milliseconds(one.total), *shares, milliseconds(one.moved), overlapped
        )
    return grid


Event = dict[str, Any]
Interval = tuple[float, float]
Lane = tuple[int, str]  # rank, and the name of its thread or stream

CALL = "tpkernels profile: call"  # the range around each call of `tpkernels profile --op`
# COPY: the rank itself copies, excluding waits within the copy. MOVE: data moves without the rank.
COMPUTE, COPY, MOVE, WAIT = "compute", "copy", "transfer", "wait"
_PIDS = 100  # process ids reserved for each rank in the merged trace
_FUSED = ("all_gather_matmul_kernel", "matmul_reduce_scatter_kernel", "matmul_all_reduce_kernel")
# ATen ops that create, move or view tensors and compute nothing.
_MAKES = "empty empty_strided empty_like resize_"
_MOVES = "copy_ to _to_copy clone contiguous item _local_scalar_dense is_nonzero"
_LOOKS = (
    "view _unsafe_view as_strided slice select narrow split chunk unbind t transpose permute "
    "reshape flatten expand squeeze unsqueeze detach alias"
)
_NO_COMPUTE = frozenset(f"{_MAKES} {_MOVES} {_LOOKS}".split(" "))


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
        new["pid"] = pids.setdefault(old, rank * _PIDS + len(pids))
        if "id" in event:
            new["id"] = f"{rank}:{event['id']}"
        if event["name"] == "process_name":
            label = labels.get(old, "CPU")
            new["args"] = {"name": f"rank {rank}" if label == "CPU" else f"rank {rank}, {label}"}
        elif event["name"] == "process_sort_index":
            new["args"] = {"sort_index": new["pid"]}
        yield new


def rank_of(event: Event) -> int:
    """Return the rank of an event in a merged trace."""
    return int(event["pid"] // _PIDS)


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
            return (MOVE,)
        return (COMPUTE, MOVE) if name in _FUSED else (COMPUTE,)
    if name == ranges.MATMUL:
        return (COMPUTE,)
    namespace, _, op = name.partition("::")
    return (COMPUTE,) if namespace == "aten" and op not in _NO_COMPUTE else ()


# Kinds of time in a timeline. Drawn in this order: a wait covers the copy that contains it.
COLOURS = {COMPUTE: "tab:blue", COPY: "tab:orange", WAIT: "tab:red", MOVE: "tab:green"}
_SPANS = {COMPUTE: (-0.4, 0.8), COPY: (-0.4, 0.3), WAIT: (-0.4, 0.8), MOVE: (0.1, 0.3)}
_MOST_INCHES = 30.0


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
    """Return the times of all ranks in a merged trace, within calls if there are any. If a rank
    runs GPU kernels, its host only queues work: the host's ops do not count as compute."""
    by_rank: list[dict[str, list[Interval]]] = [defaultdict(list) for _ in range(ranks)]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    on_gpu = {rank_of(event) for event in spans if event.get("cat") == "kernel"}
    for event in spans:
        mine = by_rank[rank_of(event)]
        span = (event["ts"], event["ts"] + event["dur"])
        mine["all"].append(span)
        if event["name"].startswith(CALL):
            mine["calls"].append(span)
        queues = rank_of(event) in on_gpu and event.get("cat") != "kernel"
        for kind in kinds(event):
            if not (queues and kind == COMPUTE):
                mine[kind].append(span)
    return [_times(own) for own in by_rank]


def _times(spans: dict[str, list[Interval]]) -> RankTime:
    whole = spans["all"]
    if not whole:
        return RankTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    window = union(spans["calls"] or [(min(a for a, _ in whole), max(b for _, b in whole))])
    wait = both(union(spans[WAIT]), window)
    compute = both(union(spans[COMPUTE]), window)
    copied = without(union(spans[COPY]), without(wait, compute))
    moved = both(union([*copied, *spans[MOVE]]), window)
    exposed = without(moved, compute)
    return RankTime(
        total=_milliseconds(window),
        compute=_milliseconds(compute),
        copy=_milliseconds(exposed),
        wait=_milliseconds(without(without(wait, compute), exposed)),
        moved=_milliseconds(moved),
        overlapped=_milliseconds(both(moved, compute)),
    )


def lanes(trace: dict[str, Any]) -> dict[Lane, dict[str, list[Interval]]]:
    """Return the intervals, in microseconds, of each kind of time in every thread and stream that
    has any."""
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    spans: dict[tuple[int, Any], dict[str, list[Interval]]] = {}
    for event in trace["traceEvents"]:
        for kind in kinds(event) if event["ph"] == "X" else ():
            of_lane = spans.setdefault((event["pid"], event["tid"]), defaultdict(list))
            of_lane[kind].append((event["ts"], event["ts"] + event["dur"]))
    result: dict[Lane, dict[str, list[Interval]]] = {}
    for i, (pid, tid) in enumerate(sorted(spans, key=str)):
        first = sorted(each for each in spans if each[0] == pid)[0] == (pid, tid)
        label = names.get(pid, "") if first else f"{names.get(pid, '')}, {tid}"
        result[pid // _PIDS, label or str(i)] = {
            kind: union(intervals) for kind, intervals in spans[pid, tid].items()
        }
    return result


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted, disjoint intervals that cover the same time."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def both(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the time in both of two unions."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            result.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the time in union ``a`` but not in union ``b``."""
    edges = [edge for interval in b for edge in interval]
    outside = zip([-float("inf"), *edges[1::2]], [*edges[::2], float("inf")], strict=True)
    return both(a, list(outside))


def _milliseconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e3


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
        """Merge the recordings of ranks. ``what`` names the op or script in the trace."""
        trace = merge([json.loads(gzip.decompress(each.trace)) for each in recordings])
        hosts = sorted({each.host for each in recordings})
        trace["otherData"] = {"what": what, "ranks": len(recordings), "hosts": hosts}
        return cls(trace, times(trace, len(recordings)), hosts, recordings[0].plan)

    @property
    def moved(self) -> float:
        """Return the milliseconds during which data moved, summed over the ranks."""
        return sum(each.moved for each in self.spent)

    @property
    def overlapped(self) -> float:
        """Return the fraction of `moved` during which the rank also computed."""
        return sum(each.overlapped for each in self.spent) / self.moved if self.moved else 0.0


@dataclass(frozen=True)
class Files:
    """Where a profile is written."""

    trace: Path
    timeline: Path

    @classmethod
    def within(cls, folder: Path) -> Files:
        """Create a folder for the files. ``UsageError`` if they cannot be written."""
        make_output_folder(folder)
        return cls(writable(folder / "trace.json"), writable(folder / "timeline.png"))

    def write(self, profile: Profile, title: str) -> None:
        """Write the trace and, with matplotlib, the timeline."""
        with writing(self.trace):
            self.trace.write_text(json.dumps(profile.trace))
        if report.unsupported() is None:
            with writing(self.timeline):
                timeline(profile.trace, self.timeline, title)


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


def timeline(trace: dict[str, Any], path: Path, title: str) -> None:
    """Draw a merged trace in the format given by the suffix of ``path``.

    Compute fills the lane. Copies use its upper part, and concurrent transfers its lower part.
    Waits cover compute and copies. Time counts from the first thing drawn.
    """
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch

    rows = lanes(trace)
    drawn = [span for lane in rows.values() for spans in lane.values() for span in spans]
    start = min((begin for begin, _ in drawn), default=0.0)
    canvas = Canvas(figsize=(10, min(1.5 + 0.5 * len(rows), _MOST_INCHES)), layout="constrained")
    axes = canvas.subplots()
    for row, lane in enumerate(rows.values()):
        for kind, colour in COLOURS.items():
            bottom, height = _SPANS[kind]
            spans = [
                ((begin - start) / 1e3, (end - begin) / 1e3) for begin, end in lane.get(kind, [])
            ]
            axes.broken_barh(spans, (row + bottom, height), color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [label for _, label in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize="medium", parse_math=False)
    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    canvas.savefig(path, dpi=150)
