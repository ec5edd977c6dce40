"""`tpkernels plan` for one product: the problem from text, and the reasons of the ranking. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpkernels.mesh.cost import Estimate, ranked
from tpkernels.mesh.layout import Placements, text_of
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem
from tpkernels.ops import _check
from tpkernels.planning.machines import Profile
from tpkernels.terminal import UsageError, at_least, dtype_named, number_in

_NAMES: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Row:
    """A strategy and what it costs. ``reason``: why it is the fastest, or what makes it slower."""

    plan: MatmulPlan
    cost: Estimate
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.plan.strategy,
            "result": text_of(self.plan.out),
            "steps": str(self.plan),
            "bytes": self.plan.nbytes,
            "flops": self.plan.flops,
            "seconds": self.cost.seconds,
            "product_seconds": self.cost.product,
            "communication_seconds": self.cost.communication,
            "exposed_seconds": self.cost.exposed,
            "memory_bytes": self.cost.memory,
            "reason": self.reason,
        }


def mesh_of(text: str) -> tuple[int, ...]:
    """The shape in ``"8"`` or ``"2x4"``."""
    sizes = tuple(number_in(part) for part in text.lower().split("x"))
    if len(sizes) > 2 or not all(1 <= size <= _MOST_RANKS for size in sizes):
        raise UsageError(f"--mesh is '{text}'; pass one or two numbers of ranks, such as 8 or 2x4")
    return sizes


def placements_of(option: str, text: str, dims: int) -> Placements:
    """The placements in ``"S0"`` or ``"S0,R"``. On a mesh of two dims one name stands for the first
    dim, and the second is R."""
    names = [part.strip().upper() for part in text.split(",")]
    names += ["R"] * (dims - len(names)) if len(names) == 1 else []
    for name in names:
        if name not in _NAMES:
            raise UsageError(
                f"unknown placement '{name}' in --{option}; choose from {', '.join(_NAMES)}"
            )
    if len(names) != dims:
        raise UsageError(
            f"--{option} is '{text}' with {len(names)} placements; the mesh has {dims} dims"
        )
    return tuple(_NAMES[name] for name in names)


def partial_itemsize(wire_dtype: str | None, dtype: torch.dtype) -> int:
    """Bytes of an element of a partial result that travels. ``UsageError`` for a dtype in which it
    cannot."""
    try:
        wire = _check.wire_dtype(None if wire_dtype is None else dtype_named(wire_dtype), dtype)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return wire.itemsize


def problem_of(
    extents: tuple[int, int, int],
    mesh: str,
    x: str,
    w: str,
    out: str | None,
    itemsize: int,
    partial_itemsize: int | None = None,
) -> MatmulProblem:
    """The problem in the options (m, k, n). ``UsageError`` for what is none."""
    m, k, n = extents
    at_least(1, m=m, k=k, n=n)
    shape = mesh_of(mesh)
    return MatmulProblem(
        m=m,
        k=k,
        n=n,
        mesh_shape=shape,
        x=placements_of("x", x, len(shape)),
        w=placements_of("w", w, len(shape)),
        out=None if out is None else placements_of("out", out, len(shape)),
        itemsize=itemsize,
        partial_itemsize=partial_itemsize,
    )


def rows(problem: MatmulProblem, profile: Profile) -> list[Row]:
    """The strategies, the fastest first."""
    pairs = ranked(problem, profile)
    return [Row(plan, cost, _reason(cost, pairs[0][1], profile)) for plan, cost in pairs]


def _reason(cost: Estimate, best: Estimate, profile: Profile) -> str:
    if not cost.fits(profile):
        return f"needs more than the device's {profile.memory / 1e9:.4g} GB"
    if cost is best:
        hidden = cost.communication - cost.exposed
        if not cost.communication:
            return "the fastest: nothing to communicate"
        if hidden > 0.01 * cost.communication:
            return f"the fastest: hides {hidden / cost.communication:.0%} of its communication"
        return "the fastest"
    multiplies, moves = cost.product - best.product, cost.exposed - best.exposed
    if max(multiplies, moves) < 0.005 * best.seconds:
        return "as fast, with no fewer bytes"
    if multiplies > moves:
        return f"computes {cost.product / best.product:.3g}x as long"
    return f"exposes {1e3 * moves:.3g} ms more of communication"
