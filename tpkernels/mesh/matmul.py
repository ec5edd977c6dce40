"""``x @ w`` of DTensors, by the cheapest plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tpkernels import dtypes, validation
from tpkernels.mesh import estimates, execution
from tpkernels.mesh.agreement import (
    Known,
    agreed_machine,
    disagreement,
    in_step,
    known_machine,
    known_on,
    mesh_text,
)
from tpkernels.mesh.layout import Placements, checked, text_of
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem, choose
from tpkernels.planning.algorithms import check_algorithm

_MOST_MESH_DIMS = 2


@torch.compiler.disable(reason="tpkernels plans a sharded product outside of graphs")
def sharded_matmul(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None = None,
    strategy: str = "auto",
    *,
    wire_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> DTensor:
    """Compute ``x @ w`` on a mesh of one or two dims, wherever the operands lie and the result is
    wanted.

    Args:
        x: [M, K], each mesh dim Shard(0), Shard(1), Replicate() or Partial().
        w: [K, N], the same; K may be sharded otherwise than in ``x``.
        out_placements: of the result, one for each mesh dim; Partial() leaves the sum to the
            caller. None: those of the cheapest plan whose result is not Partial.
        strategy: what each mesh dim splits, such as "M" or "M,K" (see `plans`), or "auto": the
            plan that takes the least time by the cost model; among these the one that moves the
            fewest bytes. The rates are those of the machine of the mesh's first rank, which the
            ranks of a mesh share in their first product.
        wire_dtype: dtype in which partial results travel; ``x``'s (default) or float32. With
            float32 a sum over several mesh dims is rounded once.
        algorithm: of the ops that the plan is made of.

    Returns:
        The product, a DTensor with the given placements. Shards are DTensor's: those of
        ``torch.chunk``, of which the last may be smaller or empty.

    The gradients are sharded products again, planned in the same way. They have the placements of
    ``x`` and ``w``; that of a Partial operand is replicated.

    Raises:
        TypeError, ValueError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: three mesh dims or more, a dtype, an
            algorithm, or a placement.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    _check_operands(x, w)
    out = None if out_placements is None else tuple(out_placements)
    problem = _checked_call(x._spec, w._spec, out, strategy, wire_dtype)
    if algorithm != "auto":
        check_algorithm(algorithm)
    mesh = x.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh {mesh}")
    place = execution.Place(
        mesh=mesh,
        coordinate=tuple(coordinate),
        algorithm=algorithm,
        wire_dtype=wire_dtype or x.dtype,
    )
    return _run(Product(problem=problem, dtype=x.dtype, strategy=strategy), x, w, place)


