"""``tpkernels stuck``: the calls of a running job, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkernels
from tests.cli.test_cli import invoke
from tests.support import faults


def waiting_job(flag: str) -> None:
    """Rank 1 makes its second call when ``flag`` exists."""
    group = faults.new_group()
    for i in range(2):
        while i == 1 and group.rank() == 1 and not Path(flag).exists():
            time.sleep(0.02)
        tpkernels.all_gather(torch.ones(2, 3), group)


def test_a_hung_job_is_shown(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with faults.watched_ranks(2) as ranks:
        pids = list(ranks.pids)
        ranks.submit(waiting_job, str(flag))
        deadline = time.monotonic() + faults.PATIENCE
        while "rank 1 has not made call" not in (result := invoke("stuck", pids[0])).output:
            assert time.monotonic() < deadline, result.output
            time.sleep(0.05)
        results = [invoke("stuck", pid, "--last", 1) for pid in pids]
        groups: list[dict[str, Any]] = json.loads(
            invoke("stuck", pids[1], "--json", "--last", 64).stdout
        )
        flag.touch()
        assert all(outcome.ok for outcome in ranks.collect(faults.COLLECT_SECONDS))
    for result in results:
        lines = result.output.splitlines()
        assert lines[0].startswith("group '") and lines[0].endswith("', 2 ranks"), lines
        assert lines[1].startswith("rank 1 has not made call #"), lines
        assert lines[3] == f"rank 0 (pid {pids[0]}):", lines
        assert "all_gather([4, 3] float32" in lines[4] and ", started " in lines[4], lines
        assert "s ago, test_stuck.py:" in lines[4] and lines[4].endswith(" in waiting_job"), lines
        assert lines[5] == f"rank 1 (pid {pids[1]}):" and ", completed " in lines[7], lines
    (group,) = groups
    assert [rank["pid"] for rank in group["ranks"]] == pids
    newest, peer = (rank["calls"][0] for rank in group["ranks"])
    assert newest["state"] == "started" and peer["state"] == "completed"
    assert newest["number"] == peer["number"] + 1 and 0 < newest["started"] < time.monotonic()
    assert len(group["ranks"][0]["calls"]) > 2


@pytest.fixture
def idle_pid() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_process_without_groups_is_refused(idle_pid: int) -> None:
    result = invoke("stuck", idle_pid)
    assert result.exit_code == 2 and "has no group of tpkernels" in result.output, result.output


def test_a_process_that_has_ended_is_refused() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    result = invoke("stuck", process.pid)
    assert result.exit_code == 2, result.output
    assert f"no process has PID {process.pid}" in result.output, result.output


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (PermissionError(), "run tpkernels stuck as the user of the process, or as root"),
        ("pid:[1]", "is in a different pid namespace"),
    ],
)
def test_a_process_that_cannot_be_read_is_refused(
    found: PermissionError | str, message: str, idle_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readlink(path: str) -> str:
        if path != f"/proc/{idle_pid}/ns/pid":
            return original(path)
        if isinstance(found, PermissionError):
            raise found
        return found

    original = os.readlink
    monkeypatch.setattr(os, "readlink", readlink)
    result = invoke("stuck", idle_pid)
    assert result.exit_code == 2 and message in result.output, result.output


@pytest.mark.parametrize("last", [0, 65])
def test_the_number_of_calls_is_bounded(last: int) -> None:
    result = invoke("stuck", 1, "--last", last)
    assert result.exit_code == 2 and f"--last is {last}" in result.output, result.output
