"""Execution of checked calls: allocate the results and run the planned call.

Each family of ops has one function, because its ops differ only in their operands. Steps that can
fail on a single rank, such as allocations, run here, under the group lock (`backends.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from tpkernels import _C
from tpkernels.algorithms.chunks import GatherOutputs, result_shape, splits_columns
from tpkernels.algorithms.direct.cpu import get_collective
from tpkernels.algorithms.reduction import Reduction, RmsNorm
from tpkernels.common import dtypes
from tpkernels.groups.call import Call
from tpkernels.local.matmul import needs_fp32
from tpkernels.local.memory import empty
from tpkernels.local.packed import is_packed, weight_columns
from tpkernels.local.scaled import Packing, ScaledMatrix, ScaledWeight, Scaling, get_scaling
from tpkernels.local.weight import OpaqueWeight, Weight
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


def gather(call: Call, args: GatherArguments) -> Result:
    """Run a gather. Return (gathered, outs), or only the gathered x if the op has no matmul."""
    problem, x, scale, packing = call.problem, args.x, args.scale_x, None
    if not args.weights:
        out = empty(problem.shape, problem.dtype, x.device)
        call.function(call, x, GatherOutputs([], [], [], out))
        return out
    gathered = empty(problem.shape, problem.dtype, x.device) if args.return_gathered else None
    weights: Sequence[Weight | OpaqueWeight] = args.weights
    assert isinstance(problem.options, GatherOptions)  # faster than `options_as`
    dtype = problem.options.out_dtype or x.dtype
    outs = [empty((*problem.shape[:-1], weight_columns(w)), dtype, x.device) for w in args.weights]
    if scale is not None:
        if get_scaling(scale) is Scaling.ROW and list(scale.shape) == [*problem.shape[:-1], 1]:
            scale = _local_shard(call, scale, problem.split_dim)  # scales of the rows of all ranks
        packing = Packing.for_rows(x, scale)
        weights = _scaled_weights(args.weights, args.scales_w, packing, scale, args.use_fast_accum)
        x = packing.pack(x, scale)
    biases = [materialize(b) for b in args.biases] if args.biases else [None] * len(weights)
    call.function(call, x, GatherOutputs(weights, biases, outs, gathered))
    if gathered is None:
        return args.x.new_empty(0), outs
    return gathered if packing is None else packing.data(gathered).contiguous(), outs


def reduce(call: Call, args: ReduceArguments) -> Result:
    """Run a reduction. Return the sum, or (normed, sum) if the op has an RMSNorm."""
    problem, x, scale, bias = call.problem, args.x, args.scale_x, args.bias
    w: Weight | OpaqueWeight | None = args.w
    if scale is not None:
        assert args.w is not None and args.scale_w is not None  # required by the schemas
        packing = Packing.for_rows(x, scale)
        (w,) = _scaled_weights([args.w], [args.scale_w], packing, scale, args.use_fast_accum)
        x = packing.pack(x, scale)
    if bias is not None and splits_columns(problem):
        bias = _local_shard(call, bias, 0)
    assert isinstance(problem.options, ReduceOptions)
    dtype = problem.options.out_dtype
    reduction = Reduction.create(args.x, dtype, bias, args.residual)
    out = empty(result_shape(problem, call.group.rank), dtype, x.device)
    weight = args.weight if args.norm_weight is None else args.norm_weight
    if weight is not None:
        norm = RmsNorm(weight.contiguous(), args.eps)
        return call.function(call, x, w, out, reduction, norm), out
    call.function(call, x, w, out, reduction)
    return out


def reduce_in_place(call: Call, args: ReduceArguments) -> None:
    """Overwrite x with the sum over the ranks."""
    x = args.x
    out = x if x.is_contiguous() else empty(x.shape, x.dtype, x.device)
    call.function(call, x, None, out, Reduction.create(x))
    if out is not x:
        x.copy_(out)


def dispatch(call: Call, args: RoutedArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an MoE dispatch. Return the expert-sorted rows and the rows per local expert."""
    x, scale = args.x, args.scale_x
    x = x.contiguous() if scale is None else Packing.for_rows(x, scale).pack(x, scale)
    return call.function(call, x, args.routes)


def combine(call: Call, args: RoutedArguments) -> torch.Tensor:
    """Run an MoE combine. Return the weighted sum of the expert outputs of each local token."""
    assert args.topk_weights is not None  # required by the schema
    x = args.x.contiguous()
    weights = args.topk_weights.to(dtypes.accumulator(x.dtype)).contiguous()
    out = empty((weights.shape[0], x.shape[1]), x.dtype, x.device)
    call.function(call, x, args.routes, weights, out)
    return out


