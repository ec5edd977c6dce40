"""What a rank does in a plan: the steps on its shards, and the product with the step that is one op
with it.

Shards may be empty. Ranks of one group agree on whether there is anything to send, because their
shards differ only along the dim that the step moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from tpkernels.groups import name_of
from tpkernels.mesh.layout import Placements, split_sizes
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem, Step
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.all_to_all import all_to_all
from tpkernels.ops.autograd import algorithm_like, matmul
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.reduce_scatter import reduce_scatter
from tpkernels.planning.algorithms import ALGORITHMS


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank is.

    Attributes:
        mesh: that of the DTensors.
        coordinate: this rank's, one index for each mesh dim.
        algorithm: of the ops.
        wire_dtype: of the result as long as it is Partial and will be summed.
    """

    mesh: DeviceMesh
    coordinate: tuple[int, ...]
    algorithm: str
    wire_dtype: torch.dtype

    def group(self, step: Step) -> str:
        return name_of((self.mesh, step.mesh_dim))

    def sizes(
        self, step: Step, shape: Sequence[int], placements: Placements, dim: int | None = None
    ) -> tuple[int, ...]:
        """Return the sizes of the shards that the step gathers or leaves, in its group: along
        ``dim``, by default the step's. ``placements`` may be those before or after the step: only
        earlier mesh dims matter."""
        dim = step.tensor_dim if dim is None else dim
        assert dim is not None  # an all-reduce has no shards
        mesh_shape = self.mesh.shape
        return split_sizes(shape[dim], placements, mesh_shape, self.coordinate, step.mesh_dim, dim)


def run(
    plan: MatmulPlan, problem: MatmulProblem, x: torch.Tensor, w: torch.Tensor, place: Place
) -> torch.Tensor:
    """Compute this rank's part of the result, contiguous. x and w are its parts of the operands."""
    dtype, wire = x.dtype, place.wire_dtype
    x = _run_steps([s for s in plan.before if s.operand == "x"], problem, problem.x, x, place)
    w = _run_steps([s for s in plan.before if s.operand == "w"], problem, problem.w, w, place)
    device = x.device.type
    moves = plan.after or (plan.fused is not None and plan.fused.operand == "out")
    of_product = wire if moves and Partial() in plan.product else dtype
    off = torch.is_autocast_enabled(device)  # entering costs 3 us. The same dtype by every plan
    with torch.autocast(device, enabled=False) if off else contextlib.nullcontext():
        y = _product(plan, problem, x, w, place, of_product)
    y = _run_steps(plan.after, problem, plan.product, y, place, (wire, dtype))
    return y.to(dtype).contiguous()  # rounded only now if the caller gets a Partial result


def _run_steps(
    steps: Sequence[Step],
    problem: MatmulProblem,
    placements: Placements,
    t: torch.Tensor,
    place: Place,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> torch.Tensor:
    """Take steps on ``t``.

    Args:
        dtypes: of t as long as it is Partial, and then; None: it stays as it is.
    """
    for step in steps:
        after = step.after(placements)
        out_dtype = None if dtypes is None else dtypes[Partial() not in after]
        if place.mesh.shape[step.mesh_dim] == 1:
            t = t if out_dtype is None else t.to(out_dtype)
        else:
            t = _run_step(step, problem.shape(step.operand), placements, t, place, out_dtype)
        placements = after
    return t


def _run_step(
    step: Step,
    shape: Sequence[int],
    placements: Placements,
    t: torch.Tensor,
    place: Place,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    algorithm = algorithm_like(place.algorithm, has_matmul=False, last_dim=False)
    if step.tensor_dim is None:
        return all_reduce(t, place.group(step), out_dtype=out_dtype, algorithm=algorithm)
    dim, sizes = step.tensor_dim, place.sizes(step, shape, placements)
    rank = place.coordinate[step.mesh_dim]
    if step.kind == "slice":
        return t.narrow(dim, sum(sizes[:rank]), sizes[rank])
    if step.scatter_dim is not None:
        if algorithm != "auto" and t.device.type in ALGORITHMS[algorithm].no_all_to_all:
            algorithm = "auto"
        return all_to_all(
            t,
            place.group(step),
            dim,
            step.scatter_dim,
            gather_sizes=sizes,
            scatter_sizes=place.sizes(step, shape, placements, step.scatter_dim),
            algorithm=algorithm,
        )
    if step.kind == "all_gather":
        return all_gather(t, place.group(step), dim, shard_sizes=sizes, algorithm=algorithm)
    return reduce_scatter(
        t, place.group(step), dim, out_dtype=out_dtype, shard_sizes=sizes, algorithm=algorithm
    )


def _product(
    plan: MatmulPlan,
    problem: MatmulProblem,
    x: torch.Tensor,
    w: torch.Tensor,
    place: Place,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the product in ``dtype``, with the step that is one op with it."""
    step = plan.fused
    if step is None:
        if dtype != x.dtype and x.numel() and w.numel():
            return matmul(x, w, dtype)
        return torch.matmul(x, w).to(dtype)
    if step.operand == "x":
        sizes = place.sizes(step, problem.shape("x"), plan.x)
        return _gathered(x, w, place.group(step), sizes, place.algorithm, dtype)
    if step.operand == "w":
        sizes = place.sizes(step, problem.shape("w"), plan.w)
        return _gathered(w.t(), x.t(), place.group(step), sizes, place.algorithm, dtype).t()
    whole = (x.shape[0], w.shape[1])
    if step.tensor_dim is None:
        if not prod(whole):
            return x.new_empty(whole, dtype=dtype)
        return matmul_all_reduce(
            *_with_a_summand(x, w),
            place.group(step),
            out_dtype=dtype,
            wire_dtype=place.wire_dtype,
            algorithm=place.algorithm,
        )
    sizes = place.sizes(step, problem.shape("out"), plan.product)
    if not prod(whole):
        shard = list(whole)
        shard[step.tensor_dim] = sizes[place.coordinate[step.mesh_dim]]
        return x.new_empty(shard, dtype=dtype)
    return matmul_reduce_scatter(
        *_with_a_summand(x, w),
        place.group(step),
        step.tensor_dim,
        out_dtype=dtype,
        wire_dtype=place.wire_dtype,
        shard_sizes=sizes,
        algorithm=place.algorithm,
    )


def _gathered(
    x: torch.Tensor,
    w: torch.Tensor,
    group: str,
    sizes: Sequence[int],
    algorithm: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``concat_r(x_r) @ w``. The ops take no w without columns, which may be this rank's
    alone: it gets one."""
    rows, columns = sum(sizes), w.shape[1]
    if not rows * x.shape[1]:
        return x.new_zeros(rows, columns, dtype=dtype)
    if not columns:
        w = w.new_zeros(w.shape[0], 1)
    y = all_gather_matmul(x, w, group, 0, out_dtype=dtype, shard_sizes=sizes, algorithm=algorithm)
    return y[:, :columns]


def _with_a_summand(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give x and w one zero summand if K = 0, perhaps on this rank alone: the ops need one."""
    if x.shape[1]:
        return x, w
    return x.new_zeros(x.shape[0], 1), w.new_zeros(1, w.shape[1])
