"""From an op's arguments to what its ranks must agree on, and to its results without data: derived
from what the op does (`op_spec`), in one place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tpkernels.common import dtypes
from tpkernels.common.shards import shard_sizes
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of
from tpkernels.local.scaled import Packing, numbers_in, scaling_of
from tpkernels.ops import scaled, validation
from tpkernels.planning.op_spec import OPS, OpSpec, Options
from tpkernels.planning.problem import Problem


def problem_of(op: str, group: Group, given: Any) -> Problem:
    """Check an op's arguments, before anything is sent, and return its problem.

    Args:
        op: as in `OPS`.
        given: the arguments, by the names in the op's schema. ``x`` is this rank's; of an op that
            gathers, its shard along ``gather_dim``, of which the ranks have ``shard_sizes``.

    Raises:
        ValueError, TypeError: invalid arguments.
        NotImplementedError: valid ones that the op does not support.
    """
    spec, x = OPS[op], given.x
    if spec.routed:
        return _routed(op, group, given)
    _check_input(spec, x)
    shape, dim = list(x.shape), None
    sizes: tuple[int, ...] = ()
    if spec.gathers or spec.exchanges:
        dim = validation.dim(given.gather_dim, x.dim(), "gather_dim")
        if spec.scaled:
            scaled.not_last(dim, x.shape, "gather_dim", "x is gathered along its rows")
        name = "gather_sizes" if spec.exchanges else "shard_sizes"
        sizes = validation.gather_sizes(
            getattr(given, name), shape[dim], group.rank, group.world, name
        )
        shape[dim] = sum(sizes)
    if spec.scaled:
        scaled.check_scale(given.scale_x, x, shape[:-1], dim, sizes)
    options = Options()
    if spec.has_matmul:
        options = replace(options, local_product=_check_weights(spec, given, shape[-1]))
    if spec.exchanges:
        options = replace(options, scattered=_scattered(given, shape, dim, group.world))
    wire, kept = x.dtype, list(shape)
    if spec.reduces:
        if spec.has_matmul:
            shape[-1] = kept[-1] = columns_of(given.w)
        if spec.scatters:
            dim = validation.dim(given.scatter_dim, x.dim(), "scatter_dim")
            if spec.scaled:
                text = "scaled products are scattered along their rows"
                scaled.not_last(dim, shape, "scatter_dim", text)
            sizes = validation.scatter_sizes(given.shard_sizes, shape[dim], group.world)
            kept[dim] = sizes[group.rank]
        wire, summed = _check_epilogue(spec, given, shape, kept, dim)
        options = replace(summed, local_product=options.local_product)
    elif spec.has_matmul:
        options = replace(options, return_gathered=given.return_gathered, **_products(spec, given))
        if spec.scaled:  # rows travel with their scales
            shape[-1], wire = Packing.of(x, given.scale_x).words, torch.float32
    return Problem(
        op=op,
        device=validation.device(x),
        world=group.world,
        shape=tuple(shape),
        dim=dim,
        sizes=sizes,
        dtype=wire,
        options=options,
    )


def _routed(op: str, group: Group, given: Any) -> Problem:
    """Return the problem of an op on tokens with routes."""
    spec, x, routes = OPS[op], given.x, given.routes
    scale = getattr(given, "scale_x", None)
    if scale is None:
        dtypes.check_supported(x.dtype, "x")
    else:
        scaled.check_rows(x, scale)
    if x.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [rows, H], H at least 1")
    if given.num_experts < 1:
        raise ValueError(f"num_experts is {given.num_experts}; it must be at least 1")
    if given.max_rows is not None and given.max_rows < 1:
        raise ValueError(f"max_rows is {given.max_rows}; it must be at least 1")
    tokens = x if spec.dispatches else given.topk_weights
    name = "x" if spec.dispatches else "topk_weights"
    if routes.dim() != 2 or routes.shape[1] < 1 or routes.dtype not in dtypes.MOVED:
        raise ValueError(
            f"routes is {dtypes.name(routes.dtype)} of shape {list(routes.shape)}; it must be "
            "int32 or int64, [tokens of all ranks, k], k at least 1"
        )
    k = routes.shape[1]
    if spec.combines and not (tokens.dim() == 2 and tokens.is_floating_point()):
        raise ValueError(
            f"topk_weights is {dtypes.name(tokens.dtype)} of shape {list(tokens.shape)}; it must "
            "be floating-point, [tokens, k]"
        )
    if spec.combines and tokens.shape[1] != k:
        raise ValueError(f"topk_weights has shape {list(tokens.shape)}, but routes has {k} a token")
    sizes = validation.gather_sizes(
        given.shard_sizes, tokens.shape[0], group.rank, group.world, "shard_sizes", name
    )
    if sum(sizes) != routes.shape[0]:
        raise ValueError(
            f"routes has {routes.shape[0]} tokens, but the ranks have {sum(sizes)}: {list(sizes)}"
        )
    options = Options(routes=(given.num_experts, k), max_rows=given.max_rows)
    columns, wire = x.shape[1], x.dtype
    if scale is not None:  # rows travel with their scales
        options = replace(options, k=columns, x_dtype=wire, scale_x=f"{scale.shape[1]} a row")
        columns, wire = Packing.of(x, scale).words, torch.float32
    return Problem(
        op=op,
        device=validation.device(x),
        world=group.world,
        shape=(sum(sizes), columns),
        dim=0,
        sizes=sizes,
        dtype=wire,
        options=options,
    )


def _check_input(spec: OpSpec, x: torch.Tensor) -> None:
    if spec.scaled:
        scaled.check_input(x)
    elif spec.has_matmul:
        validation.matrix_input(x)
    else:
        moved = not spec.reduces and validation.device(x) == "cpu"
        dtypes.check_supported(x.dtype, "x", moved=moved)
        if spec.normed and (x.dim() < 1 or x.shape[-1] < 1):
            raise ValueError(f"x has shape {list(x.shape)}; it must be [..., N], N at least 1")


def _check_weights(spec: OpSpec, given: Any, k: int) -> bool:
    """Check the weights next to an x of ``k`` columns; return whether all ranks must know of a
    `LocalProduct` among them."""
    x = given.x
    if not spec.gathers:
        if spec.scaled:
            scaled.check_weight(given.w, given.scale_w, x, given.scale_x, "w")
            return False
        validation.weight(given.w, x, k, "w")
        return validation.has_local_product([given.w], x)
    weights, biases = given.weights, given.biases
    if not weights:
        raise ValueError("weights is empty; pass at least one weight")
    if spec.scaled and len(given.scales_w) != len(weights):
        raise ValueError(f"{len(given.scales_w)} scales for {len(weights)} weights")
    if not spec.scaled:
        validation.weights(weights, biases, x, k)
        return validation.has_local_product(weights, x)
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights")
    allowed = (scaled.out_dtype(given.out_dtype),)
    for i, (w, scale) in enumerate(zip(weights, given.scales_w, strict=True)):
        scaled.check_weight(w, scale, x, given.scale_x, f"weights[{i}]")
        if biases is not None and biases[i].shape != (0,):
            validation.bias(biases[i], x, w.shape[1], f"biases[{i}]", allowed)
    return False


def _scattered(
    given: Any, shape: Sequence[int], gathered: int | None, world: int
) -> tuple[int, tuple[int, ...]]:
    """Return the scattered dim of an exchange, and each rank's rows of it."""
    dim = validation.dim(given.scatter_dim, len(shape), "scatter_dim")
    if dim == gathered:
        raise ValueError(f"gather_dim and scatter_dim are both {dim}; they must differ")
    return dim, validation.scatter_sizes(given.scatter_sizes, shape[dim], world, "scatter_sizes")