def plans(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> tuple[MatmulPlan, ...]:
    """Return all plans of `sharded_matmul` for these operands, the cheapest first. Local: before
    the first product on a mesh, the rates are those of this rank's machine."""
    problem = _problem(x, w, out_placements, wire_dtype)
    return tuple(plan for plan, _ in estimates.ranked(problem, known_machine(x.device_mesh)))


def explain(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> str:
    """Show the plans as a table: strategy, result, predicted ms, bytes received by all ranks
    together, flops of all ranks together, and the steps. Steps in brackets are one op with the
    product. Local, as `plans`."""
    problem = _problem(x, w, out_placements, wire_dtype)
    machine = known_machine(x.device_mesh)
    mesh = " x ".join(map(str, problem.mesh_shape))
    header = (
        f"[{problem.m}, {problem.k}] {text_of(problem.x)} @ [{problem.k}, {problem.n}] "
        f"{text_of(problem.w)} on a mesh of {mesh}, {machine.title}"
    )
    table = [("strategy", "result", "ms", "bytes", "flops", "steps")]
    for plan, costs in estimates.ranked(problem, machine):
        numbers = (f"{1e3 * costs.seconds:.3g}", str(plan.nbytes), str(plan.flops))
        table.append((plan.strategy, text_of(plan.out), *numbers, str(plan)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [f"{text:{'<' if i < 2 else '>'}{widths[i]}}" for i, text in enumerate(row[:5])]
            + [row[5]]
        )
        for row in table
    ]
    return "\n".join([header, *lines])


def _problem(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None,
    wire_dtype: torch.dtype | None,
) -> MatmulProblem:
    """Check the operands, and return the problem."""
    _check_operands(x, w)
    return _checked_problem(x._spec, w._spec, out_placements, wire_dtype)


def _check_operands(x: DTensor, w: DTensor) -> None:
    """Check what the specs do not tell."""
    for name, operand in (("x", x), ("w", w)):
        if not isinstance(operand, DTensor):
            raise TypeError(
                f"{name} is a {type(operand).__name__}, not a DTensor; make it one with "
                "torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            )
        if operand.device.type != operand.device_mesh.device_type:
            raise ValueError(
                f"{name} is on {operand.device} but its mesh on {operand.device_mesh.device_type}; "
                "move its shards there, and make it a DTensor again"
            )


def _checked_problem(
    x: DTensorSpec,
    w: DTensorSpec,
    out_placements: Sequence[Placement] | None,
    wire_dtype: torch.dtype | None,
) -> MatmulProblem:
    """Check operands by their specs, which are the same on all ranks, and return the problem.

    Raises:
        TypeError, ValueError: invalid, or not on one mesh.
        NotImplementedError: three mesh dims or more, a dtype, or a placement.
    """
    for name, spec in (("x", x), ("w", w)):
        if spec.ndim != 2:
            raise ValueError(f"{name} has shape {list(spec.shape)}; it must be a matrix")
    mesh = x.mesh
    if w.mesh != mesh:
        raise ValueError(f"x is on {mesh} and w on {w.mesh}; both must be on the same mesh")
    if mesh.ndim > _MOST_MESH_DIMS:
        raise NotImplementedError(
            f"the mesh has {mesh.ndim} dims {mesh.shape}; meshes of one and two dims are supported"
        )
    assert x.tensor_meta is not None
    assert w.tensor_meta is not None
    x_dtype, w_dtype = x.tensor_meta.dtype, w.tensor_meta.dtype
    for name, dtype in (("x", x_dtype), ("w", w_dtype)):
        dtypes.check_supported(dtype, name)
    if x_dtype != w_dtype:
        raise TypeError(
            f"x is {dtypes.name(x_dtype)} but w is {dtypes.name(w_dtype)}; they must be equal"
        )
    if x.shape[1] != w.shape[0]:
        raise ValueError(
            f"x has shape {list(x.shape)} and w {list(w.shape)}: x's columns must be w's rows"
        )
    wire = validation.wire_dtype(wire_dtype, x_dtype)
    return _problem_of(x, w, out_placements, x_dtype, wire)


def _problem_of(
    x: DTensorSpec,
    w: DTensorSpec,
    out_placements: Sequence[Placement] | None,
    dtype: torch.dtype,
    wire: torch.dtype,
) -> MatmulProblem:
    """Return the problem of operands that have been checked."""
    dims = x.mesh.ndim
    return MatmulProblem(
        m=x.shape[0],
        k=x.shape[1],
        n=w.shape[1],
        mesh_shape=tuple(x.mesh.shape),
        x=checked(x.placements, 2, dims, "x"),
        w=checked(w.placements, 2, dims, "w"),
        out=None if out_placements is None else checked(out_placements, 2, dims, "out_placements"),
        itemsize=dtype.itemsize,
        partial_itemsize=wire.itemsize,
    )


@dataclass(frozen=True, kw_only=True)
class Product:
    """What a plan is made for, the same on all ranks of a mesh."""

    problem: MatmulProblem
    dtype: torch.dtype
    strategy: str

    def text(self, place: execution.Place) -> str:
        """Describe the product for errors, and for the comparison with other ranks'."""
        one = self.problem
        out = "any" if one.out is None else text_of(one.out)
        return (
            f"sharded_matmul([{one.m}, {one.k}] {text_of(one.x)} @ [{one.k}, {one.n}] "
            f"{text_of(one.w)} -> {out}, {dtypes.name(self.dtype)}, partials in "
            f"{dtypes.name(place.wire_dtype)}, strategy '{self.strategy}', algorithm "
            f"'{place.algorithm}', on {mesh_text(place.mesh)})"
        )


def _run(product: Product, x: DTensor, w: DTensor, place: execution.Place) -> DTensor:
    """Compute the product by the plan of all ranks, which is made in the first call."""
    known: Known[tuple[MatmulPlan, str]] = known_on(place.mesh)
    key = product, place.wire_dtype, place.algorithm
    planned, text = known.get(key), ""
    if planned is None:
        text = product.text(place)
        with in_step(place.mesh):
            different = disagreement(text, place.mesh)
        if different:
            raise different
    with in_step(place.mesh):
        if planned is None:
            machine = agreed_machine(place.mesh)
            plan = estimates.choose(product.problem, product.strategy, machine)
            planned = known.add(key, (plan, text))
            known.history.attach()
        plan, text = planned
        if plan.nbytes:  # what communicates nothing need not be made by all ranks
            known.history.begin(text)
        try:
            result: DTensor = _ShardedMatmul.apply(x, w, plan, product, place)
        finally:
            known.history.end()
    return result


@functools.lru_cache(maxsize=1024)
def _checked_call(
    x: DTensorSpec,
    w: DTensorSpec,
    out: Placements | None,
    strategy: str,
    wire_dtype: torch.dtype | None,
) -> MatmulProblem:
    """Without the mesh: specs are equal for equal meshes, which may have other groups."""
    problem = _checked_problem(x, w, out, wire_dtype)
    choose(problem, strategy)  # raises if there is no such strategy
    return problem


class _ShardedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: DTensor, w: DTensor, plan: MatmulPlan, product: Product, place: execution.Place
    ) -> DTensor:
        ctx.save_for_backward(x, w)
        ctx.place = place
        problem = product.problem
        y = execution.run(plan, problem, x.to_local(), w.to_local(), place)
        # As DTensor's own autograd functions do it. from_local would be one more of them and take
        # 24 us; the whole call takes 32 to 38. AMD EPYC (family 25 model 17), 1 thread, 2026-11-22.
        meta = TensorMeta(torch.Size((problem.m, problem.n)), (problem.n, 1), y.dtype)
        return DTensor(y, DTensorSpec(place.mesh, plan.out, meta), requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        x, w = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _gradient(grad, w.t(), x.placements, ctx.place)
        if ctx.needs_input_grad[1]:
            grad_w = _gradient(x.t(), grad, w.placements, ctx.place)
        return grad_x, grad_w, None, None, None


def _gradient(a: DTensor, b: DTensor, of: Placements, place: execution.Place) -> DTensor:
    """Compute a product of the backward, with the placements of the gradient of an operand that has
    those ``of``. Each addend of a Partial operand has the gradient of the sum.

    The groups are those of the forward: DTensor keeps meshes in caches by value, and a transposed
    DTensor may be on an equal mesh whose groups have ended.
    """
    out = tuple(Replicate() if isinstance(one, Partial) else one for one in of)
    problem = _problem_of(a._spec, b._spec, out, a.dtype, place.wire_dtype)
    return _run(Product(problem=problem, dtype=a.dtype, strategy="auto"), a, b, place)
