"""``tpkernels profile``: ranks on a common clock, times by category, and scripts that fail."""

from __future__ import annotations

import json
import re
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from tests.cli.test_cli import invoke
from tests.support.tiers import sweep
from tpkernels import torch_private
from tpkernels.cli.profile import _CALL, times
from tpkernels.local import matmul, ranges

SCRIPT = """
import sys, torch, torch.distributed as dist, tpkernels
dist.init_process_group("gloo")
assert sys.argv[1:] == ["--rows", "64"], sys.argv
x, w = torch.ones(32, 64), torch.ones(64, 64)
for _ in range(3):
    y = torch.relu(tpkernels.all_gather_matmul(x, w, dist.group.WORLD))
assert y.shape == (64, 64) and (y == 64).all()
"""


def event(name: str, begin: float, end: float, gpu: bool = False) -> Any:
    """Return a stand-in for an event of the torch profiler. Times are in ms."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=1e3 * begin, end=1e3 * end),
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
        is_user_annotation=False,
    )


def test_times_of_calls() -> None:
    """A copy of 10 ms contains a wait of 4 ms. A transfer of 20 ms contains a matmul of 12 ms and a
    wait of 5 ms."""
    events = [
        event(_CALL, 0, 60),
        event(ranges.COPY, 0, 10),
        event(ranges.WAIT, 3, 7),
        event(ranges.TRANSFER, 20, 40),
        event(ranges.MATMUL, 20, 32),
        event("aten::mm", 21, 31),
        event(ranges.WAIT, 34, 39),
        event(ranges.MATMUL, 60, 99),  # outside of calls
    ]
    assert times(events) == (60, 12, 4 + 5, 6 + 20, 12)


def test_a_host_wait_overlaps_no_gpu_communication() -> None:
    """NCCL runs for 20 ms, the last 10 ms concurrently with a matmul, while the host waits in
    `item()`."""
    nccl = event("ncclDevKernel_AllGather", 5, 25, gpu=True)
    events = [
        event("aten::mm", 0, 2),
        event("aten::item", 2, 40),
        event("cudaStreamSynchronize", 3, 40),
        nccl,
        event("gemm", 15, 35, gpu=True),
        event("Memcpy", 35, 38, gpu=True),
    ]
    assert times(events) == (40, 20, 17, 20 + 3, 10)
    assert times([event("aten::add", 0, 5), nccl]) == (25, 0, 0, 20, 0)


def test_a_script_without_torch_ops(tmp_path: Path) -> None:
    assert times([]) == (0,) * 5
    script = tmp_path / "nothing.py"
    script.write_text("print('no torch here')")
    result = invoke("profile", "--tp", 1, "--out", tmp_path, script)
    assert result.exit_code == 2, result.output
    assert "ran no torch op and moved no data on any rank" in result.stderr
    assert not list(tmp_path.glob("*.json"))


def events_by_rank(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the events of two ranks in a trace. The ranks have separate processes and flows."""
    merged = json.loads((folder / "trace.json").read_text())
    events: list[list[dict[str, Any]]] = [[], []]
    for event in merged["traceEvents"]:
        rank = int(event["pid"].startswith("rank 1: "))
        events[rank].append(event)
        assert all(event[key].startswith(f"rank {rank}: ") for key in ("pid", "id") if key in event)
    names = [event["args"]["name"] for event in chain(*events) if event["name"] == "process_name"]
    assert all(name.startswith(("rank 0, ", "rank 1, ")) for name in names) and len(names) >= 2
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
    assert re.search(r"^ +1 ( +[\d.]+){4}  (\d+%|no data moved) +$", shown.output, re.MULTILINE)
    assert f"{algorithm}: requested" in shown.output
    events = events_by_rank(tmp_path / "new" / "folder")
    names = [{event["name"] for event in rank_events} for rank_events in events]
    expected = {*EXPECTED[algorithm], "tpkernels::all_gather_matmul"}
    # a rank that is always later never waits
    assert all(rank_names >= expected - {ranges.WAIT} for rank_names in names)
    assert names[0] | names[1] >= expected
    # The ranks share a clock, and a barrier separates the calls: a call begins only after the
    # previous call has ended on both ranks.
    first, second = (
        [
            (event["ts"], event["ts"] + event["dur"])
            for event in rank_events
            if event["name"] == _CALL
        ]
        for rank_events in events
    )
    calls = list(zip(first, second, strict=True))
    assert len(calls) == 4
    for rank_0, rank_1 in calls:
        assert max(rank_0[0], rank_1[0]) < min(rank_0[1], rank_1[1]), "no time in common"
    for (_, (_, end)), ((begin, _), _) in pairwise(calls):
        assert end < begin + 200


@pytest.mark.thorough
def test_a_script_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    quiet = (
        # otherwise the profiler prints lines
        "import os; assert os.environ['KINETO_LOG_LEVEL'] == '6'"
    )
    script.write_text(f"{quiet}\n{SCRIPT}")
    shown = invoke("profile", "--out", str(tmp_path), str(script), "--rows", "64")
    assert shown.exit_code == 0, shown.output
    for events in events_by_rank(tmp_path):
        names = [event["name"] for event in events]
        assert names.count("tpkernels::all_gather_matmul") == 3 and "aten::relu" in names


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


def test_no_range_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 4)
    opened: list[str] = []
    record_function = torch_private.RecordFunctionFast

    def record(name: str) -> object:
        opened.append(name)
        return record_function(name)

    monkeypatch.setattr(torch_private, "RecordFunctionFast", record)
    matmul.local_matmul(x, x, torch.empty(4, 4))
    assert not opened and not ranges.profiling()
    with profile():
        matmul.local_matmul(x, x, torch.empty(4, 4))
        assert ranges.profiling()
    assert opened == [ranges.MATMUL]
