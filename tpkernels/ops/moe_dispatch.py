"""Tokens to the experts that a router chose for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpkernels.common import dtypes
from tpkernels.errors import CollectiveMismatchError
from tpkernels.groups import GroupLike, break_if_interrupted, name_of
from tpkernels.local.scaled import Packing
from tpkernels.ops import validation
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.arguments import RoutedArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "moe_dispatch(Tensor x, Tensor routes, int num_experts, str group, *, Tensor? scale_x=None, "
    "SymInt[]? shard_sizes=None, SymInt? max_rows=None, str algorithm='auto') -> "
    "(Tensor rows, Tensor counts)"
)


class Handle(NamedTuple):
    """What `moe_combine` needs of a dispatch.

    Attributes:
        routes: [tokens of all ranks, k], the expert of each route.
        topk_weights: [tokens, k], of this rank's tokens.
        num_experts: of all ranks.
        counts: [experts of this rank], the rows of each.
        group: its name.
        shard_sizes: tokens of each rank; None: all the same.
        max_rows: rows that every rank has; None: one for each route to its experts.
        scales: of this rank's rows; None: they have none.
    """

    routes: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int
    counts: torch.Tensor
    group: str
    shard_sizes: Sequence[int] | None
    max_rows: int | None
    scales: torch.Tensor | None


def _save(ctx: Context, given: RoutedArguments, output: Sequence[torch.Tensor]) -> None:
    ctx.save_for_backward(given.routes)
    ctx.mark_non_differentiable(output[1])
    ctx.num_experts, ctx.group, ctx.tokens = given.num_experts, given.group, given.x.shape[0]
    names = ("shard_sizes", "max_rows", "algorithm")
    ctx.options = {name: getattr(given, name) for name in names}


def _backward(ctx: Context, needs: Needs, grad_rows: torch.Tensor, _: None) -> dict[str, Any]:
    (routes,) = ctx.saved_tensors
    ones = grad_rows.new_ones(ctx.tokens, routes.shape[1])
    grad_x = torch.ops.tpkernels.moe_combine.default(
        grad_rows, ones, routes, ctx.num_experts, ctx.group, **ctx.options
    )
    return {"x": grad_x}


def _check_scales(x: torch.Tensor, scale: torch.Tensor) -> None:
    validation.scaled_rows(x, scale)
    if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad):
        raise NotImplementedError(
            f"moe_dispatch has no gradient with scale_x; {validation.NO_GRADIENT}"
        )


OP: Op[Any] = define(SCHEMA, save=_save, backward=_backward)


def gather_routes(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    group: str,
    shard_sizes: Sequence[int] | None,
) -> torch.Tensor:
    """Return the ``topk_ids`` of all ranks, once what belongs to a dispatch has been checked."""
    validation.topk(topk_ids, topk_weights, x)
    # As GPUs move it, in a dtype that tells int32 from int64. A tensor of one column or no rows is
    # contiguous whatever its strides.
    words = torch.float64 if topk_ids.dtype == torch.int64 else torch.float32
    bits = topk_ids.clone(memory_format=torch.contiguous_format).view(words)
    try:
        return all_gather(bits, group, shard_sizes=shard_sizes).view(topk_ids.dtype)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{error} This call gathers topk_ids, which is {dtypes.name(topk_ids.dtype)} of shape "
            f"{list(topk_ids.shape)} on this rank. Its dtype and k must be equal on all ranks. If "
            "the number of tokens differs by rank, pass shard_sizes with the tokens of each rank.",
            peer=error.peer,
        ) from error


def moe_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    group: GroupLike,
    *,
    scale_x: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    max_rows: int | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, Handle]:
    """Send each token to the ranks that hold its experts, without padding or dropped tokens.

    On one rank it equals::

        order = topk_ids.flatten().argsort(stable=True)
        rows, counts = x[order // k], topk_ids.flatten().bincount(minlength=num_experts)

    The ranks hold consecutive experts, ``tpkernels.shard_sizes(num_experts, world)`` of them.

    Args:
        x: [tokens, H], this rank's. With ``scale_x`` also of float8_e4m3fn or float8_e5m2, without
            a gradient.
        topk_ids: [tokens, k] of int32 or int64, the experts of each token, in any order and also
            several times the same.
        topk_weights: [tokens, k], floating-point; `moe_combine` sums by them.
        scale_x: scales of x in float32, [tokens, 1] or [tokens, H / 128]. They travel with the
            rows: ``handle.scales`` are those of ``rows``, for `scaled_grouped_matmul`.
        shard_sizes: tokens of each rank; default: all the same.
        max_rows: how many ``rows`` every rank gets, so that their number depends on no route: the
            first ``counts.sum()`` are filled, the others are zeros. The same on all ranks.

    Returns:
        ``rows`` [R, H], a row for each route to this rank's experts: by expert, and within one by
        rank, token and place in ``topk_ids``; ``counts`` [experts of this rank] of int64, the rows
        of each; and the handle for `moe_combine`.

    Raises:
        RoutingError: an expert that there is not, of any rank, or more routes to a rank's experts
            than ``max_rows``; on all ranks. Nothing has been sent, and the group can go on.
        CaptureError: a CUDA graph is captured, and the host would have to wait.

    All ranks gather all ``topk_ids`` first, from which each knows the counts. On CUDA tensors the
    host waits for them, but not with ``max_rows`` by ``direct`` or on one rank: there `moe_combine`
    makes NaN of a token with a route for which `RoutingError` would be raised. The gradient of
    ``x`` comes back by the routes and is summed in the order of ``topk_ids``.

    ``torch.ops.tpkernels.moe_dispatch`` takes the gathered ids as ``routes``, and returns rows with
    scales as they travel (`local.scaled.Packing`).
    """
    try:
        name = name_of(group)
        if scale_x is not None:
            _check_scales(x, scale_x)
        routes = gather_routes(x, topk_ids, topk_weights, name, shard_sizes)
        rows, counts = OP.entry()(
            x,
            routes,
            num_experts,
            name,
            scale_x=scale_x,
            shard_sizes=shard_sizes,
            max_rows=max_rows,
            algorithm=algorithm,
        )
        scales = None
        if scale_x is not None:
            rows, scales = Packing.of(x, scale_x).unpack(rows)
        handle = Handle(
            routes, topk_weights, num_experts, counts, name, shard_sizes, max_rows, scales
        )
        return rows, counts, handle
    except BaseException as error:  # between the two calls
        break_if_interrupted(group, error)
        raise
