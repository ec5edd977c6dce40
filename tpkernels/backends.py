"""Where a planned call runs: one table (op, algorithm) -> function for each device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tpkernels import _C, cuda, kernels
from tpkernels.algorithms import (
    direct,
    direct_cuda,
    fused,
    pipelined,
    pipelined_cuda,
    ring,
    unfused,
)
from tpkernels.algorithms.links import hang_up
from tpkernels.algorithms.ranges import profiling, recorded_waits
from tpkernels.group import Group
from tpkernels.plan import Plan
from tpkernels.problem import Problem
from tpkernels.symm.host import HostWorkspace

OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
)


def _table(**algorithms: ModuleType) -> dict[tuple[str, str], Callable[..., Any]]:
    return {
        (op, name): getattr(module, op)
        for name, module in algorithms.items()
        for op in OPS
        if hasattr(module, op)
    }


TABLES = {
    "cpu": _table(unfused=unfused, ring=ring, direct=direct, pipelined=pipelined, fused=fused),
    "cuda": _table(
        unfused=unfused, ring=ring, direct=direct_cuda, pipelined=pipelined_cuda, fused=fused
    ),
}


def lacking(algorithm: str, device: str, on: torch.device) -> str | None:
    """Why the kernels of an algorithm cannot run on tensors of a device type, this process's being
    ``on``; None: it can tell no reason, or there are none."""
    if algorithm == "fused":
        return kernels.obstacle(device)
    if device == "cuda" and algorithm in ("direct", "pipelined"):
        return cuda.obstacle(on)
    return None


@dataclass(frozen=True, eq=False)
class Call:
    """A checked and planned call on a group, ready to run any number of times."""

    group: Group
    problem: Problem
    plan: Plan

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return TABLES[self.problem.device][self.problem.op, self.plan.algorithm]

    @property
    def workspace(self) -> HostWorkspace:
        assert self.group.workspace is not None  # `choose` asks for it only where there is one
        return self.group.workspace

    @functools.cached_property
    def layout(self) -> _C.Layout:
        """The gathered or scattered tensor, as the extension sees it."""
        return _C.Layout(self.problem.outer, self.problem.inner, self.problem.sizes)


def run(call: Call, execute: Callable[..., Any], *args: Any) -> Any:
    """Runs ``execute(call, *args)``; calls on one group run one after the other. All that an op
    does once its arguments have been checked belongs in there: an error on the way, such as no
    memory for a result, breaks the group, and peers that wait for this rank are told."""
    group = call.group
    with group.lock:
        group.check_usable()
        try:
            group.in_call = True
            if profiling():
                with recorded_waits(group.workspace):
                    return execute(call, *args)
            return execute(call, *args)
        except BaseException as error:
            group.leave(error)
            hang_up(call, error)
            raise
        finally:
            group.in_call = False
