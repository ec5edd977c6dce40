"""MoE combine: send expert outputs back to the ranks of the tokens and sum them per token."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpkernels.common import dtypes
from tpkernels.ops.arguments import RoutedArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.moe_dispatch import Handle
from tpkernels.ops.registration import Op, define, define_kernel, uncompiled

SCHEMA = (
    "moe_combine(Tensor x, Tensor topk_weights, Tensor routes, int num_experts, str group, *, "
    "SymInt[]? shard_sizes=None, SymInt? max_rows=None, str algorithm='auto') -> Tensor"
)


# The rows of `moe_dispatch`, with the row count of `like`, so that a backward can be traced. `like`
# also keeps the call in the backward. AOTAutograd moves a call without gradient inputs into the
# forward if its result is smaller than its input, which may hold on some ranks only.
define_kernel(
    "_moe_dispatch_rows(Tensor x, Tensor routes, int num_experts, str group, Tensor like, *, "
    "SymInt[]? shard_sizes=None, SymInt? max_rows=None, str algorithm='auto') -> Tensor",
    run=lambda x, routes, num_experts, group, like, **options: (
        torch.ops.tpkernels.moe_dispatch.default(x, routes, num_experts, group, **options)[0]
    ),
    fake=lambda x, routes, num_experts, group, like, **_: x.new_empty(like.shape[0], x.shape[1]),
)


def _save(ctx: Context, args: RoutedArguments, output: torch.Tensor) -> None:
    ctx.save_for_backward(args.x, args.topk_weights, args.routes)
    ctx.num_experts, ctx.group = args.num_experts, args.group
    ctx.shard_sizes = args.shard_sizes
    ctx.options = {"max_rows": args.max_rows, "algorithm": args.algorithm}


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    """Return the gradients of rows and router weights.

    The gradient of a row is its router weight times the gradient of its token. The gradient of a
    weight is the dot product of the row and the gradient of its token. Each weight is sent as a
    separate token with a single assignment.
    """
    x, weights, routes = ctx.saved_tensors
    ops, acc_dtype, (tokens, k) = torch.ops.tpkernels, dtypes.accumulator(x.dtype), weights.shape
    sizes, options = ctx.shard_sizes, ctx.options
    single = routes.reshape(-1, 1), ctx.num_experts, ctx.group
    single_options = options | {"shard_sizes": sizes and [size * k for size in sizes]}
    dispatch = ops._moe_dispatch_rows.default
    row_grads = dispatch(grad, routes, ctx.num_experts, ctx.group, x, shard_sizes=sizes, **options)
    row_grads, grads = row_grads.to(acc_dtype), {}
    if needs.x:
        factors = weights.to(acc_dtype).reshape(-1, 1)
        grads["x"] = (row_grads * dispatch(factors, *single, row_grads, **single_options)).to(
            x.dtype
        )
    if needs.topk_weights:
        dots = (row_grads * x.to(acc_dtype)).sum(1, keepdim=True)
        ones = dots.new_ones(tokens * k, 1)
        weight_grads = ops.moe_combine.default(dots, ones, *single, **single_options)
        grads["topk_weights"] = weight_grads.view(tokens, k).to(weights.dtype)
    return grads


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward)


def _is_empty_in_training(x: torch.Tensor) -> bool:
    """Return True if a training graph is compiled while this rank has no rows.

    The backward calls would have results without elements (`validation.empty_shards`).
    """
    if not (torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled()):
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(x.shape[0] == 0)


def moe_combine(x: torch.Tensor, handle: Handle, *, algorithm: str = "auto") -> torch.Tensor:
    """Send expert outputs back to the ranks of the tokens and return their weighted sum.

    On one rank, with ``order`` from `moe_dispatch`, it equals::

        outputs = torch.empty_like(x).index_copy_(0, order, x).view(tokens, k, -1)
        y = sum(topk_weights[:, j, None] * outputs[:, j].float() for j in range(k)).to(x.dtype)

    Args:
        x: [R, H], floating-point expert outputs, in the row order of ``moe_dispatch``.
        handle: Handle that the ``moe_dispatch`` call returned.

    Returns:
        [tokens, H] of the local tokens, in the dtype of ``x``. The weighted sum accumulates in fp32
        in the order of ``topk_ids`` and is rounded once. It is bitwise identical on any number of
        ranks.

    Gradient: for ``x`` and ``topk_weights``. The backward dispatches ``grad`` to the experts.

    ``torch.ops.tpkernels.moe_combine`` accepts the fields of the handle as separate arguments.
    """
    run = functools.partial(uncompiled, OP) if _is_empty_in_training(x) else OP.entry()
    result: torch.Tensor = run(
        x,
        handle.topk_weights,
        handle.routes,
        handle.num_experts,
        handle.group,
        shard_sizes=handle.shard_sizes,
        max_rows=handle.max_rows,
        algorithm=algorithm,
    )
    return result
