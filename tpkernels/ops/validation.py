"""Argument checks of all ops, made before anything is sent. Messages give the value and what is
allowed. First the messages that several checks share, then single arguments, operands with scales,
tokens with routes, groups of rows, and what `problems` checks of each op."""

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
    columns_of,
    columns_of_stack,
    is_packed,
    is_packed_stack,
    rows_of,
)
from tpkernels.local.product import CustomMatmul, Weight
from tpkernels.local.scaled import (
    BLOCK,
    FP4,
    FP8,
    TILE_ROWS,
    Scaling,
    block_of,
    numbers_in,
    scaling_of,
    swizzled_numel,
)
from tpkernels.ops.arguments import ReduceArguments, RoutedArguments
from tpkernels.planning.op_spec import OpSpec
from tpkernels.torch_private import elements_overlap

INDICES = (torch.int32, torch.int64)
SCALED_OUT = (torch.bfloat16, torch.float16, torch.float32)
NO_GRADIENT = (
    "call it under torch.no_grad(), or keep the operands in a wider dtype and use the op without "
    "scales"
)


def _form(
    fits: bool, tensor: torch.Tensor, what: str, form: str, *, with_dtype: bool = False
) -> None:
    if not fits:
        given = f"is {dtypes.name(tensor.dtype)} of" if with_dtype else "has"
        raise ValueError(f"{what} {given} shape {list(tensor.shape)}; it must be {form}")


def _dtype(tensor: torch.Tensor, what: str, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(dict.fromkeys(map(dtypes.name, allowed)))
        raise TypeError(f"{what} is {dtypes.name(tensor.dtype)}; it must be {names}")


def _floating(tensor: torch.Tensor, what: str) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{what} is {dtypes.name(tensor.dtype)}; it must be floating-point")


def _needed(
    fits: bool, shape: Sequence[int], x: torch.Tensor, needed: str, what: str, form: str = "shape"
) -> None:
    if not fits:
        given = f"{what} has {form} {list(shape)}"
        raise ValueError(f"{given}, but x of shape {list(x.shape)} needs [{needed}]")


# Single arguments.


def dim(value: int, shape: Sequence[int], what: str, *, scaled: bool = False) -> int:
    """Return a dim of ``shape``; negative ones are refused, and with scales the last one, along
    which they are shared."""
    if not 0 <= value < len(shape):
        dims = len(shape)
        raise ValueError(f"{what} is {value}; a tensor of {dims} dims allows 0 to {dims - 1}")
    if scaled and value == len(shape) - 1:
        raise NotImplementedError(
            f"{what} is {value}, the last dim of shape {list(shape)}; with scales it must be 0 to "
            f"{len(shape) - 2}"
        )
    return value


def tensors(arguments: Mapping[str, Any]) -> None:
    """Check all tensors among an op's arguments: dense, and on the device of the first, which is x
    in all ops that communicate. The dispatcher does not: with one tensor on the meta device it
    takes the fake kernel, and it overlooks optional lists."""
    first, x = next(iter(arguments.items()))
    for name, value in arguments.items():
        listed = isinstance(value, (list, tuple))
        for i, tensor in enumerate(value if listed else [value]):
            if not isinstance(tensor, torch.Tensor):
                continue
            what = f"{name}[{i}]" if listed else name
            if tensor.is_nested or tensor.layout != torch.strided:
                kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
                raise NotImplementedError(f"{what} {kind}; the ops support dense tensors only")
            if tensor.device != x.device:
                raise ValueError(
                    f"{what} is on {tensor.device} but {first} is on {x.device}; they must be on "
                    "the same device"
                )


def device(x: torch.Tensor) -> str:
    """Return the type of x's device; raise where the ops do not run on it."""
    if x.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"x is on {x.device}; the ops support cpu and cuda")
    return x.device.type


def written_once(x: torch.Tensor) -> None:
    """Check that x can be overwritten: no two of its elements share memory."""
    if not x.is_contiguous() and elements_overlap(x):
        raise ValueError(
            f"x of shape {list(x.shape)} and strides {list(x.stride())} has elements that share "
            "memory and cannot be overwritten; pass x.contiguous()"
        )


