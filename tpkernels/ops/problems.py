"""From an op's arguments to what its ranks must agree on, and to its results without data: derived
from what the op does (`op_spec`), in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpkernels.common.shards import shard_sizes
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of
from tpkernels.local.scaled import Packing, numbers_in, scaling_of
from tpkernels.ops import validation
from tpkernels.planning.op_spec import OPS, Options
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
    validation.op_input(spec, x)
    shape, dim = list(x.shape), None
    sizes: tuple[int, ...] = ()
    if spec.gathers or spec.exchanges:
        dim = validation.dim(given.gather_dim, shape, "gather_dim", scaled=spec.scaled)
        name = "gather_sizes" if spec.exchanges else "shard_sizes"
        sizes = validation.gather_sizes(getattr(given, name), shape[dim], group, name)
        shape[dim] = sum(sizes)
    if spec.scaled:
        validation.scale_of_x(given.scale_x, x, shape[:-1], dim, sizes)
    options = Options()
    if spec.has_matmul:
        options = replace(options, local_product=validation.op_weights(spec, given, shape[-1]))
    if spec.exchanges:
        options = replace(options, scattered=validation.scattered(given, shape, dim, group.world))
    wire, kept = x.dtype, list(shape)
    if spec.reduces:
        if spec.has_matmul:
            shape[-1] = kept[-1] = columns_of(given.w)
        if spec.scatters:
            dim = validation.dim(given.scatter_dim, shape, "scatter_dim", scaled=spec.scaled)
            sizes = validation.scatter_sizes(given.shard_sizes, shape[dim], group.world)
            kept[dim] = sizes[group.rank]
        wire, result = validation.op_epilogue(spec, given, shape, kept, dim)
        options = replace(
            options,
            x_dtype=x.dtype,
            out_dtype=result,
            bias=getattr(given, "bias", None) is not None,
            residual=getattr(given, "residual", None) is not None,
        )
        if spec.normed:
            weight = given.norm_weight if spec.has_matmul else given.weight
            options = replace(options, norm=(float(given.eps), weight.dtype))
    elif spec.has_matmul:
        result = validation.op_products(spec, given)
        options = replace(options, return_gathered=given.return_gathered)
        if not spec.scaled:
            options = replace(options, out_dtype=None if result == x.dtype else result)
        else:  # rows travel with their scales
            options = replace(
                options,
                k=numbers_in(x.dtype, x.shape[-1]),
                x_dtype=x.dtype,
                scale_x=scaling_of(given.scale_x).value,
                out_dtype=result,
            )
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
    x, sizes = given.x, validation.routed(OPS[op], given, group)
    routes = given.num_experts, given.routes.shape[1]
    options, columns, wire = Options(routes=routes, max_rows=given.max_rows), x.shape[1], x.dtype
    scale = given.scale_x if OPS[op].dispatches else None
    if scale is not None:  # rows travel with their scales
        options = replace(options, k=columns, x_dtype=wire, scale_x=f"{scale.shape[1]} per row")
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


def fake_result(op: str, group: Group, given: Any) -> Any:
    """Return an op's result without data, for tracing."""
    spec, x = OPS[op], given.x
    dtype = getattr(given, "out_dtype", None)
    if spec.scaled:
        dtype = validation.out_dtype(dtype, x, scaled=True)
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
        dim = validation.dim(given.gather_dim, shape, "gather_dim")
        shape[dim] = shape[dim] * group.world if sizes is None else sum(sizes)
    if spec.gathers and spec.has_matmul:
        outs = [x.new_empty((*shape[:-1], columns_of(w)), dtype=dtype) for w in given.weights]
        return x.new_empty(shape if given.return_gathered else [0]), outs
    if spec.has_matmul:
        shape[-1] = columns_of(given.w)
    if spec.scatters:
        sizes = given.scatter_sizes if spec.exchanges else given.shard_sizes
        dim = validation.dim(given.scatter_dim, shape, "scatter_dim")
        shape[dim] = shape[dim] // group.world if sizes is None else sizes[group.rank]
    result = x.new_empty(shape, dtype=dtype)
    return (result, x.new_empty(shape)) if spec.normed else result
