"""What a plan costs on a machine, by the cost model of planning/cost.py: seconds, and bytes of
memory. A step that is one op with the product is cut into one chunk for each rank.

Left out: flops and copies of reductions and slices, tiles that do not fill a device, and the time
of launching.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch.distributed.tensor import Partial

from tpkernels.mesh.layout import Placements, local_shape
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem, Step, by_name, plans_for
from tpkernels.planning.cost import (
    Profile,
    all_to_all_seconds,
    collective_seconds,
    fused_seconds,
    product_seconds,
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a plan costs the rank with the largest shards.

    Attributes:
        seconds: from begin to end.
        product: of these, the local product alone.
        communication: seconds of all collectives alone.
        memory: peak bytes of operands, temporaries and results.
    """

    seconds: float
    product: float
    communication: float
    memory: int

    @property
    def exposed(self) -> float:
        """Return the seconds in which the rank does not multiply."""
        return self.seconds - self.product

    def fits(self, profile: Profile) -> bool:
        """Return whether the device's memory, if its size is known, is enough."""
        return not 0 < profile.memory < self.memory


def _step_seconds(profile: Profile, step: Step, mesh_shape: Sequence[int]) -> float:
    ranks = mesh_shape[step.mesh_dim]
    if not step.communicates or ranks == 1:
        return 0.0
    passes = 2 if step.kind == "all_reduce" else 1
    whole = step.nbytes / prod(mesh_shape) / passes * ranks / (ranks - 1)
    stride = prod(mesh_shape[step.mesh_dim + 1 :])
    if step.kind == "all_to_all":
        return all_to_all_seconds(profile, whole, ranks, stride=stride)
    return collective_seconds(profile, whole, ranks, stride=stride, passes=passes)


def estimate(plan: MatmulPlan, problem: MatmulProblem, profile: Profile) -> Estimate:
    """Estimate what a plan costs on a machine."""
    mesh = problem.mesh_shape
    m, k = _largest(problem, "x", plan.x)
    n = _largest(problem, "w", plan.w)[1]
    product = product_seconds(profile, m, k, n, problem.itemsize)
    seconds = {step: _step_seconds(profile, step, mesh) for step in plan.steps}
    total = product + sum(time for step, time in seconds.items() if step is not plan.fused)
    if plan.fused is not None:
        fused, ranks = plan.fused, mesh[plan.fused.mesh_dim]
        # Rows of the result, but its columns for a gather of w or a scatter of columns.
        cut = 2 if fused.operand == "w" or fused.tensor_dim == 1 else 0
        both = fused_seconds(profile, (m, k, n), cut, seconds[fused], ranks, problem.itemsize)
        total += both - product
    return Estimate(
        seconds=total,
        product=product,
        communication=sum(seconds.values()),
        memory=_peak_memory(plan, problem),
    )


def _largest(problem: MatmulProblem, operand: str, placements: Placements) -> tuple[int, int]:
    """Return the shape of the first rank's shard: none is larger."""
    mesh = problem.mesh_shape
    rows, columns = local_shape(problem.shape(operand), placements, mesh, (0,) * len(mesh))
    return rows, columns


def _peak_memory(plan: MatmulPlan, problem: MatmulProblem) -> int:
    """Estimate the peak. The operands are there throughout, and each step's input until the step
    ends. A Partial result that no step moves is in the operands' dtype from the product on."""
    moves = plan.after or (plan.fused is not None and plan.fused.operand == "out")

    def nbytes(operand: str, placements: Placements) -> int:
        elements = prod(_largest(problem, operand, placements))
        if operand == "out" and not moves:
            return elements * problem.itemsize
        return elements * problem.itemsize_of(operand, placements)

    held = {"x": nbytes("x", problem.x), "w": nbytes("w", problem.w), "out": 0}
    own, temporary, peak = sum(held.values()), {"x": 0, "w": 0, "out": 0}, 0

    def change(operand: str, after: int) -> None:
        nonlocal peak
        peak = max(peak, own + sum(temporary.values()) + after)
        temporary[operand] = after

    at = {"x": problem.x, "w": problem.w}
    fused = [plan.fused] if plan.fused is not None else []
    for step in (*plan.before, *(step for step in fused if step.operand != "out")):
        at[step.operand] = step.after(at[step.operand])
        if step.communicates:  # a slice is a view
            change(step.operand, nbytes(step.operand, at[step.operand]))
    partial = plan.product
    if fused and fused[0].operand == "out":  # the product before its reduction
        rest = list(plan.product)
        rest[fused[0].mesh_dim] = Partial()
        partial = tuple(rest)
    change("out", nbytes("out", partial))
    temporary["x"] = temporary["w"] = 0
    if partial != plan.product:
        change("out", nbytes("out", plan.product))
    after = plan.product
    for step in plan.after:
        after = step.after(after)
        change("out", nbytes("out", after))
    return peak


@functools.lru_cache(maxsize=1024)
def ranked(problem: MatmulProblem, profile: Profile) -> tuple[tuple[MatmulPlan, Estimate], ...]:
    """Return the plans of `plans_for` with their cost: those that fit into the device's memory
    first, of these the fastest; the fewest bytes decide between equals. The same on all ranks that
    have the same profile."""
    pairs = [(plan, estimate(plan, problem, profile)) for plan in plans_for(problem)]
    # Rounded, because sums of the same times in another order differ in the last bits. The sort is
    # stable, and plans_for sorts by bytes.
    return tuple(
        sorted(pairs, key=lambda pair: (not pair[1].fits(profile), round(pair[1].seconds, 12)))
    )


def choose(problem: MatmulProblem, strategy: str, profile: Profile) -> MatmulPlan:
    """Return the plan of that strategy; the fastest for "auto".

    Raises:
        ValueError: there is no such strategy, or it cannot give the result.
    """
    return by_name(tuple(plan for plan, _ in ranked(problem, profile)), problem, strategy)