def matrix_input(x: torch.Tensor, *, scaled: bool = False) -> None:
    """Check x [..., K] of a dtype that is supported, or of one that has ``scaled`` forms."""
    dtypes.check_supported(x.dtype, "x", (*FP8, FP4) if scaled else dtypes.CODES)
    if x.dim() < 2 or (scaled and x.shape[-1] < 1):
        raise ValueError(f"x must have at least 2 dims [..., K] with K >= 1, not {list(x.shape)}")


def weight(w: Weight, x: torch.Tensor, k: int, what: str) -> None:
    """Check w [k, N] of x's dtype, where ``k`` is the columns of the (gathered) x."""
    if k < 1:
        raise ValueError(f"x has shape {list(x.shape)}: K must be at least 1")
    shape, form = list(w.shape), "shape"
    if is_packed(w):
        check_packed(w, what)
        if w.is_cuda:
            raise NotImplementedError(
                f"{what} is packed and on {w.device}, but packed weights are supported on CPUs "
                "only; pass the unpacked weight"
            )
        shape, form = [rows_of(w), columns_of(w)], "packed shape"
    _needed(len(shape) == 2 and shape[0] == k, shape, x, f"{k}, N", what, form)
    if shape[1] < 1:
        raise ValueError(f"{what} has shape {shape}: N must be at least 1")
    if w.dtype == torch.int8 and is_packed(w) and x.dtype != torch.float64:
        return
    if w.dtype != x.dtype:
        packed = f": pack it in {dtypes.name(x.dtype)}" if is_packed(w) else ""
        raise TypeError(
            f"{what} is {dtypes.name(w.dtype)} but x is {dtypes.name(x.dtype)}; they must be equal"
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
    """Check weights [k, N_i], each with a bias [N_i] of a dtype in ``allowed`` or, in the ops'
    lists, one of no elements. ``scaled``: the scales of x, and of each weight."""
    if not values:
        raise ValueError("weights is empty; pass at least one weight")
    for name, each in (("scales_w", scaled[1] if scaled else None), ("biases", biases)):
        if each is not None and len(each) != len(values):
            raise ValueError(
                f"{name} has length {len(each)}, but weights has length {len(values)}; they must "
                "be equal"
            )
    for i, w in enumerate(values):
        if scaled is None:
            weight(w, x, k, f"weights[{i}]")
        else:
            assert isinstance(w, torch.Tensor)  # the dispatcher takes no others
            scaled_weight(w, scaled[1][i], x, scaled[0], f"weights[{i}]")
        if biases is not None and biases[i].shape != (0,):
            if isinstance(w, CustomMatmul):
                raise NotImplementedError(
                    f"weights[{i}] is a CustomMatmul, which does not support biases[{i}]; add the "
                    "bias in its function"
                )
            bias(biases[i], x, columns_of(w), f"biases[{i}]", allowed)


def whole(
    w: Weight,
    x: torch.Tensor,
    result: torch.dtype,
    algorithm: str,
    what: str,
    by_columns: bool = False,
) -> None:
    """Check the use of a weight that is packed, or known to a `CustomMatmul` alone: all of its
    columns are multiplied at once and give results of x's dtype.

    Args:
        result: the dtype of the product before it travels, or is returned.
        by_columns: the op splits the columns over the ranks.
    """
    if not (isinstance(w, CustomMatmul) or is_packed(w)):
        return
    given = f"{what} is {'a CustomMatmul' if isinstance(w, CustomMatmul) else 'packed'}"
    if algorithm == "fused":
        raise NotImplementedError(
            f"{given}, which the kernels of 'fused' cannot read; pass the weight as a plain "
            "tensor, or choose a different algorithm"
        )
    if by_columns:
        raise NotImplementedError(
            f"{given}, so the last dim of the result cannot be split over the ranks; pass the "
            "weight as a plain tensor, or choose a different scatter_dim"
        )
    if result != x.dtype:
        raise NotImplementedError(
            f"{given}, so its matmul returns {dtypes.name(x.dtype)}, the dtype of x, not "
            f"{dtypes.name(result)}; pass the weight as a plain tensor, or leave "
            f"{'wire_dtype' if what == 'w' else 'out_dtype'} at its default"
        )


def bias(
    value: torch.Tensor | None,
    x: torch.Tensor,
    columns: int,
    what: str = "bias",
    allowed: Sequence[torch.dtype] | None = None,
) -> None:
    """Check bias [columns], of a dtype in ``allowed``: by default x's or the accumulator's."""
    if value is None:
        return
    if tuple(value.shape) != (columns,):
        raise ValueError(f"{what} has shape {list(value.shape)}, expected [{columns}]")
    _dtype(value, what, allowed or (x.dtype, dtypes.accumulator(x.dtype)))


def out_dtype(value: torch.dtype | None, x: torch.Tensor, *, scaled: bool = False) -> torch.dtype:
    """Return the requested dtype; by default x's, and bfloat16 of ``scaled`` operands."""
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
    """Return the dtype that partials travel in: x's, or float32."""
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
    what: str = "shard_sizes",
    name: str = "x",
) -> tuple[int, ...]:
    """Return the rows per rank of a dim of which this rank has ``size`` rows, as all ranks do by
    default."""
    if sizes is None:
        return (size,) * group.world
    checked = check_sizes(sizes, group.world)
    if checked[group.rank] != size:
        raise ValueError(
            f"{name} has {size} rows in the gathered dim, but {what} {list(checked)} specifies "
            f"{checked[group.rank]} for rank {group.rank}"
        )
    return checked


