"""DTensors whose shards are computed on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.overrides import enable_reentrant_dispatch


class Work(Protocol):
    """What a deferred DTensor stands for.

    Attributes:
        inputs: what it is computed from, as autograd knows them.
    """

    @property
    def inputs(self) -> tuple[DTensor | None, ...]: ...

    def value(self) -> DTensor:
        """The result as DTensor computes it, without a gradient to ``inputs``."""

    def gradients(self, grad: DTensor) -> Sequence[DTensor | None]:
        """Those of ``inputs``; called after `value`."""


class Deferred(DTensor):
    """Computed on first use of its shard, and a plain DTensor from then on.

    Invariant: without slots of its own, so that the class can change.

    Everything reads the shard as ``_local_tensor``: DTensor's methods, its autograd functions, and
    through ``__torch_dispatch__`` all operators.
    """

    __slots__ = ()
    work: Work

    @property
    def _local_tensor(self) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # not deferred again
            value = self.work.value()
        become(self, value._local_tensor, value._spec)
        return self._local_tensor

    @_local_tensor.setter
    def _local_tensor(self, placeholder: torch.Tensor) -> None:
        """DTensor's constructor sets it."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # typed as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        with enable_reentrant_dispatch():
            for tensor in tensors:
                if isinstance(tensor, Deferred):
                    compute(tensor)
        return func(*args, **(kwargs or {}))


def compute(deferred: Deferred) -> None:
    """Makes it a plain DTensor. No-op if it is one."""
    _ = deferred._local_tensor


def become(deferred: Deferred, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Makes it a plain DTensor with this shard."""
    deferred._spec = spec
    DTensor.__dict__["_local_tensor"].__set__(deferred, local)
    del deferred.work
    deferred.__class__ = DTensor  # type: ignore[assignment]


def defer(work: Work, spec: DTensorSpec) -> Deferred:
    """The result of ``work``, with its gradient, before it is computed. ``spec``: what it will
    have."""
    result: Deferred = _Defer.apply(work, spec, *work.inputs)
    result.work = work
    return result


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, spec: DTensorSpec, *inputs: DTensor | None) -> Deferred:
        ctx.work = work
        assert spec.tensor_meta is not None
        assert inputs[0] is not None
        placeholder = torch.empty((), dtype=spec.tensor_meta.dtype, device=inputs[0].device)
        return Deferred(placeholder, spec, requires_grad=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: DTensor) -> Any:
        return None, None, *ctx.work.gradients(grad)
