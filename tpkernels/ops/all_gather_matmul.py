"""``y_i = concat_r(x_r) @ w_i``: the column-parallel layer with sequence parallelism (QKV,
gate/up)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from tpkernels import validation
from tpkernels.algorithms.parts import Products
from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of, fake_columns_of
from tpkernels.local.product import LocalProduct, Weight
from tpkernels.op_spec import Options
from tpkernels.ops._all_gather_matmul_grad import backward, save
from tpkernels.ops._autocast import define_autocast
from tpkernels.ops._library import (
    bias_list,
    callable_for,
    define,
    define_backward,
)
from tpkernels.ops._shortcut import shortcut
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_gather_matmul(Tensor x, Tensor[] weights, str group, int gather_dim=0, "
    "Tensor[]? biases=None, *, ScalarType? out_dtype=None, bool return_gathered=False, "
    "SymInt[]? shard_sizes=None, str algorithm='auto') -> (Tensor gathered, Tensor[] outs)"
)


def _problem(group: Group, given: Any) -> Problem:
    x = given.x
    validation.matrix_input(x)
    dim = validation.dim(given.gather_dim, x.dim(), "gather_dim")
    sizes = validation.gather_sizes(given.shard_sizes, x.shape[dim], group.rank, group.world)
    shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    if not given.weights:
        raise ValueError("weights is empty; pass at least one weight")
    validation.weights(given.weights, given.biases, x, shape[-1])
    out_dtype = validation.out_dtype(given.out_dtype, x)
    for i, w in enumerate(given.weights):
        validation.whole(w, x, out_dtype, given.algorithm, f"weights[{i}]")
    return Problem(
        op="all_gather_matmul",
        device=validation.device(x),
        world=group.world,
        shape=shape,
        dim=dim,
        sizes=sizes,
        dtype=x.dtype,
        options=Options(
            out_dtype=None if out_dtype == x.dtype else out_dtype,
            return_gathered=given.return_gathered,
            local_product=validation.has_local_product(given.weights, x),
        ),
    )


def _execute(call: Call, given: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x, weights, biases = given.x, given.weights, given.biases
    lead, out_dtype = call.problem.shape[:-1], given.out_dtype or x.dtype
    outs = [empty((*lead, columns_of(w)), out_dtype, x.device) for w in weights]
    gathered = empty(call.problem.shape, x.dtype, x.device) if given.return_gathered else None
    each_bias = [b if b.numel() else None for b in biases] if biases else [None] * len(weights)
    call.function(call, x, Products(weights, each_bias, outs, gathered))
    return (x.new_empty(0) if gathered is None else gathered), outs


def _fake(group: Group, given: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = given.x
    shape = validation.gathered_shape(x.shape, given.gather_dim, given.shard_sizes, group)
    outs = [
        x.new_empty((*shape[:-1], fake_columns_of(w, shape[-1])), dtype=given.out_dtype)
        for w in given.weights
    ]
    return x.new_empty(shape if given.return_gathered else [0]), outs


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("all_gather_matmul", save=save, backward=backward)
define_autocast("all_gather_matmul")
run_all_gather_matmul = shortcut("all_gather_matmul")  # with tensors


@overload
def all_gather_matmul(
    x: torch.Tensor, weights: Weight, group: GroupLike, gather_dim: int = 0, **options: Any
) -> torch.Tensor: ...
@overload
def all_gather_matmul(
    x: torch.Tensor,
    weights: Sequence[Weight],
    group: GroupLike,
    gather_dim: int = 0,
    **options: Any,
) -> list[torch.Tensor]: ...
def all_gather_matmul(  # type: ignore[misc]
    x: torch.Tensor,
    weights: Weight | Sequence[Weight],
    group: GroupLike,
    gather_dim: int = 0,
    *,
    biases: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Any:
    """Gather ``x`` over the ranks of ``group`` and multiply it by each weight, as one operation.

    Args:
        x: [..., K], this rank's shard along ``gather_dim``; any strides.
        weights: [K, N] or several [K, N_i] that share the gather; any strides
            (``linear.weight.t()`` is the fast layout), packed (`pack`), or a `LocalProduct`. N may
            differ by rank.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        gather_dim: the dim of ``x`` that is split over the ranks.
        biases: [N] for each weight, or None.
        out_dtype: dtype of the result; default ``x``'s. The matmul accumulates in fp32 either way
            (docs/numerics.md has cuBLAS's exception).
        return_gathered: also return the gathered ``x``.
        save_gathered: keep the gathered ``x`` for the gradient of the weights. By default ``x``
            is kept and gathered again in the backward, which takes a small fraction of the time of
            the matmul that follows; keeping it takes the memory of all ranks' activations on every
            rank. ``return_gathered`` keeps it too.
        shard_sizes: rows of each rank along ``gather_dim``; default: all the same.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    Returns:
        y [..., M, ..., N] for one weight, a list for several; ``(gathered, y)`` with
        ``return_gathered``.

    The gradient of ``x`` is one ``matmul_reduce_scatter``; that of a weight is a matmul of the
    gathered ``x`` and the gradient of its result. A leaf weight with ``grad_dtype`` float32 gets
    its gradient in float32, not rounded to ``x``'s dtype.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.

    In ``torch.ops.tpkernels.all_gather_matmul`` a weight without a bias gets an empty one, and the
    first result is ``gathered``, empty unless requested. The arguments mean what they mean in
    ``torch.ops.symm_mem.fused_all_gather_matmul``.
    """
    try:
        single = isinstance(weights, (torch.Tensor, LocalProduct))
        each = [weights] if isinstance(weights, (torch.Tensor, LocalProduct)) else list(weights)
        each_bias = [biases] if isinstance(biases, torch.Tensor) else biases
        keep = save_gathered and torch.is_grad_enabled()
        keep = keep and any(isinstance(w, torch.Tensor) and w.requires_grad for w in each)
        gathered, outs = callable_for("all_gather_matmul", each, run_all_gather_matmul)(
            x,
            each,
            name_of(group),
            gather_dim,
            biases=None if biases is None else bias_list(x, each_bias),
            out_dtype=out_dtype,
            return_gathered=return_gathered or keep,
            shard_sizes=shard_sizes,
            algorithm=algorithm,
        )
        result = outs[0] if single else outs
        return (gathered, result) if return_gathered else result
    except BaseException as error:
        break_if_left(group, error)
        raise
