"""``multimem``: torch's multimem ops (`torch.ops.symm_mem`), by which an NVSwitch adds what it
reads in all ranks' memory, or stores in all ranks' memory at once (NVLink SHARP).

all_gather      `multimem_all_gather_out` of the shard into the buffer; copies to the result
reduce_scatter  the partials into the buffer; `multimem_one_shot_all_reduce_out` of the rank's own
                shard alone. Each rank passes another part of the buffer, of the same length: torch
                reads the part that a rank passes, on all ranks
all_reduce      the partial into the buffer; `multimem_all_reduce_` there, so that all ranks get the
                sum of one reduction: the same bits

A matmul writes its partial into the buffer. Bias, residual and another dtype take one launch behind
the sum, a norm those of torch.

Numerics: the switch adds in an order of its own, bfloat16 in fp32, and rounds the sum to the dtype
of the partials. Hence it needs numerics "vendor". Torch has no kernel that sums float16.

Memory: one symmetric tensor of each group and GPU (`CudaWorkspace.multicast`), apart from the
workspace of our kernels, whose words do not order what torch's kernels do. A symmetric tensor of
the user is copied into it: ranks that passed different ones would wait for ever.

Sync: torch's kernels begin and end with a barrier of all ranks, so one buffer is enough. Between
two of them a rank's buffer is written and read by this rank alone, on its stream: peers read and
store there only behind the barrier at the beginning, which they pass when this rank's kernel runs,
hence when its copies out of the buffer and into it have ended; and before the barrier at the end.

Failure: torch's barriers have no deadline, and do not compare calls. If a rank does not come, is
lost, or makes another call, the kernels of the others wait until their processes end. So "auto"
never takes this algorithm (`Algorithm.unbounded`).

No GPU has run this; `tpkernels qualify` checks it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from tpkernels.algorithms.parts import Products, as_rows, partial_of, shard_counts
from tpkernels.algorithms.rank_order import gathers_in_rank_order, scatters_in_rank_order
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.call import Call
from tpkernels.integers import round_up
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.symm.cuda import CudaWorkspace

_ops: Any = torch.ops.symm_mem
_PACK = 16  # bytes that a thread of torch's kernels moves at a time, if all is aligned to them


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
    # Torch starts as many blocks on all ranks, as it must, if all parts are aligned alike.
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
