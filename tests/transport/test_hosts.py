"""Ranks on several hosts: network namespaces with addresses of their own, joined by torchrun."""

from __future__ import annotations

import json
import re
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
    """``start(nproc, ...)`` runs support/across_hosts.py on both, with ``nproc[i]`` ranks on host
    i."""

    def run(nproc: tuple[int, int], *arguments: str) -> Started:
        return [
            hosts.torchrun(i, count, across_hosts.__name__, *arguments)
            for i, count in enumerate(nproc)
        ]

    return run


def results(started: Started, out: Path, world: int, seconds: float) -> list[dict[str, Any]]:
    """What the ranks found."""
    for process in started:
        said = process.communicate(timeout=seconds)
        assert process.returncode == 0, said[1][-3000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(world)]


def require_works(found: dict[str, Any], nproc: tuple[int, int]) -> None:
    """All ops worked, on both groups."""
    assert not found["failures"], "\n".join(found["failures"])
    assert found["across"] == {"shared_memory": False, "ranks": sum(nproc)}
    assert found["inside"]["shared_memory"] and found["inside"]["ranks"] in nproc
    assert found["same_bits"] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [(1, 1), (2, 1)])
def test_ops_work_across_hosts(
    start: Callable[..., Started], tmp_path: Path, nproc: tuple[int, int]
) -> None:
    """Two ranks on each work before their link is cut."""
    out = tmp_path / "found"
    started = start(nproc, "works", str(out))
    for found in results(started, out, sum(nproc), START_SECONDS + 90):
        require_works(found, nproc)


def found_by(ranks: list[int], out: Path, seconds: float) -> list[dict[str, Any]]:
    """What ranks found that need not end well."""
    files, until = [Path(f"{out}.{rank}.json") for rank in ranks], time.monotonic() + seconds
    while not all(file.exists() and file.stat().st_size for file in files):
        assert time.monotonic() < until, "a rank hangs"
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "op"),
    [
        pytest.param("unfused", "all_gather", marks=pytest.mark.slow),
        pytest.param("ring", "matmul_reduce_scatter", marks=pytest.mark.slow),
        pytest.param("ring", "all_gather_matmul", marks=pytest.mark.slow),
        ("hierarchical", "matmul_all_reduce"),
    ],
)
def test_a_link_that_is_cut_is_a_timeout(
    hosts: Hosts, start: Callable[..., Started], tmp_path: Path, algorithm: str, op: str
) -> None:
    out = tmp_path / "found"
    each = 2 if algorithm == "hierarchical" else 1
    job = "works_and_cut" if each == 2 else "cut"
    started, world = start((each, each), job, str(out), algorithm, op), 2 * each
    until = time.monotonic() + START_SECONDS + 90
    while not all(Path(f"{out}.{rank}").exists() for rank in range(world)):
        assert time.monotonic() < until, "the ranks have not begun"
        assert all(process.poll() is None for process in started), started[0].communicate()
        time.sleep(0.02)
    hosts.cut(1)
    errors: list[str] = []
    for rank, found in enumerate(found_by([*range(world)], out, across_hosts.TIMEOUT + 10)):
        if each == 2:
            require_works(found, (2, 2))
        errors.append(found["error"])
        assert found["calls"] >= 5, found
        assert found["text"].startswith(op) and f"rank {rank} waited" in found["text"], found
        assert re.search(f"timeout {across_hosts.TIMEOUT:g} s|waited 3.* s for", found["text"])
        assert "make a new one" in found["text"], found
        assert 0.9 * across_hosts.TIMEOUT < found["seconds"] < across_hosts.TIMEOUT + SLACK, found
        again = found["again"]
        assert again["error"] == "GroupBrokenError" and found["error"] in again["text"], found
        assert again["seconds"] < across_hosts.TIMEOUT / 2, found
    # The first of several ranks to give up closes its connections, which the others notice.
    assert "CollectiveTimeoutError" in errors, errors
    assert set(errors) <= {"CollectiveTimeoutError", *["PeerLostError"] * (each > 1)}, errors


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
