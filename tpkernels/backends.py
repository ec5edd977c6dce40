"""Where a planned call runs: one table (op, algorithm) -> function for each device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tpkernels import _C
from tpkernels.algorithms import direct, fused, pipelined, ring, unfused
from tpkernels.algorithms.links import hang_up
from tpkernels.algorithms.ranges import profiling, recorded_waits
from tpkernels.groups import Group
from tpkernels.plan import Plan, Problem
from tpkernels.symm.host import HostWorkspace

_ALGORITHMS: dict[str, ModuleType] = {
    "unfused": unfused,
    "ring": ring,
    "direct": direct,
    "pipelined": pipelined,
    "fused": fused,
}
OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
)


def _table(*names: str) -> dict[tuple[str, str], Callable[..., Any]]:
    return {
        (op, name): getattr(_ALGORITHMS[name], op)
        for name in names
        for op in OPS
        if hasattr(_ALGORITHMS[name], op)
    }


TABLES = {"cpu": _table(*_ALGORITHMS), "cuda": _table("unfused", "ring", "fused")}


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


def run(call: Call, *args: Any) -> Any:
    """Runs the call; calls on one group run one after the other. An error on the way breaks the
    group, and peers that wait for this rank are told."""
    group = call.group
    with group.lock:
        group.check_usable()
        try:
            if profiling():
                with recorded_waits(group.workspace):
                    return call.function(call, *args)
            return call.function(call, *args)
        except BaseException as error:
            group.leave(error)
            hang_up(call, error)
            raise
