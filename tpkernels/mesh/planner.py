"""Plans of a sharded matmul on a mesh, and their cost on a machine. Pure functions.

Algorithm:

1. A strategy selects a split for each mesh dim (`_SPLITS`). The splits determine the placements of
   x and w before the local matmul, and the placements of the result after it.
2. For every strategy, find the steps that receive the fewest bytes: from the placements of the
   operands to the placements of the strategy, and from its result to the requested placements. This
   is a shortest path over placements (`_shortest_paths`).
3. Of the fusable steps next to the matmul, fuse the step that receives the most bytes. The fused op
   runs in one chunk per rank.

The cost model is in planning/cost.py. It ignores flops and copies of reductions and slices, tiles
that do not fill a device, and launch times.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpkernels.mesh.layout import (
    Placements,
    count_exchanged_elements,
    count_stored_elements,
    format_placements,
    local_shape,
    replace_placement,
)
from tpkernels.planning.cost import (
    Profile,
    all_to_all_seconds,
    collective_seconds,
    fused_seconds,
    matmul_seconds,
)

# Splits of a matmul over the ranks of a mesh dim: placements of x [M, K], w [K, N] and the result.
_SPLITS: Mapping[str, tuple[Placement, Placement, Placement]] = MappingProxyType(
    {
        "M": (Shard(0), Replicate(), Shard(0)),
        "N": (Replicate(), Shard(1), Shard(1)),
        "K": (Shard(1), Shard(0), Partial()),
        "none": (Replicate(), Replicate(), Replicate()),
        "sum_x": (Partial(), Replicate(), Partial()),
        "sum_w": (Replicate(), Partial(), Partial()),
    }
)


@dataclass(frozen=True, kw_only=True)
class MatmulProblem:
    """A sharded matmul [m, k] @ [k, n], with the placements of x, w and the result.

    Sizes are unsharded. Identical on all ranks.
    """

    m: int
    k: int
    n: int
    mesh_shape: tuple[int, ...]
    x: Placements
    w: Placements
    out: Placements | None  #: None: any placements without Partial
    itemsize: int  #: bytes per element
    partial_itemsize: int | None = None  #: for a Partial result; None: ``itemsize``

    @property
    def operands_text(self) -> str:
        """Return the operands as text, such as ``[8, 16] S0 @ [16, 4] R``."""
        x, w = format_placements(self.x), format_placements(self.w)
        return f"[{self.m}, {self.k}] {x} @ [{self.k}, {self.n}] {w}"

    def __str__(self) -> str:
        return f"{self.operands_text} on a mesh of {' x '.join(map(str, self.mesh_shape))}"

    def get_itemsize(self, operand: str, placements: Placements) -> int:
        """Return the bytes per communicated element of "x", "w" or "out"."""
        if operand == "out" and self.partial_itemsize is not None and Partial() in placements:
            return self.partial_itemsize
        return self.itemsize

    def shape(self, operand: str) -> tuple[int, int]:
        """Return the unsharded shape of "x", "w" or "out"."""
        return {"x": (self.m, self.k), "w": (self.k, self.n), "out": (self.m, self.n)}[operand]

    def max_shard_shape(self, operand: str, placements: Placements) -> tuple[int, int]:
        """Return the shape of the largest shard, which is the shard of the first rank."""
        first = (0,) * len(self.mesh_shape)
        rows, columns = local_shape(self.shape(operand), placements, self.mesh_shape, first)
        return rows, columns


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of the placement of one tensor on one mesh dim.

    ``kind`` is one of

    - "all_gather": Shard to Replicate,
    - "reduce_scatter": Partial to Shard,
    - "all_reduce": Partial to Replicate,
    - "all_to_all": Shard to Shard,
    - "slice": Replicate to Shard, without communication.
    """

    kind: str
    operand: str  #: "x", "w" or "out"
    mesh_dim: int  #: mesh dim of the communicating ranks
    tensor_dim: int | None  #: gathered, scattered or sliced dim; None for an all-reduce
    nbytes: int = 0  #: bytes received by all ranks of the mesh; an all-reduce counts twice
    scatter_dim: int | None = None  #: scattered dim of an all-to-all, which gathers ``tensor_dim``

    @property
    def communicates(self) -> bool:
        return self.kind != "slice"

    def after(self, placements: Placements) -> Placements:
        """Return the placements after the step."""
        split = self.tensor_dim if self.kind in ("reduce_scatter", "slice") else self.scatter_dim
        placement = Replicate() if split is None else Shard(split)
        return replace_placement(placements, self.mesh_dim, placement)

    def seconds(self, profile: Profile, mesh_shape: Sequence[int]) -> float:
        """Return the time of the step on a machine, without overlap."""
        ranks = mesh_shape[self.mesh_dim]
        if not self.communicates or ranks == 1:
            return 0.0
        passes = 2 if self.kind == "all_reduce" else 1
        full_nbytes = self.nbytes / prod(mesh_shape) / passes * ranks / (ranks - 1)
        stride = prod(mesh_shape[self.mesh_dim + 1 :])
        if self.kind == "all_to_all":
            return all_to_all_seconds(profile, full_nbytes, ranks, stride=stride)
        return collective_seconds(profile, full_nbytes, ranks, stride=stride, passes=passes)

    def __str__(self) -> str:
        name = self.kind.replace("_", "-")
        dim = "" if self.tensor_dim is None else f" dim {self.tensor_dim}"
        dim += "" if self.scatter_dim is None else f" for dim {self.scatter_dim}"
        return f"{name} {self.operand}{dim} over mesh dim {self.mesh_dim}"


