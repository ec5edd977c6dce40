"""What the backward passes of the ops share.

A backward calls ``torch.ops.tpkernels`` itself, so AOTAutograd can trace it like a forward. It
communicates: all ranks must run the same backward passes in the same order and request gradients of
the same inputs. Ranks that differ get the errors of any mismatched call
(``CollectiveMismatchError``, ``CollectiveTimeoutError``).

Whose gradient it is:

- Where each rank uses its result differently (all_gather_matmul, matmul_reduce_scatter, all_gather,
  reduce_scatter), the loss is the sum over the ranks, and the backward is the exact adjoint: sums
  become gathers, gathers become sums.
- Where the result is the same on all ranks (all_reduce, matmul_all_reduce), all ranks compute the
  same loss from it, and it counts once. The gradient is the same on all ranks too, and goes to each
  summand unchanged, without communication. This is Megatron's convention: a tensor-parallel model
  has the gradients of the unsharded one. ``torch.distributed.nn.functional.all_reduce`` counts the
  loss W times instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels import dtypes
from tpkernels.algorithms.parts import as_rows
from tpkernels.local.matmul import local_matmul, new_product
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of, fake_columns_of
from tpkernels.ops._library import define_local
from tpkernels.ops._shortcut import matmul_shortcut
from tpkernels.planning.algorithms import ALGORITHMS

SCHEMA = "_matmul(Tensor x, Tensor w, *, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    shape = (*x.shape[:-1], columns_of(w))
    if out_dtype in (None, x.dtype):
        return new_product(as_rows(x), w, bias).view(shape)
    out = empty(shape, out_dtype, x.device)
    local_matmul(as_rows(x), w, as_rows(out), bias)
    return out


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], fake_columns_of(w, x.shape[-1])), dtype=out_dtype)


# The local matmul of the algorithms: accumulates in fp32, rounds once, to any dtype, and is fast
# where torch.mm of 16-bit operands is slow.
define_local(SCHEMA, run=_run, fake=_fake)
_matmul = matmul_shortcut("_matmul")


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ w + bias`` on this rank alone, without a gradient. x [..., K], w [K, N] or packed, bias
    [N]."""
    result: torch.Tensor = _matmul(x, w, bias=bias, out_dtype=out_dtype)
    return result


@dataclass(frozen=True)
class WeightGrad:
    """Memory layout and dtype of the gradient of a weight [K, N].

    It has the weight's layout, so ``linear.weight``, of which the op got a transposed view, takes
    it over without a copy.
    """

    transposed: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, w: torch.Tensor) -> WeightGrad:
        dtype = w.dtype
        # A leaf can request gradients in a dtype other than its own.
        asked = getattr(w, "grad_dtype", None) if w.is_leaf else None
        if asked == dtypes.accumulator(dtype):
            dtype = asked
        return cls(w.stride(0) < w.stride(1), dtype)

    def product(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """``x^T @ grad`` over all rows. x [..., K], grad [..., N]."""
        x, grad = as_rows(x), as_rows(grad)
        if self.transposed:
            return matmul(grad.t(), x, self.dtype).t()
        return matmul(x.t(), grad, self.dtype)


def bias_grad(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of grad [..., N] over its rows, rounded once."""
    return as_rows(grad).sum(0, dtype=dtypes.accumulator(grad.dtype)).to(dtype)


def bias_grads(
    grads: Sequence[torch.Tensor | None],
    needs: Sequence[bool] | bool,
    dtypes_of: Sequence[torch.dtype] | None,
) -> list[torch.Tensor | None] | None:
    """`bias_grad` of each result whose bias needs it; None where the op had no biases."""
    if not needs or dtypes_of is None:
        return None
    assert not isinstance(needs, bool)  # a list, like the biases
    return [
        None if grad is None or not need else bias_grad(grad, dtype)
        for grad, need, dtype in zip(grads, needs, dtypes_of, strict=True)
    ]


def algorithm_like(forward: str, *, has_matmul: bool, last_dim: bool) -> str:
    """Return the algorithm of a collective in the backward: the one requested in the forward, or
    "auto" where that needs a matmul and there is none, or cannot split the one there is, along the
    last dim."""
    if forward == "auto":
        return forward
    algorithm = ALGORITHMS[forward]
    fits = not algorithm.overlaps_matmul
    if has_matmul:
        fits = not (last_dim and algorithm.splits_matmul)
    return forward if fits else "auto"
