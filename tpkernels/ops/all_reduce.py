"""``sum_r(x_r)`` on every rank."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels import dtypes, groups
from tpkernels.backends import run
from tpkernels.call import Call
from tpkernels.groups import GroupLike
from tpkernels.groups.group import Group
from tpkernels.local.memory import empty
from tpkernels.ops import _check
from tpkernels.ops._library import (
    define,
    define_backward,
    define_in_place,
    plan_call,
    remember,
)
from tpkernels.ops._reduction import describe, reduction_of
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_reduce(Tensor x, str group, *, ScalarType? out_dtype=None, str algorithm='auto') -> Tensor"
)
SCHEMA_IN_PLACE = "all_reduce_(Tensor(a!) x, str group, *, str algorithm='auto') -> ()"


def _call(x: torch.Tensor, group: str, out_dtype: torch.dtype | None, algorithm: str) -> Call:
    own = groups.get(group)
    key = ("all_reduce", x.shape, x.dtype, x.device, out_dtype, algorithm)
    call = own.calls.get(key)
    if call is None:
        call = remember(own, key, _prepare(own, x, out_dtype, algorithm))
    return call


def _prepare(group: Group, x: torch.Tensor, out_dtype: torch.dtype | None, algorithm: str) -> Call:
    dtypes.check_supported(x.dtype, "x")
    problem = Problem(
        op="all_reduce",
        device=_check.device(x),
        world=group.world,
        shape=tuple(x.shape),
        dim=None,
        sizes=(),
        dtype=x.dtype,
        options=describe(x.dtype, _check.out_dtype(out_dtype, x)),
    )
    return plan_call(group, problem, algorithm, x.device)


def _run(
    x: torch.Tensor,
    group: str,
    *,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    call = _call(x, group, out_dtype, algorithm)
    result: torch.Tensor = run(call, _execute, x, out_dtype)
    return result


def _execute(call: Call, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    out = empty(x.shape, out_dtype or x.dtype, x.device)
    call.function(call, x, out, reduction_of(x, out_dtype))
    return out


def _run_in_place(x: torch.Tensor, group: str, *, algorithm: str = "auto") -> None:
    _check.written_once(x)
    call = _call(x, group, None, algorithm)
    run(call, _execute_in_place, x)


def _execute_in_place(call: Call, x: torch.Tensor) -> None:
    out = x if x.is_contiguous() else empty(x.shape, x.dtype, x.device)
    call.function(call, x, out, reduction_of(x, None))
    if out is not x:
        x.copy_(out)


def _fake(
    x: torch.Tensor,
    group: str,
    *,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    groups.get(group)
    return x.new_empty(x.shape, dtype=out_dtype)


def _fake_in_place(x: torch.Tensor, group: str, *, algorithm: str = "auto") -> None:
    groups.get(group)


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: torch.Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> Any:
    return grad.to(ctx.dtype), None


define(SCHEMA, run=_run, fake=_fake)
define_backward("all_reduce", run=_run, save=_save, backward=_backward)
define(SCHEMA_IN_PLACE, run=_run_in_place, fake=_fake_in_place)
define_in_place(
    "all_reduce_",
    run=_run_in_place,
    instead="it overwrites its input: use tpkernels.all_reduce",
)


def all_reduce(
    x: torch.Tensor,
    group: GroupLike,
    *,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Sums the ranks' ``x``, on every rank.

    Args:
        x: of the same shape on all ranks; any strides.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        out_dtype: dtype of the result; default ``x``'s.
        algorithm: "auto", or one of "unfused", "ring", "direct".

    Returns:
        The sum, taken in fp32 in the order of the ranks and rounded once: the same bits on every
        rank and in every run.

    The gradient of the result is taken to be the same on all ranks, since all compute the same loss
    from it, and passes to each rank's ``x`` as it is. What all ranks share and each multiplies by
    weights of its own needs the opposite, the sum of its gradients: ``x = x.view_as(x)`` for the
    products alone, with ``x.register_hook(lambda grad: tpkernels.all_reduce(grad, group))``.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has been sent then.
        NotImplementedError: right but not supported: a dtype, or the algorithm asked for.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    result: Any = torch.ops.tpkernels.all_reduce.default(
        x, groups.name_of(group), out_dtype=out_dtype, algorithm=algorithm
    )
    return result


def all_reduce_(x: torch.Tensor, group: GroupLike, *, algorithm: str = "auto") -> torch.Tensor:
    """``all_reduce`` into ``x`` itself, which is returned. Raises what ``all_reduce`` does,
    ``NotImplementedError`` where a gradient of ``x`` is recorded, and ``ValueError`` where elements
    of ``x`` share memory, as in an expanded tensor."""
    torch.ops.tpkernels.all_reduce_.default(x, groups.name_of(group), algorithm=algorithm)
    return x
