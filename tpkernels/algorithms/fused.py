"""One Triton kernel that both moves data and multiplies; see kernels/ for the algorithms.

Tiles in time on rank 0 of 3; `*r` are the tiles of rank r's rows, `->r` stores to its memory:

    all_gather_matmul        *0   wait for 1, *1   wait for 2, *2
    matmul_reduce_scatter    *1 ->1   *2 ->2   *0   wait for 1 and 2, sum the own rows
    matmul_all_reduce        each tile to all ranks and summed by all (one-shot), or to its owner,
                             which sums it and stores the sum to all ranks (two-shot)

On CPU tensors the kernels run under Triton's interpreter, one process per rank, in the host's
arena: slow, but the same code that GPUs run.

Sync: among kernels as in kernels/sync.py. A thread watches the peers and ends the kernels' waits
when one is lost. On CPU tensors each call is also an epoch of the host's channel, which detects a
peer in a call of another algorithm. On GPUs a call only queues its kernel: see cuda/queued.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from tpkernels import cuda
from tpkernels._C.host import Phase
from tpkernels.algorithms.parts import Products
from tpkernels.algorithms.rank_order import gathers_in_rank_order, scatters_in_rank_order
from tpkernels.algorithms.reduction import Reduction
from tpkernels.cuda.queued import bound, queue
from tpkernels.groups.call import Call
from tpkernels.planning.qualification import COPY_ENGINES
from tpkernels.symm.cuda import CudaWorkspace, Watch
from tpkernels.symm.device import DeviceWorkspace, Prepared, kernel_error
from tpkernels.symm.gpu_memory import GpuSegment
from tpkernels.symm.streams import SideStream

if TYPE_CHECKING:  # this imports Triton
    from tpkernels.kernels.configs import MatmulConfig

# Smallest shard, in bytes, that copy engines bring instead of programs of the kernel. Not measured.
COPY_ENGINE_BYTES = 4 << 20


def _run(
    call: Call,
    device: torch.device,
    key: Hashable,
    prepare: Callable[[], Prepared],
    *tensors: object,
) -> None:
    """Run what ``prepare`` returns, which is the same for calls with the same key. On CPU tensors
    it has succeeded when this returns."""
    if call.problem.device == "cuda":
        queue(call, device, key, prepare, *tensors)
        return
    needs = prepare()
    space = call.workspace.device(needs.words, needs.buffer_bytes, call.plan.text)
    run = needs.bind(space, call.plan.signature)
    channel = call.workspace.channel
    channel.begin(call.plan.signature, call.plan.text)
    channel.publish(Phase.DATA)
    with Watch(channel, [space]) as watch:
        run(*tensors)
    if watch.error is not None:
        raise watch.error
    failure = space.failure()
    if failure is not None:
        channel.watch(Phase.RESULT, 0.0)  # the channel knows more about the peers
        raise kernel_error(
            failure, where=call.plan.text, rank=call.group.rank, timeout=call.group.timeout
        )
    channel.publish(Phase.RESULT)
    # These waits end the epoch; the kernels' words keep the ranks in step.
    for peer in call.peers_in_ring_order:
        channel.wait(peer, Phase.DATA)


def _config(call: Call, x: torch.Tensor, w: torch.Tensor) -> MatmulConfig:
    """Return the block sizes, which follow from the rows of all ranks and the columns of w: ranks
    that sum choose the same."""
    from tpkernels.kernels.configs import config_for

    return config_for(x.device, x.dtype, call.problem.rows, w.shape[-1])


def _place(x: torch.Tensor) -> Hashable:
    """Return what a prepared launch knows of an operand besides its shape and dtype: the strides,
    and whether TMA can read it."""
    return x.stride(), x.data_ptr() % 16 == 0


@gathers_in_rank_order
def gather(call: Call, x: torch.Tensor, products: Products) -> None:
    sizes, whole = call.problem.shard_rows, products.memory(call, x).flatten(0, -2)
    rows, outs = x.contiguous().flatten(0, -2), [out.flatten(0, -2) for out in products.outs]
    weights = list(products.weights)
    biases = [None if bias is None else bias.contiguous() for bias in products.biases]
    if max(sizes) * rows.shape[1] * x.element_size() >= COPY_ENGINE_BYTES and _copies(call, x):
        _gather_by_copies(call, rows, weights, biases, outs, whole)
        return

    def prepare() -> Prepared:
        from tpkernels.kernels import all_gather_matmul as kernel

        return kernel.prepare(
            _config(call, x, weights[0]), rows, weights, whole, outs[0].dtype, sizes
        )

    key = tuple([_place(w) for w in weights])
    _run(call, x.device, key, prepare, rows, weights, biases, outs, whole)


def _copies(call: Call, x: torch.Tensor) -> bool:
    """Return whether all ranks can use copy engines, and nothing has disqualified them. Collective
    at the first call."""
    if call.problem.device != "cuda" or call.problem.world == 1:
        return False
    variants = call.workspace.on_gpus[x.device].current.variants
    if variants and COPY_ENGINES not in variants:
        return False
    return call.group.unsupported_kernels(x.device, "CUDA", cuda.unsupported(x.device)) is None


def _gather_by_copies(
    call: Call,
    rows: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    whole: torch.Tensor,
) -> None:
    """Gather and multiply with chunks that copy engines bring while the first product runs."""
    device, sizes, dtype = rows.device, call.problem.shard_rows, outs[0].dtype
    by_kernels, planned = cuda.flags_take_kernels(device), call.plan.signature
    # Peers that read x in place publish words with the signature of its memory; the first product
    # compares them while it waits.
    in_place = call.workspace.on_gpus[device].segments.find(rows)
    signature = planned if in_place is None else in_place.signature(planned)
    peers = call.peers_in_ring_order

    def prepare() -> Prepared:
        from tpkernels.kernels import all_gather_matmul as kernel

        config = _config(call, rows, weights[0])
        first, step, chunks = kernel.prepare_arriving(
            config, weights[0], whole, dtype, sizes, by_kernels
        )
        multiply_others = kernel.bind_others(config, whole, weights[1:], dtype)
        flags = len(sizes) * chunks

        def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
            multiply_first = first.bind(space, signature)

            def run(
                memory: CudaWorkspace,
                in_place: GpuSegment | None,
                rows: torch.Tensor,
                weights: list[torch.Tensor],
                biases: list[torch.Tensor | None],
                outs: list[torch.Tensor],
                whole: torch.Tensor,
            ) -> None:
                results = [whole, *outs]
                with cuda.CopyCall(memory.current, planned, results, in_place, flags) as copies:
                    bring_rows(copies, memory.side, peers, rows, whole, sizes, step, chunks)
                    try:
                        multiply_first(whole, weights[0], biases[0], outs[0])
                    finally:
                        memory.side.join()
                    multiply_others(whole, weights[1:], biases[1:], outs[1:])

            return run

        return first._replace(bind=bind)

    key = by_kernels, signature, *[_place(w) for w in weights]
    memory, run = bound(call, device, key, prepare, signature)
    with memory:
        run(memory, in_place, rows, weights, biases, outs, whole)


def bring_rows(
    copies: cuda.CopyCall,
    side: SideStream,
    peers: Sequence[int],
    rows: torch.Tensor,
    whole: torch.Tensor,
    sizes: tuple[int, ...],
    step: int,
    chunks: int,
) -> None:
    """Within a call, fill ``whole`` [sum(sizes), K] with ``rows`` [sizes[rank], K] and, in the
    order of ``peers``, with the peers' rows. A flag tells the kernel of each chunk, ``step`` rows;
    a rank has ``chunks`` at most. The kernel is launched later: where all streams share one
    hardware queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1, it starts behind the last fetch, and
    nothing overlaps.
    """
    row_bytes = rows.shape[1] * rows.element_size()
    whole.narrow(0, sum(sizes[: copies.rank]), rows.shape[0]).copy_(rows)
    side.fork()
    with side.current():
        if copies.in_place is None:
            copies.put(rows, 0)
        copies.publish(copies.last_word)
    for owner in peers:
        begin = sum(sizes[:owner])
        for chunk, top in enumerate(range(0, sizes[owner], step)):
            to = whole.narrow(0, begin + top, min(step, sizes[owner] - top))
            with side.next():
                if top == 0:  # later chunks are copied after this one
                    copies.await_word(owner, copies.last_word)
                with side.copying():
                    copies.copy_from(owner, to, top * row_bytes)
                copies.raise_flag(owner * chunks + chunk)


@scatters_in_rank_order
def reduce(
    call: Call, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, reduction: Reduction
) -> None:
    problem, rows = call.problem, x.flatten(0, -2)

    def prepare() -> Prepared:
        config = _config(call, x, w)
        if problem.spec.scatters:
            from tpkernels.kernels import matmul_reduce_scatter as scatter

            return scatter.prepare(config, rows, w, problem.shard_rows, problem.dtype)
        from tpkernels.kernels import matmul_all_reduce as kernel

        return kernel.prepare(config, rows, w, out.dtype, problem.world, problem.dtype)

    added = reduction.bias, reduction.residual
    _run(call, x.device, (_place(rows), _place(w)), prepare, rows, w, *added, out.flatten(0, -2))
