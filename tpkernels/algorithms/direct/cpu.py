"""One matmul, and a collective on shared memory that reads all peers' buffers at once.

    all_gather_matmul        publish x | wait for all | copy the shards | matmul
    matmul_reduce_scatter    matmul | publish the partial | wait for all | sum the own rows
    matmul_all_reduce        the same, of all rows (one-shot), or of an equal part, which is then
                             published and copied by the others (two-shot)

The matmul is not split, so this is fastest when it has few rows. csrc/host/collectives.h has the
collectives, their chunks and their synchronisation; csrc/calls/ops.h has the calls that need no
Python once they are planned.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from tpkernels import _C
from tpkernels.algorithms.parts import Products, matmul_partial, shard_shape
from tpkernels.algorithms.pieces import Exchange
from tpkernels.algorithms.reduction import Reduction, RmsNorm, Rows
from tpkernels.call import Call
from tpkernels.local.matmul import converts
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of, is_packed
from tpkernels.local.product import LocalProduct, Weight
from tpkernels.local.ranges import COPY, recorded


def bind(op: str, call: Call, given: Any) -> _C.calls.Bound | None:
    """Return what runs calls of an op with these arguments in the extension; None: Python does,
    because operands or results are converted or split, or a product is the caller's.

    Args:
        op: as in ``torch.ops.tpkernels``; ``call`` does not tell what is in place.
        given: the op's arguments, which have been checked.
    """
    x, problem, calls = given.x, call.problem, _C.calls
    weights = given.weights if op == "all_gather_matmul" else [getattr(given, "w", None)]
    if any(isinstance(w, LocalProduct) for w in weights):
        return None
    dtypes = {x.dtype, problem.dtype, getattr(given, "out_dtype", None) or x.dtype}
    if len(dtypes) > 1 or prod(problem.shape) == 0:
        return None
    if problem.spec.has_matmul and converts(x.dtype, prod(problem.shape[:-1])):
        return None
    shape = () if problem.dim is None else tuple(shard_shape(problem, call.group.rank))
    match op:
        case "all_reduce_":
            return calls.AllReduceInPlace(call.collective)
        case "all_reduce":
            return calls.AllReduce(call.collective, problem.shape)
        case "all_gather":
            return calls.AllGather(call.collective, call.layout, problem.shape)
        case "reduce_scatter":
            return calls.ReduceScatter(call.collective, call.layout, shape)
        case "all_to_all":
            exchange = Exchange.of(given, problem.world)
            layouts = _exchange_layouts(call, exchange)
            return calls.AllToAll(call.collective, *layouts, tuple(exchange.result_shape(call)))
        case "all_gather_matmul":
            if given.biases:
                return None
            return calls.AllGatherMatmul(
                call.collective,
                call.layout,
                problem.shape,
                [(*problem.shape[:-1], columns_of(w)) for w in given.weights],
                [is_packed(w) for w in given.weights],
                given.return_gathered,
            )
        case "matmul_all_reduce":
            return calls.MatmulAllReduce(call.collective, problem.shape, is_packed(given.w))
        case "all_reduce_rms_norm":
            return calls.AllReduceRmsNorm(call.collective, problem.shape, given.eps)
        case "matmul_all_reduce_rms_norm":
            return calls.MatmulAllReduceRmsNorm(
                call.collective, problem.shape, given.eps, is_packed(given.w)
            )
        case "matmul_reduce_scatter":
            if given.bias is not None and problem.dim == len(problem.shape) - 1:
                return None  # each rank adds its part of the bias
            return calls.MatmulReduceScatter(
                call.collective, call.layout, shape, is_packed(given.w)
            )
    return None


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    out = empty(call.problem.shape, x.dtype, x.device)
    with recorded(COPY):
        call.collective.all_gather(x.contiguous(), out, call.layout)
    return out


def all_gather_matmul(call: Call, x: torch.Tensor, products: Products) -> None:
    whole = products.memory(call, x)
    with recorded(COPY):
        call.collective.all_gather(x.contiguous(), whole, call.layout)
    products.multiply(whole)


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, x.device)
    with recorded(COPY):
        call.collective.reduce_scatter(
            x.contiguous(), out, call.layout, reduction.bias, reduction.residual
        )
    return out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    return reduce_scatter(call, matmul_partial(call, x, w), reduction)


def all_to_all(call: Call, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    out = exchange.result(call, x)
    with recorded(COPY):
        call.collective.all_to_all(x.contiguous(), out, *_exchange_layouts(call, exchange))
    return out


def _exchange_layouts(
    call: Call, exchange: Exchange
) -> tuple[_C.host.ShardLayout, _C.host.ShardLayout, int]:
    """Return what this rank gives, what it takes, and the elements of the largest piece."""
    problem, dim = call.problem, call.problem.dim
    assert dim is not None  # an all-to-all has one
    x, out = shard_shape(problem, call.group.rank), exchange.result_shape(call)

    def layout(shape: list[int], dim: int, sizes: tuple[int, ...]) -> _C.host.ShardLayout:
        return _C.host.ShardLayout(prod(shape[:dim]), prod(shape[dim + 1 :]), sizes)

    given = layout(x, exchange.dim, exchange.sizes)
    return given, layout(out, dim, problem.sizes), exchange.largest(call)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``. Peers cannot read ``x`` in place then, as it is being overwritten."""
    with recorded(COPY):
        call.collective.all_reduce(x.contiguous(), out, reduction.bias, reduction.residual)


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    partial = matmul_partial(call, x, w)
    out = empty(partial.shape, reduction.out_dtype, x.device)
    all_reduce(call, partial, out, reduction)
    return out


def all_reduce_rms_norm(call: Call, x: torch.Tensor, reduction: Reduction, norm: RmsNorm) -> Rows:
    total = empty(x.shape, reduction.out_dtype, x.device)
    normed = empty(x.shape, reduction.out_dtype, x.device)
    with recorded(COPY):
        call.collective.all_reduce_rms_norm(
            x.contiguous(),
            total,
            normed,
            norm.weight,
            norm.eps,
            reduction.bias,
            reduction.residual,
        )
    return normed, total


def matmul_all_reduce_rms_norm(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction, norm: RmsNorm
) -> Rows:
    return all_reduce_rms_norm(call, matmul_partial(call, x, w), reduction, norm)
