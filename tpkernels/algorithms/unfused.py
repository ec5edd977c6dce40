"""The plain way: a ``torch.distributed`` collective, then the matmul, or the other way round.

It runs on any process group, and is what ``auto`` chooses where ranks share no memory. Reductions
move the partials with an all-to-all and sum them here, in fp32 and in rank order: the same bytes
travel as in a reduce-scatter, and the bits are those of every other algorithm.

Where there is a workspace its barrier comes first, so that a rank in another call is found before
anything is sent. The words that follow order nothing; they tell how far a rank has come: READ, it
has called torch.distributed; RESULT, it is through.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from tpkernels._C import Phase
from tpkernels.algorithms.common import (
    Reduction,
    as_rows,
    empty_share,
    matmul_partial,
    reduce_into,
    reduced,
)
from tpkernels.algorithms.memory import empty
from tpkernels.algorithms.product import product
from tpkernels.errors import CollectiveTimeoutError, PeerLostError

if TYPE_CHECKING:
    from tpkernels.backends import Call
    from tpkernels.groups import Group

# A reduction moves in steps whose buffers the allocator keeps, rather than taking fresh pages.
_STEP_BYTES = 4 << 20
_LOOK = timedelta(seconds=0.02)  # between looks at the peers


def _enter(call: Call) -> None:
    workspace = call.group.workspace
    if workspace is not None and call.group.world > 1 and call.problem.device == "cpu":
        workspace.channel.begin(call.plan.signature, call.plan.text)
        workspace.channel.barrier()


def _finish(call: Call, work: Any) -> None:
    """Waits for torch.distributed, and watches the peers meanwhile: gloo itself tells only the
    neighbours of a rank that it died, and nobody that it gave up. On GPUs it is the stream that
    waits, and torch.distributed that watches."""
    group = call.group
    if call.problem.device == "cuda":
        work.wait()
        return
    if group.workspace is not None:
        group.workspace.channel.publish(Phase.READ)
    while not work.is_completed():
        with contextlib.suppress(RuntimeError):  # not there yet; or a failure, raised again below
            work.wait(_LOOK)
            return
        _watch(group, 0.0)
    try:
        work.wait()
    except RuntimeError as error:
        late = "timed out" in str(error).lower()
        # A connection may close a little before the kernel reports the process as ended.
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            _watch(group, group.timeout if late else 0.0)
            time.sleep(0.005)
        kind = CollectiveTimeoutError if late else PeerLostError
        where = f"{call.plan.text}: rank {group.rank} waited for torch.distributed"
        raise kind(f"{where}: {error}. The group is broken: make a new one.") from error


def _watch(group: Group, waited: float) -> None:
    """Raises if a peer is lost, or late: those first that have not called torch.distributed."""
    if group.workspace is not None:
        group.workspace.channel.watch(Phase.READ, waited)
        group.workspace.channel.watch(Phase.RESULT, waited)


def _leave(call: Call) -> None:
    """Tells the peers that this rank needs nothing more of them: its process may end."""
    if call.group.workspace is not None and call.problem.device == "cpu":
        call.group.workspace.channel.publish(Phase.RESULT)


def _options(cls: Any, call: Call) -> Any:
    options = cls()
    options.timeout = timedelta(seconds=call.group.timeout)
    return options


def _gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    """x of all ranks along the problem's dim, contiguous."""
    group, problem = call.group, call.problem
    if group.world == 1:
        return x.contiguous()
    dim, sizes = problem.dim, problem.sizes
    assert dim is not None  # an all-gather has one
    largest = max(sizes)
    if x.shape[dim] < largest:  # the collective takes equal shards only
        padded = x.new_zeros((*x.shape[:dim], largest, *x.shape[dim + 1 :]))
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        x = padded
    stacked = _all_gather(call, x.reshape(-1)).view(group.world, *x.shape)
    _leave(call)
    if dim == 0 and all(size == largest for size in sizes):
        return stacked.flatten(0, 1)
    return torch.cat([stacked[r].narrow(dim, 0, size) for r, size in enumerate(sizes)], dim)


