"""How a checked call of an op runs: its results are allocated, and its planned call fills them.

One function for each kind of op: all its ops differ in operands alone. All that can fail for one
rank alone, such as an allocation, happens here, within the call's turn (`backends.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from tpkernels import _C
from tpkernels.algorithms.direct.cpu import collective_of
from tpkernels.algorithms.parts import Products, result_shape, splits_columns
from tpkernels.algorithms.reduction import Reduction, RmsNorm
from tpkernels.common import dtypes
from tpkernels.groups.call import Call
from tpkernels.local.matmul import converts
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of, is_packed
from tpkernels.local.product import Product, Weight
from tpkernels.local.scaled import Packing, ScaledMatrix, ScaledWeight, Scaling, scaling_of
from tpkernels.ops.arguments import (
    ExchangeArguments,
    GatherArguments,
    OpArguments,
    ReduceArguments,
    RoutedArguments,
)
from tpkernels.ops.problems import Result
from tpkernels.planning.op_spec import GatherOptions, ReduceOptions
from tpkernels.torch_private import is_zero_tensor


def gather(call: Call, given: GatherArguments) -> Result:
    """Run an op that gathers; return (gathered, outs), or what is gathered if nothing is
    multiplied."""
    problem, x, scale, packing = call.problem, given.x, given.scale_x, None
    if not given.weights:
        gathered = empty(problem.shape, problem.dtype, x.device)
        call.function(call, x, Products([], [], [], gathered))
        return gathered
    whole = empty(problem.shape, problem.dtype, x.device) if given.return_gathered else None
    weights: Sequence[Weight | Product] = given.weights
    assert isinstance(problem.options, GatherOptions)  # `options_as` would be one call more
    dtype = problem.options.out_dtype or x.dtype
    outs = [empty((*problem.shape[:-1], columns_of(w)), dtype, x.device) for w in given.weights]
    if scale is not None:
        if scaling_of(scale) is Scaling.ROW and list(scale.shape) == [*problem.shape[:-1], 1]:
            scale = _own_shard(call, scale, problem.split_dim)  # of the scales of all rows
        packing = Packing.of(x, scale)
        weights = _scaled(given.weights, given.scales_w, packing, scale, given.use_fast_accum)
        x = packing.pack(x, scale)
    biases = [materialized(b) for b in given.biases] if given.biases else [None] * len(weights)
    call.function(call, x, Products(weights, biases, outs, whole))
    if whole is None:
        return given.x.new_empty(0), outs
    return whole if packing is None else packing.data(whole).contiguous(), outs


def reduce(call: Call, given: ReduceArguments) -> Result:
    """Run an op that reduces; return the sum, after the normalised rows if it normalises."""
    problem, x, scale, bias = call.problem, given.x, given.scale_x, given.bias
    w: Weight | Product | None = given.w
    if scale is not None:
        assert given.w is not None and given.scale_w is not None  # the schemas have both
        packing = Packing.of(x, scale)
        (w,) = _scaled([given.w], [given.scale_w], packing, scale, given.use_fast_accum)
        x = packing.pack(x, scale)
    if bias is not None and splits_columns(problem):
        bias = _own_shard(call, bias, 0)
    assert isinstance(problem.options, ReduceOptions)
    dtype = problem.options.out_dtype
    reduction = Reduction.of(given.x, dtype, bias, given.residual)
    out = empty(result_shape(problem, call.group.rank), dtype, x.device)
    weight = given.weight if given.norm_weight is None else given.norm_weight
    if weight is not None:
        norm = RmsNorm(weight.contiguous(), given.eps)
        return call.function(call, x, w, out, reduction, norm), out
    call.function(call, x, w, out, reduction)
    return out


def reduce_in_place(call: Call, given: ReduceArguments) -> None:
    """Overwrite x with its sum over the ranks."""
    x = given.x
    out = x if x.is_contiguous() else empty(x.shape, x.dtype, x.device)
    call.function(call, x, None, out, Reduction.of(x))
    if out is not x:
        x.copy_(out)


def dispatch(call: Call, given: RoutedArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an op that brings tokens to their experts; return their rows, and how many each has."""
    x, scale = given.x, given.scale_x
    x = x.contiguous() if scale is None else Packing.of(x, scale).pack(x, scale)
    return call.function(call, x, given.routes)


