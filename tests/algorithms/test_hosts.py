"""Ranks on several hosts: network namespaces with separate addresses, joined by torchrun.

Each rank runs ``python -m tests.algorithms.test_hosts JOB FILE`` and writes its results to
FILE.<rank>.json.
"""

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
ALGORITHMS = ("auto", "unfused", "ring", "hierarchical")
F32 = torch.float32
MODULE = "tests.algorithms.test_hosts"
START_SECONDS = 60.0  # time for torchrun, the rendezvous and the imports
SLACK = 5.0

Started: TypeAlias = list["subprocess.Popen[str]"]


# Jobs of a rank.


def _ranks_by_host() -> list[list[int]]:
    """Return the ranks of each host, in the placement of torchrun."""
    hosts = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(hosts, torch.tensor([int(os.environ["GROUP_RANK"])]))
    host_by_rank = [int(host) for host in hosts]
    return [
        [r for r, host_of_rank in enumerate(host_by_rank) if host_of_rank == host]
        for host in sorted(set(host_by_rank))
    ]


def works() -> dict[str, Any]:
    """Run every op on the group that spans the hosts and on the group of the local host."""
    ranks = _ranks_by_host()
    local_groups = [dist.new_group(members) for members in ranks]
    local_group = next(group for group in local_groups if isinstance(group, dist.ProcessGroup))
    has_local_peers = max(map(len, ranks)) > 1
    algorithms = {
        "across": ALGORITHMS if has_local_peers else ALGORITHMS[:-1],
        "inside": ALGORITHMS[:-1],
    }
    results: dict[str, Any] = {"failures": []}
    world = faults.require_group(dist.group.WORLD)
    for name, group in [("across", world), ("inside", local_group)]:
        tpkernels.init(group, TIMEOUT * 5)
        shared_memory = groups.get(group.group_name).shared_memory
        results[name] = {"shared_memory": shared_memory, "ranks": group.size()}
        cases = {replace(case, algorithm="auto") for case in one_of_each(group.size())}
        for case in sorted(cases, key=str):
            for algorithm in algorithms[name]:
                results["failures"] += check_cases([replace(case, algorithm=algorithm)], group)
    results["same_bits"] = []
    for case in [
        Case(op="matmul_reduce_scatter", shape=(120, 33), k=(70,), biases=(F32,)),
        Case(op="all_reduce", shape=(50, 31), dtype=torch.bfloat16),
    ]:
        outputs = [
            call(replace(case, algorithm=algorithm), world)[0] for algorithm in algorithms["across"]
        ]
        results["same_bits"].append(all(torch.equal(outputs[0], output) for output in outputs))
    return results


def repeated(
    group: dist.ProcessGroup,
    algorithm: str,
    op: str,
    timeout: float,
    after_five: Callable[[], object],
) -> dict[str, Any]:
    """Call an op until it fails. Return the endings of that call and of the call after it.

    ``after_five`` is called after five calls.
    """
    tpkernels.init(group, timeout)
    call = functools.partial(faults.run_op, op, group, algorithm, 4096)
    calls, deadline = 0, time.monotonic() + 60
    while not (ending := faults.record_ending(call)).error and time.monotonic() < deadline:
        calls += 1
        if calls == 5:
            after_five()
    next_ending = faults.record_ending(call)
    return {**asdict(ending), "calls": calls, "again": asdict(next_ending)}


