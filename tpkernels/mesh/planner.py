"""Every way to compute a sharded matrix product on a mesh, and what each costs on a machine. Pure.

Algorithm: on each mesh dim the ranks split the product in one of a few ways (`_SPLITS`), which
fixes where x and w must lie before the local product and where the result lies after it. For
every combination of splits over the mesh dims, the steps that move the fewest bytes lead there from
where x and w are, and from the result to where it is wanted (a shortest path over placements,
`_routes`). One step next to the product, the one that moves the most, becomes one op with it, cut
into one chunk for each rank.

The cost model is that of planning/cost.py. Left out: flops and copies of reductions and slices,
tiles that do not fill a device, and the time of launching.
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
    exchanged_elements,
    held_elements,
    local_shape,
    placements_text,
    with_placement,
)
from tpkernels.planning.cost import (
    Profile,
    all_to_all_seconds,
    collective_seconds,
    fused_seconds,
    matmul_seconds,
)

# What the ranks along a mesh dim split: where x [M, K] and w [K, N] lie, and the result then.
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
    """A sharded matrix product, the same on all ranks: [m, k] @ [k, n] in all, with the placements
    of x, w and the result."""

    m: int
    k: int
    n: int
    mesh_shape: tuple[int, ...]
    x: Placements
    w: Placements
    out: Placements | None  #: None: any without Partial
    itemsize: int  #: bytes of an element
    partial_itemsize: int | None = None  #: of the result while it is Partial; None: the same

    @property
    def operands(self) -> str:
        """Return the operands as text, such as ``[8, 16] S0 @ [16, 4] R``."""
        x, w = placements_text(self.x), placements_text(self.w)
        return f"[{self.m}, {self.k}] {x} @ [{self.k}, {self.n}] {w}"

    def __str__(self) -> str:
        return f"{self.operands} on a mesh of {' x '.join(map(str, self.mesh_shape))}"

    def itemsize_of(self, operand: str, placements: Placements) -> int:
        """Return the bytes of an element of "x", "w" or "out" on its way from or to the product."""
        if operand == "out" and self.partial_itemsize is not None and Partial() in placements:
            return self.partial_itemsize
        return self.itemsize

    def shape(self, operand: str) -> tuple[int, int]:
        """Return the shape of the whole "x", "w" or "out"."""
        return {"x": (self.m, self.k), "w": (self.k, self.n), "out": (self.m, self.n)}[operand]

    def largest(self, operand: str, placements: Placements) -> tuple[int, int]:
        """Return the shape of the first rank's shard: none is larger."""
        first = (0,) * len(self.mesh_shape)
        rows, columns = local_shape(self.shape(operand), placements, self.mesh_shape, first)
        return rows, columns


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of one tensor's placement on one mesh dim: "all_gather" (Shard to Replicate),
    "reduce_scatter" (Partial to Shard), "all_reduce" (Partial to Replicate), "all_to_all" (Shard to
    Shard) or "slice" (Replicate to Shard, without communication)."""

    kind: str
    operand: str  #: "x", "w" or "out"
    mesh_dim: int  #: whose ranks take part
    tensor_dim: int | None  #: that is gathered, scattered or sliced; None for an all-reduce
    nbytes: int = 0  #: received by all ranks of the mesh; an all-reduce counts twice
    scatter_dim: int | None = None  #: of an all-to-all, which gathers ``tensor_dim``

    @property
    def communicates(self) -> bool:
        return self.kind != "slice"

    def after(self, placements: Placements) -> Placements:
        """Return the placements that the step leaves behind."""
        split = self.tensor_dim if self.kind in ("reduce_scatter", "slice") else self.scatter_dim
        left = Replicate() if split is None else Shard(split)
        return with_placement(placements, self.mesh_dim, left)

    def seconds(self, profile: Profile, mesh_shape: Sequence[int]) -> float:
        """Return what the step alone takes on a machine."""
        ranks = mesh_shape[self.mesh_dim]
        if not self.communicates or ranks == 1:
            return 0.0
        passes = 2 if self.kind == "all_reduce" else 1
        whole = self.nbytes / prod(mesh_shape) / passes * ranks / (ranks - 1)
        stride = prod(mesh_shape[self.mesh_dim + 1 :])
        if self.kind == "all_to_all":
            return all_to_all_seconds(profile, whole, ranks, stride=stride)
        return collective_seconds(profile, whole, ranks, stride=stride, passes=passes)

    def __str__(self) -> str:
        name = self.kind.replace("_", "-")
        dim = "" if self.tensor_dim is None else f" dim {self.tensor_dim}"
        dim += "" if self.scatter_dim is None else f" for dim {self.scatter_dim}"
        return f"{name} {self.operand}{dim} over mesh dim {self.mesh_dim}"


@dataclass(frozen=True, kw_only=True)
class MatmulPlan:
    """One way to compute a `MatmulProblem`. ``strategy`` is what each mesh dim splits: "M", "N",
    "K"; "none": its ranks all compute the same; "sum_x", "sum_w": each multiplies its addend of the
    Partial x or w. ``nbytes`` are those that all ranks of the mesh receive, ``flops`` those of
    all."""

    strategy: str
    before: tuple[Step, ...]  #: on x and w
    fused: Step | None  #: that is one op with the product
    after: tuple[Step, ...]  #: on the result
    x: Placements  #: of the local product's operands, after a ``fused`` gather
    w: Placements
    result: Placements  #: of its result, after a ``fused`` reduction
    out: Placements
    nbytes: int
    flops: int

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all steps, in order."""
        return (*self.before, *([self.fused] if self.fused else []), *self.after)

    @property
    def moves_result(self) -> bool:
        """Return whether a step moves the product's result."""
        return bool(self.after) or (self.fused is not None and self.fused.operand == "out")

    @property
    def cost(self) -> tuple[int, int, int]:
        """Return what decides between plans without a machine."""
        return self.nbytes, self.flops, len(self.steps)

    def __str__(self) -> str:
        texts = [str(step) for step in self.before]
        if self.fused is None:
            texts.append("matmul")
        elif self.fused.operand == "out":
            texts.append(f"[matmul + {self.fused}]")
        else:
            texts.append(f"[{self.fused} + matmul]")
        return "; ".join(texts + [str(step) for step in self.after])


