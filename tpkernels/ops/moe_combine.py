"""What experts made of tokens, back to the tokens' ranks."""

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


# The rows of `moe_dispatch`, as many as `like` has, so that a backward can be traced. `like` also
# keeps the call in the backward: one that takes no gradient is moved into the forward if its result
# is smaller than its input, as on some ranks only.
define_kernel(
    "_moe_dispatch_rows(Tensor x, Tensor routes, int num_experts, str group, Tensor like, *, "
    "SymInt[]? shard_sizes=None, SymInt? max_rows=None, str algorithm='auto') -> Tensor",
    run=lambda x, routes, num_experts, group, like, **options: (
        torch.ops.tpkernels.moe_dispatch.default(x, routes, num_experts, group, **options)[0]
    ),
    fake=lambda x, routes, num_experts, group, like, **_: x.new_empty(like.shape[0], x.shape[1]),
)


def _save(ctx: Context, given: RoutedArguments, output: torch.Tensor) -> None:
    ctx.save_for_backward(given.x, given.topk_weights, given.routes)
    ctx.num_experts, ctx.group = given.num_experts, given.group
    ctx.shard_sizes = given.shard_sizes
    ctx.options = {"max_rows": given.max_rows, "algorithm": given.algorithm}


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    """The gradient of a row is its weight times that of its token; a weight's is the dot product of
    the two. A weight travels as a token of its own, with one route."""
    x, weights, routes = ctx.saved_tensors
    ops, wide, (tokens, k) = torch.ops.tpkernels, dtypes.accumulator(x.dtype), weights.shape
    sizes, options = ctx.shard_sizes, ctx.options
    single = routes.reshape(-1, 1), ctx.num_experts, ctx.group
    one_by_one = options | {"shard_sizes": sizes and [size * k for size in sizes]}
    rows_of = ops._moe_dispatch_rows.default
    of_tokens = rows_of(grad, routes, ctx.num_experts, ctx.group, x, shard_sizes=sizes, **options)
    of_tokens, found = of_tokens.to(wide), {}
    if needs.x:
        factors = weights.to(wide).reshape(-1, 1)
        found["x"] = (of_tokens * rows_of(factors, *single, of_tokens, **one_by_one)).to(x.dtype)
    if needs.topk_weights:
        dots = (of_tokens * x.to(wide)).sum(1, keepdim=True)
        ones = dots.new_ones(tokens * k, 1)
        of_weights = ops.moe_combine.default(dots, ones, *single, **one_by_one)
        found["topk_weights"] = of_weights.view(tokens, k).to(weights.dtype)
    return found


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward)


def _is_empty_in_training(x: torch.Tensor) -> bool:
    """Return whether this rank has no rows while a graph is compiled for training: the calls of the
    backward have results without elements there (`validation.empty_shards`)."""
    if not (torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled()):
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(x.shape[0] == 0)


def moe_combine(x: torch.Tensor, handle: Handle, *, algorithm: str = "auto") -> torch.Tensor:
    """Return the expert outputs to the ranks of their tokens, and sum them by router weight.

    On one rank, after `moe_dispatch`, it equals::

        by_route = torch.empty_like(x).index_copy_(0, order, x).view(tokens, k, -1)
        y = sum(weights[:, j, None] * by_route[:, j].float() for j in range(k)).to(x.dtype)

    Args:
        x: [R, H], a row for each row that ``moe_dispatch`` has returned, in its order.
        handle: of that dispatch.

    Returns:
        [tokens, H] of this rank's tokens. The products with the weights are summed in fp32, in the
        order of ``topk_ids``, and rounded once: the same bits on any number of ranks.

    Rows and ``topk_weights`` get gradients. ``torch.ops.tpkernels.moe_combine`` takes the fields of
    the handle one by one.
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
