"""``multimem``: collectives by torch's multimem ops (`torch.ops.symm_mem`) on an NVSwitch (NVLink
SHARP). The switch reduces on a load from all ranks' memory, and broadcasts on a store.

all_gather      `multimem_all_gather_out` from the shard into the buffer, then a copy to the result
reduce_scatter  copy the partials into the buffer, then `multimem_one_shot_all_reduce_out` of the
                local shard only. Each rank passes a different slice of the buffer, of equal length:
                torch reads the slice that a rank passes, in the memory of all ranks
all_reduce      copy the partial into the buffer, then `multimem_all_reduce_` in place. All ranks
                receive the result of the same reduction, so they get the same bits

A matmul writes its partial directly into the buffer. One more launch adds bias and residual and
converts the dtype; a norm uses torch's kernels.

Numerics: the switch does not guarantee an order of summation. It accumulates bfloat16 in fp32 and
rounds to the dtype of the partials. This requires numerics "vendor". torch has no multimem kernel
for float16 sums.

Memory: each group has one symmetric buffer per GPU (`CudaWorkspace.multicast`). It is separate from
the workspace of our kernels, because our signals do not order torch's kernels. A symmetric tensor
that the user passes is copied into the buffer. If ranks passed different tensors in place, they
would wait for ever.

Sync: torch's kernels start and end with a barrier over all ranks, so one buffer suffices.
1. Between two of these kernels only the local rank reads and writes its buffer, on one stream.
2. Peers access the buffer only after the first barrier. They pass it once this rank's kernel runs,
   and the copies out of the buffer and into it precede that kernel on the stream.
3. Peers stop accessing the buffer before the second barrier.

Failure: torch's barriers have no deadline and do not compare calls. If a rank is lost or makes a
different call, the kernels of the other ranks wait until their processes end. Hence "auto" never
selects this algorithm (`Algorithm.unbounded`).

No GPU has run this; `tpkernels qualify` checks it.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from tpkernels.algorithms.parts import Products, as_rows, partial_of, shard_counts
from tpkernels.algorithms.rank_order import gathers_in_rank_order, scatters_in_rank_order
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.common.integers import round_up
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.symm.cuda import CudaWorkspace

_ops = torch.ops.symm_mem
_PACK = 16  # bytes per vector access of torch's kernels; requires this alignment


@gathers_in_rank_order
def gather(call: Call, x: torch.Tensor, products: Products) -> None:
    whole, own = products.memory(call, x), _bytes_of(x.contiguous())
    sizes = [count * x.element_size() for count in shard_counts(call.problem)]
    slot = round_up(max(sizes), _PACK)
    with _workspace(call, x.device, slot * len(sizes)) as memory:
        if own.numel() < slot or not _is_aligned(own):
            padded = empty([slot], own.dtype, own.device)
            padded[: own.numel()].copy_(own)
            own = padded
        gathered = memory.multicast[: slot * len(sizes)]
        if slot:
            _ops.multimem_all_gather_out(own, call.group.pg.group_name, gathered)
        shards = [gathered[rank * slot :][:size] for rank, size in enumerate(sizes)]
        torch.cat(shards, out=_bytes_of(whole))
    products.multiply(whole)


@scatters_in_rank_order
def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x``, where all ranks keep the sum."""
    if call.problem.spec.scatters:
        _reduce_scatter(call, x, w, out, reduction)
        return
    dtype, count = call.problem.dtype, out.numel()
    length = _padded(count, dtype)
    with _workspace(call, x.device, length * dtype.itemsize) as memory:
        total = memory.multicast[: length * dtype.itemsize].view(dtype)
        _put_partial(call, x, w, total[:count])
        if count:
            _ops.multimem_all_reduce_(total, "sum", call.group.pg.group_name)
        _finish(out, total[:count], reduction)


def _reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    dtype, counts, rank = call.problem.dtype, shard_counts(call.problem), call.group.rank
    # torch derives the number of blocks from the alignment, and it must be equal on all ranks.
    length, begins = _padded(max(counts), dtype), list(accumulate(counts[:-1], initial=0))
    in_slots = any(begin * dtype.itemsize % _PACK for begin in begins)
    if in_slots:
        begins = [owner * length for owner in range(len(counts))]
    nbytes = (begins[-1] + length) * dtype.itemsize
    with _workspace(call, x.device, nbytes) as memory:
        partials = memory.multicast[:nbytes].view(dtype)
        if in_slots:
            shards = partial_of(call, x, w).contiguous().view(-1).split(counts)
            for begin, shard in zip(begins, shards, strict=True):
                partials[begin:][: shard.numel()].copy_(shard)
        else:
            _put_partial(call, x, w, partials[: sum(counts)])
        in_place = reduction.keeps(dtype) and counts[rank] == length and _is_aligned(out)
        total = out.view(-1) if in_place else empty([length], dtype, x.device)
        if length:
            part = partials[begins[rank] :][:length]
            _ops.multimem_one_shot_all_reduce_out(part, "sum", call.group.pg.group_name, total)
        if not in_place:
            _finish(out, total[: counts[rank]], reduction)


def _put_partial(call: Call, x: torch.Tensor, w: Weight | None, to: torch.Tensor) -> None:
    """Fill ``to``, flat, with ``x @ w``, or with x without a matmul."""
    if w is None:
        to.view(x.shape).copy_(x)
        return
    rows = as_rows(x)
    local_matmul(rows, w, to.view(len(rows), call.problem.shape[-1]))


def _finish(out: torch.Tensor, total: torch.Tensor, reduction: Reduction) -> None:
    """Set ``out = round(total + bias + residual)``."""
    if reduction.keeps(total.dtype):
        out.copy_(total.view(out.shape))
    else:
        reduce_into(out, [total], reduction)


def _workspace(call: Call, device: torch.device, nbytes: int) -> CudaWorkspace:
    """Return the workspace, to be entered around a call that uses so many bytes of its multicast
    memory. Raises what `HostWorkspace.multicast` does."""
    return call.workspace.multicast(device, nbytes, call.plan.text)


def _padded(count: int, dtype: torch.dtype) -> int:
    """Return the elements of whole packs."""
    return round_up(count * dtype.itemsize, _PACK) // dtype.itemsize


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % _PACK == 0


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as flat bytes."""
    return x.view(-1).view(torch.uint8)
