"""How a checked call of an op runs: its results are allocated, and its planned call fills them.

One function for each kind of op: all its ops differ in operands alone. All that can fail for one
rank alone, such as an allocation, happens here, within the call's turn (`backends.run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpkernels.algorithms.parts import Products, result_shape, splits_columns
from tpkernels.algorithms.reduction import Reduction, RmsNorm
from tpkernels.common import dtypes
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of
from tpkernels.local.scaled import Packing, ScaledMatrix, ScaledWeight, Scaling, scaling_of
from tpkernels.planning.problem import Problem
from tpkernels.torch_private import is_zero_tensor


def gather(call: Call, given: Any) -> Any:
    """Run an op that gathers; return (gathered, outs), or what is gathered if nothing is
    multiplied."""
    problem, spec, x, rows = call.problem, call.problem.spec, given.x, None
    gathered = None
    if not spec.has_matmul or given.return_gathered:
        gathered = empty(problem.shape, problem.dtype, x.device)
    if not spec.has_matmul:
        call.function(call, x, Products([], [], [], gathered))
        return gathered
    weights, biases = given.weights, given.biases
    dtype = problem.options.out_dtype or x.dtype
    outs = [empty((*problem.shape[:-1], columns_of(w)), dtype, x.device) for w in weights]
    if spec.scaled:
        scale = _own_scale(given.scale_x, problem, call.group.rank)
        rows = Rows.of(x, scale, weights, given.scales_w, given.use_fast_accum)
        x, weights = rows.packed, rows.weights
    each_bias = [materialized(b) for b in biases] if biases else [None] * len(weights)
    call.function(call, x, Products(weights, each_bias, outs, gathered))
    if gathered is None:
        return given.x.new_empty(0), outs
    return gathered if rows is None else rows.packing.data(gathered).contiguous(), outs


def reduce(call: Call, given: Any) -> Any:
    """Run an op that reduces; return the sum, after the normalised rows if it normalises."""
    problem, spec, x = call.problem, call.problem.spec, given.x
    w, bias = given.w if spec.has_matmul else None, getattr(given, "bias", None)
    if spec.scaled:
        rows = Rows.of(x, given.scale_x, [given.w], [given.scale_w], given.use_fast_accum)
        x, w = rows.packed, rows.weights[0]
    if bias is not None and splits_columns(problem):
        bias = bias.narrow(0, sum(problem.sizes[: call.group.rank]), problem.sizes[call.group.rank])
    dtype = problem.options.out_dtype
    assert dtype is not None  # a reduction has one
    reduction = Reduction.of(given.x, dtype, bias, getattr(given, "residual", None))
    out = empty(result_shape(problem, call.group.rank), dtype, x.device)
    if not spec.normed:
        call.function(call, x, w, out, reduction)
        return out
    weight = given.norm_weight if spec.has_matmul else given.weight
    norm = RmsNorm(weight.contiguous(), given.eps)
    return call.function(call, x, w, out, reduction, norm), out


def reduce_in_place(call: Call, given: Any) -> None:
    """Overwrite x with its sum over the ranks."""
    x = given.x
    out = x if x.is_contiguous() else empty(x.shape, x.dtype, x.device)
    call.function(call, x, None, out, Reduction.of(x))
    if out is not x:
        x.copy_(out)


def dispatch(call: Call, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an op that brings tokens to their experts; return their rows, and how many each has."""
    x = given.x
    if given.scale_x is None:
        x = x.contiguous()
    else:
        x = Packing.of(x, given.scale_x).pack(x, given.scale_x)
    return call.function(call, x, given.routes)


def combine(call: Call, given: Any) -> torch.Tensor:
    """Run an op that brings the experts' rows back and sums each token's."""
    x = given.x.contiguous()
    weights = given.topk_weights.to(dtypes.accumulator(x.dtype)).contiguous()
    out = empty((weights.shape[0], x.shape[1]), x.dtype, x.device)
    call.function(call, x, given.routes, weights, out)
    return out


def exchange(call: Call, given: Any) -> torch.Tensor:
    """Run an op that exchanges shards."""
    x = given.x
    out = empty(result_shape(call.problem, call.group.rank), x.dtype, x.device)
    call.function(call, x, out)
    return out


def materialized(bias: torch.Tensor) -> torch.Tensor | None:
    """Return a bias of an optional list: in memory that holds its values, which the dispatcher sees
    to for all other tensors, and None for an empty one."""
    if bias.is_neg() or is_zero_tensor(bias):
        bias = bias.clone()
    return bias if bias.numel() else None


def _own_scale(scale: torch.Tensor, problem: Problem, rank: int) -> torch.Tensor:
    """Return the scales of this rank's shard, of its own or of those of the gathered x."""
    gathered = [*problem.shape[:-1], 1]
    if scaling_of(scale) is Scaling.ROW and list(scale.shape) == gathered:
        assert problem.dim is not None  # a gather has one
        return scale.narrow(problem.dim, sum(problem.sizes[:rank]), problem.sizes[rank])
    return scale


class Rows(NamedTuple):
    """An x as the algorithms move and multiply it: packed rows, and the weights that do so."""

    packed: torch.Tensor
    weights: list[ScaledWeight]
    packing: Packing

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        scale: torch.Tensor,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        fast_accum: bool,
    ) -> Rows:
        packing = Packing.of(x, scale)
        made = [
            ScaledWeight(
                ScaledMatrix(w, _as_scalar(scale_w)), packing, _as_scalar(scale), fast_accum
            )
            for w, scale_w in zip(weights, scales, strict=True)
        ]
        return cls(packing.pack(x, scale), made, packing)


def _as_scalar(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(()) if scaling_of(scale) is Scaling.TENSOR else scale
