"""``tpkernels profile``: ranks on one clock, kinds of time, and scripts that fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import profile

from tests.cli.test_cli import invoke
from tests.support.tiers import sweep
from tpkernels.cli.profile import CALL, PIDS, lanes, merge, times
from tpkernels.local import matmul as product
from tpkernels.local import ranges

SCRIPT = """
import sys, torch, torch.distributed as dist, tpkernels
dist.init_process_group("gloo")
assert sys.argv[1:] == ["--rows", "64"], sys.argv
x, w = torch.ones(32, 64), torch.ones(64, 64)
for _ in range(3):
    y = torch.relu(tpkernels.all_gather_matmul(x, w, dist.group.WORLD))
assert y.shape == (64, 64) and (y == 64).all()
"""


def event(name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    span = {"ph": "X", "pid": 7, "tid": 7, "ts": begin, "dur": end - begin}
    return {"name": name, **span, **more}


def trace(*events: dict[str, Any], base: int = 0) -> dict[str, Any]:
    named = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}}
    ]
    return {"baseTimeNanoseconds": base, "traceEvents": [*named, *events]}


def rank_of(event: dict[str, Any]) -> int:
    """Return the rank of an event in a merged trace."""
    return int(event["pid"] // PIDS)


def test_ranks_come_on_one_clock_and_apart() -> None:
    merged = merge(
        [
            trace(event("a", 100, 200), base=5_000_000),
            trace(event("a", 5100, 5200, id=3), event("x", 0, 1, pid="Spans"), base=0),
            trace(event("a", 100, 200, pid=0, tid=1, id=3), base=5_001_000),
        ]
    )
    spans = [(rank_of(e), e["ts"], e["dur"]) for e in merged["traceEvents"] if e["ph"] == "X"]
    assert spans == [(0, 0.0, 100), (1, 0.0, 100), (2, 1.0, 100)]
    ids = [e["id"] for e in merged["traceEvents"] if "id" in e]
    assert len(set(ids)) == 2  # flows stay within a rank
    names = [e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]


def test_each_moment_counts_once() -> None:
    """A copy of 10, which waits for 4 of them; a transfer of 20 that contains a matmul of 12 and a
    wait of 5."""
    ms = 1000.0
    merged = merge(
        [
            trace(
                event(f"{CALL} 0", 0, 60 * ms),
                event(ranges.COPY, 0, 10 * ms),
                event(ranges.WAIT, 3 * ms, 7 * ms),
                event(ranges.TRANSFER, 20 * ms, 40 * ms),
                event(ranges.MATMUL, 20 * ms, 32 * ms),
                event("aten::mm", 21 * ms, 31 * ms),
                event(ranges.WAIT, 34 * ms, 39 * ms),
                event(ranges.MATMUL, 60 * ms, 99 * ms),  # outside of calls
            )
        ]
    )
    (spent,) = times(merged, 1)
    assert (spent.total, spent.compute, spent.copy, spent.wait) == (60, 12, 6 + 8, 4)
    assert (spent.moved, spent.overlapped) == (6 + 20, 12)
    assert len(lanes(merged)) == 1


def test_a_host_that_waits_hides_no_communication_of_its_gpu() -> None:
    """NCCL for 20, the last 10 concurrent with a matmul, while the host waits in `item()`."""
    ms = 1000.0
    merged = merge(
        [
            trace(
                event("aten::mm", 0, 2 * ms),
                event("aten::item", 2 * ms, 40 * ms),
                event("cudaStreamSynchronize", 3 * ms, 40 * ms, cat="cuda_runtime"),
                event("ncclDevKernel_AllGather", 5 * ms, 25 * ms, cat="kernel", pid=0),
                event("gemm", 15 * ms, 35 * ms, cat="kernel", pid=0, tid=2),
                event("Memcpy", 35 * ms, 38 * ms, cat="gpu_memcpy", pid=0, tid=2),
            )
        ]
    )
    (spent,) = times(merged, 1)
    assert (spent.total, spent.compute, spent.copy) == (40, 20, 10 + 3)
    assert (spent.moved, spent.overlapped) == (23, 10)
    kernel = event("ncclDevKernel_AllGather", 0, 20 * ms, cat="kernel", pid=0)
    (spent,) = times(merge([trace(event("aten::add", 0, 5 * ms), kernel)]), 1)
    assert (spent.compute, spent.moved, spent.overlapped) == (0, 20, 0)


def test_nothing_recorded_takes_no_time() -> None:
    (spent,) = times(merge([trace()]), 1)
    assert spent.total == spent.moved == spent.compute == 0


def test_a_script_of_which_nothing_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('no torch here')")
    result = invoke("profile", "--tp", 1, "--out", tmp_path, script)
    assert result.exit_code == 2, result.output
    assert "computed and moved nothing with torch on any rank" in result.stderr
    assert not list(tmp_path.glob("*.json"))


def loaded(folder: Path) -> list[dict[str, Any]]:
    """The events of a trace, which a viewer must be able to load."""
    merged = json.loads((folder / "trace.json").read_text())
    assert set(merged) == {"displayTimeUnit", "traceEvents", "otherData"}
    events: list[dict[str, Any]] = merged["traceEvents"]
    for one in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(one), one
        assert one["ts"] >= 0 and (one["ph"] != "X" or one["dur"] >= 0), one
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    return events


EXPECTED = {
    "direct": {ranges.MATMUL, ranges.COPY, ranges.WAIT},
    "pipelined": {ranges.MATMUL, ranges.COPY, ranges.TRANSFER},
    "ring": {ranges.MATMUL, ranges.TRANSFER, ranges.WAIT},
    "unfused": {ranges.MATMUL, ranges.TRANSFER, ranges.WAIT},
}


@pytest.mark.parametrize("algorithm", sweep(EXPECTED))
def test_an_op_on_two_ranks(tmp_path: Path, algorithm: str) -> None:
    options = ["--shape", "256,512,512", "--algorithm", algorithm, "--calls", "4"]
    shown = invoke(
        "profile", "--op", "all_gather_matmul", *options, "--out", str(tmp_path / "new" / "folder")
    )
    assert shown.exit_code == 0, shown.output
    summary = r"^Overlapped: \d+% of [\d.]+ ms in which data moves\.$"
    assert re.search(summary, shown.output, re.MULTILINE)
    assert f"{algorithm}: asked for" in shown.output
    events = loaded(tmp_path / "new" / "folder")
    for rank in (0, 1):
        names = {e["name"] for e in events if rank_of(e) == rank}
        wanted = {*EXPECTED[algorithm], "tpkernels::all_gather_matmul"}
        assert names >= wanted - {ranges.WAIT}, (rank, names)  # one rank may always be the later
    assert {e["name"] for e in events} >= wanted
    # After a barrier, no rank begins a call before all ranks have ended the previous one.
    calls: dict[str, list[tuple[float, float]]] = {}
    for e in events:
        if e["name"].startswith(CALL):
            calls.setdefault(e["name"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(calls) == 4
    for one, other in zip(list(calls.values()), list(calls.values())[1:], strict=False):
        assert len(one) == 2
        assert max(begin for begin, _ in one) < min(end for _, end in one), "no time in common"
        assert max(end for _, end in one) < min(begin for begin, _ in other) + 200


@pytest.mark.thorough
def test_a_script_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    quiet = (
        "import os; assert os.environ['KINETO_LOG_LEVEL'] == '6'"  # or it prints lines of its own
    )
    script.write_text(f"{quiet}\n{SCRIPT}")
    shown = invoke("profile", "--out", str(tmp_path), str(script), "--rows", "64")
    assert shown.exit_code == 0, shown.output
    events = loaded(tmp_path)
    for rank in (0, 1):
        count = sum(
            e["name"] == "tpkernels::all_gather_matmul" and rank_of(e) == rank for e in events
        )
        assert count == 3
        assert any(e["name"] == "aten::relu" and rank_of(e) == rank for e in events)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ArithmeticError(f'rank {RANK} cannot')", "ArithmeticError: rank 1 cannot"),
        pytest.param(
            "time.sleep(600) if RANK else os.kill(os.getpid(), 9)",
            "killed by SIGKILL",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raises", "dies while the other goes on"],
)
@mock.patch("tpkernels.launch.ranks.GRACE_SECONDS", 0.5)
def test_a_script_that_fails(tmp_path: Path, body: str, message: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(
        "import os, pathlib, sys, time; RANK = int(os.environ['RANK'])\n"
        f"folder = pathlib.Path({str(tmp_path)!r}); (folder / f'{{os.getpid()}}.pid').touch()\n"
        f"while len(list(folder.glob('*.pid'))) < 2: time.sleep(0.01)\n{body}"
    )
    shown = invoke("profile", "--out", str(tmp_path), str(script))
    assert shown.exit_code == 1, shown.output
    assert shown.output.startswith("FAIL: record_script failed on") and message in shown.output
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2 and not any(Path("/proc", str(pid)).exists() for pid in pids)
    assert not (tmp_path / "trace.json").exists()


def test_no_range_is_opened_where_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 4)
    opened: list[str] = []
    range_of = ranges._Range
    monkeypatch.setattr(ranges, "_Range", lambda name: opened.append(name) or range_of(name))
    product.local_matmul(x, x, torch.empty(4, 4))
    assert not opened and not ranges.profiling()
    with profile():
        product.local_matmul(x, x, torch.empty(4, 4))
        assert ranges.profiling()
    assert opened == [ranges.MATMUL]