# The plans of a problem.


def steps_from(
    operand: str,
    shape: tuple[int, ...],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    itemsize: int,
    partial_itemsize: int,
) -> list[Step]:
    """Return every step that can be taken. An element has ``itemsize`` bytes, or
    ``partial_itemsize`` as long as the tensor is Partial anywhere.

    A mesh dim can gather or split a tensor dim only if no later mesh dim splits it: mesh dims
    split from left to right, so the later one's shards are shards of this one's.
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
            others = [dim for dim in free if dim != placement.dim]
            changes = [("all_gather", placement.dim, None)]
            changes += [("all_to_all", placement.dim, dim) for dim in others]
        # The ranks along the mesh dim hold the whole once, together, in the size before the step.
        whole = held_elements(shape, with_placement(placements, mesh_dim, Shard(0)), mesh_shape)
        before = partial_itemsize if Partial() in placements else itemsize
        for kind, dim, scatter_dim in changes:
            step = Step(
                kind=kind,
                operand=operand,
                mesh_dim=mesh_dim,
                tensor_dim=dim,
                scatter_dim=scatter_dim,
            )
            if scatter_dim is not None:
                moved = exchanged_elements(shape, placements, mesh_shape, mesh_dim, scatter_dim)
            else:
                moved = whole * (mesh_shape[mesh_dim] - 1) * step.communicates
            each = before
            if kind == "all_reduce":
                each += partial_itemsize if Partial() in step.after(placements) else itemsize
            steps.append(replace(step, nbytes=moved * each))
    return steps


@functools.lru_cache(maxsize=4096)
def _routes(
    operand: str,
    shape: tuple[int, int],
    start: Placements,
    mesh_shape: tuple[int, ...],
    itemsize: int,
    partial_itemsize: int,
) -> Mapping[Placements, tuple[Step, ...]]:
    """Find the steps that move the fewest bytes from ``start`` to each placement that can be
    reached; among these the fewest steps."""
    order = itertools.count()  # placements do not compare
    queue: list[tuple[int, int, int, Placements, tuple[Step, ...]]] = [(0, 0, 0, start, ())]
    found: dict[Placements, tuple[Step, ...]] = {}
    while queue:
        nbytes, count, _, placements, route = heapq.heappop(queue)
        if placements in found:
            continue
        found[placements] = route
        for step in steps_from(operand, shape, placements, mesh_shape, itemsize, partial_itemsize):
            entry = (nbytes + step.nbytes, count + 1, next(order))
            heapq.heappush(queue, (*entry, step.after(placements), (*route, step)))
    return MappingProxyType(found)


def _fusable(step: Step) -> bool:
    """Return whether an op does the step and the product: the ops gather rows of their left
    operand, or of w^T by ``w^T x^T``, but not the dim that the product sums over."""
    if step.operand == "out":
        return step.kind in ("reduce_scatter", "all_reduce")
    return step.kind == "all_gather" and step.tensor_dim == "xw".index(step.operand)


def _plan(
    problem: MatmulProblem, strategy: tuple[str, ...], routes: Sequence[tuple[Step, ...]]
) -> MatmulPlan:
    """Make the plan of a strategy with the steps on x, on w and on the result."""
    x_route, w_route, out_route = routes
    candidates = [*x_route[-1:], *w_route[-1:], *out_route[:1]]
    fusable = [step for step in candidates if step.nbytes and _fusable(step)]
    fused = max(fusable, key=lambda step: step.nbytes, default=None)
    x, w, result = _placements_of(strategy)
    if fused is not None and fused.operand == "out":
        result = fused.after(result)
    after = tuple(step for step in out_route if step is not fused)
    sizes = zip(problem.mesh_shape, strategy, strict=True)
    copies = prod(size for size, split in sizes if split not in ("M", "N", "K"))
    return MatmulPlan(
        strategy=",".join(strategy),
        before=tuple(step for step in (*x_route, *w_route) if step is not fused),
        fused=fused,
        after=after,
        x=x,
        w=w,
        result=result,
        out=functools.reduce(lambda placements, step: step.after(placements), after, result),
        nbytes=sum(step.nbytes for route in routes for step in route),
        flops=2 * problem.m * problem.k * problem.n * copies,
    )


def _placements_of(strategy: Sequence[str]) -> tuple[Placements, Placements, Placements]:
    """Return where x, w and the local product's result lie."""
    x, w, out = zip(*(_SPLITS[split] for split in strategy), strict=True)
    return x, w, out


