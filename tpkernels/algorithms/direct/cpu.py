"""One matmul, and a collective on shared memory that reads all peers' buffers at once.

    all_gather_matmul        publish x | wait for all | copy the shards | matmul
    matmul_reduce_scatter    matmul | publish the partial | wait for all | sum the own rows
    matmul_all_reduce        the same, of all rows (one-shot), or of an equal part, which is then
                             published and copied by the others (two-shot)

The matmul is not split, so this is fastest when it has few rows. csrc/host/collectives.h has the
collectives, their chunks and their synchronisation. Where nothing is converted, the extension runs
the planned call by itself (`bind`, csrc/calls/direct.h); the functions take every call.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tpkernels.local.product import Weight
from tpkernels.local.ranges import COPY, recorded


def bind(
    call: Call, given: Any, arguments: _C.calls.Arguments, in_place: bool
) -> _C.calls.Direct | None:
    """Return what runs calls with these arguments in the extension; None: Python does, because
    operands or results are converted or split, or a product is the caller's.

    Args:
        given: the op's arguments, which have been checked.
        in_place: the op overwrites x.
    """
    x, problem, spec = given.x, call.problem, call.problem.spec
    weights: Sequence[Weight] = []
    if spec.has_matmul:
        weights = given.weights if spec.gathers else [given.w]
    if spec.scaled or not all(isinstance(w, torch.Tensor) for w in weights):
        return None
    dtypes = {x.dtype, problem.dtype, getattr(given, "out_dtype", None) or x.dtype}
    if len(dtypes) > 1 or prod(problem.shape) == 0:
        return None
    if weights and converts(x.dtype, prod(problem.shape[:-1])):
        return None
    by_columns = problem.dim == len(problem.shape) - 1
    if by_columns and getattr(given, "bias", None) is not None:
        return None  # each rank adds its part of the bias
    if getattr(given, "biases", None):
        return None
    products = []
    if spec.gathers:
        products = [(*problem.shape[:-1], columns_of(w)) for w in weights]
    return _C.calls.Direct(
        collective_of(call),
        arguments,
        in_place=in_place,
        shape=_result_shape(call),
        packed=[is_packed(w) for w in weights],
        products=products,
        return_gathered=getattr(given, "return_gathered", False),
        eps=getattr(given, "eps", 0.0),
    )


def _result_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the tensor that the collective makes on this rank."""
    problem, rank = call.problem, call.group.rank
    if problem.spec.exchanges:
        return tuple(_exchange(call).result_shape(call))
    return tuple(shard_shape(problem, rank)) if problem.spec.scatters else problem.shape


def _exchange(call: Call) -> Exchange:
    assert call.problem.options.scattered is not None  # an all-to-all's
    return Exchange(*call.problem.options.scattered)


def collective_of(call: Call) -> _C.calls.Collective:
    """Return the call's collective on shared memory, made once."""
    made: _C.calls.Collective | None = call.kept.get("collective")
    if made is None:
        made = call.kept["collective"] = _new_collective(call)
    return made


def _new_collective(call: Call) -> _C.calls.Collective:
    problem, plan, workspace = call.problem, call.plan, call.workspace
    spec = problem.spec
    id_of_call = workspace.channel, workspace.segments, plan.signature, plan.text
    if spec.keeps_sum:
        return _C.calls.Collective(*id_of_call, "all_reduce")
    if spec.exchanges:
        exchange, result = _exchange(call), list(_result_shape(call))
        given = _layout(shard_shape(problem, call.group.rank), exchange.dim, exchange.sizes)
        taken = _layout(result, problem.dim, problem.sizes)
        largest = exchange.largest(call)
        return _C.calls.Collective(*id_of_call, "all_to_all", given, taken, largest)
    name = "all_gather" if spec.gathers else "reduce_scatter"
    layout = _layout(problem.shape, problem.dim, problem.sizes)
    return _C.calls.Collective(*id_of_call, name, layout)


def _layout(shape: Sequence[int], dim: int | None, sizes: tuple[int, ...]) -> _C.host.ShardLayout:
    assert dim is not None  # it is split
    return _C.host.ShardLayout(prod(shape[:dim]), prod(shape[dim + 1 :]), sizes)


def _run(
    call: Call,
    x: torch.Tensor,
    out: torch.Tensor,
    reduction: Reduction | None = None,
    normed: torch.Tensor | None = None,
    norm: RmsNorm | None = None,
) -> None:
    bias, residual = (None, None) if reduction is None else (reduction.bias, reduction.residual)
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    with recorded(COPY):
        collective_of(call).run(x.contiguous(), out, bias, residual, normed, weight, eps)


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    out = empty(call.problem.shape, x.dtype, x.device)
    _run(call, x, out)
    return out


def all_gather_matmul(call: Call, x: torch.Tensor, products: Products) -> None:
    whole = products.memory(call, x)
    _run(call, x, whole)
    products.multiply(whole)


def all_to_all(call: Call, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    out = exchange.result(call, x)
    _run(call, x, out)
    return out


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, x.device)
    _run(call, x, out, reduction)
    return out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    return reduce_scatter(call, matmul_partial(call, x, w), reduction)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``. Peers cannot read ``x`` in place then, as it is being overwritten."""
    _run(call, x, out, reduction)


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    partial = matmul_partial(call, x, w)
    out = empty(partial.shape, reduction.out_dtype, x.device)
    _run(call, partial, out, reduction)
    return out


def all_reduce_rms_norm(call: Call, x: torch.Tensor, reduction: Reduction, norm: RmsNorm) -> Rows:
    total = empty(x.shape, reduction.out_dtype, x.device)
    normed = empty(x.shape, reduction.out_dtype, x.device)
    _run(call, x, total, reduction, normed, norm)
    return normed, total


def matmul_all_reduce_rms_norm(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction, norm: RmsNorm
) -> Rows:
    return all_reduce_rms_norm(call, matmul_partial(call, x, w), reduction, norm)