def combine(call: Call, given: RoutedArguments) -> torch.Tensor:
    """Run an op that brings the experts' rows back and sums each token's."""
    assert given.topk_weights is not None  # the schema has them
    x = given.x.contiguous()
    weights = given.topk_weights.to(dtypes.accumulator(x.dtype)).contiguous()
    out = empty((weights.shape[0], x.shape[1]), x.dtype, x.device)
    call.function(call, x, given.routes, weights, out)
    return out


def exchange(call: Call, given: ExchangeArguments) -> torch.Tensor:
    """Run an op that exchanges shards."""
    x = given.x
    out = empty(result_shape(call.problem, call.group.rank), x.dtype, x.device)
    call.function(call, x, out)
    return out


def bind(
    call: Call,
    given: OpArguments,
    arguments: _C.calls.Arguments,
    execute: Callable[[Call, OpArguments], object],
    in_place: bool,
) -> _C.calls.Bound | None:
    """Return what runs warm calls with these arguments: all of `direct` in the extension, or
    ``execute(call, arguments)``. The extension does what `backends.run` does before and after it,
    without the warnings, which the next planned call gives. None: on GPUs without a workspace,
    which tells of failures."""
    group, alarm, deterministic = call.group, None, None
    if call.problem.device == "cuda":
        if group.workspace is None:
            return None
        alarm = group.workspace.alarm
        if call.problem.spec.reduces:
            deterministic = group.cuda_sums.planned_for_flag
    elif call.plan.algorithm == "direct":
        made = _bind_direct(call, given, arguments, in_place)
        if made is not None:
            return made
    return _C.calls.PythonCall(arguments, execute, call, alarm, deterministic)


def _bind_direct(
    call: Call, given: OpArguments, arguments: _C.calls.Arguments, in_place: bool
) -> _C.calls.Direct | None:
    """Return what runs calls by `direct` on CPU tensors in the extension; None: Python does,
    because operands or results are converted or split, or a product is the caller's."""
    x, problem, weights = given.x, call.problem, list[Weight]()
    return_gathered, eps = False, 0.0
    out_dtype: torch.dtype | None = None
    if isinstance(given, RoutedArguments) or problem.spec.scaled:
        return None
    if isinstance(given, GatherArguments):
        if given.biases:
            return None
        weights, out_dtype = list(given.weights), given.out_dtype
        return_gathered = given.return_gathered
    elif isinstance(given, ReduceArguments):
        if given.bias is not None and splits_columns(problem):
            return None  # each rank adds its part of the bias
        weights, out_dtype = [] if given.w is None else [given.w], given.out_dtype
        eps = given.eps
    converted = len({x.dtype, problem.dtype, out_dtype or x.dtype}) > 1
    plain = all(isinstance(w, torch.Tensor) for w in weights)
    if converted or not plain or prod(problem.shape) == 0:
        return None
    if not all(map(is_packed, weights)) and converts(x.dtype, prod(problem.shape[:-1])):
        return None
    return _C.calls.Direct(
        collective_of(call),
        arguments,
        in_place=in_place,
        shape=tuple(result_shape(problem, call.group.rank)),
        multiplies=bool(weights),
        gathers=problem.spec.gathers,
        return_gathered=return_gathered,
        eps=eps,
    )


def materialized(bias: torch.Tensor) -> torch.Tensor | None:
    """Return a bias with its values in memory, or None for an empty one. For all arguments but
    optional lists the dispatcher sees to that."""
    if bias.is_neg() or is_zero_tensor(bias):
        bias = bias.clone()
    return bias if bias.numel() else None


def _own_shard(call: Call, whole: torch.Tensor, dim: int) -> torch.Tensor:
    sizes, rank = call.problem.sizes, call.group.rank
    return whole.narrow(dim, sum(sizes[:rank]), sizes[rank])


def _scaled(
    weights: Sequence[Weight],
    scales: Sequence[torch.Tensor],
    packing: Packing,
    scale_x: torch.Tensor,
    fast_accum: bool,
) -> list[ScaledWeight]:
    """Return weights that multiply the packed rows of an x."""

    def as_scalar(scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(()) if scaling_of(scale) is Scaling.TENSOR else scale

    made = []
    for w, scale in zip(weights, scales, strict=True):
        assert isinstance(w, torch.Tensor)  # the dispatcher takes no others
        matrix = ScaledMatrix(w, as_scalar(scale))
        made.append(ScaledWeight(matrix, packing, as_scalar(scale_x), fast_accum))
    return made
