"""Time of a warm call on one rank, on the host and in a CUDA graph, compared with NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.one_gpu.machine import Machine
from benchmarks.one_gpu.stages import Case, Row
from tpkernels.common.text import describe_error
from tpkernels.ops.tuner import capture_graph
from tpkernels.timing import benchmark

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce")
ALGORITHMS = ("unfused", "direct", "pipelined", "fused")
_SHAPE, _REHEARSED = (64, 1024, 1024), (8, 32, 32)
_GRAPH_CALLS = 20


def cases(machine: Machine) -> Iterator[Case]:
    """Yield a case for each op and algorithm, and for NCCL."""
    m, n, k = machine.choose(_SHAPE, _REHEARSED)
    x, w = machine.random(m, k, seed=1), machine.random(n, k, seed=2).t()
    for op in OPS:
        operands = (x,) if op == "all_reduce" else (x, w)
        for algorithm in ALGORITHMS:
            yield f"{op} {algorithm}", partial(_op, machine, op, algorithm, operands)
    yield "all_reduce of torch.distributed", partial(_torch, machine, x)


@cache
def _group(machine: Machine) -> dist.ProcessGroup:
    backend = "cpu:gloo,cuda:nccl" if machine.is_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    tpkernels.init(group, autotune=False)
    return group


def _op(machine: Machine, op: str, algorithm: str, operands: tuple[torch.Tensor, ...]) -> Row:
    group = _group(machine)
    run = partial(getattr(tpkernels, op), *operands, group, algorithm=algorithm)
    try:
        run()
    except NotImplementedError as error:
        return {"why not": str(error)[:200]}
    return _times(machine, run)


def _torch(machine: Machine, x: torch.Tensor) -> Row:
    return _times(machine, partial(dist.all_reduce, x, group=_group(machine)))


def _times(machine: Machine, run: Callable[[], object]) -> Row:
    host = benchmark(run, iterations=machine.choose(300, 3), device="cpu")
    machine.synchronize()
    row: Row = {"host us": round(1e3 * host.median, 1), "p95": round(1e3 * host.p95, 1)}
    try:
        if machine.is_gpu:
            replay = capture_graph(run, _GRAPH_CALLS)
            row["graph us"] = round(machine.microseconds(replay) / _GRAPH_CALLS, 2)
    except RuntimeError as error:  # the time on the host still counts
        row |= {"bad": True, "error": f"captured: {describe_error(error)}"[:600]}
    return row
