"""``y_i = concat_r(x_r) @ w_i``: the column-parallel layer with sequence parallelism (QKV,
gate/up)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from tpkernels import dtypes, groups
from tpkernels.backends import run
from tpkernels.call import Call
from tpkernels.groups import GroupLike
from tpkernels.groups.group import Group
from tpkernels.local.memory import empty
from tpkernels.ops import _check
from tpkernels.ops._all_gather_matmul_grad import backward, save
from tpkernels.ops._library import (
    bias_list,
    define,
    define_autocast,
    define_backward,
    plan_call,
    remember,
)
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_gather_matmul(Tensor x, Tensor[] weights, str group, int gather_dim=0, "
    "Tensor[]? biases=None, *, ScalarType? out_dtype=None, bool return_gathered=False, "
    "SymInt[]? shard_sizes=None, str algorithm='auto') -> (Tensor gathered, Tensor[] outs)"
)


def _prepare(
    group: Group,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gather_dim: int,
    biases: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    return_gathered: bool,
    shard_sizes: Sequence[int] | None,
    algorithm: str,
) -> Call:
    _check.matrix_input(x)
    dim = _check.dim(gather_dim, x.dim(), "gather_dim")
    sizes = _check.gather_sizes(shard_sizes, x.shape[dim], group.rank, group.world)
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    if not weights:
        raise ValueError("weights is empty; pass at least one weight")
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights")
    for i, w in enumerate(weights):
        _check.weight(w, x, shape[-1], f"weights[{i}]")
        if biases is not None and biases[i].shape != (0,):
            _check.bias(biases[i], x, w.shape[1], f"biases[{i}]")
    out = _check.out_dtype(out_dtype, x)
    options = [] if out == x.dtype else [f"out {dtypes.name(out)}"]
    if return_gathered:
        options.append("return_gathered")
    problem = Problem(
        op="all_gather_matmul",
        device=_check.device(x),
        world=group.world,
        shape=tuple(shape),
        dim=dim,
        sizes=sizes,
        dtype=x.dtype,
        options=tuple(options),
    )
    return plan_call(group, problem, algorithm, x.device)


def _run(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: str,
    gather_dim: int = 0,
    biases: Sequence[torch.Tensor] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    own = groups.get(group)
    key = (
        "all_gather_matmul",
        x.shape,
        x.dtype,
        x.device,
        tuple((w.shape, w.dtype, w.device) for w in weights),
        gather_dim,
        biases is not None and tuple((b.shape, b.dtype, b.device) for b in biases),
        out_dtype,
        return_gathered,
        None if shard_sizes is None else tuple(shard_sizes),
        algorithm,
    )
    call = own.calls.get(key)
    if call is None:
        call = _prepare(
            own, x, weights, gather_dim, biases, out_dtype, return_gathered, shard_sizes, algorithm
        )
        remember(own, key, call)
    result: tuple[torch.Tensor, list[torch.Tensor]] = run(
        call, _execute, x, weights, biases, out_dtype or x.dtype, return_gathered
    )
    return result


def _execute(
    call: Call,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype,
    return_gathered: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    lead = call.problem.shape[:-1]
    outs = [empty((*lead, w.shape[1]), out_dtype, x.device) for w in weights]
    gathered = empty(call.problem.shape, x.dtype, x.device) if return_gathered else None
    each_bias = [b if b.numel() else None for b in biases] if biases else [None] * len(weights)
    call.function(call, x, weights, each_bias, outs, gathered)
    return (x.new_empty(0) if gathered is None else gathered), outs


def _fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: str,
    gather_dim: int = 0,
    biases: Any = None,
    *,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    own = groups.get(group)
    shape = list(x.shape)
    dim = _check.dim(gather_dim, x.dim(), "gather_dim")
    shape[dim] = shape[dim] * own.world if shard_sizes is None else sum(shard_sizes)
    outs = [x.new_empty((*shape[:-1], w.shape[1]), dtype=out_dtype) for w in weights]
    return x.new_empty(shape if return_gathered else [0]), outs


define(SCHEMA, run=_run, fake=_fake)
define_backward("all_gather_matmul", run=_run, save=save, backward=backward)
define_autocast("all_gather_matmul")


@overload
def all_gather_matmul(
    x: torch.Tensor, weights: torch.Tensor, group: GroupLike, gather_dim: int = 0, **options: Any
) -> torch.Tensor: ...
@overload
def all_gather_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: GroupLike,
    gather_dim: int = 0,
    **options: Any,
) -> list[torch.Tensor]: ...
def all_gather_matmul(  # type: ignore[misc]
    x: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
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
    """Gathers ``x`` over the ranks of ``group`` and multiplies it by each weight, as one operation.

    Args:
        x: [..., K], this rank's shard along ``gather_dim``; any strides.
        weights: [K, N] or several [K, N_i] that share the gather; any strides
            (``linear.weight.t()`` is the fast layout). N may differ by rank.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        gather_dim: the dim of ``x`` that is split over the ranks.
        biases: [N] for each weight, or None.
        out_dtype: dtype of the result; default ``x``'s. Products accumulate in fp32 either way.
        return_gathered: also return the gathered ``x``.
        save_gathered: keep the gathered ``x`` for the gradient of the weights. By default ``x``
            alone is kept, and gathered again in the backward: that takes a small part of the time
            of the product that follows, where keeping takes the memory of all ranks' activations on
            each. ``return_gathered`` keeps it too.
        shard_sizes: rows of each rank along ``gather_dim`` where they are not all equal.
        algorithm: "auto", or one of "unfused", "ring", "direct", "pipelined".

    Returns:
        y [..., M, ..., N] for one weight, a list for several; ``(gathered, y)`` with
        ``return_gathered``.

    The gradient of ``x`` is one ``matmul_reduce_scatter``, that of a weight the product of the
    gathered ``x`` and its result's gradient. A weight that is a leaf with ``grad_dtype`` float32
    gets its gradient in float32, without a rounding to ``x``'s dtype.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has been sent then.
        NotImplementedError: right but not supported: a dtype, or the algorithm asked for.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.

    In ``torch.ops.tpkernels.all_gather_matmul`` a weight without a bias has one of no elements, and
    ``gathered`` comes first, of no elements unless asked for. The argument meanings are those of
    ``torch.ops.symm_mem.fused_all_gather_matmul``.
    """
    single = isinstance(weights, torch.Tensor)
    each = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    each_bias = [biases] if isinstance(biases, torch.Tensor) else biases
    keep = save_gathered and torch.is_grad_enabled() and any(w.requires_grad for w in each)
    gathered, outs = torch.ops.tpkernels.all_gather_matmul.default(
        x,
        each,
        groups.name_of(group),
        gather_dim,
        biases=bias_list(x, each_bias),
        out_dtype=out_dtype,
        return_gathered=return_gathered or keep,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
    result = outs[0] if single else outs
    return (gathered, result) if return_gathered else result
