"""All-reduce: ``sum_r(x_r)`` on every rank."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.ops import validation
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_reduce(Tensor x, str group, *, ScalarType? out_dtype=None, str algorithm='auto') -> Tensor"
)

SCHEMA_IN_PLACE = "all_reduce_(Tensor(a!) x, str group, *, str algorithm='auto') -> ()"


def _save(ctx: Context, args: ReduceArguments, output: torch.Tensor) -> None:
    ctx.dtype = args.x.dtype


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    return {"x": grad.to(ctx.dtype)}


OP_IN_PLACE: Op[None] = define(
    SCHEMA_IN_PLACE,
    no_gradient="it overwrites its input; use tpkernels.all_reduce",
    check=validation.overwritable,
)


_LIBRARY = torch.library.Library("tpkernels", "IMPL")  # its destructor unregisters the kernel


@torch.library.impl(_LIBRARY, OP_IN_PLACE.unrecorded.name(), "Functionalize")
def _functionalize(x: torch.Tensor, group: str, *, algorithm: str = "auto") -> None:
    """Replace the in-place op in compiled graphs, which contain no mutating ops.

    The sum is a new tensor, and the compiler regenerates all views of ``x`` from it.
    """
    validation.overwritable(x)
    x.copy_(torch.ops.tpkernels.all_reduce(x, group, algorithm=algorithm))


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward)


def all_reduce(
    x: torch.Tensor,
    group: GroupLike,
    *,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Sum ``x`` over the ranks and return the sum on every rank.

    It equals::

        y = x.clone()
        dist.all_reduce(y, group=group)

    Args:
        x: Floating-point tensor with the same shape and dtype on all ranks, and any strides.
        out_dtype: Dtype of the result. Default: the dtype of ``x``.

    Returns:
        The sum. It accumulates in fp32 in rank order, is rounded once, and is bitwise identical on
        all ranks and in all runs. For CUDA tensors, ``numerics`` of `init` selects the order.

    Gradient: the gradient of the result, without communication. All ranks are assumed to compute
    the same loss from the result. An input that all ranks share and multiply by different weights
    needs the sum of its gradients: pass ``x = x.view_as(x)`` to those matmuls and call
    ``x.register_hook(lambda grad: tpkernels.all_reduce(grad, group))``.
    """
    return OP.entry()(x, group_name(group), out_dtype=out_dtype, algorithm=algorithm)


def all_reduce_(x: torch.Tensor, group: GroupLike, *, algorithm: str = "auto") -> torch.Tensor:
    """Sum ``x`` over the ranks in place, on every rank.

    It equals::

        dist.all_reduce(x, group=group)

    Args:
        x: Floating-point tensor with the same shape and dtype on all ranks. If it requires a
            gradient, `NotImplementedError` is raised. If two elements share memory, as in an
            expanded tensor, `ValueError` is raised.

    Returns:
        ``x``, overwritten with the sum. The sum is rounded as in `all_reduce`.

    Gradient: not supported. Use `all_reduce`.
    """
    OP_IN_PLACE.entry()(x, group_name(group), algorithm=algorithm)
    return x
