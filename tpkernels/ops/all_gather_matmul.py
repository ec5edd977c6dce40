"""``y_i = concat_r(x_r) @ w_i``: the column-parallel layer with sequence parallelism (QKV,
gate/up)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from tpkernels.common import dtypes
from tpkernels.groups import GroupLike, name_of
from tpkernels.local.product import CustomMatmul, Weight
from tpkernels.ops.arguments import GatherArguments
from tpkernels.ops.autograd import ColumnGrads, Context, Needs, matmul, split_options
from tpkernels.ops.registration import Op, bias_list, define

SCHEMA = (
    "all_gather_matmul(Tensor x, Tensor[] weights, str group, int gather_dim=0, "
    "Tensor[]? biases=None, *, ScalarType? out_dtype=None, bool return_gathered=False, "
    "SymInt[]? shard_sizes=None, str algorithm='auto') -> (Tensor gathered, Tensor[] outs)"
)


def _save(ctx: Context, given: GatherArguments, output: Sequence[torch.Tensor]) -> None:
    ctx.group, ctx.dim, ctx.returned = given.group, given.gather_dim, given.return_gathered
    ctx.options = {"shard_sizes": given.shard_sizes, "algorithm": given.algorithm}
    kept = output[0] if ctx.returned else given.x
    ctx.columns = ColumnGrads(ctx, given.x, given.weights, given.biases, kept)
    if not ctx.returned:
        ctx.mark_non_differentiable(output[0])


def _backward(
    ctx: Context,
    needs: Needs,
    grad_gathered: torch.Tensor | None,
    grad_outs: Sequence[torch.Tensor | None],
) -> dict[str, Any]:
    kept, *weights = ctx.saved_tensors
    grad_x = None
    if needs.x:
        grad_x = _grad_x(ctx, grad_gathered, ctx.columns.factors(grad_outs, weights))

    def whole() -> torch.Tensor:
        """Not overlapped with the matmul, on purpose. AMD EPYC Zen 3, 1 thread, 2026-11-21, two
        shards of (2048, 2048, 2048): the gather is 1.1 ms of 236 ms in bf16 and 2.2 of 195 in fp32,
        while a sum over shards reads and writes the fp32 accumulator once per shard."""
        if ctx.returned:
            return kept
        gathered: torch.Tensor = torch.ops.tpkernels.all_gather.default(
            kept, ctx.group, ctx.dim, **split_options(ctx, has_matmul=False)
        )
        return gathered

    return {"x": grad_x, **ctx.columns.of_weights(needs, grad_outs, whole)}


def _grad_x(
    ctx: Context,
    grad_gathered: torch.Tensor | None,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """``rows_r(sum_r(grad @ back + grad_gathered))``, in one reduce-scatter."""
    ops = torch.ops.tpkernels
    if factors is None:
        assert grad_gathered is not None  # the backward runs only if there is a gradient
        partial = grad_gathered
    elif grad_gathered is None:
        last = ctx.dim == factors[0].dim() - 1
        options = split_options(ctx, has_matmul=True, last_dim=last)
        return ops.matmul_reduce_scatter.default(*factors, ctx.group, ctx.dim, **options)
    else:
        dtype = ctx.columns.dtype
        wide = matmul(*factors, dtypes.accumulator(dtype))
        partial = wide.add_(grad_gathered).to(dtype)
    options = split_options(ctx, has_matmul=False)
    return ops.reduce_scatter.default(partial, ctx.group, ctx.dim, **options)


OP: Op[Any] = define(SCHEMA, save=_save, backward=_backward, autocast=True)


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
            (``linear.weight.t()`` is the fast layout), packed (`pack`), or a `CustomMatmul`. N may
            differ by rank.
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

    Returns:
        y [..., M, ..., N] for one weight, a list for several; ``(gathered, y)`` with
        ``return_gathered``.

    The gradient of ``x`` is one ``matmul_reduce_scatter``; that of a weight is a matmul of the
    gathered ``x`` and the gradient of its result. A leaf weight with ``grad_dtype`` float32 gets
    its gradient in float32, not rounded to ``x``'s dtype.

    In ``torch.ops.tpkernels.all_gather_matmul`` a weight without a bias gets an empty one, and the
    first result is ``gathered``, empty unless requested. The arguments mean what they mean in
    ``torch.ops.symm_mem.fused_all_gather_matmul``.
    """
    single = isinstance(weights, (torch.Tensor, CustomMatmul))
    each = [weights] if isinstance(weights, (torch.Tensor, CustomMatmul)) else list(weights)
    each_bias = [biases] if isinstance(biases, torch.Tensor) else biases
    keep = save_gathered and torch.is_grad_enabled()
    keep = keep and any(isinstance(w, torch.Tensor) and w.requires_grad for w in each)
    gathered, outs = OP.entry()(
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
