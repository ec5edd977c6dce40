"""Matmul of DTensors by the cheapest plan."""

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
from tpkernels.mesh.agreement import Agreement, get_profile
from tpkernels.mesh.layout import Placements, check_placements, format_placements, local_shape
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem, Step, choose, sort_plans
from tpkernels.ops import validation
from tpkernels.ops.autograd import compatible_algorithm, matmul
from tpkernels.planning.algorithms import ALGORITHMS, check_algorithm
from tpkernels.torch_private import dtensor_spec, get_dtensor_spec

_MAX_MESH_DIMS = 2

_Move: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_Matmul: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
    """Compute ``x @ w`` on a mesh of one or two dims, for any placements of operands and result.

    Equals ``x.full_tensor() @ w.full_tensor()``, distributed with ``out_placements``.

    Args:
        x: [M, K], with Shard(0), Shard(1), Replicate() or Partial() on each mesh dim.
        w: [K, N], with Shard(0), Shard(1), Replicate() or Partial() on each mesh dim. ``x`` and
            ``w`` may shard K differently.
        out_placements: placements of the result, one per mesh dim. Partial() leaves the reduction
            to the caller. None: the placements of the cheapest plan without Partial.
        strategy: the split on each mesh dim, such as "M" or "M,K" (see `plans`), or "auto": the
            fastest plan by the cost model, with ties broken by bytes. The cost model uses the rates
            of the first rank of the mesh. The ranks exchange them in their first matmul.
        wire_dtype: dtype of communicated partial sums: the dtype of ``x`` (default), or float32.
            With float32, a sum over several mesh dims is rounded once.
        algorithm: algorithm of the ops.

    Returns:
        The result, a DTensor with ``out_placements``. Shards are chunks of ``torch.chunk``, so the
        last shards may be smaller or empty.

    Gradients are sharded matmuls, planned with ``strategy="auto"``. They have the placements of
    ``x`` and ``w``. The gradient of a Partial operand is replicated.

    Raises:
        TypeError, ValueError: invalid arguments. No data was sent.
        NotImplementedError: not supported: three or more mesh dims, a dtype, an algorithm or a
            placement.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    _check_operands(x, w)
    out = None if out_placements is None else tuple(out_placements)
    call = _checked_call(
        get_dtensor_spec(x), get_dtensor_spec(w), out, strategy, wire_dtype, algorithm
    )
    return _run(call, x, w, x.device_mesh)


def plans(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> tuple[MatmulPlan, ...]:
    """Return all plans of `sharded_matmul` for these operands, the cheapest first. Local.

    Before the first matmul on the mesh, the cost model uses the rates of the local machine.
    """
    _check_operands(x, w)
    problem = _make_problem(get_dtensor_spec(x), get_dtensor_spec(w), out_placements, wire_dtype)
    return tuple(plan for plan, _ in sort_plans(problem, get_profile(x.device_mesh)))


def explain(
    x: DTensor,
    w: DTensor,
    out_placements: Sequence[Placement] | None = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> str:
    """Return the plans as a table. Local, as `plans`.

    The columns are the strategy, the placements of the result, the predicted time in ms, the bytes
    that all ranks receive, the flops of all ranks, and the steps. Brackets mark a step that is
    fused with the matmul.
    """
    _check_operands(x, w)
    problem = _make_problem(get_dtensor_spec(x), get_dtensor_spec(w), out_placements, wire_dtype)
    profile = get_profile(x.device_mesh)
    table = [("strategy", "result", "ms", "bytes", "flops", "steps")]
    for plan, estimate in sort_plans(problem, profile):
        numbers = (f"{1e3 * estimate.seconds:.3g}", str(plan.nbytes), str(plan.flops))
        table.append((plan.strategy, format_placements(plan.out), *numbers, str(plan)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"{problem}, {profile.title}"]
    for row in table:
        cells = [f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row[:5])]
        lines.append("  ".join([*cells, row[5]]))
    return "\n".join(lines)


def _check_operands(x: DTensor, w: DTensor) -> None:
    """Check the properties that a DTensor spec does not contain."""
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


def _make_problem(
    x: dtensor_spec.DTensorSpec,
    w: dtensor_spec.DTensorSpec,
    out_placements: Sequence[Placement] | None,
    wire_dtype: torch.dtype | None,
) -> MatmulProblem:
    """Check the operands by their specs, which are equal on all ranks, and return the problem.

    Raises:
        TypeError, ValueError: invalid operands, or operands on different meshes.
        NotImplementedError: three or more mesh dims, a dtype or a placement.
    """
    mesh, dims = x.mesh, x.mesh.ndim
    for name, spec in (("x", x), ("w", w)):
        if spec.ndim != 2:
            raise ValueError(f"{name} has shape {list(spec.shape)}; it must be a matrix")
    if w.mesh != mesh:
        raise ValueError(f"x is on {mesh} and w on {w.mesh}; both must be on the same mesh")
    if dims > _MAX_MESH_DIMS:
        raise NotImplementedError(
            f"the mesh has {dims} dims {mesh.shape}; meshes of one and two dims are supported"
        )
    x_dtype, w_dtype = _get_dtype(x), _get_dtype(w)
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
        x=check_placements(x.placements, 2, dims, "x"),
        w=check_placements(w.placements, 2, dims, "w"),
        out=None
        if out_placements is None
        else check_placements(out_placements, 2, dims, "out_placements"),
        itemsize=x_dtype.itemsize,
        partial_itemsize=validation.wire_dtype(wire_dtype, x_dtype).itemsize,
    )


def _get_dtype(spec: dtensor_spec.DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None  # always set in DTensors
    return spec.tensor_meta.dtype


@dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """Arguments of a sharded matmul that must be equal on all ranks of the mesh."""

    problem: MatmulProblem
    dtype: torch.dtype
    strategy: str
    wire_dtype: torch.dtype  #: dtype of a Partial result that will be reduced
    algorithm: str

    def describe(self, mesh: str) -> str:
        """Describe the matmul, for errors and for the comparison between ranks."""
        out = "any" if self.problem.out is None else format_placements(self.problem.out)
        return (
            f"sharded_matmul({self.problem.operands_text} -> {out}, {dtypes.name(self.dtype)}, "
            f"partials in {dtypes.name(self.wire_dtype)}, strategy '{self.strategy}', algorithm "
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
    """Check the arguments and return the call.

    The call does not contain the mesh. The cache compares specs by value, and equal meshes may have
    different groups.
    """
    problem = _make_problem(x, w, out, wire_dtype)
    choose(problem, strategy)  # raises if the strategy does not exist
    if algorithm != "auto":
        check_algorithm(algorithm)
    if x.mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not in the mesh {x.mesh}")
    dtype = _get_dtype(x)
    return MatmulCall(
        problem=problem,
        dtype=dtype,
        strategy=strategy,
        wire_dtype=wire_dtype or dtype,
        algorithm=algorithm,
    )


def _run(call: MatmulCall, x: DTensor, w: DTensor, mesh: DeviceMesh) -> DTensor:
    """Run a matmul. The first call compares it with all ranks and plans it."""
    agreement = Agreement.for_mesh(mesh)
    executor: MatmulExecutor | None = agreement.executors.get(call)
    description = (
        call.describe(agreement.mesh_description) if executor is None else executor.description
    )
    if executor is None:
        agreement.compare(description, get_profile(mesh))
    with agreement.break_on_error(description):
        if executor is None:
            plan = choose(call.problem, call.strategy, agreement.profile)
            executor = MatmulExecutor(
                call, plan, agreement, mesh.get_coordinate() or (), description
            )
            agreement.add(call, executor)
        result: DTensor = _ShardedMatmul.apply(x, w, executor, mesh)
    return result


class MatmulExecutor:
    """Runs a planned matmul on this rank.

    Shards may be empty. The ranks of a group agree on whether a step sends data, because their
    shards differ only along the dim that the step moves.
    """

    def __init__(
        self,
        call: MatmulCall,
        plan: MatmulPlan,
        agreement: Agreement,
        coordinate: Sequence[int],
        description: str,
    ) -> None:
        self.call, self.plan, self.description = call, plan, description
        self._names, self._device, self._coordinate = agreement.names, agreement.device, coordinate
        problem = call.problem
        self.shape, self.stride = torch.Size((problem.m, problem.n)), (problem.n, 1)
        self._x_moves = self._make_moves("x", problem.x, plan.before)
        self._w_moves = self._make_moves("w", problem.w, plan.before)
        self._run_matmul = self._make_matmul()
        self._out_moves = self._make_moves("out", plan.result, plan.after)

    def run(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return the local shard of the result from the local shards of x and w. Contiguous."""
        for move in self._x_moves:
            x = move(x)
        for move in self._w_moves:
            w = move(w)
        autocasts = torch.is_autocast_enabled(self._device)  # torch.autocast costs 3 us to enter
        # Without autocast, because the result dtype must not depend on the plan.
        with torch.autocast(self._device, enabled=False) if autocasts else contextlib.nullcontext():
            y = self._run_matmul(x, w)
        for move in self._out_moves:
            y = move(y)
        return y.to(self.call.dtype).contiguous()  # a Partial result is rounded here

    def _make_moves(
        self, operand: str, placements: Placements, steps: Sequence[Step]
    ) -> list[_Move]:
        """Return one function for each step on ``operand`` that has an effect.

        A Partial result is in the wire dtype.
        """
        moves = []
        for step in steps:
            if step.operand == operand:
                next_placements, out_dtype = step.after(placements), None
                if operand == "out":
                    out_dtype = (
                        self.call.wire_dtype if Partial() in next_placements else self.call.dtype
                    )
                if self.call.problem.mesh_shape[step.mesh_dim] > 1:
                    moves.append(self._make_move(step, placements, out_dtype))
                elif out_dtype is not None:
                    moves.append(methodcaller("to", out_dtype))
                placements = next_placements
        return moves

    def _make_move(
        self, step: Step, placements: Placements, out_dtype: torch.dtype | None
    ) -> _Move:
        # The requested algorithm, or "auto" if it needs a matmul.
        algorithm = compatible_algorithm(self.call.algorithm, has_matmul=False, last_dim=False)
        options: dict[str, Any] = {"group": self._names[step.mesh_dim], "algorithm": algorithm}
        if step.tensor_dim is None:
            return functools.partial(ops.all_reduce, out_dtype=out_dtype, **options)
        dim, sizes = step.tensor_dim, self._shard_sizes(step, placements, step.tensor_dim)
        if step.kind == "slice":
            rank = self._coordinate[step.mesh_dim]
            return methodcaller("narrow", dim, sum(sizes[:rank]), sizes[rank])
        if step.scatter_dim is not None:
            unsupported_ops = {} if algorithm == "auto" else ALGORITHMS[algorithm].unsupported_ops
            if "all_to_all" in unsupported_ops.get(self._device, ()):
                options["algorithm"] = "auto"
            return functools.partial(
                ops.all_to_all,
                gather_dim=dim,
                scatter_dim=step.scatter_dim,
                gather_sizes=sizes,
                scatter_sizes=self._shard_sizes(step, placements, step.scatter_dim),
                **options,
            )
        options["shard_sizes"] = sizes
        if step.kind == "all_gather":
            return functools.partial(ops.all_gather, gather_dim=dim, **options)
        return functools.partial(
            ops.reduce_scatter, scatter_dim=dim, out_dtype=out_dtype, **options
        )

    def _make_matmul(self) -> _Matmul:
        """Return the local matmul, including the fused step."""
        call, plan, step = self.call, self.plan, self.plan.fused
        dtype = call.wire_dtype if plan.moves_result and Partial() in plan.result else call.dtype
        if step is None:
            return functools.partial(_local_matmul, dtype=dtype)
        options: dict[str, Any] = {
            "group": self._names[step.mesh_dim],
            "algorithm": call.algorithm,
            "out_dtype": dtype,
        }
        if step.operand == "out":
            options["wire_dtype"] = call.wire_dtype
            if step.tensor_dim is None:
                return functools.partial(_matmul_reduce, op=ops.matmul_all_reduce, options=options)
            sizes = self._shard_sizes(step, plan.result, step.tensor_dim)
            options |= {"scatter_dim": step.tensor_dim, "shard_sizes": sizes}
            shard = step.tensor_dim, sizes[self._coordinate[step.mesh_dim]]
            return functools.partial(
                _matmul_reduce, op=ops.matmul_reduce_scatter, options=options, shard=shard
            )
        if step.operand == "x":
            options["shard_sizes"] = self._shard_sizes(step, plan.x, 0)
            return functools.partial(_gather_matmul, options=options)
        options["shard_sizes"] = self._shard_sizes(step, plan.w, 1)  # x @ concat_r(w_r)
        return lambda x, w: _gather_matmul(w.t(), x.t(), options).t()

    def _shard_sizes(self, step: Step, placements: Placements, dim: int) -> tuple[int, ...]:
        """Return the shard sizes along ``dim`` in the group of the step.

        ``placements`` may be the placements before or after the step: only earlier mesh dims
        matter.
        """
        problem, mesh_dim = self.call.problem, step.mesh_dim
        shape, mesh = problem.shape(step.operand), problem.mesh_shape
        length = local_shape(shape, placements[:mesh_dim], mesh, self._coordinate)[dim]
        return tuple(chunk_sizes(length, mesh[mesh_dim]))


