"""From an op's arguments to what its ranks must agree on, and to its results without data: one
function of each for a family of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from tpkernels.common.shards import shard_sizes
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of
from tpkernels.local.product import CustomMatmul, Weight
from tpkernels.local.scaled import Packing, numbers_in, scaling_of
from tpkernels.ops import validation
from tpkernels.ops.arguments import (
    AnyGather,
    AnyReduce,
    CombineArguments,
    DispatchArguments,
    ExchangeArguments,
    GatherArguments,
    OpArguments,
    ReduceArguments,
    RoutedArguments,
    ScaledGatherArguments,
    ScaledReduceArguments,
)
from tpkernels.planning.op_spec import (
    OPS,
    ExchangeOptions,
    GatherOptions,
    OpSpec,
    Options,
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
    return _FAMILIES[type(given)][0](op, group, given)


def _gather(op: str, group: Group, given: GatherArguments) -> Problem:
    x, weights, options = given.x, given.weights, GatherOptions()
    if weights is None:
        validation.moved(x)
    else:
        validation.matrix_input(x)
    shape, dim, sizes = _gathered(group, given)
    if weights is not None:
        validation.weights(weights, given.biases, x, shape[-1])
        result = validation.out_dtype(given.out_dtype, x)
        for i, w in enumerate(weights):
            validation.whole(w, x, result, given.algorithm, f"weights[{i}]")
        options = GatherOptions(
            out_dtype=None if result == x.dtype else result,
            return_gathered=given.return_gathered,
            local_product=_is_known_to_all(x, weights),
        )
    return _problem(op, group, x, shape, options, dim, sizes)


def _scaled_gather(op: str, group: Group, given: ScaledGatherArguments) -> Problem:
    """Rows travel with their scales."""
    x, scale = given.x, given.scale_x
    validation.matrix_input(x, scaled=True)
    shape, dim, sizes = _gathered(group, given, scaled=True)
    validation.scale_of_x(scale, x, shape[:-1], dim, sizes)
    result = validation.out_dtype(given.out_dtype, x, scaled=True)
    scales = scale, given.scales_w
    validation.weights(given.weights, given.biases, x, shape[-1], scales, (result,))
    options = GatherOptions(
        scales=Scales(numbers_in(x.dtype, x.shape[-1]), x.dtype, scaling_of(scale).value),
        out_dtype=result,
        return_gathered=given.return_gathered,
    )
    shape[-1] = Packing.of(x, scale).words
    return _problem(op, group, x, shape, options, dim, sizes, torch.float32)


def _gathered(
    group: Group, given: AnyGather, *, scaled: bool = False
) -> tuple[list[int], int, tuple[int, ...]]:
    """Return the shape of the gathered x, the dim and each rank's rows of it."""
    shape = list(given.x.shape)
    dim = validation.dim(given.gather_dim, shape, "gather_dim", scaled=scaled)
    sizes = validation.gather_sizes(given.shard_sizes, shape[dim], group)
    shape[dim] = sum(sizes)
    return shape, dim, sizes


def _reduce(op: str, group: Group, given: AnyReduce) -> Problem:
    x, w, spec = given.x, given.w, OPS[op]
    shape, dim, local_product = list(x.shape), None, False
    sizes: tuple[int, ...] = ()
    if isinstance(given, ScaledReduceArguments):
        validation.matrix_input(x, scaled=True)
        validation.scale_of_x(given.scale_x, x, shape[:-1], None, ())
        validation.scaled_weight(given.w, given.scale_w, x, given.scale_x, "w")
    elif w is None:
        validation.summand(x, normed=spec.normed)
    else:
        validation.matrix_input(x)
        validation.weight(w, x, shape[-1], "w")
        local_product = _is_known_to_all(x, [w])
    if w is not None:
        shape[-1] = columns_of(w)
    kept = list(shape)
    if spec.scatters:
        dim = validation.dim(given.scatter_dim, shape, "scatter_dim", scaled=spec.scaled)
        sizes = validation.scatter_sizes(given.shard_sizes, shape[dim], group.world)
        kept[dim] = sizes[group.rank]
    wire, result = validation.epilogue(given, shape, kept, by_columns=dim == len(shape) - 1)
    norm = None
    if isinstance(given, ReduceArguments) and given.norm is not None:
        norm = validation.norm(given, given.norm, shape[-1])
    options = ReduceOptions(
        x_dtype=x.dtype,
        out_dtype=result,
        bias=given.bias is not None,
        residual=given.residual is not None,
        local_product=local_product,
        norm=norm,
    )
    return _problem(op, group, x, shape, options, dim, sizes, wire)


def _is_known_to_all(x: torch.Tensor, weights: Sequence[Weight]) -> bool:
    """Return whether all ranks must know of a `CustomMatmul` among them. On a GPU it keeps ``auto``
    from taking ``fused``, whose measured times are those of plain weights."""
    return validation.device(x) == "cuda" and any(isinstance(w, CustomMatmul) for w in weights)


