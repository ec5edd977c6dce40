"""A NCCL communicator over the ranks of a process group.

csrc/nccl/communicator.h tells how a call that NCCL cannot complete ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tpkernels import _C, defaults, dtypes, groups
from tpkernels._C import NcclOperation, NcclOperationKind
from tpkernels.errors import CollectiveTimeoutError
from tpkernels.groups import GroupLike
from tpkernels.nccl import checks, memory
from tpkernels.nccl.bootstrap import meet
from tpkernels.text import of_error

_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_PAUSE = 1e-3  # between looks at the device, s


@dataclass(frozen=True)
class Window:
    """Memory that all ranks have registered."""

    handle: int
    tensor: torch.Tensor


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


class Communicator:
    """A NCCL communicator. Making one is collective: all ranks of ``group`` do it together, each
    with the CUDA device current that it is to use, and with the same options.

    Every method returns within ``timeout`` or raises, and then no further call can run. Those that
    move data enqueue on torch's current stream and return; `check` and `wait` find out how that
    went. `close` it: one that is merely dropped is aborted, with all that is on its way.

    Args:
        group: a ProcessGroup, a mesh dimension or a group's name. It passes the communicator's id
            on, and may be destroyed afterwards.
        timeout: seconds that one call may take.
        library: path of the NCCL to use; by default the one that `tpkernels info` shows.
        name: shown in errors and, from NCCL 2.27 on, in NCCL's logs; the group's by default.
        cta_policy: "default", "efficiency" or "zero" (copy engines, no CTAs); NCCL 2.27.
        min_ctas, max_ctas: how many CTAs NCCL may use.

    Raises:
        ValueError: an option is out of range or differs between ranks.
        NotImplementedError: no CUDA device, no NCCL, or it is too old for what is asked.
        CollectiveTimeoutError, PeerLostError, TpkernelsError: on all ranks, if one does not come or
            cannot take part.
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
            met = meet(own.participant(timeout), library, options)
            native = _C.NcclCommunicator(
                met.library,
                met.unique_id,
                own.rank,
                own.world,
                timeout=timeout,
                name=name,
                **options,
            )
        self._set(native, met.library, met.device, timeout, name)

    def _set(
        self,
        native: _C.NcclCommunicator,
        library: _C.NcclLibrary,
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
        # Also when the process ends: what runs on the device then would wait for its peers.
        weakref.finalize(self, native.abort, "it was dropped without having been closed")

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's ``x``, one after the other along dim 0."""
        checks.has_rows(x)
        out = x.new_empty((self.world * x.shape[0], *x.shape[1:])) if out is None else out
        checks.pair(x, out, self.device)
        checks.elements(out.numel(), self.world * x.numel(), "out", f"x from {self.world} ranks")
        return self._enqueue(NcclOperationKind.ALL_GATHER, x, out, x.numel())

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part along dim 0 of the sum of all ranks' ``x``, in NCCL's order and in x's
        dtype."""
        rows = checks.divisible(x, self.world)
        out = x.new_empty((rows, *x.shape[1:])) if out is None else out
        checks.pair(x, out, self.device)
        checks.elements(out.numel(), x.numel() // self.world, "out", f"x over {self.world} ranks")
        return self._enqueue(NcclOperationKind.REDUCE_SCATTER, x, out, out.numel())

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all ranks' ``x``, in NCCL's order and in x's dtype; ``out=x`` is in place."""
        out = torch.empty_like(x) if out is None else out
        checks.pair(x, out, self.device)
        checks.elements(out.numel(), x.numel(), "out", "x")
        return self._enqueue(NcclOperationKind.ALL_REDUCE, x, out, x.numel())

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrites ``x`` with the root's; returns it."""
        checks.rank(root, self.world, "root")
        checks.tensor(x, "x", self.device)
        return self._enqueue(NcclOperationKind.BROADCAST, x, x, x.numel(), root)

    def send(self, x: torch.Tensor, peer: int) -> None:
        """Sends ``x``, of which the peer receives as many elements. Sends and receives that wait
        for each other belong in one `group`."""
        checks.rank(peer, self.world, "peer")
        checks.tensor(x, "x", self.device)
        self._enqueue(NcclOperationKind.SEND, x, x, x.numel(), peer)

    def recv(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """Overwrites ``x`` with what the peer sends; returns it."""
        checks.rank(peer, self.world, "peer")
        checks.tensor(x, "x", self.device)
        return self._enqueue(NcclOperationKind.RECV, x, x, x.numel(), peer)

    def all_to_all(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        send_rows: Sequence[int] | None = None,
        recv_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Sends piece r of ``x`` along dim 0 to rank r; returns what the ranks sent here, in rank
        order. Pieces are equal unless their rows are given: ``send_rows[r]`` here must be
        ``recv_rows[this rank]`` on rank r."""
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
            _C.nccl_all_to_all(x.data_ptr(), out.data_ptr(), sent, received, code, stream), x, out
        )
        return out

    def _enqueue(
        self, kind: NcclOperationKind, x: torch.Tensor, out: torch.Tensor, count: int, peer: int = 0
    ) -> torch.Tensor:
        code, stream = dtypes.CODES[x.dtype], _stream(self.device)
        operation = NcclOperation(kind, x.data_ptr(), out.data_ptr(), count, code, peer, stream)
        self._submit([operation], x, out)
        return out

    def _submit(self, operations: list[NcclOperation], *tensors: torch.Tensor) -> None:
        batch = getattr(self._local, "batch", None)
        if batch is None:
            self._native.enqueue(operations)
        else:
            batch.append((operations, tensors))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """What this thread asks of the communicator inside starts as one, when the block ends. An
        error within the block starts nothing."""
        if getattr(self._local, "batch", None) is not None:
            raise RuntimeError(f"{self!r}: this thread is within a group already")
        # Holds the tensors, too, until all are enqueued: memory freed before would be another's.
        batch: list[tuple[list[NcclOperation], tuple[torch.Tensor, ...]]] = []
        self._local.batch = batch
        try:
            yield
        finally:
            self._local.batch = None
        self._native.enqueue([operation for operations, _ in batch for operation in operations])

    def check(self) -> None:
        """Raises if something that was enqueued has failed, and aborts then. From any thread.

        Raises:
            PeerLostError: a peer's process or its link is gone.
            TpkernelsError: NCCL reports another error.
        """
        self._native.check()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the current stream has run what was enqueued so far, and checks meanwhile; a
        stream that does not come to it within ``timeout`` (by default the communicator's) is a
        `CollectiveTimeoutError`, after an abort."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        while not done.query():
            self.check()
            if time.monotonic() >= deadline:
                text = f"{self!r}: what was enqueued did not end within {limit:g} s"
                self._native.abort(text)
                raise CollectiveTimeoutError(f"{text}. It is broken: make a new one.")
            time.sleep(_PAUSE)
        self.check()

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """A communicator of the ranks that give the same color, ordered by key (by default by
        rank); None for color None. Collective.

        Raises:
            NotImplementedError: NCCL before 2.18.
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
        """A tensor in memory of NCCL's, as windows need it (``ncclMemAlloc``, NCCL 2.19). That is
        freed with the last tensor on it, whatever a stream still does with it: `wait` first."""
        dtypes.check_supported(dtype, "the tensor")
        return memory.empty(self.library, shape, dtype, self.device)

    def register_window(self, x: torch.Tensor) -> Window | None:
        """Registers memory made by `empty`, of the same size on all ranks, for NCCL's symmetric
        kernels; collective. None where the ranks' devices have none.

        Raises:
            NotImplementedError: NCCL before 2.27.
        """
        checks.tensor(x, "x", self.device)
        handle = self._native.register_window(x.data_ptr(), x.nbytes, _SYMMETRIC)
        return Window(handle, x) if handle else None

    def deregister_window(self, window: Window) -> None:
        """Undoes `register_window`. Collective."""
        self._native.deregister_window(window.handle)

    def close(self) -> None:
        """Waits until all ranks are through with all operations, and frees. Collective, idempotent;
        does nothing after a failure."""
        self._native.close()

    def abort(self) -> None:
        """Ends what is on its way and frees; the peers fail then. From any thread."""
        self._native.abort("it was aborted")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # peers may wait for what this rank did not send
            self._native.abort(of_error(error))

    def __repr__(self) -> str:
        return (
            f"<nccl.Communicator '{self.name}', rank {self.rank} of {self.world} on {self.device}, "
            f"NCCL {self.library.version}>"
        )