@dataclass(frozen=True, kw_only=True)
class MatmulPlan:
    """A plan of a sharded matmul.

    ``strategy`` names the split on each mesh dim:

    - "M", "N", "K": rows of the result, columns of the result, or the summed dim.
    - "none": all ranks compute the same matmul.
    - "sum_x", "sum_w": each rank multiplies the local addend of the Partial x or w.

    ``nbytes`` counts the bytes that all ranks of the mesh receive, ``flops`` the flops of all
    ranks.
    """

    strategy: str
    before: tuple[Step, ...]  #: steps on x and w
    fused: Step | None  #: step that is fused with the matmul
    after: tuple[Step, ...]  #: steps on the result
    x: Placements  #: placements of x in the local matmul, after a ``fused`` gather
    w: Placements  #: placements of w in the local matmul, after a ``fused`` gather
    result: Placements  #: placements of its result, after a ``fused`` reduction
    out: Placements  #: placements after all steps
    nbytes: int
    flops: int

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all steps, in order."""
        return (*self.before, *([self.fused] if self.fused else []), *self.after)

    @property
    def moves_result(self) -> bool:
        """Return whether a step communicates or slices the result of the matmul."""
        return bool(self.after) or (self.fused is not None and self.fused.operand == "out")

    @property
    def cost(self) -> tuple[int, int, int]:
        """Return the sort key of plans without a machine."""
        return self.nbytes, self.flops, len(self.steps)

    def __str__(self) -> str:
        items = [str(step) for step in self.before]
        if self.fused is None:
            items.append("matmul")
        elif self.fused.operand == "out":
            items.append(f"[matmul + {self.fused}]")
        else:
            items.append(f"[{self.fused} + matmul]")
        return "; ".join(items + [str(step) for step in self.after])


# Plans of a problem.


def possible_steps(
    operand: str,
    shape: tuple[int, ...],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    itemsize: int,
    partial_itemsize: int,
) -> list[Step]:
    """Return all steps that the placements allow.

    An element has ``itemsize`` bytes, or ``partial_itemsize`` bytes while any placement is Partial.

    A mesh dim can gather or split a tensor dim only if no later mesh dim splits it: mesh dims split
    from left to right, so shards of a later mesh dim are shards of shards.
    """
    steps = []
    for mesh_dim, placement in enumerate(placements):
        free = [dim for dim in range(len(shape)) if Shard(dim) not in placements[mesh_dim + 1 :]]
        changes: list[tuple[str, int | None, int | None]] = []  # kind, tensor dim, scattered dim
        if isinstance(placement, Replicate):
            changes = [("slice", dim, None) for dim in free]
        elif not isinstance(placement, Shard):
            changes = [("all_reduce", None, None)]
            changes += [("reduce_scatter", dim, None) for dim in free]
        elif placement.dim in free:
            other_dims = [dim for dim in free if dim != placement.dim]
            changes = [("all_gather", placement.dim, None)]
            changes += [("all_to_all", placement.dim, dim) for dim in other_dims]
        # Number of elements on the mesh if the ranks along mesh_dim held each element once.
        num_elements = count_stored_elements(
            shape, replace_placement(placements, mesh_dim, Shard(0)), mesh_shape
        )
        old_itemsize = partial_itemsize if Partial() in placements else itemsize
        for kind, dim, scatter_dim in changes:
            step = Step(
                kind=kind,
                operand=operand,
                mesh_dim=mesh_dim,
                tensor_dim=dim,
                scatter_dim=scatter_dim,
            )
            if scatter_dim is not None:
                num_received = count_exchanged_elements(
                    shape, placements, mesh_shape, mesh_dim, scatter_dim
                )
            else:
                num_received = num_elements * (mesh_shape[mesh_dim] - 1) * step.communicates
            received_itemsize = old_itemsize
            if kind == "all_reduce":
                received_itemsize += (
                    partial_itemsize if Partial() in step.after(placements) else itemsize
                )
            steps.append(replace(step, nbytes=num_received * received_itemsize))
    return steps


@functools.lru_cache(maxsize=4096)
def _shortest_paths(
    operand: str,
    shape: tuple[int, int],
    start: Placements,
    mesh_shape: tuple[int, ...],
    itemsize: int,
    partial_itemsize: int,
) -> Mapping[Placements, tuple[Step, ...]]:
    """Find the steps that receive the fewest bytes from ``start`` to each reachable placement.

    Ties are broken by the number of steps.
    """
    order = itertools.count()  # placements do not compare
    queue: list[tuple[int, int, int, Placements, tuple[Step, ...]]] = [(0, 0, 0, start, ())]
    paths: dict[Placements, tuple[Step, ...]] = {}
    while queue:
        nbytes, count, _, placements, path = heapq.heappop(queue)
        if placements in paths:
            continue
        paths[placements] = path
        for step in possible_steps(
            operand, shape, placements, mesh_shape, itemsize, partial_itemsize
        ):
            entry = (nbytes + step.nbytes, count + 1, next(order))
            heapq.heappush(queue, (*entry, step.after(placements), (*path, step)))
    return MappingProxyType(paths)


def _fusable(step: Step) -> bool:
    """Return whether an op fuses the step with the matmul.

    The ops can gather rows of their left operand. To gather columns of w, run ``w^T x^T``: these
    are rows of w^T. The ops cannot gather the summed dim.
    """
    if step.operand == "out":
        return step.kind in ("reduce_scatter", "all_reduce")
    return step.kind == "all_gather" and step.tensor_dim == "xw".index(step.operand)


def _plan(
    problem: MatmulProblem, strategy: tuple[str, ...], paths: Sequence[tuple[Step, ...]]
) -> MatmulPlan:
    """Return the plan of a strategy with the given steps on x, on w and on the result."""
    x_path, w_path, out_path = paths
    candidates = [*x_path[-1:], *w_path[-1:], *out_path[:1]]
    fusable = [step for step in candidates if step.nbytes and _fusable(step)]
    fused = max(fusable, key=lambda step: step.nbytes, default=None)
    x, w, result = _strategy_placements(strategy)
    if fused is not None and fused.operand == "out":
        result = fused.after(result)
    after = tuple(step for step in out_path if step is not fused)
    sizes = zip(problem.mesh_shape, strategy, strict=True)
    copies = prod(size for size, split in sizes if split not in ("M", "N", "K"))
    return MatmulPlan(
        strategy=",".join(strategy),
        before=tuple(step for step in (*x_path, *w_path) if step is not fused),
        fused=fused,
        after=after,
        x=x,
        w=w,
        result=result,
        out=functools.reduce(lambda placements, step: step.after(placements), after, result),
        nbytes=sum(step.nbytes for path in paths for step in path),
        flops=2 * problem.m * problem.k * problem.n * copies,
    )


def _strategy_placements(strategy: Sequence[str]) -> tuple[Placements, Placements, Placements]:
    """Return the placements of x, w and the result of the local matmul."""
    x, w, out = zip(*(_SPLITS[split] for split in strategy), strict=True)
    return x, w, out


@functools.lru_cache(maxsize=1024)
def make_plans(problem: MatmulProblem) -> tuple[MatmulPlan, ...]:
    """Return one plan for each strategy that can produce the result, cheapest first.

    The order is by bytes, then by flops, then by number of steps.
    """

    def find_paths(operand: str, start: Placements) -> Mapping[Placements, tuple[Step, ...]]:
        shape, mesh = problem.shape(operand), problem.mesh_shape
        partial = problem.get_itemsize(operand, (Partial(),))
        return _shortest_paths(operand, shape, start, mesh, problem.itemsize, partial)

    from_x, from_w = find_paths("x", problem.x), find_paths("w", problem.w)
    plans = []
    for strategy in itertools.product(_SPLITS, repeat=len(problem.mesh_shape)):
        x, w, out = _strategy_placements(strategy)
        if x not in from_x or w not in from_w:
            continue
        from_out = find_paths("out", out)
        targets = [problem.out] if problem.out else [t for t in from_out if Partial() not in t]
        candidates = [(from_x[x], from_w[w], from_out[t]) for t in targets if t in from_out]
        if candidates:
            plans_of_strategy = (_plan(problem, strategy, paths) for paths in candidates)
            plans.append(min(plans_of_strategy, key=lambda plan: plan.cost))
    return tuple(sorted(plans, key=lambda plan: plan.cost))


# Cost of plans on a machine.


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted cost of a plan on the rank with the largest shards."""

    seconds: float
    matmul: float  #: seconds of the local matmul, without communication
    communication: float  #: seconds of all collectives, without overlap
    memory: int  #: peak bytes of operands, temporaries and results

    @property
    def exposed(self) -> float:
        """Return the communication time that the matmul does not hide, in seconds."""
        return self.seconds - self.matmul

    def fits(self, profile: Profile) -> bool:
        """Return whether the plan fits into the device memory. True if its size is unknown."""
        return not 0 < profile.memory < self.memory


