"""NCCL without torch: a communicator over the ranks of a process group, with bounded calls.

NCCL is loaded on first use, so this module imports on machines without NCCL and CUDA.

Problem: a NCCL call may wait for peers forever, in the call itself or later on the device.

Algorithm: the communicator is non-blocking. NCCL runs anything that may wait on a thread of its
own, and the call returns at once with "in progress". The caller then polls for the result until the
work completes or the deadline passes. After a failure or the deadline it aborts, which also ends
work on the device. Abort and destroy may join NCCL's threads, so they run on a separate thread; if
that does not return in time, it is abandoned together with the communicator.

Sync (`_Bounded`): ``_turn`` admits one call at a time, from its start to its completion, because
NCCL refuses a second call while one is in progress. ``_in_nccl`` is held during each NCCL function
but not between polls, so another thread can check or abort meanwhile. Abort and destroy free NCCL's
communicator, so ``_ended_by`` is set before they run and checked before each use.

The operations of a group are enqueued in one call. So NCCL's own group is never open between two of
our calls, where an abort would leave it holding operations of a freed communicator.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch

from tpkernels import _C, groups
from tpkernels.common import defaults, dtypes
from tpkernels.common.text import of_error
from tpkernels.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    PeerLostError,
    TpkernelsError,
)
from tpkernels.groups import GroupLike
from tpkernels.symm.exchange import Participant

__all__ = ["Communicator", "facts", "load"]

SONAME = "libnccl.so.2"
_PAUSES = 2e-5, 1e-3  # s between polls: the first, and the longest
_ABORT_SECONDS = 5.0  # that an abort may take; the timeout, if that is shorter
_DTYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_SUCCESS, _REMOTE_ERROR, _IN_PROGRESS, _TIMEOUT = 0, 6, 7, 8  # ncclResult_t

Operation: TypeAlias = tuple[str, int, int, int, int, int, int]  #: see csrc/nccl/bindings.cpp


class Communicator:
    """A NCCL communicator. Creating one is collective: all ranks of ``group`` do it together, with
    the same timeout. Each rank uses the CUDA device that is current when it does.

    Every method returns within ``timeout`` or raises; after an error no further call is possible.
    Methods that move data take contiguous tensors, enqueue their work on torch's current stream and
    return; `check` and `wait` report whether it succeeded. `close` the communicator when it is no
    longer needed: one that is garbage-collected first is aborted, with all work in flight.

    Args:
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name. It is used to set up the
            communicator, and may be destroyed afterwards.
        timeout: limit for one call, in seconds.
        library: path of the NCCL to use; by default the one that ``tpkernels info`` shows.

    Raises:
        ValueError: the timeout is out of range or differs between ranks.
        NotImplementedError: there is no CUDA device, or no NCCL that is new enough.
        TpkernelsError: a rank cannot take part or did not come in time; raised on all ranks.
    """

    def __init__(
        self, group: GroupLike, *, timeout: float = defaults.TIMEOUT, library: str | None = None
    ) -> None:
        if not 0 < timeout <= 86400:
            raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
        members = groups.get(groups.name_of(group))
        self.timeout, self.rank, self.world = timeout, members.rank, members.world
        with members.turn():
            self.library, self.device, unique_id = _bootstrap(members.participant(timeout), library)
            name = f"NCCL communicator '{members.name}', rank {self.rank} of {self.world}"
            native = _C.nccl.Communicator(self.library, unique_id, self.rank, self.world)
            self._native = _Bounded(native, self.library, name, timeout)
        # The calls of each thread's `group`, with their tensors: their memory must not be reused
        # before they are enqueued.
        self._batch = threading.local()
        # Runs at exit too: work left on the device would wait for its peers.
        weakref.finalize(self, self._native.abort, "it was garbage-collected before it was closed")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ``x`` of all ranks along dim 0, in rank order."""
        rows = self.world * self._shard(x, 1)
        return self._enqueue("all_gather", x, x.new_empty([rows, *x.shape[1:]]))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard, along dim 0, of what `all_reduce` returns."""
        rows = self._shard(x, self.world)
        return self._enqueue("reduce_scatter", x, x.new_empty([rows, *x.shape[1:]]))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' ``x``, in NCCL's order and in x's dtype."""
        self._check(x)
        return self._enqueue("all_reduce", x, torch.empty_like(x))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send shard r of ``x`` along dim 0 to rank r, and return the shards received, in rank
        order. For shards of different sizes, `send` and `recv` them in one `group`."""
        rows, out = self._shard(x, self.world), torch.empty_like(x)
        with self.group() if self._open_group is None else contextlib.nullcontext():
            for peer in range(self.world):
                self.send(x.narrow(0, peer * rows, rows), peer)
                self.recv(out.narrow(0, peer * rows, rows), peer)
        return out

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrite ``x`` with the root's ``x``, and return it."""
        return self._enqueue_with("broadcast", x, root, "root")

    def send(self, x: torch.Tensor, peer: int) -> None:
        """Send ``x``; the peer must receive as many elements. Sends and receives that wait for each
        other must be in one `group`."""
        self._enqueue_with("send", x, peer, "peer")

    def recv(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """Overwrite ``x`` with what the peer sends, and return it."""
        return self._enqueue_with("recv", x, peer, "peer")

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start all calls that this thread makes in the block as one, when the block ends. If the
        block raises, none is started."""
        if self._open_group is not None:
            raise RuntimeError("this thread is already in a group() block of the communicator")
        calls = self._batch.calls = []
        try:
            yield
        finally:
            self._batch.calls = None
        if calls:
            self._native.enqueue([operation for operation, *_ in calls])

    def check(self) -> None:
        """Abort and raise if an enqueued operation has failed. May be called from any thread.

        Raises:
            PeerLostError: a peer's process or the link to it is gone.
            TpkernelsError: NCCL reports another error.
        """
        self._native.check()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the current stream has run all work enqueued so far, for at most ``timeout``
        seconds (the communicator's), calling `check` meanwhile.

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
                text = f"enqueued work did not complete within {limit:g} s"
                self._native.fail(CollectiveTimeoutError, text)
            time.sleep(_PAUSES[1])
        self.check()

    def close(self) -> None:
        """Wait until all ranks have finished all operations, then free the communicator.
        Collective and idempotent; does nothing after a failure."""
        self._native.close()

    def abort(self) -> None:
        """Cancel work in flight and free the communicator, from any thread. Peers' calls fail."""
        self._native.abort("it was aborted")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # Closing would wait for peers that may wait for this rank.
            self._native.abort(of_error(error))

    @property
    def _open_group(self) -> list[tuple[Operation, torch.Tensor, torch.Tensor]] | None:
        return getattr(self._batch, "calls", None)

    def _enqueue(
        self, kind: str, x: torch.Tensor, out: torch.Tensor, peer: int = 0
    ) -> torch.Tensor:
        count = min(x.numel(), out.numel())  # NCCL counts the elements of a shard
        if count == 0:  # on all ranks
            self.check()
            return out
        stream = torch.cuda.current_stream(self.device).cuda_stream
        memory = x.data_ptr(), out.data_ptr()
        operation = (kind, *memory, count, _DTYPES[x.dtype], peer, stream)
        if (calls := self._open_group) is None:
            self._native.enqueue([operation])
        else:
            calls.append((operation, x, out))
        return out

    def _enqueue_with(self, kind: str, x: torch.Tensor, rank: int, name: str) -> torch.Tensor:
        if not 0 <= rank < self.world:
            raise ValueError(f"{name} is {rank}; it must be a rank from 0 to {self.world - 1}")
        self._check(x)
        return self._enqueue(kind, x, x, rank)

    def _check(self, x: torch.Tensor) -> None:
        """Raise unless NCCL can use ``x`` in place."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}, not a tensor")
        dtypes.check_supported(x.dtype, "x")
        if x.device != self.device:
            raise ValueError(f"x is on {x.device}, but the communicator is on {self.device}")
        if not x.is_contiguous():
            raise ValueError(
                f"x of shape {list(x.shape)} and strides {list(x.stride())} is not contiguous; "
                "pass the result of .contiguous()"
            )

    def _shard(self, x: torch.Tensor, ranks: int) -> int:
        """Return the rows of ``x`` for each of so many ranks."""
        self._check(x)
        if x.dim() < 1 or x.shape[0] % ranks:
            raise ValueError(
                f"x has shape {list(x.shape)}; it must have at least 1 dim, and its number of rows "
                f"must be divisible by {ranks}"
            )
        return x.shape[0] // ranks


class _Bounded:
    """NCCL's communicator, whose calls return within ``timeout`` or raise; see above."""

    def __init__(
        self, native: _C.nccl.Communicator, library: _C.nccl.Library, name: str, timeout: float
    ) -> None:
        self._native, self._library, self._name, self._timeout = native, library, name, timeout
        self._turn, self._in_nccl = threading.Lock(), threading.Lock()
        self._ending = threading.Lock()  # held from the end on
        self._ended_by = ""
        self._pid = os.getpid()
        self._call("setup", lambda: _SUCCESS)  # which has begun

    def enqueue(self, operations: Sequence[Operation]) -> None:
        """Return when the operations, which start as one, are on their streams."""
        more = f" and {len(operations) - 1} more" if len(operations) > 1 else ""
        self._call(f"{operations[0][0]}{more}", lambda: self._native.enqueue(operations))

    def check(self) -> None:
        code = self._ask(self._native.async_error)
        if code not in (_SUCCESS, _IN_PROGRESS):
            self._fail_with("an operation in flight", code)

    def close(self) -> None:
        if self._ended_by:
            return
        self._call("close", self._native.finalize)
        if not self._end(False, "it was closed"):
            text = "ncclCommDestroy did not return in time and was abandoned"
            raise CollectiveTimeoutError(f"{self._name}: {text}")

    def abort(self, why: str) -> bool:
        """End the work on the device; later calls report ``why``. Return whether NCCL returned in
        time."""
        if os.getpid() != self._pid:
            return True  # the parent still uses its sockets and device
        return self._end(True, why)

    def fail(self, kind: type[TpkernelsError], text: str) -> NoReturn:
        """Abort and raise."""
        text = f"{self._name}: {text}"
        if not self.abort(text):
            text += "; ncclCommAbort did not return and was abandoned"
        raise kind(f"{text}. The communicator is broken; create a new communicator.")

    def _fail_with(self, call: str, code: int) -> NoReturn:
        kinds = {_REMOTE_ERROR: PeerLostError, _TIMEOUT: CollectiveTimeoutError}
        text = f"{call} failed: {self._library.error_text(code)}"
        self.fail(kinds.get(code, TpkernelsError), text)

    def _call(self, call: str, function: Callable[[], int]) -> None:
        """Run a NCCL function, from its start to its completion."""
        self._require_usable()
        if not self._turn.acquire(timeout=self._timeout):
            raise CollectiveTimeoutError(
                f"{self._name}: {call} waited {self._timeout:g} s for a call on a different thread"
            )
        try:
            deadline, (pause, longest) = time.monotonic() + self._timeout, _PAUSES
            code = self._ask(function)
            while code in (_SUCCESS, _IN_PROGRESS):  # some return success while in progress
                code = self._ask(self._native.async_error)
                if code == _SUCCESS:
                    return
                if code == _IN_PROGRESS:
                    if time.monotonic() >= deadline:
                        self.fail(
                            CollectiveTimeoutError,
                            f"{call} did not complete within {self._timeout:g} s: a rank did not "
                            "join or cannot be reached",
                        )
                    time.sleep(pause)
                    pause = min(2 * pause, longest)
            self._fail_with(call, code)
        except BaseException as error:
            self.abort(f"{call} was interrupted by {of_error(error)}")  # unless it has ended
            raise
        finally:
            self._turn.release()

    def _ask(self, function: Callable[[], int]) -> int:
        """Return the result of one NCCL function."""
        self._require_usable()  # before the lock, which a fork may find taken
        with self._in_nccl:
            self._require_usable()
            return function()

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise GroupBrokenError(
                f"{self._name} belongs to process {self._pid}, and process {os.getpid()} is a fork "
                "of it; create a communicator in the fork"
            )
        if self._ended_by:
            raise GroupBrokenError(
                f"{self._name} cannot run more calls; create a new communicator. The reason: "
                f"{self._ended_by}"
            )

    def _end(self, aborts: bool, why: str) -> bool:
        """Abort or destroy, once. Return whether NCCL returned in time."""
        if not self._ending.acquire(blocking=False):
            return True
        self._ended_by, seconds = why, min(self._timeout, _ABORT_SECONDS)
        # A thread that holds the lock for longer is stuck in NCCL, and only an abort can free it.
        locked = self._in_nccl.acquire(timeout=seconds)
        try:
            return self._native.free(aborts, seconds)
        finally:
            if locked:
                self._in_nccl.release()


# Set-up.


def _current_device() -> torch.device:
    """Return the current CUDA device, after creating its context, which NCCL needs."""
    if not torch.cuda.is_available():
        raise NotImplementedError(
            f"a NCCL communicator needs a CUDA device, but torch {torch.__version__} does not see "
            "any"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)
    return device


def _bootstrap(
    participant: Participant, path: str | None
) -> tuple[_C.nccl.Library, torch.device, bytes]:
    """Return the library, the device and rank 0's unique id. Collective: the ranks exchange
    capabilities before NCCL is initialised, so that all raise if one cannot take part."""
    report: dict[str, Any] = {"timeout": participant.timeout}
    failure: Exception | None = None
    try:
        device, library = _current_device(), load(path)
        code, unique_id = library.unique_id() if participant.rank == 0 else (_SUCCESS, b"")
        if code != _SUCCESS:
            raise TpkernelsError(f"ncclGetUniqueId failed: {library.error_text(code)}")
        report |= {"NCCL": library.version, "unique_id": unique_id.hex()}
    except Exception as error:  # of any kind: the other ranks must learn of it
        failure, report["error"] = error, of_error(error)
    reports = participant.exchange("NCCL communicator", report)
    if failure is not None:
        raise failure
    where = f"NCCL communicator of group '{participant.group}'"
    for rank, other in enumerate(reports):
        if "error" in other:
            text = f"{where}: rank {rank} cannot take part: {other['error']}"
            raise TpkernelsError(text, peer=rank)
    for key, kind in (("timeout", ValueError), ("NCCL", TpkernelsError)):
        values = [other[key] for other in reports]
        if len(set(values)) > 1:
            raise kind(f"{where}: the ranks have {key} {values}; all ranks must have the same")
    return library, device, bytes.fromhex(reports[0]["unique_id"])


# The library.


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield where a NCCL is from and its file, the best one first: torch's own, if it has one, is
    loaded in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libnccl.so" in line:
            yield "loaded in this process", line.split(maxsplit=5)[5]
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            yield "from a wheel", str(distribution.locate_file(f"nvidia/nccl/lib/{SONAME}"))
    yield "the system's", SONAME


def _find() -> tuple[str, _C.nccl.Library]:
    """Return where the best NCCL is from, and the library: see `load`."""
    refusals = []
    for origin, name in dict.fromkeys(_candidates()):
        try:
            return origin, _C.nccl.Library(name)
        except NotImplementedError as error:
            refusals.append(str(error))
    raise NotImplementedError(
        f"cannot load NCCL: {'; '.join(refusals)}. Install it with `pip install nvidia-nccl-cu13` "
        "(-cu12 for CUDA 12), or pass the path of the library"
    )


def load(library: str | None = None) -> _C.nccl.Library:
    """Load NCCL from a file, or the process's own copy (torch's), that of an ``nvidia-nccl`` wheel
    or the system's, in this order. The result has its ``path`` and ``version``.

    Raises:
        NotImplementedError: there is none, or it is older than 2.14.
    """
    return _find()[1] if library is None else _C.nccl.Library(library)


def facts() -> dict[str, Any]:
    """Describe the NCCL that `load` would load: its ``path``, ``version`` and ``origin``. Without
    NCCL, only ``unsupported``: the reason."""
    try:
        origin, library = _find()
    except NotImplementedError as error:
        return {"unsupported": str(error)}
    return {"path": library.path, "version": library.version, "origin": origin}
