"""The collectives of the backend "tpkernels" on CPU tensors.

If the ranks of a group share memory, a collective is a call on the channel of the group
(csrc/host/channel.h), like the ops of this package. If the ranks span hosts, all-reduce, all-gather
and reduce-scatter of floating-point tensors use `hierarchical`, and gloo runs all other
collectives. Point-to-point operations and sparse tensors always use gloo.

Invariant 1 (one order): the collectives of a rank run in the order in which they were started. An
asynchronous collective runs on the thread of the group. While it is pending, later collectives
queue behind it, and ops of the group wait for it.

Invariant 2 (equal choices): the choice between memory, `hierarchical` and gloo depends only on
values that are equal on all ranks: op, dtype, layout and topology. It does not depend on strides or
splits.

Invariant 3 (checks first): arguments are checked before the first call, so a ``ValueError``,
``TypeError`` or ``NotImplementedError`` leaves the group usable.
"""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tpkernels import _C, groups
from tpkernels.common import dtypes
from tpkernels.errors import CollectiveMismatchError, GroupBrokenError
from tpkernels.groups.c10d.async_calls import AsyncCalls, CallWork
from tpkernels.groups.group import Group
from tpkernels.planning.algorithms import CHUNK_BYTES, SLACK_BYTES
from tpkernels.torch_private import (
    BackendOptions,
    RecordFunctionFast,
    all_gather_single,
    make_gloo_group,
    profiling,
    reduce_scatter_single,
)

# The names and codes (csrc/host/reduce_ops.h) of reductions.
_SUM, _MEAN, _MIN, _MAX, _PRODUCT, _AND, _OR, _XOR = range(8)
_OPS = {
    ReduceOp.SUM: ("op sum", _SUM),
    ReduceOp.AVG: ("op avg", _MEAN),
    ReduceOp.MIN: ("op min", _MIN),
    ReduceOp.MAX: ("op max", _MAX),
    ReduceOp.PRODUCT: ("op product", _PRODUCT),
    ReduceOp.BAND: ("op band", _AND),
    ReduceOp.BOR: ("op bor", _OR),
    ReduceOp.BXOR: ("op bxor", _XOR),
}
_COMPLEX_OPS = {_SUM, _MEAN}
_REAL_OPS = {_SUM, _MEAN, _MIN, _MAX, _PRODUCT}
_INTEGER_OPS = {_SUM, _MIN, _MAX, _PRODUCT, _AND, _OR, _XOR}
# A bool is the byte 0 or 1, and remains one: a sum is a logical or, as in NCCL.
_OPS_ON_BOOL = {_SUM: _OR, _MAX: _OR, _PRODUCT: _AND, _MIN: _AND, _AND: _AND, _OR: _OR, _XOR: _XOR}


@dataclass(frozen=True)
class Reduction:
    """An element-wise reduction of the tensors of all ranks.

    Attributes:
        name, op: its name and its code.
        dtype, numbers: the code of a dtype, and the numbers of that dtype in an element.
    """

    name: str
    op: int
    dtype: int
    numbers: int


