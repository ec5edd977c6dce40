"""A cached plan: a checked and planned call on a group that can run any number of times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from tpkernels.groups.group import Group
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Plan
from tpkernels.planning.problem import Problem
from tpkernels.symm.host import HostWorkspace
from tpkernels.symm.node import Node


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of an algorithm besides the tensors."""

    group: Group
    problem: Problem
    plan: Plan
    function: Callable[..., Any]  #: implementation of the op in the algorithm
    generation: int  #: ``group.generation`` when the call was planned

    @functools.cached_property
    def cache(self) -> dict[Hashable, Any]:
        """Return the cache for values that an algorithm computes once per call."""
        return {}

    @property
    def workspace(self) -> HostWorkspace:
        # Without shared memory, `choose` selects an algorithm that does not use this property.
        assert self.group.workspace is not None
        return self.group.workspace

    @property
    def node(self) -> Node | None:
        """Return the ranks of this host if the algorithm spans hosts, or None."""
        return self.group.node if ALGORITHMS[self.plan.algorithm].spans_hosts else None

    @functools.cached_property
    def peers_in_ring_order(self) -> tuple[int, ...]:
        """Return the peers in ring order, starting after this rank. Each rank then starts with a
        different peer."""
        rank, world = self.group.rank, self.group.world
        return tuple((rank + i) % world for i in range(1, world))
