"""Argument checks of all ops. They run before any data is sent.

Messages state the value and what is accepted. Order: shared checks, single arguments, scaled
operands, MoE assignments, groups of rows, and the checks of `problems` per op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from tpkernels.common import dtypes
from tpkernels.common.integers import ceil_div
from tpkernels.common.shards import check_sizes
from tpkernels.groups.group import Group
from tpkernels.local.packed import (
    check_packed,
    is_packed,
    is_packed_stack,
    stack_columns,
    weight_columns,
    weight_rows,
)
from tpkernels.local.scaled import (
    BLOCK,
    FP4,
    FP8,
    TILE_ROWS,
    Scaling,
    get_scaling,
    num_values,
    scale_block,
    swizzled_numel,
)
from tpkernels.local.weight import CustomMatmul, Weight
from tpkernels.ops.arguments import ReduceArguments, RoutedArguments
from tpkernels.planning.op_spec import OpSpec, SumUnits
from tpkernels.planning.problem import INVARIANT
from tpkernels.torch_private import elements_overlap

INDICES = (torch.int32, torch.int64)
# Limits of a sum by a tree (csrc/calls/matmul.cpp, sum_tree.h).
_MAX_SUM_UNIT, _MAX_SUM_K = 256, 1 << 24
SCALED_OUT = (torch.bfloat16, torch.float16, torch.float32)
NO_GRADIENT = (
    "call it under torch.no_grad(), or keep the operands in a wider dtype and use the op without "
    "scales"
)


def _check_form(
    fits: bool, tensor: torch.Tensor, name: str, form: str, *, with_dtype: bool = False
) -> None:
    if not fits:
        verb = f"is {dtypes.name(tensor.dtype)} of" if with_dtype else "has"
        raise ValueError(f"{name} {verb} shape {list(tensor.shape)}; it must be {form}")


def _check_dtype(tensor: torch.Tensor, name: str, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(dict.fromkeys(map(dtypes.name, allowed)))
        raise TypeError(f"{name} is {dtypes.name(tensor.dtype)}; it must be {names}")


def _check_floating_point(tensor: torch.Tensor, name: str) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{name} is {dtypes.name(tensor.dtype)}; it must be floating-point")


def _check_fits_x(
    fits: bool, shape: Sequence[int], x: torch.Tensor, needed: str, name: str, form: str = "shape"
) -> None:
    if not fits:
        actual = f"{name} has {form} {list(shape)}"
        raise ValueError(f"{actual}, but x of shape {list(x.shape)} needs [{needed}]")


# Single arguments.


def dim(value: int, shape: Sequence[int], name: str, *, scaled: bool = False) -> int:
    """Check and return a dim of ``shape``.

    Rejects negative dims. With scales also rejects the last dim, because elements along it share
    scales.
    """
    if not 0 <= value < len(shape):
        dims = len(shape)
        raise ValueError(f"{name} is {value}; a tensor of {dims} dims allows 0 to {dims - 1}")
    if scaled and value == len(shape) - 1:
        raise NotImplementedError(
            f"{name} is {value}, the last dim of shape {list(shape)}; with scales it must be 0 to "
            f"{len(shape) - 2}"
        )
    return value


def tensors(arguments: Mapping[str, Any]) -> None:
    """Check that all tensor arguments are dense and on the device of the first argument.

    The first argument is x in all ops that communicate. The dispatcher does not check this: if one
    tensor is on the meta device it selects the fake kernel, and it ignores optional lists.
    """
    first, x = next(iter(arguments.items()))
    for name, value in arguments.items():
        listed = isinstance(value, (list, tuple))
        for i, tensor in enumerate(value if listed else [value]):
            if not isinstance(tensor, torch.Tensor):
                continue
            label = f"{name}[{i}]" if listed else name
            if tensor.is_nested or tensor.layout != torch.strided:
                kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
                raise NotImplementedError(f"{label} {kind}; the ops support dense tensors only")
            if tensor.device != x.device:
                raise ValueError(
                    f"{label} is on {tensor.device} but {first} is on {x.device}; they must be on "
                    "the same device"
                )


def device(x: torch.Tensor) -> str:
    """Return the device type of x. Raises NotImplementedError if the ops do not support it."""
    if x.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"x is on {x.device}; the ops support cpu and cuda")
    return x.device.type


def overwritable(x: torch.Tensor) -> None:
    """Check that no two elements of x share memory, so that x can be overwritten."""
    if not x.is_contiguous() and elements_overlap(x):
        raise ValueError(
            f"x of shape {list(x.shape)} and strides {list(x.stride())} has elements that share "
            "memory and cannot be overwritten; pass x.contiguous()"
        )


def matrix_input(x: torch.Tensor, *, scaled: bool = False) -> None:
    """Check x [..., K] and its dtype, which must be fp8 or fp4 if ``scaled``."""
    dtypes.check_supported(x.dtype, "x", (*FP8, FP4) if scaled else dtypes.CODES)
    if x.dim() < 2 or (scaled and x.shape[-1] < 1):
        raise ValueError(f"x must have at least 2 dims [..., K] with K >= 1, not {list(x.shape)}")


def weight(w: Weight, x: torch.Tensor, k: int, name: str) -> None:
    """Check w [k, N] in the dtype of x. ``k`` is the number of columns of the (gathered) x."""
    if k < 1:
        raise ValueError(f"x has shape {list(x.shape)}: K must be at least 1")
    shape, form = list(w.shape), "shape"
    if is_packed(w):
        check_packed(w, name)
        if w.is_cuda:
            raise NotImplementedError(
                f"{name} is packed and on {w.device}, but packed weights are supported on CPUs "
                "only; pass the unpacked weight"
            )
        shape, form = [weight_rows(w), weight_columns(w)], "packed shape"
    _check_fits_x(len(shape) == 2 and shape[0] == k, shape, x, f"{k}, N", name, form)
    if shape[1] < 1:
        raise ValueError(f"{name} has shape {shape}: N must be at least 1")
    if w.dtype == torch.int8 and is_packed(w) and x.dtype != torch.float64:
        return
    if w.dtype != x.dtype:
        packed = f": pack it in {dtypes.name(x.dtype)}" if is_packed(w) else ""
        raise TypeError(
            f"{name} is {dtypes.name(w.dtype)} but x is {dtypes.name(x.dtype)}; they must be equal"
            f"{packed}"
        )


def weights(
    values: Sequence[Weight],
    biases: Sequence[torch.Tensor] | None,
    x: torch.Tensor,
    k: int,
    scaled: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None,
    allowed: Sequence[torch.dtype] | None = None,
) -> None:
    """Check weights [k, N_i] and their biases [N_i].

    Args:
        biases: an empty tensor represents a missing bias.
        scaled: (scales of x, scales of the weights).
        allowed: accepted dtypes of a bias; see `bias`.
    """
    if not values:
        raise ValueError("weights is empty; pass at least one weight")
    for name, tensor_list in (("scales_w", scaled[1] if scaled else None), ("biases", biases)):
        if tensor_list is not None and len(tensor_list) != len(values):
            raise ValueError(
                f"{name} has length {len(tensor_list)}, but weights has length {len(values)}; they "
                "must be equal"
            )
    for i, w in enumerate(values):
        if scaled is None:
            weight(w, x, k, f"weights[{i}]")
        else:
            assert isinstance(w, torch.Tensor)  # checked by the dispatcher
            scaled_weight(w, scaled[1][i], x, scaled[0], f"weights[{i}]")
        if biases is not None and biases[i].shape != (0,):
            if isinstance(w, CustomMatmul):
                raise NotImplementedError(
                    f"weights[{i}] is a CustomMatmul, which does not support biases[{i}]; add the "
                    "bias in its function"
                )
            bias(biases[i], x, weight_columns(w), f"biases[{i}]", allowed)


def unsliceable_weight(
    w: Weight,
    x: torch.Tensor,
    result: torch.dtype,
    algorithm: str,
    name: str,
    by_columns: bool = False,
) -> None:
    """Check the use of a packed weight or a `CustomMatmul`.

    Such a weight cannot be split by columns, and its matmul returns the dtype of x.

    Args:
        result: Dtype of the matmul result before it is sent or returned.
        by_columns: Whether the op splits the columns over the ranks.
    """
    if not (isinstance(w, CustomMatmul) or is_packed(w)):
        return
    actual = f"{name} is {'a CustomMatmul' if isinstance(w, CustomMatmul) else 'packed'}"
    if algorithm == "fused":
        raise NotImplementedError(
            f"{actual}, which the kernels of 'fused' cannot read; pass the weight as a plain "
            "tensor, or choose a different algorithm"
        )
    if by_columns:
        raise NotImplementedError(
            f"{actual}, so the last dim of the result cannot be split over the ranks; pass the "
            "weight as a plain tensor, or choose a different scatter_dim"
        )
    if result != x.dtype:
        raise NotImplementedError(
            f"{actual}, so its matmul returns {dtypes.name(x.dtype)}, the dtype of x, not "
            f"{dtypes.name(result)}; pass the weight as a plain tensor, or leave "
            f"{'wire_dtype' if name == 'w' else 'out_dtype'} at its default"
        )


def bias(
    value: torch.Tensor | None,
    x: torch.Tensor,
    columns: int,
    name: str = "bias",
    allowed: Sequence[torch.dtype] | None = None,
) -> None:
    """Check bias [columns] of a dtype in ``allowed``. Default: dtype of x or of the accumulator."""
    if value is None:
        return
    if tuple(value.shape) != (columns,):
        raise ValueError(f"{name} has shape {list(value.shape)}, expected [{columns}]")
    _check_dtype(value, name, allowed or (x.dtype, dtypes.accumulator(x.dtype)))


def out_dtype(value: torch.dtype | None, x: torch.Tensor, *, scaled: bool = False) -> torch.dtype:
    """Check and return the output dtype. Default: dtype of x, or bfloat16 if ``scaled``."""
    if scaled:
        value = value or torch.bfloat16
        dtypes.check_supported(value, "out_dtype", SCALED_OUT, verb="is")
    if scaled or value is None or value == x.dtype:
        return value or x.dtype
    dtypes.check_supported(value, "out_dtype")
    if (value == torch.float64) != (x.dtype == torch.float64):
        raise NotImplementedError(
            f"out_dtype is {dtypes.name(value)} but x is {dtypes.name(x.dtype)}; if either is "
            "float64, both must be"
        )
    return value


def wire_dtype(value: torch.dtype | None, x: torch.dtype) -> torch.dtype:
    """Check and return the dtype of communicated partials: the dtype of x or the accumulator."""
    allowed = (x, dtypes.accumulator(x))
    if value not in (None, *allowed):
        assert value is not None  # None is in the list
        names = " or ".join(dict.fromkeys(map(dtypes.name, allowed)))
        raise ValueError(
            f"wire_dtype is {dtypes.name(value)} and x is {dtypes.name(x)}; wire_dtype must be "
            f"{names}"
        )
    return value or x


def gather_sizes(
    sizes: Sequence[int] | None,
    size: int,
    group: Group,
    sizes_name: str = "shard_sizes",
    name: str = "x",
) -> tuple[int, ...]:
    """Check and return the rows per rank of a gathered dim. This rank has ``size`` rows.

    Default: all ranks have ``size`` rows.
    """
    if sizes is None:
        return (size,) * group.world
    checked = check_sizes(sizes, group.world)
    if checked[group.rank] != size:
        raise ValueError(
            f"{name} has {size} rows in the gathered dim, but {sizes_name} {list(checked)} "
            f"specifies {checked[group.rank]} for rank {group.rank}"
        )
    return checked


def scatter_sizes(
    sizes: Sequence[int] | None, total: int, world: int, name: str = "shard_sizes"
) -> tuple[int, ...]:
    """Check and return the rows per rank of a scattered dim of ``total`` rows."""
    if sizes is None:
        if total % world:
            raise ValueError(
                f"the scattered dim has {total} rows, which is not divisible by world_size="
                f"{world}; pass {name}=tpkernels.shard_sizes({total}, {world})"
            )
        return (total // world,) * world
    checked = check_sizes(sizes, world)
    if sum(checked) != total:
        raise ValueError(
            f"{name} {list(checked)} add up to {sum(checked)}, but the scattered dim has "
            f"{total} rows"
        )
    return checked


def sum_units(spec: OpSpec, args: ReduceArguments, group: Group) -> SumUnits | None:
    """Check the operands of a sum by a tree, and return its units, or None for other sums."""
    if args.k_sizes is None and (group.numerics != INVARIANT or not spec.has_matmul):
        return None
    x, w = args.x, args.w
    op, unit = f"{spec.name} with numerics 'invariant'", args.k_unit
    if spec.scatters or spec.scaled:
        raise NotImplementedError(
            f"{op} is not supported; use matmul_all_reduce, or layers without sequence parallelism"
        )
    if x.is_cuda or x.dtype == torch.float64:
        raise NotImplementedError(
            f"{op} supports float32, bfloat16 and float16 on CPUs, and x is "
            f"{dtypes.name(x.dtype)} on {x.device}"
        )
    k = x.shape[-1]
    sizes = (k,) * group.world
    if args.k_sizes is not None:
        sizes = check_sizes(args.k_sizes, group.world, "k_sizes")
    local = sizes[group.rank]
    if local not in (0, k) or not any(sizes):
        raise ValueError(f"k_sizes is {list(sizes)}, but x of rank {group.rank} has K={k}")
    if local and not (isinstance(w, torch.Tensor) and is_packed(w)):
        raise NotImplementedError(
            f"{op} needs a packed weight, because GEMMs with plain weights round differently for "
            "different numbers of rows; pass tpkernels.pack(w)"
        )
    last = max(rank for rank, size in enumerate(sizes) if size)
    if sum(sizes) > _MAX_SUM_K:
        raise ValueError(f"k_sizes is {list(sizes)}; the sum can be at most {_MAX_SUM_K}")
    if unit < 1 or any(size % unit for size in sizes[:last]):
        raise ValueError(
            f"k_sizes is {list(sizes)} and k_unit is {unit}; k_unit must divide all sizes except "
            "the last"
        )
    multiple = 1
    if local and isinstance(w, torch.Tensor):
        multiple = w.shape[2] - 4 if w.dtype == torch.int8 else 4 // w.dtype.itemsize
    if unit % multiple:
        raise ValueError(
            f"k_unit is {unit}; with this weight it must be a multiple of {multiple}, the elements "
            "of K that are stored together"
        )
    is_int8 = isinstance(w, torch.Tensor) and w.dtype == torch.int8
    if unit > _MAX_SUM_UNIT and not is_int8:
        raise ValueError(f"k_unit is {unit}; it can be at most {_MAX_SUM_UNIT}")
    if args.wire_dtype not in (None, torch.float32):
        raise ValueError(f"{op} sends float32, but wire_dtype is {dtypes.name(args.wire_dtype)}")
    return SumUnits(unit, sizes)


def empty_shards(options: Mapping[str, Any]) -> str:
    """Return a description of the sizes that give a rank 0 rows, or an empty string.

    In a compiled graph inductor removes reads of results without elements. Then it drops the op, or
    no longer orders it before the next op, on that rank only.
    """
    for name in ("shard_sizes", "gather_sizes", "scatter_sizes"):
        sizes = options.get(name)
        if sizes is not None and any(size == 0 for size in sizes):
            return f"{name}={list(sizes)}"
    return ""


# Scaled operands. See `local.scaled` for the formats of scales.


def x_scale(
    scale: torch.Tensor,
    x: torch.Tensor,
    leading_dims: Sequence[int],
    dim: int | None,
    sizes: Sequence[int],
) -> None:
    """Check the scales of x.

    Row-wise scales may cover the local x or the gathered x. Swizzled scales must be full tiles on
    every rank, so that their concatenation is the swizzled layout of the gathered x.

    Args:
        leading_dims: Leading dims of the gathered x.
        dim: Gathered dim, or None.
        sizes: Rows of each rank along ``dim``.
    """
    rows = [[*x.shape[:-1], 1], [*leading_dims, 1]]
    _check_scale(scale, x, "scale_x", rows, x.shape[:-1], num_values(x.dtype, x.shape[-1]))
    if dim is None or get_scaling(scale) is not Scaling.BLOCK or scale.dim() != 1:
        return
    rows_per_index = prod(leading_dims[:dim]) * prod(leading_dims[dim + 1 :])
    for rank, size in enumerate(sizes):
        if size * rows_per_index % TILE_ROWS:
            raise NotImplementedError(
                f"scale_x is swizzled, but x has {size * rows_per_index} rows on rank {rank}, "
                f"which is not a multiple of {TILE_ROWS}; give each rank a multiple of "
                f"{TILE_ROWS} rows, or pass scales that are not swizzled"
            )


def scaled_weight(
    w: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, scale_x: torch.Tensor, name: str
) -> None:
    """Check w [K, N] and its scales against a checked x."""
    dtypes.check_supported(w.dtype, name, (*FP8, FP4))
    fits = w.dim() == 2 and w.shape[0] == x.shape[-1] and w.shape[1] > 0
    _check_fits_x(fits, w.shape, x, f"{x.shape[-1]}, N", name)
    if (w.dtype == FP4) != (x.dtype == FP4):
        raise TypeError(
            f"{name} is {dtypes.name(w.dtype)} and x is {dtypes.name(x.dtype)}; both must be fp8, "
            "or both fp4"
        )
    k, scale_name = num_values(w.dtype, w.shape[0]), f"the scale of {name}"
    _check_scale(scale, w, scale_name, [[1, w.shape[1]]], w.shape[1:], k)
    kinds = get_scaling(scale_x), get_scaling(scale)
    if kinds[0] is not kinds[1] and Scaling.BLOCK in kinds:
        raise ValueError(
            f"scale_x is {kinds[0].value} but {scale_name} is {kinds[1].value}; if either is "
            "block-wise, both must be"
        )


def _check_scale(
    scale: torch.Tensor,
    operand: torch.Tensor,
    name: str,
    row_shapes: Sequence[Sequence[int]],
    leading_dims: Sequence[int],
    k: int,
) -> None:
    """Check the scales of an operand with ``k`` values per row (per column of a weight).

    ``leading_dims`` are the row dims of x or the column dim of a weight.
    """
    block, block_dtype = scale_block(operand.dtype)
    shape = list(scale.shape)
    _check_dtype(
        scale, name, (block_dtype,) if operand.dtype == FP4 else (torch.float32, block_dtype)
    )
    if scale.dtype == torch.float32:
        rows = " or ".join(dict.fromkeys(str(list(row_shape)) for row_shape in row_shapes))
        fits = shape in ([], [1], *map(list, row_shapes))
        _check_form(fits, scale, name, f"[] or [1] (tensor-wise) or {rows} (row-wise)")
        return
    if k % block:
        raise ValueError(
            f"{name} has one scale per {block} elements of K, but K is {k}, which is not divisible "
            f"by {block}"
        )
    unswizzled, numel = [*leading_dims, k // block], swizzled_numel(prod(leading_dims), k // block)
    _check_form(
        shape in (unswizzled, [numel]),
        scale,
        name,
        f"{unswizzled}, or [{numel}] if it is swizzled",
    )


def scaled_rows(x: torch.Tensor, scale: torch.Tensor) -> None:
    """Check expert-sorted fp8 rows [R, K] and their row-wise or block scales."""
    dtypes.check_supported(x.dtype, "x with scales", FP8)
    _check_form(x.dim() == 2 and x.shape[1] > 0, x, "x", "[rows, K] with K >= 1")
    rows, k = x.shape
    _check_float32_scale(
        scale, "scale_x", [[rows, 1], *([[rows, k // BLOCK]] if k % BLOCK == 0 else [])]
    )


def scaled_stack(
    stack: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, scale_x: torch.Tensor
) -> bool:
    """Check fp8 expert weights [E, K, N] and their scales against checked rows.

    Returns True for block scales, False for row-wise scales.
    """
    dtypes.check_supported(stack.dtype, "w", FP8)
    fits = stack.dim() == 3 and stack.shape[1] == x.shape[1] and stack.shape[2] > 0
    _check_fits_x(fits, stack.shape, x, f"E, {x.shape[1]}, N", "w")
    (experts, k, n), per_row = stack.shape, scale_x.shape[1]
    row_wise, blocks = [experts, 1, n], [experts, k // BLOCK, ceil_div(n, BLOCK)]
    candidates = (row_wise, per_row == 1), (blocks, per_row * BLOCK == k)
    _check_float32_scale(scale, "scale_w", [shape for shape, fits_x in candidates if fits_x])
    return list(scale.shape) != row_wise


def _check_float32_scale(scale: torch.Tensor, name: str, allowed: Sequence[list[int]]) -> None:
    _check_dtype(scale, name, (torch.float32,))
    _check_form(list(scale.shape) in allowed, scale, name, " or ".join(map(str, allowed)))


# MoE assignments.


def topk(ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> None:
    """Check the expert ids and router weights, both [tokens, k], of x [tokens, H]."""
    tensors({"x": x, "topk_ids": ids, "topk_weights": weights})
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[1] < 1:
        raise ValueError(
            f"topk_ids has shape {list(ids.shape)} and topk_weights has shape "
            f"{list(weights.shape)}; both must be [tokens, k] with k >= 1"
        )
    if ids.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"x has shape {list(x.shape)}, but topk_ids has {ids.shape[0]} tokens; x must have one "
            "row per token"
        )
    _check_dtype(ids, "topk_ids", INDICES)
    _check_floating_point(weights, "topk_weights")


def routed(args: RoutedArguments, group: Group) -> tuple[int, ...]:
    """Check the arguments of an MoE op and return the number of tokens of each rank."""
    x, routes = args.x, args.routes
    if args.scale_x is not None:
        scaled_rows(x, args.scale_x)
    else:
        dtypes.check_supported(x.dtype, "x")
    _check_form(x.dim() == 2 and x.shape[1] > 0, x, "x", "[rows, H] with H >= 1")
    for option, value in (("num_experts", args.num_experts), ("max_rows", args.max_rows)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}; it must be at least 1")
    fits = routes.dim() == 2 and routes.shape[1] > 0 and routes.dtype in INDICES
    form = "int32 or int64 of shape [tokens of all ranks, k] with k >= 1"
    _check_form(fits, routes, "routes", form, with_dtype=True)
    tokens, name = x, "x"
    if args.topk_weights is not None:
        tokens, name, k = args.topk_weights, "topk_weights", routes.shape[1]
        fits = tokens.dim() == 2 and tokens.is_floating_point()
        _check_form(fits, tokens, name, "floating-point of shape [tokens, k]", with_dtype=True)
        if tokens.shape[1] != k:
            raise ValueError(
                f"{name} has shape {list(tokens.shape)}, but routes has {k} experts per token; the "
                "shape must be [tokens, k]"
            )
    sizes = gather_sizes(args.shard_sizes, tokens.shape[0], group, name=name)
    if sum(sizes) != routes.shape[0]:
        raise ValueError(
            f"routes has {routes.shape[0]} tokens, but the ranks have {sum(sizes)} in total "
            f"({list(sizes)} per rank); pass the routes of the tokens of all ranks"
        )
    return sizes


# Groups of rows, with a weight per group.


def group_counts(counts: torch.Tensor, x: torch.Tensor, stack: torch.Tensor) -> None:
    """Check the shape and dtype of ``counts``, but not the values."""
    tensors({"x": x, "counts": counts})
    if tuple(counts.shape) != (len(stack),) or counts.dtype not in INDICES:
        raise ValueError(
            f"counts is {counts.dtype} of shape {list(counts.shape)}, but w has {len(stack)} "
            f"groups; counts must be int32 or int64 of shape [{len(stack)}]"
        )


def group_operands(
    x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor | None = None
) -> None:
    """Check rows, a stack of weights and, if passed, the shape and dtype of ``counts``."""
    tensors({"x": x, "w": stack})
    matrix_input(x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [R, K] for grouped_matmul")
    if stack.dim() not in (3, 4) or (is_packed_stack(stack) and not stack.is_contiguous()):
        raise ValueError(
            f"w has shape {list(stack.shape)} and strides {list(stack.stride())}; it must be "
            "[E, K, N], or such a stack packed with tpkernels.pack"
        )
    if len(stack):
        weight(stack[0], x, x.shape[1], "w[0]")
    if counts is not None:
        group_counts(counts, x, stack)


def group_bias(bias: torch.Tensor | None, stack: torch.Tensor) -> None:
    """Check a bias [E, N] of a stack of weights [E, K, N]."""
    if bias is None:
        return
    shape = [len(stack), stack_columns(stack)]
    _check_form(list(bias.shape) == shape, bias, "bias", f"{shape}, one row per group")
    tensors({"w": stack, "bias": bias})
    _check_floating_point(bias, "bias")


# Arguments of the ops that communicate.


def op_input(spec: OpSpec, x: torch.Tensor) -> None:
    """Check the local x of an op."""
    if spec.has_matmul:
        matrix_input(x, scaled=spec.scaled)
        return
    moved = not spec.reduces and device(x) == "cpu"
    allowed = (*dtypes.CODES, *dtypes.MOVED) if moved else dtypes.CODES
    dtypes.check_supported(x.dtype, "x", allowed)
    if spec.normed:
        _check_form(x.dim() > 0 and x.shape[-1] > 0, x, "x", "[..., N] with N >= 1")


def records_custom_matmul(x: torch.Tensor, weights: Sequence[Weight]) -> bool:
    """Return True if the problem must record that a weight is a `CustomMatmul`.

    On GPUs this keeps ``auto`` from ``fused``, whose measured times are for plain weights.
    """
    return device(x) == "cuda" and any(isinstance(w, CustomMatmul) for w in weights)


def epilogue(
    args: ReduceArguments, shape: Sequence[int], out_shape: Sequence[int], *, by_columns: bool
) -> tuple[torch.dtype, torch.dtype]:
    """Check the epilogue of a reduction and return (wire dtype, output dtype).

    ``shape`` is the shape of the partials, ``out_shape`` the shape of the local result.
    """
    x, residual, scaled = args.x, args.residual, args.scale_x is not None
    result = out_dtype(args.out_dtype, x, scaled=scaled)
    if scaled:
        wire = args.wire_dtype or result
        dtypes.check_supported(wire, "wire_dtype", (result, torch.float32), verb="is")
    else:
        wire = wire_dtype(args.wire_dtype, x.dtype)
    columns = shape[-1] if shape else 1
    bias(args.bias, x, columns, allowed=(result,) if scaled else None)
    if residual is not None:
        if tuple(residual.shape) != tuple(out_shape):
            raise ValueError(
                f"residual has shape {list(residual.shape)}, but the output has shape "
                f"{list(out_shape)}; they must be equal"
            )
        _check_dtype(residual, "residual", (result,) if scaled else (x.dtype, result))
    if args.w is not None and not scaled:
        unsliceable_weight(args.w, x, wire, args.algorithm, "w", by_columns=by_columns)
    if args.norm is not None:
        bias(args.norm, x, columns, "weight" if args.w is None else "norm_weight")
        if not (math.isfinite(args.eps) and args.eps >= 0):
            raise ValueError(f"eps is {args.eps}; it must be finite and at least 0")
    return wire, result