def _products(spec: OpSpec, given: Any) -> dict[str, Any]:
    """Return the options of what a gathered x is multiplied by."""
    x = given.x
    if spec.scaled:
        return {
            "k": numbers_in(x.dtype, x.shape[-1]),
            "x_dtype": x.dtype,
            "scale_x": scaling_of(given.scale_x).value,
            "out_dtype": scaled.out_dtype(given.out_dtype),
        }
    out_dtype = validation.out_dtype(given.out_dtype, x)
    for i, w in enumerate(given.weights):
        validation.whole(w, x, out_dtype, given.algorithm, f"weights[{i}]")
    return {"out_dtype": None if out_dtype == x.dtype else out_dtype}


def _check_epilogue(
    spec: OpSpec, given: Any, shape: Sequence[int], kept: Sequence[int], dim: int | None
) -> tuple[torch.dtype, Options]:
    """Check what happens to the partials, which are of ``shape``, and of which this rank keeps the
    sum of ``kept``; return the dtype that they travel in, and the options."""
    x = given.x
    bias, residual = getattr(given, "bias", None), getattr(given, "residual", None)
    asked, asked_wire = getattr(given, "out_dtype", None), getattr(given, "wire_dtype", None)
    if spec.scaled:
        out_dtype = scaled.out_dtype(asked)
        wire = scaled.wire_dtype(asked_wire, out_dtype)
        biases = residuals = [out_dtype]
    else:
        out_dtype = validation.out_dtype(asked, x)
        wire = validation.wire_dtype(asked_wire, x.dtype)
        biases, residuals = [x.dtype, dtypes.accumulator(x.dtype)], [x.dtype, out_dtype]
    columns = shape[-1] if shape else 1
    validation.bias(bias, x, columns, allowed=biases)
    validation.residual(residual, x, kept, residuals)
    if spec.has_matmul and not spec.scaled:
        by_columns = dim == len(shape) - 1
        validation.whole(given.w, x, wire, given.algorithm, "w", by_columns=by_columns)
    options = Options(
        x_dtype=x.dtype,
        out_dtype=out_dtype,
        bias=bias is not None,
        residual=residual is not None,
    )
    if not spec.normed:
        return wire, options
    name = "norm_weight" if spec.has_matmul else "weight"
    weight = getattr(given, name)
    validation.bias(weight, x, columns, name)
    if not (math.isfinite(given.eps) and given.eps >= 0):
        raise ValueError(f"eps is {given.eps}; it must be finite and at least 0")
    return wire, replace(options, norm=(float(given.eps), weight.dtype))


