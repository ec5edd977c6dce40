"""What each rank of transport/test_hosts.py runs: ``python -m tests.support.across_hosts JOB
FILE``. It writes its results to FILE followed by its rank, as JSON."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import Case, one_of_each
from tests.support.ranked import call, check_cases
from tpkernels import groups

TIMEOUT = 3.0
WAYS = ("auto", "unfused", "ring", "hierarchical")
F32 = torch.float32


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


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
    for name, group in [("across", _world()), ("inside", inside)]:
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
        outputs = [call(replace(case, algorithm=way), _world())[0] for way in ways["across"]]
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
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        begun = Path(f"{out}.{dist.get_rank()}")
        results = worked | repeated(group, *arguments, TIMEOUT, begun.touch)
    Path(f"{out}.{os.environ['RANK']}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group may wait for a peer that cannot be reached


if __name__ == "__main__":
    main()
