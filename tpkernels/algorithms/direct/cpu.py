"""One matmul, and a collective on shared memory that reads all peers' buffers at once.

The matmul is not split, so this is fastest when it has few rows. csrc/host/collectives.h has the
collectives, their chunks and their synchronisation.
"""

from __future__ import annotations

import torch

from tpkernels import _C, dtypes
from tpkernels.algorithms.reduction import Reduction
from tpkernels.algorithms.shards import as_rows, matmul_partial, shard_shape
from tpkernels.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.ranges import COPY, recorded


def _gather_into(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    x = x.contiguous()
    segment, offset = call.workspace.locate(x)
    with recorded(COPY):
        _C.host.all_gather(
            call.workspace.channel,
            call.plan.signature,
            call.plan.text,
            x.data_ptr(),
            segment,
            offset,
            out.data_ptr(),
            call.layout,
            dtypes.CODES[x.dtype],
        )


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    out = empty(call.problem.shape, x.dtype, x.device)
    _gather_into(call, x, out)
    return out


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    whole = empty(call.problem.shape, x.dtype, x.device) if gathered is None else gathered
    _gather_into(call, x, whole)
    for w, bias, out in zip(weights, biases, outs, strict=True):
        local_matmul(as_rows(whole), w, as_rows(out), bias)


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    x = x.contiguous()
    out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, x.device)
    segment, offset = call.workspace.locate(x)
    with recorded(COPY):
        _C.host.reduce_scatter(
            call.workspace.channel,
            call.plan.signature,
            call.plan.text,
            x.data_ptr(),
            segment,
            offset,
            out.data_ptr(),
            call.layout,
            dtypes.CODES[x.dtype],
            reduction.epilogue(),
        )
    return out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    return reduce_scatter(call, matmul_partial(call, x, w), reduction)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``. Peers cannot read ``x`` in place then, as it is being overwritten."""
    x = x.contiguous()
    in_place = x.data_ptr() == out.data_ptr()
    segment, offset = (0, 0) if in_place else call.workspace.locate(x)
    with recorded(COPY):
        _C.host.all_reduce(
            call.workspace.channel,
            call.plan.signature,
            call.plan.text,
            x.data_ptr(),
            segment,
            offset,
            out.data_ptr(),
            x.numel(),
            dtypes.CODES[x.dtype],
            reduction.epilogue(),
        )


def matmul_all_reduce(
    call: Call, x: torch.Tensor, w: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    partial = matmul_partial(call, x, w)
    out = empty(partial.shape, reduction.out_dtype, x.device)
    all_reduce(call, partial, out, reduction)
    return out
