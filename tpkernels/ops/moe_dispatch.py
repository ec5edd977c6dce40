"""MoE dispatch: send tokens to the ranks that hold their experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpkernels.common import dtypes
from tpkernels.errors import CollectiveMismatchError
from tpkernels.groups import GroupLike, break_if_interrupted, group_name
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
    """State that `moe_dispatch` passes to `moe_combine`.

    Attributes:
        routes: [tokens of all ranks, k], expert ids.
        topk_weights: [tokens, k], router weights of the local tokens.
        num_experts: Number of experts of all ranks.
        counts: [local experts], rows per expert.
        group: Group name.
        shard_sizes: Tokens of each rank, or None if all are equal.
        max_rows: Capacity of each rank in rows, or None for a row per assignment.
        scales: Scales of the local rows, or None.
    """

    routes: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int
    counts: torch.Tensor
    group: str
    shard_sizes: Sequence[int] | None
    max_rows: int | None
    scales: torch.Tensor | None


def _save(ctx: Context, args: RoutedArguments, output: Sequence[torch.Tensor]) -> None:
    ctx.save_for_backward(args.routes)
    ctx.mark_non_differentiable(output[1])
    ctx.num_experts, ctx.group, ctx.tokens = args.num_experts, args.group, args.x.shape[0]
    names = ("shard_sizes", "max_rows", "algorithm")
    ctx.options = {name: getattr(args, name) for name in names}


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


def gather_topk_ids(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    group: str,
    shard_sizes: Sequence[int] | None,
) -> torch.Tensor:
    """Check the arguments of a dispatch and return the ``topk_ids`` of all ranks."""
    validation.topk(topk_ids, topk_weights, x)
    # GPUs gather floating-point dtypes only. float64 and float32 keep int64 and int32 distinct. The
    # clone has standard strides. A tensor with one column or no rows counts as contiguous with any
    # strides, but `view` may reject it.
    view_dtype = torch.float64 if topk_ids.dtype == torch.int64 else torch.float32
    bits = topk_ids.clone(memory_format=torch.contiguous_format).view(view_dtype)
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

    Rank r holds ``tpkernels.shard_sizes(num_experts, world_size)[r]`` consecutive experts.

    Args:
        x: [tokens, H], floating-point local tokens. With ``scale_x`` also float8_e4m3fn or
            float8_e5m2.
        topk_ids: [tokens, k] of int32 or int64, expert ids of each token, in any order. An id may
            occur several times.
        topk_weights: [tokens, k], floating-point router weights. `moe_combine` applies them.
        num_experts: Number of experts of all ranks.
        scale_x: Scales of ``x``, float32 [tokens, 1] or [tokens, H / 128]. They are sent with the
            rows. ``handle.scales`` holds the scales of ``rows`` for `scaled_grouped_matmul`.
        shard_sizes: Tokens of each rank. Default: all equal.
        max_rows: Fixed number of ``rows`` on every rank, equal on all ranks. The first
            ``counts.sum()`` rows are filled, the rest are zeros. Default: a row per assignment.

    Returns:
        ``(rows, counts, handle)``. ``rows`` is [R, H] in the dtype of ``x``, a row for each
        assignment to a local expert, sorted by expert, rank, token and slot in ``topk_ids``.
        ``counts`` is [local experts] of int64, rows per expert. Pass ``handle`` to `moe_combine`.

    Raises:
        RoutingError: An expert id on any rank is out of range, or the experts of a rank have more
            than ``max_rows`` assignments. All ranks raise it before sending tokens. The group
            remains usable.
        CaptureError: The host would have to wait during the capture of a CUDA graph.

    All ranks first gather ``topk_ids`` and derive the counts. For CUDA tensors the host waits for
    the counts, unless ``max_rows`` is passed and the algorithm is ``direct`` or the group has one
    rank. Then `RoutingError` is not raised, and `moe_combine` returns NaN for each token with an
    invalid assignment.

    Gradient: the gradients of the rows return to the tokens and are summed in the order of
    ``topk_ids``. With ``scale_x`` no gradient is supported.

    ``torch.ops.tpkernels.moe_dispatch`` accepts the gathered ids as ``routes``. It returns rows
    packed with their scales (`local.scaled.Packing`).
    """
    try:
        name = group_name(group)
        if scale_x is not None:
            _check_scales(x, scale_x)
        routes = gather_topk_ids(x, topk_ids, topk_weights, name, shard_sizes)
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
            rows, scales = Packing.for_rows(x, scale_x).unpack(rows)
        handle = Handle(
            routes, topk_weights, num_experts, counts, name, shard_sizes, max_rows, scales
        )
        return rows, counts, handle
    except BaseException as error:  # an interrupt between the two calls breaks the group
        break_if_interrupted(group, error)
        raise
