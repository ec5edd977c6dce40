"""The records of calls: the ring of a rank, and the report of a timeout."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.faults import Ending
from tests.support.ranked import on_ranks
from tpkernels import _C
from tpkernels.cli.stuck import read_groups

RECORDED = 64
TIMEOUT = 1.5  # s, longer than the time after which a stopped process is reported
REPORT = "Last calls of each rank, newest first:"
CAPACITY = 4096


class OneRank:
    """The channel of a group of one rank, and the file of its memory."""

    def __init__(self) -> None:
        self.region_bytes = _C.host.Channel.region_bytes(1, CAPACITY)
        self.fd = _C.host.Arena.create(self.region_bytes, 1)
        _C.host.Arena(self.fd, self.region_bytes, 1).commit(0, 0, self.region_bytes)

    def make_channel(self) -> _C.host.Channel:
        arena, pid = _C.host.Arena(self.fd, self.region_bytes, 1), os.getpid()
        limits = {"timeout": 1.0, "spin_us": 0.0, "yield_us": 0.0, "capacity": CAPACITY}
        return _C.host.Channel(arena, 0, [-1], [pid], **limits, group="g")  # type: ignore[arg-type]

    def read(self, last: int = RECORDED) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = _C.host.read_calls(self.fd, last)["ranks"][0]["calls"]
        return calls


@pytest.fixture
def one_rank() -> Iterator[OneRank]:
    one_rank = OneRank()
    yield one_rank
    os.close(one_rank.fd)


def test_the_ring_holds_the_last_calls(one_rank: OneRank) -> None:
    channel = one_rank.make_channel()
    assert one_rank.read() == []
    for i in range(1, 101):
        if i % 2:
            channel.set_caller(f"train.py:{i} in step")
        channel.begin(i, f"call {i}")
        channel.end_call()
    calls = one_rank.read()
    assert [call["number"] for call in calls] == list(range(100, 36, -1))
    assert len(calls) == RECORDED and len(one_rank.read(3)) == 3
    for call in calls:
        number = call["number"]
        assert call["call"] == f"call {number}" and call["state"] == "completed", call
        assert call["caller"] == (f"train.py:{number} in step" if number % 2 else ""), call
        assert time.monotonic() - 10 < call["started"] <= call["ended"] <= time.monotonic()


def test_the_chunks_of_a_call_are_one_record(one_rank: OneRank) -> None:
    channel = one_rank.make_channel()
    for _ in range(3):
        channel.begin(7, "a call of three chunks")
    channel.end_call()
    for signature in (7, 8):  # an equal call, then a call that begins before the last has ended
        channel.begin(signature, "one chunk")
    calls = [(call["number"], call["epoch"], call["state"]) for call in one_rank.read()]
    assert calls == [(5, 5, "started"), (4, 4, "completed"), (1, 3, "completed")]


def test_text_is_cut_between_characters(one_rank: OneRank) -> None:
    channel = one_rank.make_channel()
    for text in ("x" + "é" * 200, "y" * 160, "z"):
        channel.set_caller(text)
        channel.begin(1, text)
    texts = [(call["call"], call["caller"]) for call in one_rank.read()]
    assert texts[:2] == [("z", "z"), ("y" * 160, "y" * 120)]
    assert texts[2] == ("x" + "é" * 79, "x" + "é" * 59)


def test_no_reader_sees_a_torn_record(one_rank: OneRank) -> None:
    """A child process makes calls while this process reads them. All fields of a record belong to
    one call."""
    child = os.fork()
    if child == 0:
        channel = one_rank.make_channel()
        for i in range(1, 1 << 31):
            text = str(i) * 12
            channel.set_caller(text)
            channel.begin(i, text)
    try:
        deadline, seen = time.monotonic() + 0.7, set()
        while time.monotonic() < deadline:
            try:
                calls = one_rank.read()
            except RuntimeError:  # the child has not made its channel
                continue
            for call in calls:
                text = str(call["number"]) * 12
                assert (call["call"], call["caller"]) == (text, text[:120]), call
                seen.add(call["number"])
        assert len(seen) > RECORDED, "the ring did not wrap during the test"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("damage", ["empty", "version", "layout"])
def test_foreign_memory_is_refused(one_rank: OneRank, damage: str) -> None:
    message = {
        "empty": "its rank 0 has not set up the group yet",
        "version": "it runs a different version of tpkernels",
        "layout": "the layout of its memory is invalid",
    }
    if damage != "empty":
        one_rank.make_channel()
        arena = _C.host.Arena(one_rank.fd, one_rank.region_bytes, 1)
        offset = 0 if damage == "version" else 8
        memoryview(arena.region(0))[offset : offset + 4] = b"\x07\0\0\0"
    with pytest.raises(RuntimeError, match=message[damage]):
        one_rank.read()


def read_own(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the records of a group of this process, like an outside process."""
    groups = read_groups(os.getpid(), 3)
    return next(records for records in groups if records["group"] == group.group_name)


