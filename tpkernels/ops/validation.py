"""Argument checks, made before anything is sent. Messages give the value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpkernels.common import dtypes
from tpkernels.common.shards import check_sizes
from tpkernels.local.packed import check_packed, columns_of, is_packed, rows_of
from tpkernels.local.product import LocalProduct, Weight

_OVERLAPS = 1  # torch's answer; 0 is no, 2 is too hard to tell


def dim(value: int, ndim: int, what: str) -> int:
    """Return a dim of a tensor of ``ndim`` dims; negative ones are refused."""
    if not 0 <= value < ndim:
        raise ValueError(f"{what} is {value}; a tensor of {ndim} dims allows 0 to {ndim - 1}")
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
                raise NotImplementedError(f"{what} {kind}; the ops take dense tensors")
            if tensor.device != x.device:
                raise ValueError(f"{what} is on {tensor.device} but {first} is on {x.device}")


def device(x: torch.Tensor) -> str:
    """Return the type of x's device; raise where the ops do not run on it."""
    if x.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"x is on {x.device}; the ops run on cpu and cuda")
    return x.device.type


def written_once(x: torch.Tensor) -> None:
    """Check that x can be overwritten: no two of its elements share memory."""
    if not x.is_contiguous() and torch._debug_has_internal_overlap(x) == _OVERLAPS:
        raise ValueError(
            f"x of shape {list(x.shape)} and strides {list(x.stride())} has elements that share "
            "memory and cannot be overwritten; pass x.contiguous()"
        )


def matrix_input(x: torch.Tensor) -> None:
    """Check x [..., K] of a supported dtype."""
    dtypes.check_supported(x.dtype, "x")
    if x.dim() < 2:
        raise ValueError(f"x must have at least 2 dims [..., K], not shape {list(x.shape)}")


def topk(ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> None:
    """Check the experts of each token of x [tokens, H], and their weights."""
    tensors({"x": x, "topk_ids": ids, "topk_weights": weights})
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[1] < 1:
        raise ValueError(
            f"topk_ids has shape {list(ids.shape)} and topk_weights {list(weights.shape)}; both "
            "must be [tokens, k], k at least 1"
        )
    if ids.shape[:1] != x.shape[:1]:
        raise ValueError(f"x has shape {list(x.shape)}; topk_ids have {ids.shape[0]} tokens")
    if ids.dtype not in dtypes.MOVED:
        raise TypeError(f"topk_ids is {dtypes.name(ids.dtype)}; it must be int32 or int64")
    if not weights.is_floating_point():
        raise TypeError(f"topk_weights is {dtypes.name(weights.dtype)}; it must be floating-point")


def weight(w: Weight, x: torch.Tensor, k: int, what: str) -> None:
    """Check w [k, N] of x's dtype, where ``k`` is the columns of the (gathered) x."""
    if k < 1:
        raise ValueError(f"x has shape {list(x.shape)}: K must be at least 1")
    shape, form = list(w.shape), "shape"
    if is_packed(w):
        check_packed(w, what)
        if w.is_cuda:
            raise NotImplementedError(f"{what} is packed, which is for CPUs; pass the plain weight")
        shape, form = [rows_of(w), columns_of(w)], "packed shape"
    if len(shape) != 2 or shape[0] != k:
        raise ValueError(
            f"{what} has {form} {shape}, but x of shape {list(x.shape)} needs [{k}, N]"
        )
    if shape[1] < 1:
        raise ValueError(f"{what} has shape {shape}: N must be at least 1")
    if w.dtype == torch.int8 and is_packed(w) and x.dtype != torch.float64:
        return
    if w.dtype != x.dtype:
        packed = ": pack it in x's dtype" if is_packed(w) else ""
        raise TypeError(
            f"{what} is {dtypes.name(w.dtype)} but x is {dtypes.name(x.dtype)}; they must be equal"
            f"{packed}"
        )


def whole(
    w: Weight,
    x: torch.Tensor,
    result: torch.dtype,
    algorithm: str,
    what: str,
    by_columns: bool = False,
) -> None:
    """Check the use of a weight that is packed, or known to a `LocalProduct` alone: all of its
    columns are multiplied at once and give results of x's dtype.

    Args:
        result: the dtype of the product before it travels, or is returned.
        by_columns: the op splits the columns over the ranks.
    """
    if isinstance(w, LocalProduct):
        kind = "a LocalProduct"
    elif is_packed(w):
        kind = "packed"
    else:
        return
    if algorithm == "fused":
        raise NotImplementedError(
            f"{what} is {kind}, and the kernels of 'fused' cannot read it; pass the plain weight, "
            "or another algorithm"
        )
    if by_columns:
        raise NotImplementedError(
            f"{what} is {kind}, and its columns cannot be split along the last dim of the result; "
            "pass the plain weight"
        )
    if result != x.dtype:
        raise NotImplementedError(
            f"{what} is {kind}, and its product has x's dtype {dtypes.name(x.dtype)}, not "
            f"{dtypes.name(result)}; pass the plain weight, or leave the dtype at its default"
        )


def has_local_product(weights: Sequence[Weight], x: torch.Tensor) -> bool:
    """Return whether all ranks must know of a `LocalProduct`. On a GPU it keeps ``auto`` from
    taking ``fused``, whose measured times are those of plain weights."""
    return device(x) == "cuda" and any(isinstance(w, LocalProduct) for w in weights)


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
    _dtype_among(value, allowed or (x.dtype, dtypes.accumulator(x.dtype)), what)


def residual(
    value: torch.Tensor | None,
    x: torch.Tensor,
    shape: Sequence[int],
    allowed: Sequence[torch.dtype],
) -> None:
    """Check a residual of the output's shape and of a dtype in ``allowed``."""
    if value is None:
        return
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"residual has shape {list(value.shape)}, the output {list(shape)}")
    _dtype_among(value, allowed, "residual")


