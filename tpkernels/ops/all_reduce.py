"""``sum_r(x_r)`` on every rank."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels import dtypes, validation
from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.local.memory import empty
from tpkernels.ops._library import define, define_backward, define_in_place
from tpkernels.ops._shortcut import shortcut
from tpkernels.ops.reduction import reduction_of, reduction_options
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_reduce(Tensor x, str group, *, ScalarType? out_dtype=None, str algorithm='auto') -> Tensor"
)
SCHEMA_IN_PLACE = "all_reduce_(Tensor(a!) x, str group, *, str algorithm='auto') -> ()"


def _problem_of(group: Group, x: torch.Tensor, out_dtype: torch.dtype | None) -> Problem:
    dtypes.check_supported(x.dtype, "x")
    return Problem(
        op="all_reduce",
        device=validation.device(x),
        world=group.world,
        shape=tuple(x.shape),
        dim=None,
        sizes=(),
        dtype=x.dtype,
        options=reduction_options(x.dtype, validation.out_dtype(out_dtype, x)),
    )


def _problem(group: Group, given: Any) -> Problem:
    return _problem_of(group, given.x, given.out_dtype)


def _execute(call: Call, given: Any) -> torch.Tensor:
    x = given.x
    out = empty(x.shape, given.out_dtype or x.dtype, x.device)
    call.function(call, x, out, reduction_of(x, given.out_dtype))
    return out


def _fake(group: Group, given: Any) -> torch.Tensor:
    return given.x.new_empty(given.x.shape, dtype=given.out_dtype)


def _save(ctx: Any, given: Any, output: torch.Tensor) -> None:
    ctx.dtype = given.x.dtype


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> dict[str, Any]:
    return {"x": grad.to(ctx.dtype)}


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("all_reduce", save=_save, backward=_backward)


def _problem_in_place(group: Group, given: Any) -> Problem:
    return _problem_of(group, given.x, None)


def _execute_in_place(call: Call, given: Any) -> None:
    x = given.x
    out = x if x.is_contiguous() else empty(x.shape, x.dtype, x.device)
    call.function(call, x, out, reduction_of(x, None))
    if out is not x:
        x.copy_(out)


define(
    SCHEMA_IN_PLACE,
    problem=_problem_in_place,
    execute=_execute_in_place,
    fake=lambda group, given: None,
    check=validation.written_once,
)
define_in_place("all_reduce_", instead="it overwrites its input: use tpkernels.all_reduce")

_run = shortcut("all_reduce")
_run_in_place = shortcut("all_reduce_", overwrites=True)


def all_reduce(
    x: torch.Tensor,
    group: GroupLike,
    *,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Sum ``x`` over the ranks; every rank gets the sum.

    Args:
        x: of the same shape on all ranks; any strides.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        out_dtype: dtype of the result; default ``x``'s.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    Returns:
        The sum, in fp32, in rank order, rounded once: the same bits on every rank and in every
        run. On CUDA tensors ``numerics`` of `init` decides.

    All ranks compute the same loss from the result, so its gradient is the same on all ranks and
    goes to each rank's ``x`` unchanged. An input that all ranks share and multiply by their own
    weights needs the opposite, the sum of its gradients: pass ``x = x.view_as(x)`` to those matmuls
    and call ``x.register_hook(lambda grad: tpkernels.all_reduce(grad, group))``.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: Any = _run(x, name_of(group), out_dtype=out_dtype, algorithm=algorithm)
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise


def all_reduce_(x: torch.Tensor, group: GroupLike, *, algorithm: str = "auto") -> torch.Tensor:
    """``all_reduce`` in place; returns ``x``. Raises what ``all_reduce`` raises, and also
    ``NotImplementedError`` if ``x`` requires a gradient and ``ValueError`` if elements of ``x``
    share memory, as in an expanded tensor."""
    try:
        _run_in_place(x, name_of(group), algorithm=algorithm)
        return x
    except BaseException as error:
        break_if_left(group, error)
        raise
