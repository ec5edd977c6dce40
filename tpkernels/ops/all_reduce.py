"""``sum_r(x_r)`` on every rank."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.ops import validation
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_reduce(Tensor x, str group, *, ScalarType? out_dtype=None, str algorithm='auto') -> Tensor"
)

SCHEMA_IN_PLACE = "all_reduce_(Tensor(a!) x, str group, *, str algorithm='auto') -> ()"


def _save(ctx: Context, given: ReduceArguments, output: torch.Tensor) -> None:
    ctx.dtype = given.x.dtype


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    return {"x": grad.to(ctx.dtype)}


OP_IN_PLACE: Op[None] = define(
    SCHEMA_IN_PLACE,
    no_gradient="it overwrites its input; use tpkernels.all_reduce",
    check=validation.written_once,
)


_LIBRARY = torch.library.Library("tpkernels", "IMPL")  # kept alive: its end unregisters


@torch.library.impl(_LIBRARY, OP_IN_PLACE.unrecorded.name(), "Functionalize")
def _without_writing(x: torch.Tensor, group: str, *, algorithm: str = "auto") -> None:
    """Compiled graphs hold no op that writes: the sum is a new tensor, from which the compiler
    makes all views of ``x``."""
    validation.written_once(x)
    x.copy_(torch.ops.tpkernels.all_reduce(x, group, algorithm=algorithm))


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward)


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
        out_dtype: dtype of the result; default ``x``'s.

    Returns:
        The sum, in fp32, in rank order, rounded once: the same bits on every rank and in every
        run. On CUDA tensors ``numerics`` of `init` decides.

    All ranks compute the same loss from the result, so its gradient is the same on all ranks and
    goes to each rank's ``x`` unchanged. An input that all ranks share and multiply by their own
    weights needs the opposite, the sum of its gradients: pass ``x = x.view_as(x)`` to those matmuls
    and call ``x.register_hook(lambda grad: tpkernels.all_reduce(grad, group))``.
    """
    return OP.entry()(x, name_of(group), out_dtype=out_dtype, algorithm=algorithm)


def all_reduce_(x: torch.Tensor, group: GroupLike, *, algorithm: str = "auto") -> torch.Tensor:
    """``all_reduce`` in place; returns ``x``. Raises what ``all_reduce`` raises, and also
    ``NotImplementedError`` if ``x`` requires a gradient and ``ValueError`` if elements of ``x``
    share memory, as in an expanded tensor."""
    OP_IN_PLACE.entry()(x, name_of(group), algorithm=algorithm)
    return x