def fake_result(op: str, group: Group, given: Any) -> Any:
    """Return an op's result without data, for tracing."""
    spec, x = OPS[op], given.x
    dtype = getattr(given, "out_dtype", None)
    if spec.scaled:
        dtype = scaled.out_dtype(dtype)
    shape = list(x.shape)
    if spec.combines:
        return x.new_empty(given.topk_weights.shape[0], x.shape[1])
    if spec.dispatches:
        rows = given.max_rows
        if rows is None:
            rows = torch.library.get_ctx().new_dynamic_size()
        held = shard_sizes(given.num_experts, group.world)[group.rank]
        counts = x.new_empty(held, dtype=torch.int64)
        if given.scale_x is None:
            return x.new_empty(rows, x.shape[1]), counts
        words = Packing.of(x, given.scale_x).words
        return x.new_empty(rows, words, dtype=torch.float32), counts
    if spec.gathers or spec.exchanges:
        sizes = given.gather_sizes if spec.exchanges else given.shard_sizes
        shape = _gathered(shape, given.gather_dim, sizes, group)
    if spec.gathers and spec.has_matmul:
        outs = [x.new_empty((*shape[:-1], columns_of(w)), dtype=dtype) for w in given.weights]
        return x.new_empty(shape if given.return_gathered else [0]), outs
    if spec.has_matmul:
        shape[-1] = columns_of(given.w)
    if spec.scatters:
        sizes = given.scatter_sizes if spec.exchanges else given.shard_sizes
        shape = _shard(shape, given.scatter_dim, sizes, group)
    result = x.new_empty(shape, dtype=dtype)
    return (result, x.new_empty(shape)) if spec.normed else result


def _gathered(
    shape: Sequence[int], gather_dim: int, sizes: Sequence[int] | None, group: Group
) -> list[int]:
    """Return the shape of the whole of which ``shape`` is this rank's shard."""
    whole, at = list(shape), validation.dim(gather_dim, len(shape), "gather_dim")
    whole[at] = whole[at] * group.world if sizes is None else sum(sizes)
    return whole


def _shard(
    shape: Sequence[int], scatter_dim: int, sizes: Sequence[int] | None, group: Group
) -> list[int]:
    """Return the shape of this rank's shard of a whole of ``shape``."""
    shard, at = list(shape), validation.dim(scatter_dim, len(shape), "scatter_dim")
    shard[at] = shard[at] // group.world if sizes is None else sizes[group.rank]
    return shard