@on_ranks(2)
def test_every_algorithm_records_one_call() -> list[str]:
    """Calls that the extension runs, and calls that Python runs, of several chunks each."""
    group = faults.new_group()
    wrong = []
    for algorithm in ("direct", "pipelined", "unfused", "ring"):
        for _ in range(3):
            faults.run_op("matmul_all_reduce", group, algorithm, rows=2048)
        (records,) = (
            records
            for records in read_groups(os.getpid(), 3)
            if records["group"] == group.group_name
        )
        for call in records["ranks"][group.rank()]["calls"]:
            right = call["state"] == "completed" and f"[{algorithm}]" in call["call"]
            chunked = call["epoch"] > call["number"] or algorithm in ("unfused", "ring")
            if not (right and chunked and call["caller"].startswith("faults.py:")):
                wrong.append(f"{algorithm}: {call}")
    return wrong


def hang_job(kind: str, flag: str) -> tuple[Ending, Ending, list[str]]:
    """Rank 1 makes two calls, then is killed, is stopped, or makes no call until ``flag`` exists.
    Return how the third call ended, the call after it, and the logged warnings."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tpkernels").addHandler(handler)
    group = faults.new_group(timeout=TIMEOUT)

    def step() -> None:
        tpkernels.all_reduce(torch.ones(1024), group)

    step()
    step()
    if group.rank() == 1:
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "never":
                while not Path(flag).exists():
                    time.sleep(0.02)
    first = faults.record_ending(step)
    if group.rank() == 0:
        warnings.append(read_own(group)["text"])
    return first, faults.record_ending(step), warnings


@pytest.mark.parametrize("kind", ["never", "stop"])
def test_a_timeout_lists_the_calls_of_all_ranks(kind: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with faults.watched_ranks(3) as ranks:
        pids = list(ranks.pids)
        ranks.submit(hang_job, kind, str(flag))
        faults.collect_without(ranks, 1)
        os.kill(pids[1], signal.SIGCONT)
        flag.touch()
        outcomes = ranks.collect(faults.COLLECT_SECONDS)
        first, again, warnings = faults.values(outcomes)[0]
    sentence, _, report = first.message.partition("\n\n")
    lines = report.splitlines()
    assert first.error == "CollectiveTimeoutError" and first.peer == 1, first
    assert sentence.endswith("The group is broken; create a new group."), first
    number = int(sentence.partition("expected call #")[2].partition(",")[0])
    # The culprit first, with its last call and the line that made it.
    assert lines[0].startswith(f"rank 1 has not made call #{number}; its last call was ")
    assert f"#{number - 1} all_reduce([1024] float32" in lines[0] and ", completed 1." in lines[0]
    assert "s ago, test_call_records.py:" in lines[0] and " in step" in lines[0]
    assert lines[1] == REPORT
    blocks = [i for i, line in enumerate(lines) if line.startswith("rank ") and i > 1]
    assert [lines[i].split(" (")[0] for i in blocks] == ["rank 0", "rank 1", "rank 2"]
    assert lines[blocks[0] + 1].startswith(f"  call #{number} all_reduce([1024] float32"), report
    assert ", started 1." in lines[blocks[0] + 1], report
    assert lines[blocks[1] + 1] == f"  has not made call #{number}", report
    assert len(lines) == blocks[2] + 4, "three calls per rank"
    stopped = "its process is stopped (SIGSTOP or a debugger)"
    assert (stopped in lines[0]) == (stopped in lines[blocks[1]]) == (kind == "stop"), report
    # Only the timeout itself carries the report.
    assert again.error == "GroupBrokenError" and REPORT not in again.message, again
    late = faults.values(outcomes)[1][:2]  # the first may succeed: its peers have sent their data
    assert any(ending.error == "CollectiveTimeoutError" for ending in late), late
    assert all(REPORT not in ending.message for ending in late), late
    # A stopped process is named before the timeout.
    logged = [warning for warning in warnings if "has waited" in warning]
    assert len(logged) == (kind == "stop"), warnings
    if kind == "stop":
        assert f"rank 0 has waited 1.0 s of 1.5 s for rank 1 (pid {pids[1]})" in logged[0]


def test_the_calls_of_a_killed_rank_remain(tmp_path: Path) -> None:
    with faults.watched_ranks(3) as ranks:
        outcomes = faults.collect(ranks, hang_job, "kill", "")
        first, _, (text,) = faults.values(outcomes, 1)[0]
    assert first.error == "PeerLostError" and REPORT not in first.message, first
    line = text.splitlines()[0]
    assert line.startswith("rank 1 has not made call #") and "its process has ended" in line, text
    assert "completed" in line and "all_reduce([1024] float32" in line, text
