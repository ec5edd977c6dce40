"""Problems and fake results of calls: two functions per family of ops.

All ranks of a call must have equal `Problem` objects. Fake results are tensors without data.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from tpkernels.common.shards import shard_sizes
from tpkernels.groups.group import Group
from tpkernels.local.packed import weight_columns
from tpkernels.local.scaled import Packing, get_scaling, num_values
from tpkernels.ops import validation
from tpkernels.ops.arguments import (
    ExchangeArguments,
    GatherArguments,
    OpArguments,
    ReduceArguments,
    RoutedArguments,
)
from tpkernels.planning.op_spec import (
    OPS,
    ExchangeOptions,
    GatherOptions,
    ReduceOptions,
    RoutedOptions,
    Scales,
)
from tpkernels.planning.problem import Problem

Result: TypeAlias = (
    torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]]
)


def make_problem(op: str, group: Group, args: OpArguments) -> Problem:
    """Check the arguments of an op, before any data is sent, and return the problem.

    Args:
        op: Op name, a key of `OPS`.
        args: Local arguments. For a gather, ``x`` is the local shard along ``gather_dim``.

    Raises:
        ValueError, TypeError: An argument is invalid.
        NotImplementedError: The op does not support a valid argument.
    """
    if isinstance(args, GatherArguments):
        return _gather(op, group, args)
    if isinstance(args, ReduceArguments):
        return _reduce(op, group, args)
    if isinstance(args, ExchangeArguments):
        return _exchange(op, group, args)
    return _routed(op, group, args)


def _gather(op: str, group: Group, args: GatherArguments) -> Problem:
    spec, x, weights, scale = OPS[op], args.x, args.weights, args.scale_x
    validation.op_input(spec, x)
    shape, wire, options = list(x.shape), x.dtype, GatherOptions()
    dim = validation.dim(args.gather_dim, shape, "gather_dim", scaled=spec.scaled)
    sizes = validation.gather_sizes(args.shard_sizes, shape[dim], group)
    shape[dim] = sum(sizes)
    if scale is not None:  # rows are sent with their scales
        validation.x_scale(scale, x, shape[:-1], dim, sizes)
        result = validation.out_dtype(args.out_dtype, x, scaled=True)
        scales = scale, args.scales_w
        validation.weights(weights, args.biases, x, shape[-1], scales, (result,))
        options = GatherOptions(
            scales=Scales(num_values(x.dtype, x.shape[-1]), x.dtype, get_scaling(scale).value),
            out_dtype=result,
            return_gathered=args.return_gathered,
        )
        shape[-1], wire = Packing.for_rows(x, scale).packed_width, torch.float32
    elif spec.has_matmul:
        validation.weights(weights, args.biases, x, shape[-1])
        result = validation.out_dtype(args.out_dtype, x)
        for i, w in enumerate(weights):
            validation.unsliceable_weight(w, x, result, args.algorithm, f"weights[{i}]")
        options = GatherOptions(
            out_dtype=None if result == x.dtype else result,
            return_gathered=args.return_gathered,
            local_product=validation.records_custom_matmul(x, weights),
        )
    return Problem(op, validation.device(x), group.world, tuple(shape), dim, sizes, wire, options)


def _reduce(op: str, group: Group, args: ReduceArguments) -> Problem:
    spec, x, w, scale = OPS[op], args.x, args.w, args.scale_x
    validation.op_input(spec, x)
    shape, dim, sizes, local_product = list(x.shape), None, tuple[int, ...](), False
    if scale is not None:
        validation.x_scale(scale, x, shape[:-1], None, ())
        assert isinstance(w, torch.Tensor) and args.scale_w is not None  # required by the schemas
        validation.scaled_weight(w, args.scale_w, x, scale, "w")
    elif w is not None:
        validation.weight(w, x, shape[-1], "w")
        local_product = validation.records_custom_matmul(x, [w])
    if w is not None:
        shape[-1] = weight_columns(w)
    out_shape = list(shape)
    if spec.scatters:
        dim = validation.dim(args.scatter_dim, shape, "scatter_dim", scaled=spec.scaled)
        sizes = validation.scatter_sizes(args.shard_sizes, shape[dim], group.world)
        out_shape[dim] = sizes[group.rank]
    wire, result = validation.epilogue(args, shape, out_shape, by_columns=dim == len(shape) - 1)
    sum_units = validation.sum_units(spec, args, group)
    if sum_units is not None:
        wire = torch.float32
    options = ReduceOptions(
        x_dtype=x.dtype,
        out_dtype=result,
        bias=args.bias is not None,
        residual=args.residual is not None,
        local_product=local_product,
        norm=None if args.norm is None else (float(args.eps), args.norm.dtype),
        sum_units=sum_units,
    )
    return Problem(op, validation.device(x), group.world, tuple(shape), dim, sizes, wire, options)


def _exchange(op: str, group: Group, args: ExchangeArguments) -> Problem:
    x, shape = args.x, list(args.x.shape)
    validation.op_input(OPS[op], x)
    dim = validation.dim(args.gather_dim, shape, "gather_dim")
    sizes = validation.gather_sizes(args.gather_sizes, shape[dim], group, "gather_sizes")
    shape[dim] = sum(sizes)
    scatter_dim = validation.dim(args.scatter_dim, shape, "scatter_dim")
    if scatter_dim == dim:
        raise ValueError(f"gather_dim and scatter_dim are both {scatter_dim}; they must differ")
    scatter_sizes = validation.scatter_sizes(
        args.scatter_sizes, shape[scatter_dim], group.world, "scatter_sizes"
    )
    options = ExchangeOptions(dim=scatter_dim, sizes=scatter_sizes)
    return Problem(
        op, validation.device(x), group.world, tuple(shape), dim, sizes, x.dtype, options
    )


def _routed(op: str, group: Group, args: RoutedArguments) -> Problem:
    x, scale, sizes = args.x, args.scale_x, validation.routed(args, group)
    columns, wire, scales = x.shape[1], x.dtype, None
    if scale is not None:  # rows are sent with their scales
        scales = Scales(columns, wire, f"{scale.shape[1]} per row")
        columns, wire = Packing.for_rows(x, scale).packed_width, torch.float32
    options = RoutedOptions(
        experts=args.num_experts,
        top_k=args.routes.shape[1],
        max_rows=args.max_rows,
        scales=scales,
    )
    return Problem(
        op, validation.device(x), group.world, (sum(sizes), columns), 0, sizes, wire, options
    )


def fake_result(op: str, group: Group, args: OpArguments) -> Result:
    """Return the result of an op without data, for tracing."""
    spec, x, shape, dtype = OPS[op], args.x, list(args.x.shape), None
    if isinstance(args, RoutedArguments):
        return _fake_routed(group, args)
    if isinstance(args, ExchangeArguments):
        gather_sizes, scatter_sizes = args.gather_sizes, args.scatter_sizes
    else:
        gather_sizes = scatter_sizes = args.shard_sizes
        dtype = args.out_dtype
        if spec.scaled:
            dtype = validation.out_dtype(dtype, x, scaled=True)
    if not isinstance(args, ReduceArguments):
        dim = validation.dim(args.gather_dim, shape, "gather_dim")
        shape[dim] = shape[dim] * group.world if gather_sizes is None else sum(gather_sizes)
    if isinstance(args, GatherArguments):
        if not spec.has_matmul:
            return x.new_empty(shape)
        outs = [x.new_empty((*shape[:-1], weight_columns(w)), dtype=dtype) for w in args.weights]
        return x.new_empty(shape if args.return_gathered else [0]), outs
    if isinstance(args, ReduceArguments) and args.w is not None:
        shape[-1] = weight_columns(args.w)
    if spec.scatters:
        dim = validation.dim(args.scatter_dim, shape, "scatter_dim")
        shape[dim] = (
            shape[dim] // group.world if scatter_sizes is None else scatter_sizes[group.rank]
        )
    result = x.new_empty(shape, dtype=dtype)
    return (result, x.new_empty(shape)) if spec.normed else result


def _fake_routed(group: Group, args: RoutedArguments) -> Result:
    x = args.x
    if args.topk_weights is not None:
        return x.new_empty(args.topk_weights.shape[0], x.shape[1])
    rows: int | torch.SymInt | None = args.max_rows
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    num_local = shard_sizes(args.num_experts, group.world)[group.rank]
    counts = x.new_empty(num_local, dtype=torch.int64)
    if args.scale_x is None:
        return x.new_empty(rows, x.shape[1]), counts
    packed_width = Packing.for_rows(x, args.scale_x).packed_width
    return x.new_empty(rows, packed_width, dtype=torch.float32), counts
