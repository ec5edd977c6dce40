"""Shared helpers of the backward passes.

A backward calls ``torch.ops.tpkernels``, so AOTAutograd can trace it like a forward. It
communicates: all ranks must run the same backward passes in the same order and request gradients of
the same inputs. If ranks differ, they raise ``CollectiveMismatchError`` or
``CollectiveTimeoutError``, as for any mismatched call.

Loss convention:

- If ranks use their results differently (all_gather_matmul, matmul_reduce_scatter, all_gather,
  reduce_scatter), the loss is the sum over the ranks. The backward is the exact adjoint: sums
  become gathers, gathers become sums.
- If all ranks hold the same result (all_reduce, matmul_all_reduce), all compute the same loss,
  which counts once. The gradient is equal on all ranks and is passed to each summand unchanged,
  without communication. This is the Megatron convention: a tensor-parallel model has the gradients
  of the unsharded model. ``torch.distributed.nn.functional.all_reduce`` counts the loss W times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tpkernels.algorithms.chunks import as_rows
from tpkernels.common import dtypes
from tpkernels.local.matmul import allocating_matmul, local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import weight_columns
from tpkernels.local.weight import Weight
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.registration import define_kernel
from tpkernels.planning.algorithms import ALGORITHMS

SCHEMA = "_matmul(Tensor x, Tensor w, *, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    shape = (*x.shape[:-1], weight_columns(w))
    if out_dtype in (None, x.dtype):
        return allocating_matmul(as_rows(x), w, bias).view(shape)
    out = empty(shape, out_dtype, x.device)
    local_matmul(as_rows(x), w, as_rows(out), bias)
    return out


# Local matmul of the algorithms. It accumulates in fp32, rounds once to any dtype, and is fast on
# processors on which torch.mm is slow for 16-bit operands.
_matmul: Callable[..., torch.Tensor] = define_kernel(
    SCHEMA,
    run=_run,
    fake=lambda x, w, *, bias=None, out_dtype=None: x.new_empty(
        (*x.shape[:-1], weight_columns(w)), dtype=out_dtype
    ),
)


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ w + bias`` of local operands, without a gradient.

    x [..., K], w [K, N] or packed, bias [N].
    """
    return _matmul(x, w, bias=bias, out_dtype=out_dtype)


class Context(Protocol):
    """Autograd context of a call, with the attributes that the ops add."""

    saved_tensors: tuple[Any, ...]  #: saved tensors, or None for a tensor that is not needed
    save_for_backward: Callable[..., None]
    mark_non_differentiable: Callable[[torch.Tensor], None]
    set_materialize_grads: Callable[[bool], None]
    group: str
    dim: int
    shard_sizes: Sequence[int] | None
    options: dict[str, Any]
    dtype: torch.dtype
    bias_dtype: torch.dtype
    residual_dtype: torch.dtype
    weight_grad: WeightGrad
    column_grads: ColumnGrads
    return_gathered: bool
    eps: float
    num_experts: int
    tokens: int


class Needs(Protocol):
    """Flags of the arguments that need a gradient, by argument name."""

    weights: Sequence[bool]
    biases: Sequence[bool]

    def __getattr__(self, name: str) -> bool: ...


