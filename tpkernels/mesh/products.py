"""``x @ w`` of DTensors, by the cheapest plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import methodcaller
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from tpkernels import ops
from tpkernels.common import dtypes
from tpkernels.common.shards import chunk_sizes
from tpkernels.mesh.agreement import Agreement, machine_of
from tpkernels.mesh.layout import Placements, checked_placements, local_shape, placements_text
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem, Step, choose, ranked
from tpkernels.ops import validation
from tpkernels.ops.autograd import algorithm_like, matmul
from tpkernels.planning.algorithms import ALGORITHMS, check_algorithm
from tpkernels.torch_private import dtensor_spec, spec_of

_MOST_MESH_DIMS = 2

_Move: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_Multiply: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.compiler.disable(reason="tpkernels plans a sharded matmul outside of graphs")
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
    call = _checked_call(spec_of(x), spec_of(w), out, strategy, wire_dtype, algorithm)
    return _run(call, x, w, x.device_mesh)


def plans(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> tuple[MatmulPlan, ...]:
    """Return all plans of `sharded_matmul` for these operands, the cheapest first. Local: before
    the first product on a mesh, the rates are those of this rank's machine."""
    _check_operands(x, w)
    problem = _problem_of(spec_of(x), spec_of(w), out_placements, wire_dtype)
    return tuple(plan for plan, _ in ranked(problem, machine_of(x.device_mesh)))


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
    _check_operands(x, w)
    problem = _problem_of(spec_of(x), spec_of(w), out_placements, wire_dtype)
    machine = machine_of(x.device_mesh)
    table = [("strategy", "result", "ms", "bytes", "flops", "steps")]
    for plan, costs in ranked(problem, machine):
        numbers = (f"{1e3 * costs.seconds:.3g}", str(plan.nbytes), str(plan.flops))
        table.append((plan.strategy, placements_text(plan.out), *numbers, str(plan)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"{problem}, {machine.title}"]
    for row in table:
        cells = [f"{text:{'<' if i < 2 else '>'}{widths[i]}}" for i, text in enumerate(row[:5])]
        lines.append("  ".join([*cells, row[5]]))
    return "\n".join(lines)


def _check_operands(x: DTensor, w: DTensor) -> None:
    """Check what the specs do not tell."""
    for name, operand in (("x", x), ("w", w)):
        if not isinstance(operand, DTensor):
            raise TypeError(
                f"{name} is a {type(operand).__name__}, not a DTensor; create a DTensor with "
                "torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            )
        if operand.device.type != operand.device_mesh.device_type:
            raise ValueError(
                f"{name} is on {operand.device} but its mesh is on "
                f"{operand.device_mesh.device_type}; move its local shards to the device of the "
                "mesh, and create the DTensor again"
            )


def _problem_of(
    x: dtensor_spec.DTensorSpec,
    w: dtensor_spec.DTensorSpec,
    out_placements: Sequence[Placement] | None,
    wire_dtype: torch.dtype | None,
) -> MatmulProblem:
    """Check operands by their specs, which are the same on all ranks, and return the problem.

    Raises:
        TypeError, ValueError: invalid, or not on one mesh.
        NotImplementedError: three mesh dims or more, a dtype, or a placement.
    """
    mesh, dims = x.mesh, x.mesh.ndim
    for name, spec in (("x", x), ("w", w)):
        if spec.ndim != 2:
            raise ValueError(f"{name} has shape {list(spec.shape)}; it must be a matrix")
    if w.mesh != mesh:
        raise ValueError(f"x is on {mesh} and w on {w.mesh}; both must be on the same mesh")
    if dims > _MOST_MESH_DIMS:
        raise NotImplementedError(
            f"the mesh has {dims} dims {mesh.shape}; meshes of one and two dims are supported"
        )
    x_dtype, w_dtype = _dtype_of(x), _dtype_of(w)
    for name, dtype in (("x", x_dtype), ("w", w_dtype)):
        dtypes.check_supported(dtype, name)
    if x_dtype != w_dtype:
        raise TypeError(
            f"x is {dtypes.name(x_dtype)} but w is {dtypes.name(w_dtype)}; they must be equal"
        )
    if x.shape[1] != w.shape[0]:
        raise ValueError(
            f"x has shape {list(x.shape)} and w has shape {list(w.shape)}; x must have as many "
            "columns as w has rows"
        )
    return MatmulProblem(
        m=x.shape[0],
        k=x.shape[1],
        n=w.shape[1],
        mesh_shape=tuple(mesh.shape),
        x=checked_placements(x.placements, 2, dims, "x"),
        w=checked_placements(w.placements, 2, dims, "w"),
        out=None
        if out_placements is None
        else checked_placements(out_placements, 2, dims, "out_placements"),
        itemsize=x_dtype.itemsize,
        partial_itemsize=validation.wire_dtype(wire_dtype, x_dtype).itemsize,
    )


def _dtype_of(spec: dtensor_spec.DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None  # DTensors have it
    return spec.tensor_meta.dtype


@dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """What the ranks of a mesh must agree on in one product."""

    problem: MatmulProblem
    dtype: torch.dtype
    strategy: str
    wire_dtype: torch.dtype  #: of the result as long as it is Partial and will be summed
    algorithm: str

    def text(self, mesh: str) -> str:
        """Describe the product for errors, and for the comparison with other ranks'."""
        out = "any" if self.problem.out is None else placements_text(self.problem.out)
        return (
            f"sharded_matmul({self.problem.operands} -> {out}, {dtypes.name(self.dtype)}, partials "
            f"in {dtypes.name(self.wire_dtype)}, strategy '{self.strategy}', algorithm "
            f"'{self.algorithm}', on {mesh})"
        )


@functools.lru_cache(maxsize=1024)
def _checked_call(
    x: dtensor_spec.DTensorSpec,
    w: dtensor_spec.DTensorSpec,
    out: Placements | None,
    strategy: str,
    wire_dtype: torch.dtype | None,
    algorithm: str,
) -> MatmulCall:
    """Check the arguments and return the call. It holds no mesh: the cache compares specs by value,
    and equal meshes may have different groups."""
    problem = _problem_of(x, w, out, wire_dtype)
    choose(problem, strategy)  # raises if there is no such strategy
    if algorithm != "auto":
        check_algorithm(algorithm)
    if x.mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not in the mesh {x.mesh}")
    dtype = _dtype_of(x)
    return MatmulCall(
        problem=problem,
        dtype=dtype,
        strategy=strategy,
        wire_dtype=wire_dtype or dtype,
        algorithm=algorithm,
    )


def _run(call: MatmulCall, x: DTensor, w: DTensor, mesh: DeviceMesh) -> DTensor:
    """Compute the product by the plan of all ranks, which is made in the first call."""
    agreed = Agreement.on(mesh)
    product: MatmulExecutor | None = agreed.products.get(call)
    text = call.text(agreed.text) if product is None else product.text
    if product is None:
        agreed.compare(text, machine_of(mesh))
    with agreed.break_on_error(text):
        if product is None:
            plan = choose(call.problem, call.strategy, agreed.machine)
            product = MatmulExecutor(call, plan, agreed, mesh.get_coordinate() or (), text)
            agreed.add(call, product)
        result: DTensor = _ShardedMatmul.apply(x, w, product, mesh)
    return result


class MatmulExecutor:
    """Runs an agreed product on this rank: its plan, and this rank's operations in it.

    Shards may be empty. Ranks of one group agree on whether there is anything to send, because
    their shards differ only along the dim that a step moves.
    """

    def __init__(
        self,
        call: MatmulCall,
        plan: MatmulPlan,
        agreed: Agreement,
        coordinate: Sequence[int],
        text: str,
    ) -> None:
        self.call, self.plan, self.text = call, plan, text
        self._names, self._device, self._coordinate = agreed.names, agreed.device, coordinate
        problem = call.problem
        self.shape, self.stride = torch.Size((problem.m, problem.n)), (problem.n, 1)
        self._x = self._moves("x", problem.x, plan.before)
        self._w = self._moves("w", problem.w, plan.before)
        self._multiply = self._multiplication()
        self._after = self._moves("out", plan.result, plan.after)

    def run(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Compute this rank's part of the result, contiguous, from its parts of the operands."""
        for move in self._x:
            x = move(x)
        for move in self._w:
            w = move(w)
        autocasts = torch.is_autocast_enabled(self._device)  # torch.autocast costs 3 us to enter
        # No autocast: the result's dtype must not depend on the plan.
        with torch.autocast(self._device, enabled=False) if autocasts else contextlib.nullcontext():
            y = self._multiply(x, w)
        for move in self._after:
            y = move(y)
        return y.to(self.call.dtype).contiguous()  # rounded only now if it stays Partial

    def _moves(self, operand: str, placements: Placements, steps: Sequence[Step]) -> list[_Move]:
        """Return one function per step on ``operand`` that does something. The result is in the
        wire dtype while it is Partial."""
        moves = []
        for step in steps:
            if step.operand == operand:
                after, out_dtype = step.after(placements), None
                if operand == "out":
                    out_dtype = self.call.wire_dtype if Partial() in after else self.call.dtype
                if self.call.problem.mesh_shape[step.mesh_dim] > 1:
                    moves.append(self._move(step, placements, out_dtype))
                elif out_dtype is not None:
                    moves.append(methodcaller("to", out_dtype))
                placements = after
        return moves

    def _move(self, step: Step, placements: Placements, out_dtype: torch.dtype | None) -> _Move:
        algorithm = algorithm_like(self.call.algorithm, has_matmul=False, last_dim=False)
        options: dict[str, Any] = {"group": self._names[step.mesh_dim], "algorithm": algorithm}
        if step.tensor_dim is None:
            return functools.partial(ops.all_reduce, out_dtype=out_dtype, **options)
        dim, sizes = step.tensor_dim, self._sizes(step, placements, step.tensor_dim)
        if step.kind == "slice":
            rank = self._coordinate[step.mesh_dim]
            return methodcaller("narrow", dim, sum(sizes[:rank]), sizes[rank])
        if step.scatter_dim is not None:
            lacks = {} if algorithm == "auto" else ALGORITHMS[algorithm].lacks
            if "all_to_all" in lacks.get(self._device, ()):
                options["algorithm"] = "auto"
            return functools.partial(
                ops.all_to_all,
                gather_dim=dim,
                scatter_dim=step.scatter_dim,
                gather_sizes=sizes,
                scatter_sizes=self._sizes(step, placements, step.scatter_dim),
                **options,
            )
        options["shard_sizes"] = sizes
        if step.kind == "all_gather":
            return functools.partial(ops.all_gather, gather_dim=dim, **options)
        return functools.partial(
            ops.reduce_scatter, scatter_dim=dim, out_dtype=out_dtype, **options
        )

    def _multiplication(self) -> _Multiply:
        """Return the local product, with the step that is one op with it."""
        call, plan, step = self.call, self.plan, self.plan.fused
        dtype = call.wire_dtype if plan.moves_result and Partial() in plan.result else call.dtype
        if step is None:
            return functools.partial(_local, dtype=dtype)
        options: dict[str, Any] = {
            "group": self._names[step.mesh_dim],
            "algorithm": call.algorithm,
            "out_dtype": dtype,
        }
        if step.operand == "out":
            options["wire_dtype"] = call.wire_dtype
            if step.tensor_dim is None:
                return functools.partial(_reduced, op=ops.matmul_all_reduce, options=options)
            sizes = self._sizes(step, plan.result, step.tensor_dim)
            options |= {"scatter_dim": step.tensor_dim, "shard_sizes": sizes}
            shard = step.tensor_dim, sizes[self._coordinate[step.mesh_dim]]
            return functools.partial(
                _reduced, op=ops.matmul_reduce_scatter, options=options, shard=shard
            )
        if step.operand == "x":
            options["shard_sizes"] = self._sizes(step, plan.x, 0)
            return functools.partial(_gathered, options=options)
        options["shard_sizes"] = self._sizes(step, plan.w, 1)  # x @ concat_r(w_r)
        return lambda x, w: _gathered(w.t(), x.t(), options).t()

    def _sizes(self, step: Step, placements: Placements, dim: int) -> tuple[int, ...]:
        """Return the sizes of the shards along ``dim`` in the step's group. ``placements`` may be
        those before or after the step: only earlier mesh dims matter."""
        problem, at = self.call.problem, step.mesh_dim
        shape, mesh = problem.shape(step.operand), problem.mesh_shape
        length = local_shape(shape, placements[:at], mesh, self._coordinate)[dim]
        return tuple(chunk_sizes(length, mesh[at]))


def _local(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != x.dtype and x.numel() and w.numel():
        return matmul(x, w, dtype)
    return torch.matmul(x, w).to(dtype)


def _gathered(x: torch.Tensor, w: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Compute ``concat_r(x_r) @ w``. The ops reject a w without columns. This rank alone may have
    one: it is padded to one column, which is cut off again."""
    rows, columns = sum(options["shard_sizes"]), w.shape[1]
    if not rows * x.shape[1]:
        return x.new_zeros(rows, columns, dtype=options["out_dtype"])
    if not columns:
        w = w.new_zeros(w.shape[0], 1)
    y: torch.Tensor = ops.all_gather_matmul(x, w, **options)
    return y[:, :columns]


def _reduced(
    x: torch.Tensor,
    w: torch.Tensor,
    op: Callable[..., torch.Tensor],
    options: dict[str, Any],
    shard: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Reduce ``x @ w``. The ops reject K = 0. This rank may have it, perhaps alone: x and w are
    padded with zeros to K = 1. ``shard``: the scattered dim, and this rank's part of it."""
    whole = [x.shape[0], w.shape[1]]
    if not prod(whole):
        if shard is not None:
            whole[shard[0]] = shard[1]
        return x.new_empty(whole, dtype=options["out_dtype"])
    if not x.shape[1]:
        x, w = x.new_zeros(x.shape[0], 1), w.new_zeros(1, w.shape[1])
    return op(x, w, **options)


class _ShardedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: DTensor, w: DTensor, product: MatmulExecutor, mesh: DeviceMesh
    ) -> DTensor:
        ctx.save_for_backward(x, w)
        ctx.call, ctx.mesh = product.call, mesh
        y = product.run(x.to_local(), w.to_local())
        # As DTensor's own autograd functions do it. from_local would be one more of them and take
        # 24 us; the whole call takes 32 to 38. AMD EPYC (family 25 model 17), 1 thread, 2026-11-22.
        meta = dtensor_spec.TensorMeta(product.shape, product.stride, y.dtype)
        spec = dtensor_spec.DTensorSpec(mesh, product.plan.out, meta)
        return DTensor(y, spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, DTensor | None, None, None]:
        x, w = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _gradient(grad, w.t(), x.placements, ctx)
        if ctx.needs_input_grad[1]:
            grad_w = _gradient(x.t(), grad, w.placements, ctx)
        return grad_x, grad_w, None, None


def _gradient(a: DTensor, b: DTensor, operand_placements: Placements, ctx: Any) -> DTensor:
    """Compute one operand's gradient, ``a @ b``, with the operand's placements, but Replicate for
    Partial: each addend of a Partial operand has the gradient of the sum.

    It runs on the forward's mesh: DTensor caches meshes by value, so a transposed DTensor may carry
    an equal mesh whose groups were destroyed.
    """
    out = tuple(Replicate() if isinstance(one, Partial) else one for one in operand_placements)
    problem = _problem_of(spec_of(a), spec_of(b), out, ctx.call.wire_dtype)
    call = replace(ctx.call, problem=problem, dtype=a.dtype, strategy="auto")
    return _run(call, a, b, ctx.mesh)
