"""Ranks on several hosts: network namespaces with addresses of their own, joined by torchrun. Each
rank runs ``python -m tests.algorithms.test_hosts JOB FILE`` and writes its results to FILE followed
by its rank, as JSON."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

import tpkernels
from benchmarks.hosts import Hosts
from tests.support import faults
from tests.support.cases import Case, one_of_each
from tests.support.paths import ROOT
from tests.support.ranked import call, check_cases
from tpkernels import groups

TIMEOUT = 3.0
WAYS = ("auto", "unfused", "ring", "hierarchical")
F32 = torch.float32
MODULE = "tests.algorithms.test_hosts"
START_SECONDS = 60.0  # torchrun, its rendezvous and the imports of the ranks
SLACK = 5.0

Started: TypeAlias = list["subprocess.Popen[str]"]


# What a rank runs.


def _ranks_of_hosts() -> list[list[int]]:
    """As torchrun has placed them."""
    hosts = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(hosts, torch.tensor([int(os.environ["GROUP_RANK"])]))
    host_of = [int(host) for host in hosts]
    return [[r for r, of in enumerate(host_of) if of == host] for host in sorted(set(host_of))]


def works() -> dict[str, Any]:
    """Every op on the group that spans the hosts, and on the group of this host's ranks."""
    ranks = _ranks_of_hosts()
    made = [dist.new_group(some) for some in ranks]
    inside = next(group for group in made if isinstance(group, dist.ProcessGroup))
    several = max(map(len, ranks)) > 1
    ways = {"across": WAYS if several else WAYS[:-1], "inside": WAYS[:-1]}
    results: dict[str, Any] = {"failures": []}
    world = faults.group_of(dist.group.WORLD)
    for name, group in [("across", world), ("inside", inside)]:
        tpkernels.init(group, TIMEOUT * 5)
        near = groups.get(group.group_name).shared_memory
        results[name] = {"shared_memory": near, "ranks": group.size()}
        cases = {replace(case, algorithm="auto") for case in one_of_each(group.size())}
        for case in sorted(cases, key=str):
            for way in ways[name]:
                results["failures"] += check_cases([replace(case, algorithm=way)], group)
    results["same_bits"] = []
    for case in [
        Case(op="matmul_reduce_scatter", shape=(120, 33), k=(70,), biases=(F32,)),
        Case(op="all_reduce", shape=(50, 31), dtype=torch.bfloat16),
    ]:
        outputs = [call(replace(case, algorithm=way), world)[0] for way in ways["across"]]
        results["same_bits"].append(all(torch.equal(outputs[0], other) for other in outputs))
    return results


def repeated(
    group: dist.ProcessGroup,
    algorithm: str,
    op: str,
    timeout: float,
    after_five: Callable[[], object],
) -> dict[str, Any]:
    """Calls an op again and again until it fails: how that call and the next one end."""
    tpkernels.init(group, timeout)
    call = functools.partial(faults.run_op, op, group, algorithm, 4096)
    calls, until = 0, time.monotonic() + 60
    while not (ending := faults.ending_of(call)).error and time.monotonic() < until:
        calls += 1
        if calls == 5:
            after_five()
    again = faults.ending_of(call)
    return {**asdict(ending), "calls": calls, "again": asdict(again)}


def main() -> None:
    job, out, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if job == "works":
        results = works()
    else:
        worked = works() if job == "works_and_cut" else {}
        group = faults.group_of(dist.new_group())
        begun = Path(f"{out}.{dist.get_rank()}")
        results = worked | repeated(group, *arguments, TIMEOUT, begun.touch)
    Path(f"{out}.{os.environ['RANK']}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group may wait for a peer that cannot be reached


# The tests.


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
    """``start(nproc, ...)`` runs this module on both, with ``nproc[i]`` ranks on host
    i."""

    def run(nproc: tuple[int, int], *arguments: str) -> Started:
        return [hosts.torchrun(i, count, MODULE, *arguments) for i, count in enumerate(nproc)]

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "op"),
    [
        ("unfused", "all_gather"),
        ("ring", "matmul_reduce_scatter"),
        ("ring", "all_gather_matmul"),
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
    for rank, found in enumerate(found_by([*range(world)], out, TIMEOUT + 10)):
        if each == 2:
            require_works(found, (2, 2))
        errors.append(found["error"])
        assert found["calls"] >= 5, found
        assert found["text"].startswith(op) and f"rank {rank} waited" in found["text"], found
        assert re.search(f"timeout {TIMEOUT:g} s|waited 3.* s for", found["text"])
        assert "create a new group" in found["text"], found
        assert 0.9 * TIMEOUT < found["seconds"] < TIMEOUT + SLACK, found
        again = found["again"]
        assert again["error"] == "GroupBrokenError" and found["error"] in again["text"], found
        assert again["seconds"] < TIMEOUT / 2, found
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
            started = hosts.torchrun(0, 1, MODULE)
            raise ArithmeticError
    except OSError as error:
        pytest.skip(f"cannot make network namespaces: {error}")
    assert names() == before
    assert started.wait(timeout=5) == -signal.SIGKILL
    started.communicate()


if __name__ == "__main__":
    main()