def _local_matmul(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != x.dtype and x.numel() and w.numel():
        return matmul(x, w, dtype)
    return torch.matmul(x, w).to(dtype)


def _gather_matmul(x: torch.Tensor, w: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Compute ``concat_r(x_r) @ w``.

    The ops reject a w without columns, and this rank may be the only rank with such a w. Pad it to
    one column, and remove the column from the result.
    """
    rows, columns = sum(options["shard_sizes"]), w.shape[1]
    if not rows * x.shape[1]:
        return x.new_zeros(rows, columns, dtype=options["out_dtype"])
    if not columns:
        w = w.new_zeros(w.shape[0], 1)
    y: torch.Tensor = ops.all_gather_matmul(x, w, **options)
    return y[:, :columns]


def _matmul_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    op: Callable[..., torch.Tensor],
    options: dict[str, Any],
    shard: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Reduce ``x @ w``.

    The ops reject K = 0, and this rank may be the only rank with K = 0. Pad x and w with zeros to K
    = 1. ``shard`` is the scattered dim, and the size of the local shard along it.
    """
    out_shape = [x.shape[0], w.shape[1]]
    if not prod(out_shape):
        if shard is not None:
            out_shape[shard[0]] = shard[1]
        return x.new_empty(out_shape, dtype=options["out_dtype"])
    if not x.shape[1]:
        x, w = x.new_zeros(x.shape[0], 1), w.new_zeros(1, w.shape[1])
    return op(x, w, **options)


class _ShardedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: DTensor, w: DTensor, executor: MatmulExecutor, mesh: DeviceMesh
    ) -> DTensor:
        ctx.save_for_backward(x, w)
        ctx.call, ctx.mesh = executor.call, mesh
        y = executor.run(x.to_local(), w.to_local())
        # The autograd functions of DTensor construct results like this. from_local would add an
        # autograd function, and 24 us to a call of 32 to 38 us (AMD EPYC, family 25 model 17,
        # 1 thread, 2026-11-22).
        meta = dtensor_spec.TensorMeta(executor.shape, executor.stride, y.dtype)
        spec = dtensor_spec.DTensorSpec(mesh, executor.plan.out, meta)
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
    """Compute the gradient ``a @ b`` of an operand, with the placements of the operand.

    For a Partial operand the gradient is replicated, because each addend has the gradient of the
    sum.

    The matmul runs on the mesh of the forward. DTensor caches meshes by value, so a transposed
    DTensor may refer to an equal mesh with destroyed groups.
    """
    out = tuple(
        Replicate() if isinstance(placement, Partial) else placement
        for placement in operand_placements
    )
    problem = _make_problem(get_dtensor_spec(a), get_dtensor_spec(b), out, ctx.call.wire_dtype)
    call = replace(ctx.call, problem=problem, dtype=a.dtype, strategy="auto")
    return _run(call, a, b, ctx.mesh)