@functools.cache
def _get_reduction(dtype: torch.dtype, reduce_op: ReduceOp.RedOpType) -> Reduction:
    """Return the reduction of tensors. Raise ``NotImplementedError`` if it is not supported."""
    name, op = _OPS.get(reduce_op, (f"op {reduce_op}", -1))
    number = dtype.to_real()
    if dtype == torch.bool:
        number, op = torch.uint8, _OPS_ON_BOOL.get(op, -1)
    code = dtypes.ELEMENT_CODES.get(number, -1)
    if dtype.is_complex:
        supported = _COMPLEX_OPS
    else:
        supported = _REAL_OPS if dtype.is_floating_point else _INTEGER_OPS
    if code < 0 or op not in supported:
        raise NotImplementedError(
            f"the backend tpkernels cannot reduce {dtype} with {name}; it supports sum, min, max "
            "and product of real numbers, avg of floating-point numbers, sum and avg of complex "
            "numbers, and bitwise operations; integers are uint8, int8, int16, int32 and int64"
        )
    return Reduction(name, op, code, dtype.itemsize // number.itemsize)


class Backend:
    """The collectives of one process group. Their names and arguments are those of
    ``c10d::Backend``.

    A synchronous collective returns None, an asynchronous one a ``Work``. They raise the errors of
    `tpkernels.errors`, after which the group is broken.
    """

    def __init__(self, options: BackendOptions) -> None:
        self.rank: int = options.group_rank
        self.world: int = options.group_size
        self.name: str = options.group_id
        self.timeout: timedelta = options.timeout
        self.gloo, self.transport = make_gloo_group(options)
        self.num_collectives = 0
        self._async_calls = AsyncCalls()
        self._group: Group | None = None
        self._caller = ""
        groups.register_backend(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of one wait for a peer."""
        self.timeout = timeout
        if self._group is not None:
            self._group.set_host_timeout(timeout.total_seconds())

    def drain(self, seconds: float | None = None) -> None:
        """Wait until the pending asynchronous collectives have run, for at most ``seconds``."""
        self._async_calls.drain(seconds)

    def shutdown(self) -> None:
        """End the thread and the connections. torch calls it when the group is destroyed."""
        self._async_calls.close()
        self._end()

    def abort(self) -> None:
        """End like `shutdown`, without waiting for pending collectives."""
        self._async_calls.close(0.0)
        self._end()

    def _end(self) -> None:
        groups.unregister_backend(self)
        self._group = None  # it refers to this object
        self.gloo.shutdown()

    # Collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None:
        if tensors[0].layout != torch.strided:
            return self.transport.allreduce(tensors, opts)
        reductions = [_get_reduction(x.dtype, opts.reduceOp.op) for x in tensors]

        def run() -> None:
            for x, reduction in zip(tensors, reductions, strict=True):
                self._all_reduce(x, reduction, opts)

        return self._start("all_reduce", run, tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None:
        (x,), root = tensors, opts.rootRank

        def run() -> None:
            if not self._shares_memory:
                self.transport.broadcast(tensors, opts).wait()
                return
            sizes = [x.numel() if rank == root else 0 for rank in range(self.world)]
            outs = [x if self.rank != root and rank == root else None for rank in range(self.world)]
            key = "broadcast", x.numel(), x.dtype, f"root {root}"
            self._gather(key, x if self.rank == root else None, outs, sizes, x.dtype)

        return self._start("broadcast", run, tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None:
        (x,), root = tensors, opts.rootRank
        reduction = _get_reduction(x.dtype, opts.reduceOp.op)

        def run() -> None:
            if not self._shares_memory:
                self.transport.reduce(tensors, opts).wait()
                return
            sizes = [x.numel() if rank == root else 0 for rank in range(self.world)]
            key = "reduce", x.numel(), x.dtype, f"root {root}", reduction.name
            self._reduce_scatter(key, x, x if self.rank == root else None, sizes, reduction)

        return self._start("reduce", run, tensors, opts)

    def allgather(
        self, outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        for shards, x in zip(outs, tensors, strict=True):
            self._check_list("all_gather", "outputs", shards, x)
            _check_numel("all_gather", "input", x, f"output {self.rank}", shards[self.rank])

        def run() -> None:
            for shards, x in zip(outs, tensors, strict=True):
                if not self._shares_memory:
                    self.transport.allgather([shards], [x], opts).wait()
                    continue
                sizes = [shard.numel() for shard in shards]
                key = "all_gather", _count(sizes), x.dtype
                self._gather(key, x, shards, sizes, x.dtype)

        return self._start("all_gather", run, outs, opts)

    allgather_coalesced = allgather

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any) -> dist.Work | None:
        return self.allgather_into_tensor_coalesced([out], [x], opts)

    def allgather_into_tensor_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        for out, x in zip(outs, tensors, strict=True):
            _check_numel("all_gather", "output", out, "input", x, self.world)

        def run() -> None:
            for out, x in zip(outs, tensors, strict=True):
                self._all_gather(out, x, opts)

        return self._start("all_gather", run, outs, opts)

    def gather(
        self, outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        (x,), root = tensors, opts.rootRank
        shards: Sequence[torch.Tensor | None] = [None] * self.world
        if self.rank == root:
            shards = outs[0]
            self._check_list("gather", "outputs", outs[0], x)
            for rank, shard in enumerate(outs[0]):
                _check_numel("gather", f"output {rank}", shard, "input", x)

        def run() -> None:
            if not self._shares_memory:
                self.transport.gather(outs, tensors, opts).wait()
                return
            key = "gather", x.numel(), x.dtype, f"root {root}"
            self._gather(key, x, shards, [x.numel()] * self.world, x.dtype)

        return self._start("gather", run, outs, opts)

    def scatter(
        self, outs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any
    ) -> dist.Work | None:
        (out,), root = outs, opts.rootRank
        if self.rank == root:
            self._check_list("scatter", "inputs", tensors[0], out)
            for rank, x in enumerate(tensors[0]):
                _check_numel("scatter", f"input {rank}", x, "output", out)

        def run() -> None:
            if not self._shares_memory:
                self.transport.scatter(outs, tensors, opts).wait()
                return
            source = _concatenate(tensors[0]) if self.rank == root else None
            sent = [out.nbytes if self.rank == root else 0] * self.world
            received = [out.nbytes if rank == root else 0 for rank in range(self.world)]
            key = "scatter", out.numel(), out.dtype, f"root {root}"
            self._exchange(key, source, out, sent, received, out.nbytes)

        return self._start("scatter", run, outs, opts)

    def reduce_scatter(
        self, outs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any
    ) -> dist.Work | None:
        (out,), (inputs,) = outs, tensors
        self._check_list("reduce_scatter", "inputs", inputs, out)
        _check_numel("reduce_scatter", f"input {self.rank}", inputs[self.rank], "output", out)
        reduction = _get_reduction(out.dtype, opts.reduceOp.op)

        def run() -> None:
            if not self._shares_memory:
                self.transport.reduce_scatter(outs, tensors, opts).wait()
                return
            sizes = [x.numel() for x in inputs]
            key = "reduce_scatter", _count(sizes), out.dtype, reduction.name
            self._reduce_scatter(key, _concatenate(inputs), out, sizes, reduction)

        return self._start("reduce_scatter", run, outs, opts)

    def _reduce_scatter_base(
        self, out: torch.Tensor, x: torch.Tensor, opts: Any
    ) -> dist.Work | None:
        return self.reduce_scatter_tensor_coalesced([out], [x], opts)

    def reduce_scatter_tensor_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        for out, x in zip(outs, tensors, strict=True):
            _check_numel("reduce_scatter", "input", x, "output", out, self.world)
        reductions = [_get_reduction(x.dtype, opts.reduceOp.op) for x in tensors]

        def run() -> None:
            for out, x, reduction in zip(outs, tensors, reductions, strict=True):
                self._reduce_scatter_single(out, x, reduction, opts)

        return self._start("reduce_scatter", run, outs, opts)

    def alltoall_base(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int],
        in_splits: list[int],
        opts: Any,
    ) -> dist.Work | None:
        _check_dtype("all_to_all", "output", out, "input", x)
        sent = self._split_bytes("input", x, in_splits)
        received = self._split_bytes("output", out, out_splits)

        def run() -> None:
            if not self._shares_memory:
                self.transport.alltoall_base(out, x, out_splits, in_splits, opts).wait()
                return
            self._all_to_all(x, out, sent, received)

        return self._start("all_to_all", run, [out], opts)

    def alltoall(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        self._check_list("all_to_all", "inputs", tensors, tensors[0])
        self._check_list("all_to_all", "outputs", outs, tensors[0])

        def run() -> None:
            sizes, dtype = [out.numel() for out in outs], tensors[0].dtype
            x, flat = _concatenate(tensors), torch.empty(sum(sizes), dtype=dtype)
            if self._shares_memory:
                received = [out.nbytes for out in outs]
                self._all_to_all(x, flat, [x.nbytes for x in tensors], received)
            else:
                splits = sizes, [x.numel() for x in tensors]
                self.transport.alltoall_base(flat, x, *splits, opts).wait()
            for out, values in zip(outs, flat.split(sizes), strict=True):
                out.detach().copy_(values.view(out.shape))

        return self._start("all_to_all", run, outs, opts)

    def barrier(self, opts: Any) -> dist.Work | None:
        def run() -> None:
            if not self._shares_memory:
                self.transport.barrier(opts).wait()
                return
            self._call("barrier", ("barrier", None, None))

        return self._start("barrier", run, [], opts)

    # Start and order.

    def _start(
        self, name: str, run: Callable[[], None], outputs: list[Any], opts: Any
    ) -> dist.Work | None:
        """Run a collective now, or on the thread of the group if it is asynchronous or must wait
        for an asynchronous one.

        A callback of a future runs on that thread, and its collectives run at once. If the callback
        was set before the next collective was started, this is the same order on all ranks.
        """
        self.num_collectives += 1
        calls, is_async = self._async_calls, opts.asyncOp
        calls.check_open(self.name)
        caller = _C.calls.find_caller()
        if calls.on_thread() or not (is_async or calls.pending):
            self._run(name, run, caller)
            return CallWork.completed(name, outputs) if is_async else None
        work, group = CallWork(name, outputs), self._get_group()
        calls.submit(
            work,
            lambda: self._run(name, run, caller),
            lambda pending: setattr(group, "has_pending_calls", pending),
        )
        if is_async:
            return work
        work.wait()
        return None

    def _get_group(self) -> Group:
        group = groups.get(self.name)
        if group.backend is not self:  # a later process group has the name
            raise GroupBrokenError(f"process group '{self.name}' has been destroyed")
        return group

    def _run(self, name: str, run: Callable[[], None], caller: str) -> None:
        self._group = group = self._get_group()
        try:
            with group.lock:
                group.check_usable()
                group.ready()
                self._caller = caller
                try:
                    with RecordFunctionFast(f"tpkernels:{name}") if profiling() else nullcontext():
                        run()
                except BaseException as error:
                    group.mark_broken(error)
                    raise
        except BaseException as error:
            groups.break_if_interrupted(self.name, error)
            raise
        if group.notices:
            group.warn()

    @property
    def group(self) -> Group:
        """Return the group of the collective that runs."""
        assert self._group is not None  # set by `_run`
        return self._group

    @property
    def _shares_memory(self) -> bool:
        return self.group.workspace is not None

    # One tensor. These methods run under the group lock, after the set-up of the group.

    def _all_reduce(self, x: torch.Tensor, reduction: Reduction, opts: Any) -> None:
        if not self._shares_memory:
            if self._is_hierarchical(x, reduction):
                torch.ops.tpkernels.all_reduce_(x.detach(), self.name, algorithm="hierarchical")
            else:
                self.transport.allreduce([x], _all_reduce_options(opts)).wait()
            return
        buffer = _input(x)
        self._call(
            "all_reduce",
            ("all_reduce", x.numel(), x.dtype, reduction.name),
            nbytes=2 * x.nbytes,
            source=buffer.data_ptr(),
            out=buffer.data_ptr(),
            count=x.numel() * reduction.numbers,
            dtype=reduction.dtype,
            op=reduction.op,
        )
        _copy_back(x, buffer)

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, opts: Any) -> None:
        if self._shares_memory:
            source, buffer = _input(x), _output(out)
            self._call(
                "all_gather",
                ("all_gather", x.numel(), x.dtype),
                nbytes=x.nbytes,
                source=source.data_ptr(),
                out=buffer.data_ptr(),
                sizes=[x.nbytes] * self.world,
            )
            _copy_back(out, buffer)
        elif self._is_hierarchical(x):
            flat = x.detach().reshape(-1)
            gathered = torch.ops.tpkernels.all_gather(flat, self.name, algorithm="hierarchical")
            out.detach().copy_(gathered.view(out.shape))
        else:
            buffer = _output(out)  # gloo compares shapes
            all_gather_single(self.transport, buffer.view(-1), _input(x).view(-1), opts).wait()
            _copy_back(out, buffer)

    def _reduce_scatter_single(
        self, out: torch.Tensor, x: torch.Tensor, reduction: Reduction, opts: Any
    ) -> None:
        if self._shares_memory:
            key = "reduce_scatter", out.numel(), x.dtype, reduction.name
            self._reduce_scatter(key, x, out, [out.numel()] * self.world, reduction)
        elif self._is_hierarchical(x, reduction):
            flat = x.detach().reshape(-1)
            shard = torch.ops.tpkernels.reduce_scatter(flat, self.name, algorithm="hierarchical")
            out.detach().copy_(shard.view(out.shape))
        else:
            buffer = _output(out)
            reduce_scatter_single(self.transport, buffer.view(-1), _input(x).view(-1), opts).wait()
            _copy_back(out, buffer)

    def _is_hierarchical(self, x: torch.Tensor, reduction: Reduction | None = None) -> bool:
        """Return whether a collective across hosts uses `hierarchical`."""
        is_sum = reduction is None or reduction.op == _SUM
        return is_sum and x.dtype in dtypes.CODES and self.group.node is not None

    def _gather(
        self,
        key: tuple[Any, ...],
        x: torch.Tensor | None,
        outs: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Copy the shard of each rank, of ``sizes`` elements, to the output for that rank."""
        nbytes = [size * dtype.itemsize for size in sizes]
        source = None if x is None else _input(x)
        buffers = [None if out is None else _output(out) for out in outs]
        self._call(
            "all_gather",
            key,
            nbytes=max(nbytes),
            source=0 if source is None else source.data_ptr(),
            sizes=nbytes,
            shard_outs=[0 if buffer is None else buffer.data_ptr() for buffer in buffers],
        )
        for out, buffer in zip(outs, buffers, strict=True):
            if out is not None and buffer is not None:
                _copy_back(out, buffer)

    def _reduce_scatter(
        self,
        key: tuple[Any, ...],
        x: torch.Tensor,
        out: torch.Tensor | None,
        sizes: Sequence[int],
        reduction: Reduction,
    ) -> None:
        """Reduce the shards of ``sizes`` elements of x. ``out`` is the output of this rank, or None
        if its shard is empty."""
        source, buffer = _input(x), None if out is None else _output(out)
        self._call(
            "reduce_scatter",
            key,
            nbytes=max(sizes) * x.itemsize * self.world,
            source=source.data_ptr(),
            out=0 if buffer is None else buffer.data_ptr(),
            count=x.numel() * reduction.numbers,
            dtype=reduction.dtype,
            op=reduction.op,
            sizes=[size * reduction.numbers for size in sizes],
        )
        if out is not None and buffer is not None:
            _copy_back(out, buffer)

    def _all_to_all(
        self, x: torch.Tensor, out: torch.Tensor, sent: list[int], received: list[int]
    ) -> None:
        """Exchange the bytes to and from each rank, after a check that they are the same on both
        sides."""
        local = array("q", sent + received)
        table = array("q", bytes(local.itemsize * len(local) * self.world))
        nbytes = local.itemsize * len(local)
        self._call(
            "all_gather",
            ("splits of all_to_all", None, x.dtype),
            source=local.buffer_info()[0],
            out=table.buffer_info()[0],
            sizes=[nbytes] * self.world,
        )
        for source in range(self.world):
            for target in range(self.world):
                given = table[2 * source * self.world + target]
                expected = table[(2 * target + 1) * self.world + source]
                if given != expected:
                    raise CollectiveMismatchError(
                        f"all_to_all of {x.dtype} in group '{self.name}': rank {source} sends "
                        f"{given} bytes to rank {target}, which expects {expected} bytes; the "
                        "input split on the one must equal the output split on the other",
                        peer=source if target == self.rank else target,
                    )
        largest = max(table)
        self._exchange(("all_to_all", None, x.dtype), x, out, sent, received, largest)

    def _exchange(
        self,
        key: tuple[Any, ...],
        x: torch.Tensor | None,
        out: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        largest: int,
    ) -> None:
        """Send ``sent`` bytes of x to each rank and receive ``received`` bytes. ``largest`` is the
        maximum over all ranks."""
        source, buffer = None if x is None else _input(x), _output(out)
        self._call(
            "all_to_all",
            key,
            nbytes=largest * self.world,
            source=0 if source is None else source.data_ptr(),
            out=buffer.data_ptr(),
            sizes=sent,
            out_sizes=received,
            max_slice=largest,
        )
        _copy_back(out, buffer)

    def _call(
        self,
        collective: str,
        key: tuple[Any, ...],
        *,
        nbytes: int = 0,
        source: int = 0,
        out: int = 0,
        count: int = 0,
        dtype: int = dtypes.ELEMENT_CODES[torch.uint8],
        op: int = _SUM,
        sizes: Sequence[int] = (),
        out_sizes: Sequence[int] = (),
        max_slice: int = 0,
        shard_outs: Sequence[int] = (),
    ) -> None:
        """Run a collective of csrc/host/collectives.h.

        Args:
            key: name, number of elements, dtype and options of the call, equal on all ranks.
            nbytes: the size of the buffer in which the call needs one step; equal on all ranks.
            source, out, shard_outs: addresses.
        """
        call_id = _get_call_id(*key)
        group = self.group
        nbytes = min(nbytes, 2 * CHUNK_BYTES * self.world) + SLACK_BYTES
        group.ensure_capacity(nbytes, call_id[1])
        assert group.workspace is not None  # `_shares_memory`
        group.in_call = True
        try:
            _C.host.run_collective(
                group.workspace.channel,
                collective,
                *call_id,
                source,
                out,
                count,
                dtype,
                op,
                sizes,
                out_sizes,
                max_slice,
                shard_outs,
                self._caller,
            )
        finally:
            group.in_call = False

    # Checks of arguments.

    def _check_list(
        self, name: str, what: str, tensors: Sequence[torch.Tensor], like: torch.Tensor
    ) -> None:
        if len(tensors) != self.world:
            raise ValueError(
                f"{name}: there are {len(tensors)} {what}, but the group has {self.world} ranks"
            )
        for rank, x in enumerate(tensors):
            _check_dtype(name, f"{what[:-1]} {rank}", x, "other tensor", like)

    def _split_bytes(self, what: str, x: torch.Tensor, splits: list[int]) -> list[int]:
        """Return the bytes of x for each rank. ``splits`` has rows of dim 0, or is empty for equal
        shares."""
        if x.dim() == 0:
            raise ValueError(f"all_to_all: the {what} has no dims; pass at least one")
        rows = x.shape[0]
        if not splits:
            if rows % self.world:
                raise ValueError(
                    f"all_to_all: the {what} has {rows} rows, which {self.world} ranks cannot "
                    "share equally; pass the split sizes"
                )
            return [x.nbytes // self.world] * self.world
        if len(splits) != self.world or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all: the {what} splits {splits} must be {self.world} numbers with the "
                f"sum {rows}, the rows of the {what}"
            )
        return [split * (x.nbytes // rows if rows else 0) for split in splits]


@functools.lru_cache(4096)
def _get_call_id(name: str, count: object, dtype: object, *options: str) -> tuple[int, str]:
    """Return the signature and the description of a call. ``count``: the number of elements, or
    None if the ranks may pass different numbers."""
    elements = "" if count is None else f"{count} elements of "
    operand = "" if dtype is None else f" of {elements}{dtype}"
    description = ", ".join([f"{name}{operand}", *options])
    return zlib.crc32(description.encode()) or 1, description


def _check_dtype(name: str, what: str, x: torch.Tensor, other: str, like: torch.Tensor) -> None:
    if x.layout != torch.strided:
        raise NotImplementedError(f"{name} of the backend tpkernels needs dense tensors")
    if x.dtype != like.dtype:
        raise TypeError(f"{name}: the {what} is {x.dtype}, but the {other} is {like.dtype}")


def _check_numel(
    name: str, what: str, x: torch.Tensor, other: str, like: torch.Tensor, factor: int = 1
) -> None:
    _check_dtype(name, what, x, other, like)
    if x.numel() != factor * like.numel():
        raise ValueError(
            f"{name}: the {what} has {x.numel()} elements, but must have {factor * like.numel()}, "
            f"because the {other} has {like.numel()}"
        )


def _count(sizes: Sequence[int]) -> object:
    """Return the number of elements of a shard for the description of a call."""
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


# Memory of tensors.


def _input(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.detach().contiguous()


def _output(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)


def _copy_back(x: torch.Tensor, buffer: torch.Tensor) -> None:
    if buffer is not x:
        x.detach().copy_(buffer)


def _concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def _all_reduce_options(opts: Any) -> Any:
    """Return the options of one tensor, for the options of one or several."""
    options = dist.AllreduceOptions()
    options.reduceOp = opts.reduceOp
    return options
