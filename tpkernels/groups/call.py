"""A checked and planned call on a group, ready to run any number of times."""

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
    """What an algorithm gets besides tensors. ``function`` is its implementation of the op."""

    group: Group
    problem: Problem
    plan: Plan
    function: Callable[..., Any]
    generation: int  #: of the group's plans when it was planned

    @functools.cached_property
    def kept(self) -> dict[Hashable, Any]:
        """Return what an algorithm derives from the call once."""
        return {}

    @property
    def workspace(self) -> HostWorkspace:
        assert self.group.workspace is not None  # else `choose` takes another algorithm
        return self.group.workspace

    @property
    def node(self) -> Node | None:
        """Return the ranks of this host, if the call's algorithm goes through their memory."""
        return self.group.node if ALGORITHMS[self.plan.algorithm].spans_hosts else None

    @functools.cached_property
    def peers_in_ring_order(self) -> tuple[int, ...]:
        """Return the other ranks, from the next one on, so that they do not all start with the same
        peer."""
        rank, world = self.group.rank, self.group.world
        return tuple((rank + i) % world for i in range(1, world))