def estimate(plan: MatmulPlan, problem: MatmulProblem, profile: Profile) -> Estimate:
    """Estimate the cost of a plan with the rates of a profile."""
    mesh = problem.mesh_shape
    (m, k), n = problem.max_shard_shape("x", plan.x), problem.max_shard_shape("w", plan.w)[1]
    matmul_time = matmul_seconds(profile, m, k, n, problem.itemsize)
    seconds = {step: step.seconds(profile, mesh) for step in plan.steps}
    total = matmul_time + sum(time for step, time in seconds.items() if step is not plan.fused)
    if plan.fused is not None:
        fused, ranks = plan.fused, mesh[plan.fused.mesh_dim]
        # Chunks split rows of the result, or columns for a gather of w or a scatter of columns.
        split_dim = 2 if fused.operand == "w" or fused.tensor_dim == 1 else 0
        fused_time = fused_seconds(
            profile, (m, k, n), split_dim, seconds[fused], ranks, problem.itemsize
        )
        total += fused_time - matmul_time
    return Estimate(
        seconds=total,
        matmul=matmul_time,
        communication=sum(seconds.values()),
        memory=_peak_memory(plan, problem),
    )


def _peak_memory(plan: MatmulPlan, problem: MatmulProblem) -> int:
    """Estimate the peak memory in bytes.

    - The operands are allocated throughout.
    - The input of a step is freed when the step ends, and the inputs of the matmul when it ends.
    - If no step moves a Partial result, it has the operand dtype from the matmul on.
    """

    def nbytes(operand: str, placements: Placements) -> int:
        elements = prod(problem.max_shard_shape(operand, placements))
        if operand == "out" and not plan.moves_result:
            return elements * problem.itemsize
        return elements * problem.get_itemsize(operand, placements)

    current, created = (
        {"x": problem.x, "w": problem.w, "out": plan.result},
        list[tuple[str, Placements]](),
    )
    operands = sum(nbytes(name, current[name]) for name in "xw")
    fused = [plan.fused] if plan.fused else []
    for step in (*plan.before, *(step for step in fused if step.operand != "out")):
        current[step.operand] = step.after(current[step.operand])
        if step.communicates:  # a slice is a view
            created.append((step.operand, current[step.operand]))
    reductions = [step for step in fused if step.operand == "out"]  # these follow the matmul
    created += [
        ("out", replace_placement(current["out"], step.mesh_dim, Partial())) for step in reductions
    ]
    created.append(("out", current["out"]))
    for step in plan.after:
        current["out"] = step.after(current["out"])
        created.append(("out", current["out"]))
    peak, temporary = operands, dict[str, int]()
    for operand, placements in created:
        size = nbytes(operand, placements)
        peak = max(peak, operands + sum(temporary.values()) + size)
        temporary = {"out": size} if operand == "out" else {**temporary, operand: size}
    return peak