@functools.lru_cache(maxsize=1024)
def plans_for(problem: MatmulProblem) -> tuple[MatmulPlan, ...]:
    """Make one plan for each strategy that can give the result, the cheapest first: the fewest
    bytes, then the fewest flops, then the fewest steps."""

    def routes(operand: str, start: Placements) -> Mapping[Placements, tuple[Step, ...]]:
        shape, mesh = problem.shape(operand), problem.mesh_shape
        partial = problem.itemsize_of(operand, (Partial(),))
        return _routes(operand, shape, start, mesh, problem.itemsize, partial)

    from_x, from_w = routes("x", problem.x), routes("w", problem.w)
    plans = []
    for strategy in itertools.product(_SPLITS, repeat=len(problem.mesh_shape)):
        x, w, out = _placements_of(strategy)
        if x not in from_x or w not in from_w:
            continue
        from_out = routes("out", out)
        targets = [problem.out] if problem.out else [t for t in from_out if Partial() not in t]
        ways = [(from_x[x], from_w[w], from_out[t]) for t in targets if t in from_out]
        if ways:
            made = (_plan(problem, strategy, way) for way in ways)
            plans.append(min(made, key=lambda plan: plan.cost))
    return tuple(sorted(plans, key=lambda plan: plan.cost))


# What they cost on a machine.


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a plan costs the rank with the largest shards."""

    seconds: float
    product: float  #: of these, the local product alone
    communication: float  #: seconds of all collectives alone
    memory: int  #: peak bytes of operands, temporaries and results

    @property
    def exposed(self) -> float:
        """Return the seconds in which the rank does not multiply."""
        return self.seconds - self.product

    def fits(self, profile: Profile) -> bool:
        """Return whether the device's memory, if its size is known, is enough."""
        return not 0 < profile.memory < self.memory


def estimate(plan: MatmulPlan, problem: MatmulProblem, profile: Profile) -> Estimate:
    """Estimate what a plan costs on a machine."""
    mesh = problem.mesh_shape
    (m, k), n = problem.largest("x", plan.x), problem.largest("w", plan.w)[1]
    product = matmul_seconds(profile, m, k, n, problem.itemsize)
    seconds = {step: step.seconds(profile, mesh) for step in plan.steps}
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


def _peak_memory(plan: MatmulPlan, problem: MatmulProblem) -> int:
    """Estimate the peak. The operands are there throughout, each step's input until the step ends,
    and what the product multiplies until it is done. A Partial result that no step moves is in the
    operands' dtype from the product on."""

    def nbytes(operand: str, placements: Placements) -> int:
        elements = prod(problem.largest(operand, placements))
        if operand == "out" and not plan.moves_result:
            return elements * problem.itemsize
        return elements * problem.itemsize_of(operand, placements)

    at, made = {"x": problem.x, "w": problem.w, "out": plan.result}, list[tuple[str, Placements]]()
    operands = sum(nbytes(name, at[name]) for name in "xw")
    fused = [plan.fused] if plan.fused else []
    for step in (*plan.before, *(step for step in fused if step.operand != "out")):
        at[step.operand] = step.after(at[step.operand])
        if step.communicates:  # a slice is a view
            made.append((step.operand, at[step.operand]))
    reductions = [step for step in fused if step.operand == "out"]  # which follow the product
    made += [("out", with_placement(at["out"], step.mesh_dim, Partial())) for step in reductions]
    made.append(("out", at["out"]))
    for step in plan.after:
        at["out"] = step.after(at["out"])
        made.append(("out", at["out"]))
    peak, temporary = operands, dict[str, int]()
    for operand, placements in made:
        size = nbytes(operand, placements)
        peak = max(peak, operands + sum(temporary.values()) + size)
        temporary = {"out": size} if operand == "out" else {**temporary, operand: size}
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


def choose(problem: MatmulProblem, strategy: str, profile: Profile | None = None) -> MatmulPlan:
    """Return the plan of ``strategy``. For "auto": the fastest plan by ``profile``, or without a
    profile the one that moves the fewest bytes.

    Raises:
        ValueError: there is no such strategy, or it cannot give the result.
    """
    plans: Sequence[MatmulPlan] = plans_for(problem)
    if profile is not None:
        plans = [plan for plan, _ in ranked(problem, profile)]
    for plan in plans:
        if strategy in ("auto", plan.strategy):
            return plan
    out = placements_text(problem.out) if problem.out else "any"
    raise ValueError(
        f"strategy is {strategy!r}, which is not available for {problem} -> {out}; "
        f"choose from 'auto', {', '.join(repr(plan.strategy) for plan in plans)}"
    )