def _exchange(op: str, group: Group, given: ExchangeArguments) -> Problem:
    x, shape = given.x, list(given.x.shape)
    validation.moved(x)
    dim = validation.dim(given.gather_dim, shape, "gather_dim")
    sizes = validation.gather_sizes(given.gather_sizes, shape[dim], group, "gather_sizes")
    shape[dim] = sum(sizes)
    to = validation.dim(given.scatter_dim, shape, "scatter_dim")
    if to == dim:
        raise ValueError(f"gather_dim and scatter_dim are both {to}; they must differ")
    parts = validation.scatter_sizes(given.scatter_sizes, shape[to], group.world, "scatter_sizes")
    return _problem(op, group, x, shape, ExchangeOptions(dim=to, sizes=parts), dim, sizes)


def _routed(op: str, group: Group, given: RoutedArguments) -> Problem:
    x, sizes = given.x, validation.routed(given, group)
    columns, wire, scales = x.shape[1], x.dtype, None
    scale = given.scale_x if isinstance(given, DispatchArguments) else None
    if scale is not None:  # rows travel with their scales
        scales = Scales(columns, wire, f"{scale.shape[1]} per row")
        columns, wire = Packing.of(x, scale).words, torch.float32
    options = RoutedOptions(
        experts=given.num_experts,
        top_k=given.routes.shape[1],
        max_rows=given.max_rows,
        scales=scales,
    )
    return _problem(op, group, x, [sum(sizes), columns], options, 0, sizes, wire)


def _problem(
    op: str,
    group: Group,
    x: torch.Tensor,
    shape: Sequence[int],
    options: Options,
    dim: int | None,
    sizes: tuple[int, ...],
    wire: torch.dtype | None = None,
) -> Problem:
    device = validation.device(x)
    return Problem(op, device, group.world, tuple(shape), dim, sizes, wire or x.dtype, options)


def fake_result(op: str, group: Group, given: OpArguments) -> Result:
    """Return an op's result without data, for tracing."""
    return _FAMILIES[type(given)][1](OPS[op], group, given)


def _fake_gather(spec: OpSpec, group: Group, given: AnyGather) -> Result:
    x, shape, dtype = given.x, list(given.x.shape), given.out_dtype
    if spec.scaled:
        dtype = validation.out_dtype(dtype, x, scaled=True)
    _fake_whole(shape, given.gather_dim, given.shard_sizes, group)
    if given.weights is None:
        return x.new_empty(shape)
    outs = [x.new_empty((*shape[:-1], columns_of(w)), dtype=dtype) for w in given.weights]
    return x.new_empty(shape if given.return_gathered else [0]), outs


def _fake_reduce(spec: OpSpec, group: Group, given: AnyReduce) -> Result:
    x, shape, dtype = given.x, list(given.x.shape), given.out_dtype
    if spec.scaled:
        dtype = validation.out_dtype(dtype, x, scaled=True)
    if given.w is not None:
        shape[-1] = columns_of(given.w)
    if spec.scatters:
        _fake_shard(shape, given.scatter_dim, given.shard_sizes, group)
    result = x.new_empty(shape, dtype=dtype)
    return (result, x.new_empty(shape)) if spec.normed else result


def _fake_exchange(_: OpSpec, group: Group, given: ExchangeArguments) -> Result:
    shape = list(given.x.shape)
    _fake_whole(shape, given.gather_dim, given.gather_sizes, group)
    _fake_shard(shape, given.scatter_dim, given.scatter_sizes, group)
    return given.x.new_empty(shape)


def _fake_whole(shape: list[int], dim: int, sizes: Sequence[int] | None, group: Group) -> None:
    dim = validation.dim(dim, shape, "gather_dim")
    shape[dim] = shape[dim] * group.world if sizes is None else sum(sizes)


def _fake_shard(shape: list[int], dim: int, sizes: Sequence[int] | None, group: Group) -> None:
    dim = validation.dim(dim, shape, "scatter_dim")
    shape[dim] = shape[dim] // group.world if sizes is None else sizes[group.rank]


def _fake_dispatch(_: OpSpec, group: Group, given: DispatchArguments) -> Result:
    x = given.x
    rows: int | torch.SymInt | None = given.max_rows
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    held = shard_sizes(given.num_experts, group.world)[group.rank]
    counts = x.new_empty(held, dtype=torch.int64)
    if given.scale_x is None:
        return x.new_empty(rows, x.shape[1]), counts
    words = Packing.of(x, given.scale_x).words
    return x.new_empty(rows, words, dtype=torch.float32), counts


def _fake_combine(_: OpSpec, group: Group, given: CombineArguments) -> Result:
    return given.x.new_empty(given.topk_weights.shape[0], given.x.shape[1])


_FAMILIES: dict[type, tuple[Callable[..., Problem], Callable[..., Result]]] = {
    GatherArguments: (_gather, _fake_gather),
    ScaledGatherArguments: (_scaled_gather, _fake_gather),
    ReduceArguments: (_reduce, _fake_reduce),
    ScaledReduceArguments: (_reduce, _fake_reduce),
    ExchangeArguments: (_exchange, _fake_exchange),
    DispatchArguments: (_routed, _fake_dispatch),
    CombineArguments: (_routed, _fake_combine),
}
