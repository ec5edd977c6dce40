"""From an op's arguments to what its ranks must agree on, and to its results without data: one
function of each for a family of ops."""

from __future__ import annotations

from typing import TypeAlias

import torch

from tpkernels.common.shards import shard_sizes
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of
from tpkernels.local.scaled import Packing, numbers_in, scaling_of
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


def problem_of(op: str, group: Group, given: OpArguments) -> Problem:
    """Check an op's arguments, before anything is sent, and return its problem.

    Args:
        op: as in `OPS`.
        given: the arguments. ``x`` is this rank's; of an op that gathers, its shard along
            ``gather_dim``, of which the ranks have ``shard_sizes``.

    Raises:
        ValueError, TypeError: invalid arguments.
        NotImplementedError: valid ones that the op does not support.
    """
    if isinstance(given, GatherArguments):
        return _gather(op, group, given)
    if isinstance(given, ReduceArguments):
        return _reduce(op, group, given)
    if isinstance(given, ExchangeArguments):
        return _exchange(op, group, given)
    return _routed(op, group, given)


def _gather(op: str, group: Group, given: GatherArguments) -> Problem:
    spec, x, weights, scale = OPS[op], given.x, given.weights, given.scale_x
    validation.op_input(spec, x)
    shape, wire, options = list(x.shape), x.dtype, GatherOptions()
    dim = validation.dim(given.gather_dim, shape, "gather_dim", scaled=spec.scaled)
    sizes = validation.gather_sizes(given.shard_sizes, shape[dim], group)
    shape[dim] = sum(sizes)
    if scale is not None:  # rows travel with their scales
        validation.scale_of_x(scale, x, shape[:-1], dim, sizes)
        result = validation.out_dtype(given.out_dtype, x, scaled=True)
        scales = scale, given.scales_w
        validation.weights(weights, given.biases, x, shape[-1], scales, (result,))
        options = GatherOptions(
            scales=Scales(numbers_in(x.dtype, x.shape[-1]), x.dtype, scaling_of(scale).value),
            out_dtype=result,
            return_gathered=given.return_gathered,
        )
        shape[-1], wire = Packing.of(x, scale).words, torch.float32
    elif spec.has_matmul:
        validation.weights(weights, given.biases, x, shape[-1])
        result = validation.out_dtype(given.out_dtype, x)
        for i, w in enumerate(weights):
            validation.whole(w, x, result, given.algorithm, f"weights[{i}]")
        options = GatherOptions(
            out_dtype=None if result == x.dtype else result,
            return_gathered=given.return_gathered,
            local_product=validation.local_product(x, weights),
        )
    return Problem(op, validation.device(x), group.world, tuple(shape), dim, sizes, wire, options)


def _reduce(op: str, group: Group, given: ReduceArguments) -> Problem:
    spec, x, w, scale = OPS[op], given.x, given.w, given.scale_x
    validation.op_input(spec, x)
    shape, dim, sizes, local_product = list(x.shape), None, tuple[int, ...](), False
    if scale is not None:
        validation.scale_of_x(scale, x, shape[:-1], None, ())
        assert isinstance(w, torch.Tensor) and given.scale_w is not None  # the schemas have both
        validation.scaled_weight(w, given.scale_w, x, scale, "w")
    elif w is not None:
        validation.weight(w, x, shape[-1], "w")
        local_product = validation.local_product(x, [w])
    if w is not None:
        shape[-1] = columns_of(w)
    kept = list(shape)
    if spec.scatters:
        dim = validation.dim(given.scatter_dim, shape, "scatter_dim", scaled=spec.scaled)
        sizes = validation.scatter_sizes(given.shard_sizes, shape[dim], group.world)
        kept[dim] = sizes[group.rank]
    wire, result = validation.epilogue(given, shape, kept, by_columns=dim == len(shape) - 1)
    options = ReduceOptions(
        x_dtype=x.dtype,
        out_dtype=result,
        bias=given.bias is not None,
        residual=given.residual is not None,
        local_product=local_product,
        norm=None if given.norm is None else (float(given.eps), given.norm.dtype),
    )
    return Problem(op, validation.device(x), group.world, tuple(shape), dim, sizes, wire, options)


