"""Ranks on several hosts: network namespaces with addresses of their own, joined by torchrun."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from benchmarks.hosts import Hosts
from tests.support import across_hosts
from tests.support.paths import ROOT

START_SECONDS = 60.0  # torchrun, its rendezvous and the imports of the ranks
SLACK = 5.0

Started: TypeAlias = list["subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks import this package and these tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, removed afterwards with all that runs on them."""
    two = Hosts(2)
    try:
        two.__enter__()
    except OSError as error:
        pytest.skip(f"cannot make network namespaces: {error}")
    try:
        yield two
    finally:
        two.__exit__(None, None, None)


@pytest.fixture
def start(hosts: Hosts) -> Callable[..., Started]:
    """``start(nproc, ...)`` runs support/across_hosts.py on both."""

    def run(nproc: int, *arguments: str) -> Started:
        return [
            hosts.torchrun(i, nproc, "tests.support.across_hosts", *arguments) for i in range(2)
        ]

    return run


def results(started: Started, out: Path, world: int, seconds: float) -> list[dict[str, Any]]:
    """What the ranks found."""
    for process in started:
        said = process.communicate(timeout=seconds)
        assert process.returncode == 0, said[1][-3000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.thorough
@pytest.mark.parametrize("nproc", [1, 2])
def test_ops_work_across_hosts(start: Callable[..., Started], tmp_path: Path, nproc: int) -> None:
    out = tmp_path / "found"
    started = start(nproc, "works", str(out), str(nproc))
    for found in results(started, out, 2 * nproc, START_SECONDS + 60):
        assert not found["failures"], "\n".join(found["failures"])
        assert found["across"] == {"shared_memory": False, "ranks": 2 * nproc}
        assert found["inside"] == {"shared_memory": True, "ranks": nproc}
        assert found["same_bits"] == [True, True]


def _await(paths: list[Path], started: Started) -> None:
    until = time.monotonic() + START_SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, "the ranks have not begun"
        assert all(process.poll() is None for process in started), started[0].communicate()
        time.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "op"),
    [
        ("unfused", "all_gather"),
        pytest.param("ring", "matmul_reduce_scatter", marks=pytest.mark.slow),
        pytest.param("ring", "all_gather_matmul", marks=pytest.mark.slow),
    ],
)
def test_a_link_that_is_cut_is_a_timeout(
    hosts: Hosts, start: Callable[..., Started], tmp_path: Path, algorithm: str, op: str
) -> None:
    out = tmp_path / "found"
    started = start(1, "cut", str(out), algorithm, op)
    _await([Path(f"{out}.{rank}") for rank in range(2)], started)
    hosts.cut(1)
    files = [Path(f"{out}.{rank}.json") for rank in range(2)]
    until = time.monotonic() + across_hosts.TIMEOUT + 10
    while not all(file.exists() and file.stat().st_size for file in files):
        assert time.monotonic() < until, "a rank hangs"
        time.sleep(0.02)
    for rank, file in enumerate(files):
        found = json.loads(file.read_text())
        assert found["calls"] >= 5 and found["error"] == "CollectiveTimeoutError", found
        assert found["text"].startswith(op) and f"rank {rank} waited" in found["text"], found
        assert f"timeout {across_hosts.TIMEOUT:g} s" in found["text"], found
        assert "make a new one" in found["text"], found
        assert 0.9 * across_hosts.TIMEOUT < found["seconds"] < across_hosts.TIMEOUT + SLACK, found
        assert "CollectiveTimeoutError" in found["broken"], found
        assert found["again_seconds"] < across_hosts.TIMEOUT / 2, found


def test_hosts_are_removed_when_a_test_fails() -> None:
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")

    def names() -> set[str]:
        listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
        return {line.split()[0] for line in listed.stdout.splitlines()}

    before = names()
    try:
        with pytest.raises(ArithmeticError), Hosts(2) as hosts:
            assert len(names() - before) == 3
            started = hosts.torchrun(0, 1, across_hosts.__name__)
            raise ArithmeticError
    except OSError as error:
        pytest.skip(f"cannot make network namespaces: {error}")
    assert names() == before
    assert started.wait(timeout=5) == -signal.SIGKILL
    started.communicate()