def scatter_sizes(
    sizes: Sequence[int] | None, total: int, world: int, what: str = "shard_sizes"
) -> tuple[int, ...]:
    """Return the rows per rank of a scattered dim of ``total`` rows."""
    if sizes is None:
        if total % world:
            raise ValueError(
                f"the scattered dim has {total} rows, which is not divisible by world_size="
                f"{world}; pass {what}=tpkernels.shard_sizes({total}, {world})"
            )
        return (total // world,) * world
    checked = check_sizes(sizes, world)
    if sum(checked) != total:
        raise ValueError(
            f"{what} {list(checked)} add up to {sum(checked)}, but the scattered dim has "
            f"{total} rows"
        )
    return checked


def empty_shards(options: Mapping[str, Any]) -> str:
    """Return the sizes among an op's options that give a rank no rows; empty if none do. In a
    compiled graph inductor makes what reads a result without elements read nothing. Then it drops
    the op, or no longer orders it before the next one, on that rank alone."""
    for name in ("shard_sizes", "gather_sizes", "scatter_sizes"):
        sizes = options.get(name)
        if sizes is not None and any(size == 0 for size in sizes):
            return f"{name}={list(sizes)}"
    return ""


# Operands with scales. `local.scaled` has the forms of scales.


def scale_of_x(
    scale: torch.Tensor,
    x: torch.Tensor,
    lead: Sequence[int],
    dim: int | None,
    sizes: Sequence[int],
) -> None:
    """Check the scales of x. Row-wise ones may be those of the gathered x, too. Swizzled ones must
    be whole tiles on every rank, so that those of all ranks, one after the other, are those of the
    gathered x.

    Args:
        lead: the leading dims of the gathered x.
        dim: the one that is gathered, of which the ranks have ``sizes``; None: none is.
    """
    rows = [[*x.shape[:-1], 1], [*lead, 1]]
    _scale(scale, x, "scale_x", rows, x.shape[:-1], numbers_in(x.dtype, x.shape[-1]))
    if dim is None or scaling_of(scale) is not Scaling.BLOCK or scale.dim() != 1:
        return
    others = prod(lead[:dim]) * prod(lead[dim + 1 :])
    for rank, size in enumerate(sizes):
        if size * others % TILE_ROWS:
            raise NotImplementedError(
                f"scale_x is swizzled, but x has {size * others} rows on rank {rank}, which is not "
                f"a multiple of {TILE_ROWS}; give each rank a multiple of {TILE_ROWS} rows, or "
                "pass scales that are not swizzled"
            )


def scaled_weight(
    w: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, scale_x: torch.Tensor, what: str
) -> None:
    """Check w [K, N] and its scales, next to an x that has been checked."""
    dtypes.check_supported(w.dtype, what, (*FP8, FP4))
    fits = w.dim() == 2 and w.shape[0] == x.shape[-1] and w.shape[1] > 0
    _needed(fits, w.shape, x, f"{x.shape[-1]}, N", what)
    if (w.dtype == FP4) != (x.dtype == FP4):
        raise TypeError(
            f"{what} is {dtypes.name(w.dtype)} and x is {dtypes.name(x.dtype)}; both must be fp8, "
            "or both fp4"
        )
    k, scale_name = numbers_in(w.dtype, w.shape[0]), f"the scale of {what}"
    _scale(scale, w, scale_name, [[1, w.shape[1]]], w.shape[1:], k)
    kinds = scaling_of(scale_x), scaling_of(scale)
    if kinds[0] is not kinds[1] and Scaling.BLOCK in kinds:
        raise ValueError(
            f"scale_x is {kinds[0].value} but {scale_name} is {kinds[1].value}; if either is "
            "block-wise, both must be"
        )


def _scale(
    scale: torch.Tensor,
    of: torch.Tensor,
    what: str,
    row_shapes: Sequence[Sequence[int]],
    lead: Sequence[int],
    k: int,
) -> None:
    """Check the scales of an operand that has ``lead`` rows (of a weight: columns) of ``k``
    numbers."""
    block, block_dtype = block_of(of.dtype)
    shape = list(scale.shape)
    _dtype(scale, what, (block_dtype,) if of.dtype == FP4 else (torch.float32, block_dtype))
    if scale.dtype == torch.float32:
        rows = " or ".join(dict.fromkeys(str(list(each)) for each in row_shapes))
        fits = shape in ([], [1], *map(list, row_shapes))
        _form(fits, scale, what, f"[] or [1] (tensor-wise) or {rows} (row-wise)")
        return
    if k % block:
        raise ValueError(
            f"{what} has one scale per {block} elements of K, but K is {k}, which is not divisible "
            f"by {block}"
        )
    each, flat = [*lead, k // block], swizzled_numel(prod(lead), k // block)
    _form(shape in (each, [flat]), scale, what, f"{each}, or [{flat}] if it is swizzled")


def scaled_rows(x: torch.Tensor, scale: torch.Tensor) -> None:
    """Check fp8 rows of experts [R, K] and their scales, which are row-wise or those of blocks."""
    dtypes.check_supported(x.dtype, "x with scales", FP8)
    _form(x.dim() == 2 and x.shape[1] > 0, x, "x", "[rows, K] with K >= 1")
    rows, k = x.shape
    _float32_scale(scale, "scale_x", [[rows, 1], *([[rows, k // BLOCK]] if k % BLOCK == 0 else [])])


def scaled_stack(
    stack: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, scale_x: torch.Tensor
) -> bool:
    """Check fp8 weights of experts [E, K, N] and their scales, next to rows that have been checked;
    return whether the scales are those of blocks."""
    dtypes.check_supported(stack.dtype, "w", FP8)
    fits = stack.dim() == 3 and stack.shape[1] == x.shape[1] and stack.shape[2] > 0
    _needed(fits, stack.shape, x, f"E, {x.shape[1]}, N", "w")
    (experts, k, n), per_row = stack.shape, scale_x.shape[1]
    row_wise, blocks = [experts, 1, n], [experts, k // BLOCK, ceil_div(n, BLOCK)]
    right = (row_wise, per_row == 1), (blocks, per_row * BLOCK == k)
    _float32_scale(scale, "scale_w", [shape for shape, matches in right if matches])
    return list(scale.shape) != row_wise


def _float32_scale(scale: torch.Tensor, what: str, allowed: Sequence[list[int]]) -> None:
    _dtype(scale, what, (torch.float32,))
    _form(list(scale.shape) in allowed, scale, what, " or ".join(map(str, allowed)))


# Tokens with routes.


def topk(ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> None:
    """Check the experts of each token of x [tokens, H], and their weights."""
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
    _dtype(ids, "topk_ids", INDICES)
    _floating(weights, "topk_weights")


def routed(given: RoutedArguments, group: Group) -> tuple[int, ...]:
    """Check an op on tokens with routes; return the tokens of each rank."""
    x, routes = given.x, given.routes
    if given.scale_x is not None:
        scaled_rows(x, given.scale_x)
    else:
        dtypes.check_supported(x.dtype, "x")
    _form(x.dim() == 2 and x.shape[1] > 0, x, "x", "[rows, H] with H >= 1")
    for what, value in (("num_experts", given.num_experts), ("max_rows", given.max_rows)):
        if value is not None and value < 1:
            raise ValueError(f"{what} is {value}; it must be at least 1")
    fits = routes.dim() == 2 and routes.shape[1] > 0 and routes.dtype in INDICES
    form = "int32 or int64 of shape [tokens of all ranks, k] with k >= 1"
    _form(fits, routes, "routes", form, with_dtype=True)
    tokens, name = x, "x"
    if given.topk_weights is not None:
        tokens, name, k = given.topk_weights, "topk_weights", routes.shape[1]
        fits = tokens.dim() == 2 and tokens.is_floating_point()
        _form(fits, tokens, name, "floating-point of shape [tokens, k]", with_dtype=True)
        if tokens.shape[1] != k:
            raise ValueError(
                f"{name} has shape {list(tokens.shape)}, but routes has {k} experts per token; the "
                "shape must be [tokens, k]"
            )
    sizes = gather_sizes(given.shard_sizes, tokens.shape[0], group, name=name)
    if sum(sizes) != routes.shape[0]:
        raise ValueError(
            f"routes has {routes.shape[0]} tokens, but the ranks have {sum(sizes)} in total "
            f"({list(sizes)} per rank); pass the routes of the tokens of all ranks"
        )
    return sizes


# Groups of rows, each with a weight of its own.


def group_counts(counts: torch.Tensor, x: torch.Tensor, stack: torch.Tensor) -> None:
    """Raise if ``counts`` are not those of a stack's groups, whatever their values."""
    tensors({"x": x, "counts": counts})
    if tuple(counts.shape) != (len(stack),) or counts.dtype not in INDICES:
        raise ValueError(
            f"counts is {counts.dtype} of shape {list(counts.shape)}, but w has {len(stack)} "
            f"groups; counts must be int32 or int64 of shape [{len(stack)}]"
        )


def group_operands(
    x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor | None = None
) -> None:
    """Check rows, a stack of weights and, once they are known, the groups' counts, whatever their
    values."""
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
    """Check a bias for each group of a stack of weights."""
    if bias is None:
        return
    shape = [len(stack), columns_of_stack(stack)]
    _form(list(bias.shape) == shape, bias, "bias", f"{shape}, one row per group")
    tensors({"w": stack, "bias": bias})
    _floating(bias, "bias")


# What an op that communicates is given.


def op_input(spec: OpSpec, x: torch.Tensor) -> None:
    """Check this rank's x."""
    if spec.has_matmul:
        matrix_input(x, scaled=spec.scaled)
        return
    moved = not spec.reduces and device(x) == "cpu"
    allowed = (*dtypes.CODES, *dtypes.MOVED) if moved else dtypes.CODES
    dtypes.check_supported(x.dtype, "x", allowed)
    if spec.normed:
        _form(x.dim() > 0 and x.shape[-1] > 0, x, "x", "[..., N] with N >= 1")


def local_product(x: torch.Tensor, weights: Sequence[Weight]) -> bool:
    """Return whether all ranks must know of a `CustomMatmul` among the weights. On a GPU it keeps
    ``auto`` from taking ``fused``, whose measured times are those of plain weights."""
    return device(x) == "cuda" and any(isinstance(w, CustomMatmul) for w in weights)


def epilogue(
    given: ReduceArguments, shape: Sequence[int], kept: Sequence[int], *, by_columns: bool
) -> tuple[torch.dtype, torch.dtype]:
    """Check what happens to the partials, which are of ``shape``, and of which this rank keeps the
    sum of ``kept``; return the dtype that they travel in, and the result's."""
    x, residual, scaled = given.x, given.residual, given.scale_x is not None
    result = out_dtype(given.out_dtype, x, scaled=scaled)
    if scaled:
        wire = given.wire_dtype or result
        dtypes.check_supported(wire, "wire_dtype", (result, torch.float32), verb="is")
    else:
        wire = wire_dtype(given.wire_dtype, x.dtype)
    columns = shape[-1] if shape else 1
    bias(given.bias, x, columns, allowed=(result,) if scaled else None)
    if residual is not None:
        if tuple(residual.shape) != tuple(kept):
            raise ValueError(
                f"residual has shape {list(residual.shape)}, but the output has shape "
                f"{list(kept)}; they must be equal"
            )
        _dtype(residual, "residual", (result,) if scaled else (x.dtype, result))
    if given.w is not None and not scaled:
        whole(given.w, x, wire, given.algorithm, "w", by_columns=by_columns)
    if given.norm is not None:
        bias(given.norm, x, columns, "weight" if given.w is None else "norm_weight")
        if not (math.isfinite(given.eps) and given.eps >= 0):
            raise ValueError(f"eps is {given.eps}; it must be finite and at least 0")
    return wire, result