@dataclass(frozen=True)
class WeightGrad:
    """Memory layout and dtype of the gradient of a weight [K, N].

    The gradient has the layout of the weight. Then ``linear.weight``, passed to the op as a
    transposed view, accumulates the gradient without a copy.
    """

    transposed: bool
    dtype: torch.dtype

    @classmethod
    def for_weight(cls, w: torch.Tensor) -> WeightGrad:
        dtype = w.dtype
        # A leaf can request a gradient dtype that differs from its dtype.
        requested = getattr(w, "grad_dtype", None) if w.is_leaf else None
        if requested == dtypes.accumulator(dtype):
            dtype = requested
        return cls(w.stride(0) < w.stride(1), dtype)

    def compute(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return ``x^T @ grad`` over all rows. x [..., K], grad [..., N]."""
        x, grad = as_rows(x), as_rows(grad)
        if self.transposed:
            return matmul(grad.t(), x, self.dtype).t()
        return matmul(x.t(), grad, self.dtype)


def bias_grad(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of grad [..., N] over its rows, rounded once."""
    return as_rows(grad).sum(0, dtype=dtypes.accumulator(grad.dtype)).to(dtype)


class ColumnGrads:
    """Gradients of ``x @ w_i + bias_i`` for several weights [K, N_i] that share x.

    Args:
        ctx: Autograd context. It saves ``saved_x`` and the weights that the backward needs.
        saved_x: The full x, or the shard from which the backward gathers x again.
    """

    def __init__(
        self,
        ctx: Context,
        x: torch.Tensor,
        weights: Sequence[Weight],
        biases: Sequence[torch.Tensor] | None,
        saved_x: torch.Tensor,
    ) -> None:
        plain = [w for w in weights if isinstance(w, torch.Tensor)]  # other weights: no gradient
        needed = any(w.requires_grad for w in plain)
        ctx.save_for_backward(saved_x if needed else None, *(plain if x.requires_grad else ()))
        ctx.set_materialize_grads(False)
        self.dtype = x.dtype
        self._weights = [WeightGrad.for_weight(w) for w in plain]
        self._biases = None if biases is None else [b.dtype for b in biases]

    def grad_operands(
        self, grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (grad, w^T), concatenated over i, or None if no output has a gradient.

        ``grad @ w^T == sum_i(grad_i @ w_i^T)`` is the gradient of the full x. As a single matmul,
        the sum over i overlaps with a reduction and is rounded once. AMD EPYC Zen 3, 1 thread,
        2026-11-21, two weights of (2048, 1024, 2816): the concatenation lasts 3.2 ms of 274 ms in
        bf16 and 7.3 ms of 260 ms in fp32.
        """
        pairs = [
            (g.to(self.dtype), w.t()) for g, w in zip(grads, weights, strict=True) if g is not None
        ]
        if len(pairs) < 2:
            return pairs[0] if pairs else None
        return torch.cat([g for g, _ in pairs], -1), torch.cat([w for _, w in pairs])

    def compute_weight_grads(
        self, needs: Needs, grads: Sequence[torch.Tensor | None], get_x: Callable[[], torch.Tensor]
    ) -> dict[str, Any]:
        """Return the gradients of the weights and biases. ``get_x()`` returns the full x."""
        weights: list[torch.Tensor | None] = [None] * len(grads)
        biases = None if self._biases is None or not needs.biases else list(weights)
        needed_grads = {i: g for i, g in enumerate(grads) if needs.weights[i] and g is not None}
        x = get_x() if needed_grads else None
        for i, grad in needed_grads.items():
            assert x is not None
            weights[i] = self._weights[i].compute(x, grad.to(self.dtype))
        if biases is not None and self._biases is not None:
            for i, (out_grad, dtype) in enumerate(zip(grads, self._biases, strict=True)):
                if out_grad is not None and needs.biases[i]:
                    biases[i] = bias_grad(out_grad, dtype)
        return {"weights": weights, "biases": biases}


def save_operands(
    ctx: Context, args: ReduceArguments, output: object, *more: torch.Tensor | None
) -> None:
    """Save the operands of a matmul with bias and residual for the backward, and ``more``."""
    x, w, bias, residual = args.x, args.w, args.bias, args.residual
    assert isinstance(w, torch.Tensor)  # only tensors have gradients
    ctx.save_for_backward(x if w.requires_grad else None, w if x.requires_grad else None, *more)
    ctx.dtype, ctx.weight_grad = x.dtype, WeightGrad.for_weight(w)
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype
    ctx.residual_dtype = x.dtype if residual is None else residual.dtype


def operand_grads(
    ctx: Context, needs: Needs, x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of x, w, bias and residual, given the gradient of their sum."""
    factor = grad.to(ctx.dtype)
    return {
        "x": matmul(factor, w.t()) if needs.x else None,
        "w": ctx.weight_grad.compute(x, factor) if needs.w else None,
        "bias": bias_grad(grad, ctx.bias_dtype) if needs.bias else None,
        "residual": grad.to(ctx.residual_dtype) if needs.residual else None,
    }


def norm_grads(
    ctx: Context,
    total: torch.Tensor,
    weight: torch.Tensor,
    grad_normed: torch.Tensor,
    grad_total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the sum (accumulator dtype) and of the RMSNorm weight (its dtype).

    The rounding of both results counts as the identity.
    """
    acc_dtype = dtypes.accumulator(total.dtype)
    rows, grad = total.to(acc_dtype), grad_normed.to(acc_dtype)
    factor = torch.rsqrt(rows.square().mean(-1, keepdim=True) + ctx.eps)
    scaled, grad_scaled = rows * factor, grad * weight.to(acc_dtype)
    projection = (grad_scaled * scaled).mean(-1, keepdim=True)
    grad_weight = as_rows(grad * scaled).sum(0).to(weight.dtype)
    return factor * (grad_scaled - scaled * projection) + grad_total, grad_weight


def backward_options(ctx: Context, *, has_matmul: bool, last_dim: bool = False) -> dict[str, Any]:
    """Return the options of a backward collective with the shard sizes of the forward."""
    forward = ctx.options["algorithm"]
    algorithm = compatible_algorithm(forward, has_matmul=has_matmul, last_dim=last_dim)
    return ctx.options | {"algorithm": algorithm}


def compatible_algorithm(forward: str, *, has_matmul: bool, last_dim: bool) -> str:
    """Return the algorithm requested in the forward if it can run in the backward, else "auto".

    An algorithm that overlaps a matmul needs a matmul. An algorithm that splits the matmul cannot
    split the last dim.
    """
    if forward == "auto":
        return forward
    algorithm = ALGORITHMS[forward]
    fits = not algorithm.overlaps_matmul
    if has_matmul:
        fits = not (last_dim and algorithm.splits_matmul)
    return forward if fits else "auto"
