"""``multimem``: collectives by torch multimem ops (`torch.ops.symm_mem`) on an NVSwitch (NVLink
SHARP). The switch reduces on a load from the memory of all ranks, and broadcasts on a store.

all_gather      `multimem_all_gather_out` from the shard into the buffer, then a copy to the result
reduce_scatter  copy the partials into the buffer, then `multimem_one_shot_all_reduce_out` of the
                local shard only. Each rank passes a different slice of the buffer, of equal length:
                torch reads the slice that a rank passes, in the memory of all ranks
all_reduce      copy the partial into the buffer, then `multimem_all_reduce_` in place. All ranks
                receive the result of one reduction, so results are bitwise identical

A matmul writes its partial directly into the buffer. One more launch adds bias and residual and
converts the dtype; a norm uses torch kernels.

Numerics: the switch does not guarantee an order of summation. It accumulates bfloat16 in fp32 and
rounds to the dtype of the partials. This requires numerics "vendor". torch does not provide a
multimem kernel for float16 sums.

Memory: each group has one symmetric buffer per GPU (`CudaWorkspace.multicast`). It is separate from
the workspace of our kernels, because our signals do not order torch kernels. A symmetric tensor
that the user passes is copied into the buffer. If ranks passed different tensors in place, they
would wait for ever.

Sync: torch kernels start and end with a barrier over all ranks, so one buffer suffices.
1. Between two of these kernels only the local rank reads and writes its buffer, on one stream.
2. Peers access the buffer only after the first barrier. They pass it once the local kernel runs,
   and the copies out of the buffer and into it precede that kernel on the stream.
3. Peers stop accessing the buffer before the second barrier.

Failure: torch barriers have no deadline and do not compare calls. If a rank is lost or runs a
different call, the kernels of its peers wait until their processes end. Hence "auto" never selects
this algorithm (`Algorithm.unbounded`).

No GPU has run this; `tpkernels qualify` checks it.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from tpkernels.algorithms.chunks import GatherOutputs, as_rows, compute_partial, shard_counts
from tpkernels.algorithms.rank_order import rank_ordered_gather, rank_ordered_reduce
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.common.integers import round_up
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.weight import Weight
from tpkernels.symm.cuda import CudaWorkspace

_ops = torch.ops.symm_mem
_PACK = 16  # bytes per vector access of torch kernels, and the required alignment


@rank_ordered_gather
def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
    result, shard = outputs.gather_buffer(call, x), _as_bytes(x.contiguous())
    sizes = [count * x.element_size() for count in shard_counts(call.problem)]
    slot = round_up(max(sizes), _PACK)
    with _multicast_workspace(call, x.device, slot * len(sizes)) as cuda_workspace:
        if shard.numel() < slot or not _is_aligned(shard):
            padded = empty([slot], shard.dtype, shard.device)
            padded[: shard.numel()].copy_(shard)
            shard = padded
        gathered = cuda_workspace.multicast[: slot * len(sizes)]
        if slot:
            _ops.multimem_all_gather_out(shard, call.group.pg.group_name, gathered)
        shards = [gathered[rank * slot :][:size] for rank, size in enumerate(sizes)]
        torch.cat(shards, out=_as_bytes(result))
    outputs.multiply(result)


@rank_ordered_reduce
def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x`` if all ranks keep the sum."""
    if call.problem.spec.scatters:
        _reduce_scatter(call, x, w, out, reduction)
        return
    dtype, count = call.problem.dtype, out.numel()
    length = _padded(count, dtype)
    with _multicast_workspace(call, x.device, length * dtype.itemsize) as cuda_workspace:
        total = cuda_workspace.multicast[: length * dtype.itemsize].view(dtype)
        _write_partial(call, x, w, total[:count])
        if count:
            _ops.multimem_all_reduce_(total, "sum", call.group.pg.group_name)
        _finish(out, total[:count], reduction)


def _reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    dtype, counts, rank = call.problem.dtype, shard_counts(call.problem), call.group.rank
    # torch derives the number of blocks from the alignment, and it must be equal on all ranks.
    length, offsets = _padded(max(counts), dtype), list(accumulate(counts[:-1], initial=0))
    in_slots = any(offset * dtype.itemsize % _PACK for offset in offsets)
    if in_slots:
        offsets = [owner * length for owner in range(len(counts))]
    nbytes = (offsets[-1] + length) * dtype.itemsize
    with _multicast_workspace(call, x.device, nbytes) as cuda_workspace:
        partials = cuda_workspace.multicast[:nbytes].view(dtype)
        if in_slots:
            shards = compute_partial(call, x, w).contiguous().view(-1).split(counts)
            for offset, shard in zip(offsets, shards, strict=True):
                partials[offset:][: shard.numel()].copy_(shard)
        else:
            _write_partial(call, x, w, partials[: sum(counts)])
        in_place = reduction.is_identity(dtype) and counts[rank] == length and _is_aligned(out)
        total = out.view(-1) if in_place else empty([length], dtype, x.device)
        if length:
            partial_shard = partials[offsets[rank] :][:length]
            _ops.multimem_one_shot_all_reduce_out(
                partial_shard, "sum", call.group.pg.group_name, total
            )
        if not in_place:
            _finish(out, total[: counts[rank]], reduction)


def _write_partial(call: Call, x: torch.Tensor, w: Weight | None, dst: torch.Tensor) -> None:
    """Fill the flat tensor ``dst`` with ``x @ w``, or with x if the op has no matmul."""
    if w is None:
        dst.view(x.shape).copy_(x)
        return
    rows = as_rows(x)
    local_matmul(rows, w, dst.view(len(rows), call.problem.shape[-1]))


def _finish(out: torch.Tensor, total: torch.Tensor, reduction: Reduction) -> None:
    """Set ``out = round(total + bias + residual)``."""
    if reduction.is_identity(total.dtype):
        out.copy_(total.view(out.shape))
    else:
        reduce_into(out, [total], reduction)


def _multicast_workspace(call: Call, device: torch.device, nbytes: int) -> CudaWorkspace:
    """Return a context manager for a call that uses ``nbytes`` of multicast memory.

    Raises the errors of `HostWorkspace.multicast`.
    """
    return call.workspace.multicast(device, nbytes, call.plan.description)


def _padded(count: int, dtype: torch.dtype) -> int:
    """Return ``count`` elements, rounded up to full packs."""
    return round_up(count * dtype.itemsize, _PACK) // dtype.itemsize


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % _PACK == 0


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat bytes."""
    return x.view(-1).view(torch.uint8)