def _all_gather(call: Call, own: torch.Tensor) -> torch.Tensor:
    """own [N] of all ranks [world * N]."""
    sent = own.cpu() if _through_host(call) else own
    received = sent.new_empty(call.group.world * sent.numel())
    options = _options(AllgatherOptions, call)
    _finish(call, call.group.pg._allgather_base(received, sent, options))
    return received.to(own.device)


def _through_host(call: Call) -> bool:
    """Whether torch.distributed moves these tensors in the host's memory only."""
    cuda = torch.device("cuda")
    return call.problem.device == "cuda" and call.group.pg._get_backend(cuda).name() == "gloo"


def _scatter(call: Call, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Sends piece r to rank r; returns what the ranks sent here, in rank order."""
    group = call.group
    count = pieces[group.rank].numel()
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    device = sent.device
    if _through_host(call):
        sent = sent.cpu()
    received = sent.new_empty(count * group.world)
    options = _options(AllToAllOptions, call)
    splits = [piece.numel() for piece in pieces]
    work = group.pg.alltoall_base(received, sent, [count] * group.world, splits, options)
    _finish(call, work)
    return received.to(device).view(group.world, -1).unbind(0)


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    _enter(call)
    gathered = _gather(call, x)
    return gathered.clone() if call.group.world == 1 else gathered


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    _enter(call)
    whole = _gather(call, x)
    if gathered is not None:
        gathered.copy_(whole)
    for w, bias, out in zip(weights, biases, outs, strict=True):
        product(as_rows(whole), w, as_rows(out), bias)


def _reduce_scatter(call: Call, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    problem, group = call.problem, call.group
    if group.world == 1:
        return reduced(partial, reduction)
    assert problem.dim is not None  # a reduce-scatter has one
    out = empty_share(call, reduction.out_dtype, partial.device)
    shares = [share.reshape(-1) for share in partial.split(list(problem.sizes), problem.dim)]
    flat = out.view(-1)
    step = _step(call, partial)
    for begin in range(0, max(share.numel() for share in shares), step):
        received = _scatter(call, [share[begin : begin + step] for share in shares])
        reduce_into(flat[begin : begin + step], received, reduction, begin)
    _leave(call)
    return out


def _step(call: Call, partial: torch.Tensor) -> int:
    """Elements of a rank's share that move at a time; all of them on a GPU."""
    if call.problem.device == "cuda":
        return max(partial.numel(), 1)
    return _STEP_BYTES // partial.element_size()


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    _enter(call)
    out = _reduce_scatter(call, x, reduction)
    return out.clone(memory_format=torch.contiguous_format) if out is x else out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    _enter(call)
    return _reduce_scatter(call, matmul_partial(call, x, w), reduction)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """Each rank reduces its part of every step of the flat tensor, then the parts are gathered."""
    _enter(call)
    group = call.group
    flat, result = x.reshape(-1), out.view(-1)
    if group.world == 1:
        if x.data_ptr() != out.data_ptr():
            result.copy_(reduced(flat, reduction))
        return
    step = _step(call, x) * group.world
    for first in range(0, flat.numel(), step):
        count = min(step, flat.numel() - first)
        part = -(-count // group.world)
        edges = [first + min(count, r * part) for r in range(group.world + 1)]
        received = _scatter(call, [flat[a:b] for a, b in itertools.pairwise(edges)])
        own = result.new_empty(part)
        begin, end = edges[group.rank], edges[group.rank + 1]
        reduce_into(own[: end - begin], received, reduction, begin)
        result[first : first + count].copy_(_all_gather(call, own)[:count])
    _leave(call)


def matmul_all_reduce(
    call: Call, x: torch.Tensor, w: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    partial = matmul_partial(call, x, w)
    if call.group.world == 1:
        return reduced(partial, reduction)
    out = empty(partial.shape, reduction.out_dtype, partial.device)
    all_reduce(call, partial, out, reduction)
    return out