def main() -> None:
    job, out, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if job == "works":
        results = works()
    else:
        earlier = works() if job == "works_and_cut" else {}
        group = faults.require_group(dist.new_group())
        marker = Path(f"{out}.{dist.get_rank()}")
        results = earlier | repeated(group, *arguments, TIMEOUT, marker.touch)
    Path(f"{out}.{os.environ['RANK']}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group may wait for an unreachable peer


# Tests.


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks import the package and the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Yield two hosts. Teardown removes them and ends their processes."""
    pair = Hosts(2)
    try:
        pair.__enter__()
    except OSError as error:
        pytest.skip(f"cannot make network namespaces: {error}")
    try:
        yield pair
    finally:
        pair.__exit__(None, None, None)


@pytest.fixture
def start(hosts: Hosts) -> Callable[..., Started]:
    """``start(nproc, ...)`` runs this module with ``nproc[i]`` ranks on host i."""

    def run(nproc: tuple[int, int], *arguments: str) -> Started:
        return [hosts.torchrun(i, count, MODULE, *arguments) for i, count in enumerate(nproc)]

    return run


def results(started: Started, out: Path, world: int, seconds: float) -> list[dict[str, Any]]:
    """Wait for the processes and return the results of the ranks."""
    for process in started:
        output = process.communicate(timeout=seconds)
        assert process.returncode == 0, output[1][-3000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(world)]


def require_works(result: dict[str, Any], nproc: tuple[int, int]) -> None:
    """Require that every op passed on both groups."""
    assert not result["failures"], "\n".join(result["failures"])
    assert result["across"] == {"shared_memory": False, "ranks": sum(nproc)}
    assert result["inside"]["shared_memory"] and result["inside"]["ranks"] in nproc
    assert result["same_bits"] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [(1, 1), (2, 1)])
def test_ops_work_across_hosts(
    start: Callable[..., Started], tmp_path: Path, nproc: tuple[int, int]
) -> None:
    """Run every op with one rank on the second host, and one or two ranks on the first.

    `test_a_cut_link_is_a_timeout` covers two ranks per host.
    """
    out = tmp_path / "found"
    started = start(nproc, "works", str(out))
    for result in results(started, out, sum(nproc), START_SECONDS + 90):
        require_works(result, nproc)


def wait_for_results(ranks: list[int], out: Path, seconds: float) -> list[dict[str, Any]]:
    """Return the results of ranks whose processes may not exit."""
    files, deadline = [Path(f"{out}.{rank}.json") for rank in ranks], time.monotonic() + seconds
    while not all(file.exists() and file.stat().st_size for file in files):
        assert time.monotonic() < deadline, "a rank hangs"
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
def test_a_cut_link_is_a_timeout(
    hosts: Hosts, start: Callable[..., Started], tmp_path: Path, algorithm: str, op: str
) -> None:
    out = tmp_path / "found"
    ranks_per_host = 2 if algorithm == "hierarchical" else 1
    job = "works_and_cut" if ranks_per_host == 2 else "cut"
    started, world = (
        start((ranks_per_host, ranks_per_host), job, str(out), algorithm, op),
        2 * ranks_per_host,
    )
    deadline = time.monotonic() + START_SECONDS + 90
    while not all(Path(f"{out}.{rank}").exists() for rank in range(world)):
        assert time.monotonic() < deadline, "the ranks have not begun"
        assert all(process.poll() is None for process in started), started[0].communicate()
        time.sleep(0.02)
    hosts.cut(1)
    errors: list[str] = []
    for rank, result in enumerate(wait_for_results([*range(world)], out, TIMEOUT + 10)):
        if ranks_per_host == 2:
            require_works(result, (2, 2))
        errors.append(result["error"])
        assert result["calls"] >= 5, result
        assert result["message"].startswith(op) and f"rank {rank} waited" in result["message"], (
            result
        )
        assert re.search(f"timeout {TIMEOUT:g} s|waited 3.* s for", result["message"])
        assert "create a new group" in result["message"], result
        assert 0.9 * TIMEOUT < result["seconds"] < TIMEOUT + SLACK, result
        next_ending = result["again"]
        assert (
            next_ending["error"] == "GroupBrokenError" and result["error"] in next_ending["message"]
        ), result
        assert next_ending["seconds"] < TIMEOUT / 2, result
    # With two ranks per host, the first rank that times out closes its connections, and its peers
    # report a lost peer.
    assert "CollectiveTimeoutError" in errors, errors
    assert set(errors) <= {"CollectiveTimeoutError", *["PeerLostError"] * (ranks_per_host > 1)}, (
        errors
    )


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
