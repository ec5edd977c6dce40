"""What the backward passes of the ops share.

A backward calls ``torch.ops.tpkernels`` itself, so that AOTAutograd traces it like a forward. It
communicates: all ranks must run the same backward passes in the same order, with gradients asked
for the same inputs. Ranks that differ find out as in any call (``CollectiveMismatchError``,
``CollectiveTimeoutError``).

Whose gradient it is:

- Where each rank makes something else of its result (all_gather_matmul, matmul_reduce_scatter,
  all_gather, reduce_scatter), the loss is the sum of what the ranks make of it, and the backward is
  the exact adjoint: sums become gathers, gathers become sums.
- Where the result is the same on all ranks (all_reduce, matmul_all_reduce), all make the same loss
  of it, which counts once. The gradient is then the same on all ranks too, and passes to each
  summand as it is, without communication. It is Megatron's convention, under which a
  tensor-parallel model has the gradients of the unsharded one;
  ``torch.distributed.nn.functional.all_reduce`` takes the loss W times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpkernels import dtypes
from tpkernels.algorithms.shards import as_rows
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.ops._library import define
from tpkernels.planning.algorithms import ALGORITHMS

SCHEMA = "_matmul(Tensor x, Tensor w, *, ScalarType? out_dtype=None) -> Tensor"


def _run(x: torch.Tensor, w: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    out = empty((*x.shape[:-1], w.shape[1]), out_dtype or x.dtype, x.device)
    local_matmul(as_rows(x), w, as_rows(out))
    return out


def _fake(
    x: torch.Tensor, w: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[1]), dtype=out_dtype)


# The product that the algorithms use: accumulated in fp32, rounded once to any dtype, and fast
# where torch.mm of 16-bit operands is not.
define(SCHEMA, run=_run, fake=_fake)


def matmul(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x @ w`` on this rank alone. x [..., K], w [K, N]."""
    result: torch.Tensor = torch.ops.tpkernels._matmul.default(x, w, out_dtype=out_dtype)
    return result


@dataclass(frozen=True)
class WeightGrad:
    """How the gradient of a weight [K, N] is to lie in memory, and its dtype.

    It lies as the weight does, so that ``linear.weight``, of which the op got a transposed view,
    takes it over without a copy.
    """

    transposed: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, w: torch.Tensor) -> WeightGrad:
        dtype = w.dtype
        # torch lets a leaf ask for gradients in another dtype than its own.
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
    """The sum of grad [..., N] over its rows, rounded once."""
    return as_rows(grad).sum(0, dtype=dtypes.accumulator(grad.dtype)).to(dtype)


def algorithm_like(forward: str, *, has_matmul: bool, last_dim: bool) -> str:
    """The algorithm of a collective in the backward: the one requested in the forward, or "auto"
    where that needs a matmul and there is none, or cannot split the one there is, along the last
    dim."""
    if forward == "auto":
        return forward
    algorithm = ALGORITHMS[forward]
    fits = not algorithm.overlaps_matmul
    if has_matmul:
        fits = not (last_dim and algorithm.splits_matmul)
    return forward if fits else "auto"
