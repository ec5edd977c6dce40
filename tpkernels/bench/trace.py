"""Merges torch profiler traces, one per rank, and classifies what the ranks spent their time on.

Clock: a trace counts microseconds from its ``baseTimeNanoseconds``, a CLOCK_REALTIME of the host to
which torch converts all time stamps. So the ranks of one host share a clock. Clocks of different
hosts are not aligned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tpkernels.local import ranges

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
    """Merges traces, given by rank, into one Chrome trace that starts at its first event. Each rank
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
    """The rank of an event in a merged trace."""
    return int(event["pid"] // _PIDS)


def kinds(event: Event) -> tuple[str, ...]:
    """The kinds of time an event counts as; possibly none or several."""
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
    """The times of all ranks in a merged trace, within calls if there are any. If a rank runs GPU
    kernels, its host only queues work: the host's ops do not count as compute."""
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
    """The intervals, in microseconds, of each kind of time in every thread and stream that has
    any."""
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
    """Sorted, disjoint intervals that cover the same time."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def both(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The time in both of two unions."""
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
    """The time in union ``a`` but not in union ``b``."""
    edges = [edge for interval in b for edge in interval]
    outside = zip([-float("inf"), *edges[1::2]], [*edges[::2], float("inf")], strict=True)
    return both(a, list(outside))


def _milliseconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e3