def out_dtype(value: torch.dtype | None, x: torch.Tensor, what: str = "out_dtype") -> torch.dtype:
    """Return the requested dtype, or x's."""
    if value is None or value == x.dtype:
        return x.dtype
    dtypes.check_supported(value, what)
    if (value == torch.float64) != (x.dtype == torch.float64):
        raise NotImplementedError(
            f"{what} {dtypes.name(value)} of {dtypes.name(x.dtype)} input; float64 mixes with no "
            "other dtype"
        )
    return value


def wire_dtype(value: torch.dtype | None, x: torch.dtype) -> torch.dtype:
    """Return the dtype that partials travel in: x's, or float32."""
    if value not in (None, x, dtypes.accumulator(x)):
        assert value is not None  # None is in the list
        raise ValueError(
            f"wire_dtype is {dtypes.name(value)}; it must be x's {dtypes.name(x)} or "
            f"{dtypes.name(dtypes.accumulator(x))}"
        )
    return value or x


def gather_sizes(
    sizes: Sequence[int] | None,
    size: int,
    rank: int,
    world: int,
    what: str = "shard_sizes",
    name: str = "x",
) -> tuple[int, ...]:
    """Return the rows per rank of a dim of which this rank has ``size`` rows, as all ranks do by
    default."""
    if sizes is None:
        return (size,) * world
    checked = check_sizes(sizes, world)
    if checked[rank] != size:
        raise ValueError(
            f"{name} has {size} rows in the gathered dim, but {what} {list(checked)} gives rank "
            f"{rank} {checked[rank]}"
        )
    return checked


def scatter_sizes(
    sizes: Sequence[int] | None, total: int, world: int, what: str = "shard_sizes"
) -> tuple[int, ...]:
    """Return the rows per rank of a scattered dim of ``total`` rows."""
    if sizes is None:
        if total % world:
            raise ValueError(
                f"{total} rows do not divide by {world} ranks; pass "
                f"{what}=tpkernels.shard_sizes({total}, {world})"
            )
        return (total // world,) * world
    checked = check_sizes(sizes, world)
    if sum(checked) != total:
        raise ValueError(
            f"{what} {list(checked)} add up to {sum(checked)}, but the scattered dim has "
            f"{total} rows"
        )
    return checked


def _dtype_among(tensor: torch.Tensor, allowed: Sequence[torch.dtype], what: str) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(dict.fromkeys(dtypes.name(d) for d in allowed))
        raise TypeError(f"{what} is {dtypes.name(tensor.dtype)}; it must be {names}")


def weights(
    values: Sequence[Weight],
    biases: Sequence[torch.Tensor] | None,
    x: torch.Tensor,
    k: int,
) -> None:
    """Check weights [k, N_i], each with a bias [N_i] or, in the ops' lists, one of no elements."""
    if biases is not None and len(biases) != len(values):
        raise ValueError(f"{len(biases)} biases for {len(values)} weights")
    for i, w in enumerate(values):
        weight(w, x, k, f"weights[{i}]")
        if biases is not None and biases[i].shape != (0,):
            if isinstance(w, LocalProduct):
                raise NotImplementedError(
                    f"weights[{i}] is a LocalProduct with a bias; add the bias in its function"
                )
            bias(biases[i], x, columns_of(w), f"biases[{i}]")


def empty_shards(options: Mapping[str, Any]) -> str:
    """Return the sizes among an op's options that give a rank no rows; empty if none do. In a
    compiled graph inductor makes what reads a result without elements read nothing. Then it drops
    the op, or no longer orders it before the next one, on that rank alone."""
    for name in ("shard_sizes", "gather_sizes", "scatter_sizes"):
        sizes = options.get(name)
        if sizes is not None and any(size == 0 for size in sizes):
            return f"{name}={list(sizes)}"
    return ""