def _exchange(op: str, group: Group, given: ExchangeArguments) -> Problem:
    x, shape = given.x, list(given.x.shape)
    validation.op_input(OPS[op], x)
    dim = validation.dim(given.gather_dim, shape, "gather_dim")
    sizes = validation.gather_sizes(given.gather_sizes, shape[dim], group, "gather_sizes")
    shape[dim] = sum(sizes)
    to = validation.dim(given.scatter_dim, shape, "scatter_dim")
    if to == dim:
        raise ValueError(f"gather_dim and scatter_dim are both {to}; they must differ")
    parts = validation.scatter_sizes(given.scatter_sizes, shape[to], group.world, "scatter_sizes")
    options = ExchangeOptions(dim=to, sizes=parts)
    return Problem(
        op, validation.device(x), group.world, tuple(shape), dim, sizes, x.dtype, options
    )


def _routed(op: str, group: Group, given: RoutedArguments) -> Problem:
    x, scale, sizes = given.x, given.scale_x, validation.routed(given, group)
    columns, wire, scales = x.shape[1], x.dtype, None
    if scale is not None:  # rows travel with their scales
        scales = Scales(columns, wire, f"{scale.shape[1]} per row")
        columns, wire = Packing.of(x, scale).words, torch.float32
    options = RoutedOptions(
        experts=given.num_experts,
        top_k=given.routes.shape[1],
        max_rows=given.max_rows,
        scales=scales,
    )
    return Problem(
        op, validation.device(x), group.world, (sum(sizes), columns), 0, sizes, wire, options
    )


def fake_result(op: str, group: Group, given: OpArguments) -> Result:
    """Return an op's result without data, for tracing."""
    spec, x, shape, dtype = OPS[op], given.x, list(given.x.shape), None
    if isinstance(given, RoutedArguments):
        return _fake_routed(group, given)
    if isinstance(given, ExchangeArguments):
        gathered, scattered = given.gather_sizes, given.scatter_sizes
    else:
        gathered = scattered = given.shard_sizes
        dtype = given.out_dtype
        if spec.scaled:
            dtype = validation.out_dtype(dtype, x, scaled=True)
    if not isinstance(given, ReduceArguments):
        dim = validation.dim(given.gather_dim, shape, "gather_dim")
        shape[dim] = shape[dim] * group.world if gathered is None else sum(gathered)
    if isinstance(given, GatherArguments):
        if not spec.has_matmul:
            return x.new_empty(shape)
        outs = [x.new_empty((*shape[:-1], columns_of(w)), dtype=dtype) for w in given.weights]
        return x.new_empty(shape if given.return_gathered else [0]), outs
    if isinstance(given, ReduceArguments) and given.w is not None:
        shape[-1] = columns_of(given.w)
    if spec.scatters:
        dim = validation.dim(given.scatter_dim, shape, "scatter_dim")
        shape[dim] = shape[dim] // group.world if scattered is None else scattered[group.rank]
    result = x.new_empty(shape, dtype=dtype)
    return (result, x.new_empty(shape)) if spec.normed else result


def _fake_routed(group: Group, given: RoutedArguments) -> Result:
    x = given.x
    if given.topk_weights is not None:
        return x.new_empty(given.topk_weights.shape[0], x.shape[1])
    rows: int | torch.SymInt | None = given.max_rows
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    held = shard_sizes(given.num_experts, group.world)[group.rank]
    counts = x.new_empty(held, dtype=torch.int64)
    if given.scale_x is None:
        return x.new_empty(rows, x.shape[1]), counts
    words = Packing.of(x, given.scale_x).words
    return x.new_empty(rows, words, dtype=torch.float32), counts