def exchange(call: Call, args: ExchangeArguments) -> torch.Tensor:
    """Run an all-to-all."""
    x = args.x
    out = empty(result_shape(call.problem, call.group.rank), x.dtype, x.device)
    call.function(call, x, out)
    return out


def bind(
    call: Call,
    args: OpArguments,
    arguments: _C.calls.Arguments,
    execute: Callable[[Call, OpArguments], object],
    in_place: bool,
) -> _C.calls.BoundCall | None:
    """Return the object that runs later calls with these arguments from the plan cache.

    It runs `direct` fully in the extension, and all other algorithms by ``execute(call,
    arguments)``. Both perform the steps of `backends.run` around the call, except for warnings: the
    next planned call issues them. Returns None on GPUs without a workspace, because failures are
    reported through the workspace.
    """
    group, alarm, deterministic = call.group, None, None
    if call.problem.device == "cuda":
        if group.workspace is None:
            return None
        alarm = group.workspace.alarm
        if call.problem.spec.reduces:
            deterministic = group.numerics_state.planned_for_flag
    elif call.plan.algorithm == "direct":
        direct = _bind_direct(call, args, arguments, in_place)
        if direct is not None:
            return direct
    return _C.calls.PythonCall(arguments, execute, call, alarm, deterministic)


def _bind_direct(
    call: Call, args: OpArguments, arguments: _C.calls.Arguments, in_place: bool
) -> _C.calls.Direct | None:
    """Return the object that runs `direct` on CPU tensors in the extension, or None.

    Python runs calls that convert or split operands or results, and calls with a `CustomMatmul`.
    """
    x, problem, weights = args.x, call.problem, list[Weight]()
    return_gathered, eps = False, 0.0
    out_dtype: torch.dtype | None = None
    if isinstance(args, RoutedArguments) or problem.spec.scaled:
        return None
    if isinstance(args, GatherArguments):
        if args.biases:
            return None
        weights, out_dtype = list(args.weights), args.out_dtype
        return_gathered = args.return_gathered
    elif isinstance(args, ReduceArguments):
        if args.bias is not None and splits_columns(problem):
            return None  # each rank adds a slice of the bias
        weights, out_dtype = [] if args.w is None else [args.w], args.out_dtype
        eps = args.eps
    wire = x.dtype if problem.sum_units else problem.dtype
    converted = len({x.dtype, wire, out_dtype or x.dtype}) > 1
    plain = all(isinstance(w, torch.Tensor) for w in weights)
    if converted or not plain or prod(problem.shape) == 0:
        return None
    if not all(map(is_packed, weights)) and needs_fp32(x.dtype, prod(problem.shape[:-1])):
        return None
    return _C.calls.Direct(
        get_collective(call),
        arguments,
        in_place=in_place,
        shape=tuple(result_shape(problem, call.group.rank)),
        has_matmul=bool(weights),
        gathers=problem.spec.gathers,
        return_gathered=return_gathered,
        eps=eps,
    )


def materialize(bias: torch.Tensor) -> torch.Tensor | None:
    """Return a bias whose values are in memory, or None if it is empty.

    The dispatcher materializes all arguments except optional lists.
    """
    if bias.is_neg() or is_zero_tensor(bias):
        bias = bias.clone()
    return bias if bias.numel() else None


def _local_shard(call: Call, full: torch.Tensor, dim: int) -> torch.Tensor:
    sizes, rank = call.problem.sizes, call.group.rank
    return full.narrow(dim, sum(sizes[:rank]), sizes[rank])


def _scaled_weights(
    weights: Sequence[Weight],
    scales: Sequence[torch.Tensor],
    packing: Packing,
    scale_x: torch.Tensor,
    fast_accum: bool,
) -> list[ScaledWeight]:
    """Return weights that multiply packed rows of x."""

    def as_scalar(scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(()) if get_scaling(scale) is Scaling.TENSOR else scale

    scaled_weights = []
    for w, scale in zip(weights, scales, strict=True):
        assert isinstance(w, torch.Tensor)  # checked by the dispatcher
        matrix = ScaledMatrix(w, as_scalar(scale))
        scaled_weights.append(ScaledWeight(matrix, packing, as_scalar(scale_x), fast_accum))
    return scaled_weights
