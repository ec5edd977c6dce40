"""What each rank of transport/test_hosts.py runs: ``python -m tests.support.across_hosts JOB
FILE``. It writes its results to FILE followed by its rank, as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import Case, one_of_each
from tests.support.ranked import call, check_cases
from tpkernels import groups

TIMEOUT = 3.0
WAYS = ("auto", "unfused", "ring")
F32 = torch.float32


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def works(nproc: int) -> dict[str, Any]:
    """Every op on the group that spans the hosts, and on the group of this host's ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = [range(first, first + nproc) for first in range(0, world, nproc)]
    inside = [dist.new_group(list(some)) for some in ranks][rank // nproc]
    assert isinstance(inside, dist.ProcessGroup)
    results: dict[str, Any] = {"failures": []}
    for name, group in [("across", _world()), ("inside", inside)]:
        tpkernels.init(group, TIMEOUT * 5)
        near = groups.get(group.group_name).shared_memory
        results[name] = {"shared_memory": near, "ranks": group.size()}
        cases = {replace(case, algorithm="auto") for case in one_of_each(group.size())}
        for case in sorted(cases, key=str):
            for way in WAYS:
                results["failures"] += check_cases([replace(case, algorithm=way)], group)
    results["same_bits"] = []
    for case in [
        Case(op="matmul_reduce_scatter", shape=(24 * world, 33), k=(70,), biases=(F32,)),
        Case(op="all_reduce", shape=(50, 31), dtype=torch.bfloat16),
    ]:
        outputs = [call(replace(case, algorithm=way), _world())[0] for way in WAYS]
        results["same_bits"].append(all(torch.equal(outputs[0], other) for other in outputs))
    return results


def cut(algorithm: str, op: str, marker: Path) -> dict[str, Any]:
    """Calls an op again and again until it fails because the link is cut."""
    group, rank = _world(), dist.get_rank()
    tpkernels.init(group, TIMEOUT)
    x, w = torch.ones(512, 512), torch.ones(512, 512)
    factors = (x, w) if "matmul" in op else (x,)
    calls, at, started = 0, 0.0, time.monotonic()
    try:
        while time.monotonic() - started < 60:
            at = time.monotonic()
            getattr(tpkernels, op)(*factors, group, algorithm=algorithm)
            calls += 1
            if calls == 5:
                marker.with_name(f"{marker.name}.{rank}").touch()
    except tpkernels.TpkernelsError as error:
        took = time.monotonic() - at
        again = time.monotonic()
        try:
            getattr(tpkernels, op)(*factors, group, algorithm=algorithm)
            broken = ""
        except tpkernels.GroupBrokenError as refusal:
            broken = str(refusal)
        return {
            "error": type(error).__name__,
            "text": str(error),
            "peer": error.peer,
            "seconds": took,
            "calls": calls,
            "broken": broken,
            "again_seconds": time.monotonic() - again,
        }
    return {"error": "", "calls": calls}


def main() -> None:
    job, out, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if job == "works":
        results = works(int(arguments[0]))
    else:
        results = cut(arguments[0], arguments[1], Path(out))
    Path(f"{out}.{os.environ['RANK']}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group may wait for a peer that cannot be reached


if __name__ == "__main__":
    main()
