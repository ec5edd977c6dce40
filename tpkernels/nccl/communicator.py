"""A NCCL communicator over the ranks of a process group.

csrc/nccl/communicator.h describes how a call ends that NCCL cannot complete.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from tpkernels import _C, defaults, dtypes, groups
from tpkernels._C.nccl import Operation, OperationKind
from tpkernels.errors import CollectiveTimeoutError
from tpkernels.groups import GroupLike
from tpkernels.nccl import checks, memory
from tpkernels.nccl.bootstrap import bootstrap
from tpkernels.nccl.memory import Window
from tpkernels.text import of_error

_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_POLL_INTERVAL = 1e-3  # s, between queries of an event


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


class Communicator:
    """A NCCL communicator. Creating one is collective: all ranks of ``group`` do it together, with
    the same options. Each rank uses the CUDA device that is current when it does.

    Every method returns within ``timeout`` or raises; after an error no further call is possible.
    Methods that move data enqueue their work on torch's current stream and return; `check` and
    `wait` report whether it succeeded. `close` the communicator when it is no longer needed: one
    that is garbage-collected first is aborted, together with all work in flight.

    Args:
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name. It is used to set up the
            communicator, and may be destroyed afterwards.
        timeout: limit for one call, in seconds.
        library: path of the NCCL to use; by default the one that ``tpkernels info`` shows.
        name: shown in errors and, from NCCL 2.27 on, in NCCL's logs; by default the group's name.
        cta_policy: "default", "efficiency" or "zero" (copy engines, no CTAs); needs NCCL 2.27.
        min_ctas, max_ctas: bounds on the number of CTAs that NCCL uses.

    Raises:
        ValueError: an option is out of range or differs between ranks.
        NotImplementedError: there is no CUDA device or no NCCL, or NCCL is too old for an option.
        TpkernelsError: a rank cannot take part or did not come in time; raised on all ranks.
    """

    def __init__(
        self,
        group: GroupLike,
        *,
        timeout: float = defaults.TIMEOUT,
        library: str | None = None,
        name: str | None = None,
        cta_policy: str | None = None,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
    ) -> None:
        options = checks.options(timeout, cta_policy, min_ctas, max_ctas)
        own = groups.get(groups.name_of(group))
        name = own.name if name is None else name
        with own.turn():
            agreed = bootstrap(own.participant(timeout), library, options)
            native = _C.nccl.Communicator(
                agreed.library,
                agreed.unique_id,
                own.rank,
                own.world,
                timeout=timeout,
                name=name,
                **options,
            )
        self._set(native, agreed.library, agreed.device, timeout, name)

    def _set(
        self,
        native: _C.nccl.Communicator,
        library: _C.nccl.Library,
        device: torch.device,
        timeout: float,
        name: str,
    ) -> None:
        self.library = library
        self.device = device
        self.timeout = timeout
        self.name = name
        self.rank: int = native.rank
        self.world: int = native.world
        self._native = native
        self._local = threading.local()
        # Runs at exit too: work left on the device would wait for its peers.
        weakref.finalize(self, native.abort, "it was dropped without having been closed")

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The ``x`` of all ranks, concatenated along dim 0 in rank order."""
        checks.has_rows(x)
        out = x.new_empty((self.world * x.shape[0], *x.shape[1:])) if out is None else out
        checks.pair(x, out, self.device)
        checks.elements(out.numel(), self.world * x.numel(), "out", f"x from {self.world} ranks")
        return self._enqueue(OperationKind.ALL_GATHER, x, out, x.numel())

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's shard, along dim 0, of what `all_reduce` returns."""
        rows = checks.divisible(x, self.world)
        out = x.new_empty((rows, *x.shape[1:])) if out is None else out
        checks.pair(x, out, self.device)
        checks.elements(out.numel(), x.numel() // self.world, "out", f"x over {self.world} ranks")
        return self._enqueue(OperationKind.REDUCE_SCATTER, x, out, out.numel())

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all ranks' ``x``, in NCCL's order and in x's dtype; ``out=x``: in place."""
        out = torch.empty_like(x) if out is None else out
        checks.pair(x, out, self.device)
        checks.elements(out.numel(), x.numel(), "out", "x")
        return self._enqueue(OperationKind.ALL_REDUCE, x, out, x.numel())

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrites ``x`` with the root's ``x``, and returns it."""
        checks.rank(root, self.world, "root")
        checks.tensor(x, "x", self.device)
        return self._enqueue(OperationKind.BROADCAST, x, x, x.numel(), root)

    def send(self, x: torch.Tensor, peer: int) -> None:
        """Sends ``x``; the peer must receive the same number of elements. Sends and receives that
        wait for each other must be in one `group`."""
        checks.rank(peer, self.world, "peer")
        checks.tensor(x, "x", self.device)
        self._enqueue(OperationKind.SEND, x, x, x.numel(), peer)

    def recv(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """Overwrites ``x`` with what the peer sends, and returns it."""
        checks.rank(peer, self.world, "peer")
        checks.tensor(x, "x", self.device)
        return self._enqueue(OperationKind.RECV, x, x, x.numel(), peer)

    def all_to_all(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        send_rows: Sequence[int] | None = None,
        recv_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Sends piece r of ``x`` along dim 0 to rank r, and returns the pieces received, in rank
        order. ``send_rows`` has the rows of each piece, by default equal; ``send_rows[r]`` must
        equal ``recv_rows[this rank]`` on rank r."""
        checks.has_rows(x)
        if send_rows is None:
            send_rows = [checks.divisible(x, self.world)] * self.world
        recv_rows = send_rows if recv_rows is None else recv_rows
        checks.rows(send_rows, self.world, "send_rows")
        checks.rows(recv_rows, self.world, "recv_rows")
        out = x.new_empty((sum(recv_rows), *x.shape[1:])) if out is None else out
        checks.pair(x, out, self.device)
        checks.has_rows(out)
        sent = checks.counts(x, send_rows, "send_rows")
        received = checks.counts(out, recv_rows, "recv_rows")
        code, stream = dtypes.CODES[x.dtype], _stream(self.device)
        self._submit(
            _C.nccl.all_to_all(x.data_ptr(), out.data_ptr(), sent, received, code, stream), x, out
        )
        return out

    def _enqueue(
        self, kind: OperationKind, x: torch.Tensor, out: torch.Tensor, count: int, peer: int = 0
    ) -> torch.Tensor:
        code, stream = dtypes.CODES[x.dtype], _stream(self.device)
        operation = Operation(kind, x.data_ptr(), out.data_ptr(), count, code, peer, stream)
        self._submit([operation], x, out)
        return out

    def _submit(self, operations: list[Operation], *tensors: torch.Tensor) -> None:
        batch = getattr(self._local, "batch", None)
        if batch is None:
            self._native.enqueue(operations)
        else:
            batch.append((operations, tensors))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Starts all calls that this thread makes in the block as one, when the block ends. If the
        block raises, none is started."""
        if getattr(self._local, "batch", None) is not None:
            raise RuntimeError(f"{self!r}: this thread is already in a group")
        # Keeps the tensors alive until all calls are enqueued, so that their memory is not reused.
        batch: list[tuple[list[Operation], tuple[torch.Tensor, ...]]] = []
        self._local.batch = batch
        try:
            yield
        finally:
            self._local.batch = None
        self._native.enqueue([operation for operations, _ in batch for operation in operations])

    def check(self) -> None:
        """Aborts and raises if an enqueued operation has failed. May be called from any thread.

        Raises:
            PeerLostError: a peer's process or the link to it is gone.
            TpkernelsError: NCCL reports another error.
        """
        self._native.check()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the current stream has run all work enqueued so far, for at most ``timeout``
        seconds (by default the communicator's). Calls `check` meanwhile.

        Raises:
            CollectiveTimeoutError: the stream was not done in time; the communicator was aborted.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        while not done.query():
            self.check()
            if time.monotonic() >= deadline:
                text = f"{self!r}: enqueued work was not done within {limit:g} s"
                self._native.abort(text)
                raise CollectiveTimeoutError(f"{text}. The communicator is broken: make a new one.")
            time.sleep(_POLL_INTERVAL)
        self.check()

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Creates a communicator of the ranks that pass the same color, ordered by key, by default
        by rank. Returns None for color None. Collective.

        Raises:
            ValueError: ``color`` is negative.
            NotImplementedError: NCCL is older than 2.18.
        """
        if color is not None and color < 0:
            raise ValueError(f"color is {color}; it must be at least 0, or None")
        name = f"{self.name}/{color}"
        native = self._native.split(color, self.rank if key is None else key, name)
        if native is None:
            return None
        child = object.__new__(Communicator)
        child._set(native, self.library, self.device, self.timeout, name)
        return child

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in memory from ``ncclMemAlloc``, which windows need. The memory
        is freed with the last tensor that uses it, even if a stream still does: `wait` first.

        Raises:
            ValueError: the shape has no elements.
            NotImplementedError: NCCL is older than 2.19, or no op takes ``dtype``.
        """
        dtypes.check_supported(dtype, "the tensor")
        return memory.empty(self.library, shape, dtype, self.device)

    def register_window(self, x: torch.Tensor) -> Window | None:
        """Registers a tensor from `empty`, of the same size on all ranks, for NCCL's symmetric
        kernels. Returns None if the ranks' devices do not support these. Collective.

        Raises:
            NotImplementedError: NCCL is older than 2.27.
        """
        checks.tensor(x, "x", self.device)
        handle = self._native.register_window(x.data_ptr(), x.nbytes, _SYMMETRIC)
        return Window(handle, x) if handle else None

    def deregister_window(self, window: Window) -> None:
        """Undoes `register_window`. Collective."""
        self._native.deregister_window(window.handle)

    def close(self) -> None:
        """Waits until all ranks have finished all operations, then frees the communicator.
        Collective and idempotent; does nothing after a failure."""
        self._native.close()

    def abort(self) -> None:
        """Cancels work in flight and frees the communicator, from any thread. Peers' calls fail."""
        self._native.abort("it was aborted")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # Closing would wait for peers that may wait for this rank.
            self._native.abort(of_error(error))

    def __repr__(self) -> str:
        return (
            f"<nccl.Communicator '{self.name}', rank {self.rank} of {self.world} on {self.device}, "
            f"NCCL {self.library.version}>"
        )