@functools.lru_cache(maxsize=1024)
def sort_plans(problem: MatmulProblem, profile: Profile) -> tuple[tuple[MatmulPlan, Estimate], ...]:
    """Return the plans of `make_plans` with their estimates, best first.

    Plans that fit into the device memory come before all others. Then the fastest plans come first,
    and ties are broken by bytes. The order is identical on all ranks with the same profile.
    """
    pairs = [(plan, estimate(plan, problem, profile)) for plan in make_plans(problem)]
    # Round the times: sums of equal times in a different order differ in the last bits. Ties keep
    # the order of make_plans, by bytes, because the sort is stable.
    return tuple(
        sorted(pairs, key=lambda pair: (not pair[1].fits(profile), round(pair[1].seconds, 12)))
    )


def choose(problem: MatmulProblem, strategy: str, profile: Profile | None = None) -> MatmulPlan:
    """Return the plan of ``strategy``.

    For "auto", return the fastest plan by ``profile``, or without a profile the plan with the
    fewest bytes.

    Raises:
        ValueError: the strategy does not exist, or cannot produce the result.
    """
    plans: Sequence[MatmulPlan] = make_plans(problem)
    if profile is not None:
        plans = [plan for plan, _ in sort_plans(problem, profile)]
    for plan in plans:
        if strategy in ("auto", plan.strategy):
            return plan
    out = format_placements(problem.out) if problem.out else "any"
    raise ValueError(
        f"strategy is {strategy!r}, which is not available for {problem} -> {out}; "
        f"choose from 'auto', {', '.join(repr(plan.strategy) for plan in plans)}"
    )
