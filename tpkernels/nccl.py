"""NCCL without torch: a communicator over the ranks of a process group, with bounded calls.

NCCL is loaded on first use, so this module imports on machines without NCCL and CUDA.

Problem: a NCCL call may wait for peers forever, in the call itself or later on the device.

Algorithm: the communicator is non-blocking. NCCL runs everything that may wait on a separate
thread, and the call returns immediately with "in progress". The caller polls for the result until
the work completes or the deadline passes. After a failure or the deadline it aborts the
communicator. The abort also ends work on the device. Abort and destroy may join NCCL threads, so
they run on a separate thread. If they do not return in time, that thread and the communicator are
abandoned.

Sync (`_Bounded`): ``_call_lock`` is held from the start of a call to its completion, because NCCL
refuses a second call while one is in progress. ``_nccl_lock`` is held during each NCCL function but
not between polls, so a different thread can check or abort. Abort and destroy free the NCCL
communicator. ``_end_reason`` is therefore set before they run and checked before each NCCL
function.

All operations of a group are enqueued in one call, so no NCCL group stays open between calls. An
abort would leave such a group with operations of a freed communicator.
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
from tpkernels.common.text import describe_error
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
_POLL_SECONDS = 2e-5, 1e-3  # first and longest interval between polls
_ABORT_SECONDS = 5.0  # limit for an abort, if the timeout is not shorter
_DTYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_SUCCESS, _REMOTE_ERROR, _IN_PROGRESS, _TIMEOUT = 0, 6, 7, 8  # ncclResult_t

Operation: TypeAlias = tuple[str, int, int, int, int, int, int]  #: see csrc/nccl/bindings.cpp


class Communicator:
    """A NCCL communicator with bounded calls.

    The constructor is collective: all ranks of ``group`` call it with the same timeout. Each rank
    uses its current CUDA device.

    Every method returns within ``timeout`` or raises. After an error no further call is possible.
    Methods that move data require contiguous tensors. They enqueue the work on the current torch
    stream and return; `check` and `wait` report whether it succeeded. `close` the communicator when
    it is no longer needed. If it is garbage-collected before `close`, it is aborted with all work
    in flight.

    Args:
        group: a ProcessGroup, a DeviceMesh (dimension) or the name of a group. It is used for the
            setup of the communicator and may be destroyed afterwards.
        timeout: limit for one call, in seconds.
        library: path of the NCCL library; by default the library that ``tpkernels info`` shows.

    Raises:
        ValueError: the timeout is out of range or differs between ranks.
        NotImplementedError: torch sees no CUDA device, or no NCCL 2.14 or newer is found.
        TpkernelsError: a rank cannot create a communicator or timed out; raised on all ranks.
    """

    def __init__(
        self, group: GroupLike, *, timeout: float = defaults.TIMEOUT, library: str | None = None
    ) -> None:
        if not 0 < timeout <= 86400:
            raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
        members = groups.get(groups.group_name(group))
        self.timeout, self.rank, self.world = timeout, members.rank, members.world
        with members.locked():
            self.library, self.device, unique_id = _bootstrap(members.participant(timeout), library)
            name = f"NCCL communicator '{members.name}', rank {self.rank} of {self.world}"
            native = _C.nccl.Communicator(self.library, unique_id, self.rank, self.world)
            self._native = _Bounded(native, self.library, name, timeout)
        # Calls in the open `group` block of each thread, with their tensors. The references keep
        # the memory from being reused before the calls are enqueued.
        self._batch = threading.local()
        # Also runs at exit, because work left on the device would wait for its peers.
        weakref.finalize(self, self._native.abort, "it was garbage-collected before it was closed")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather ``x`` along dim 0, in rank order.

        Args:
            x: [rows, ...], the same shape on all ranks.

        Returns:
            A tensor [world * rows, ...].
        """
        rows = self.world * self._shard(x, 1)
        return self._enqueue("all_gather", x, x.new_empty([rows, *x.shape[1:]]))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter ``x`` along dim 0, summed in NCCL order and in the dtype of x.

        Args:
            x: [rows, ...], with rows divisible by the number of ranks.

        Returns:
            The local shard of the sum, [rows / world, ...].
        """
        rows = self._shard(x, self.world)
        return self._enqueue("reduce_scatter", x, x.new_empty([rows, *x.shape[1:]]))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce ``x``, summed in NCCL order and in the dtype of x. Returns a new tensor."""
        self._check(x)
        return self._enqueue("all_reduce", x, torch.empty_like(x))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send shard r of ``x`` along dim 0 to rank r.

        Returns:
            The received shards, concatenated in rank order; the shape of ``x``.

        For shards of different sizes, use `send` and `recv` in one `group` block.
        """
        rows, out = self._shard(x, self.world), torch.empty_like(x)
        with self.group() if self._open_group is None else contextlib.nullcontext():
            for peer in range(self.world):
                self.send(x.narrow(0, peer * rows, rows), peer)
                self.recv(out.narrow(0, peer * rows, rows), peer)
        return out

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Broadcast ``x`` of rank ``root`` in place, and return ``x``."""
        return self._enqueue_with("broadcast", x, root, "root")

    def send(self, x: torch.Tensor, peer: int) -> None:
        """Send ``x`` to ``peer``, which must receive the same number of elements. Sends and
        receives that depend on each other must be in one `group` block."""
        self._enqueue_with("send", x, peer, "peer")

    def recv(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """Receive into ``x`` from ``peer``, and return ``x``."""
        return self._enqueue_with("recv", x, peer, "peer")

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Batch the calls of this thread in the block into one NCCL group. The group starts when
        the block ends. If the block raises, no call starts."""
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
        """Abort and raise if an enqueued operation has failed. Callable from any thread.

        Raises:
            PeerLostError: the process of a peer ended, or the link to it failed.
            TpkernelsError: NCCL reports a different error.
        """
        self._native.check()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the current stream has run all work enqueued so far. Calls `check` while it
        waits.

        Args:
            timeout: limit in seconds; by default the timeout of the communicator.

        Raises:
            CollectiveTimeoutError: the stream did not complete in time; the communicator was
                aborted.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        while not done.query():
            self.check()
            if time.monotonic() >= deadline:
                message = f"enqueued work did not complete within {limit:g} s"
                self._native.fail(CollectiveTimeoutError, message)
            time.sleep(_POLL_SECONDS[1])
        self.check()

    def close(self) -> None:
        """Wait until all ranks have completed all operations, then free the communicator.
        Collective and idempotent. Does nothing after a failure."""
        self._native.close()

    def abort(self) -> None:
        """Cancel work in flight and free the communicator. Callable from any thread. Calls of the
        peers fail."""
        self._native.abort("it was aborted")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # closing could deadlock: peers may wait for this rank
            self._native.abort(describe_error(error))

    @property
    def _open_group(self) -> list[tuple[Operation, torch.Tensor, torch.Tensor]] | None:
        return getattr(self._batch, "calls", None)

    def _enqueue(
        self, kind: str, x: torch.Tensor, out: torch.Tensor, peer: int = 0
    ) -> torch.Tensor:
        count = min(x.numel(), out.numel())  # the count argument of NCCL: elements of a shard
        if count == 0:  # zero on all ranks
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
        """Return the number of rows per rank if ``x`` is split into ``ranks`` shards."""
        self._check(x)
        if x.dim() < 1 or x.shape[0] % ranks:
            raise ValueError(
                f"x has shape {list(x.shape)}; it must have at least 1 dim, and its number of rows "
                f"must be divisible by {ranks}"
            )
        return x.shape[0] // ranks


class _Bounded:
    """A NCCL communicator whose calls return within ``timeout`` or raise. See the module
    docstring."""

    def __init__(
        self, native: _C.nccl.Communicator, library: _C.nccl.Library, name: str, timeout: float
    ) -> None:
        self._native, self._library, self._name, self._timeout = native, library, name, timeout
        self._call_lock, self._nccl_lock = threading.Lock(), threading.Lock()
        self._end_lock = threading.Lock()  # acquired once and never released
        self._end_reason = ""
        self._pid = os.getpid()
        self._call("setup", lambda: _SUCCESS)  # the constructor of `native` has started it

    def enqueue(self, operations: Sequence[Operation]) -> None:
        """Start the operations as one NCCL group. Returns when they are on their streams."""
        more = f" and {len(operations) - 1} more" if len(operations) > 1 else ""
        self._call(f"{operations[0][0]}{more}", lambda: self._native.enqueue(operations))

    def check(self) -> None:
        code = self._run_locked(self._native.async_error)
        if code not in (_SUCCESS, _IN_PROGRESS):
            self._fail_with("an operation in flight", code)

    def close(self) -> None:
        if self._end_reason:
            return
        self._call("close", self._native.finalize)
        if not self._release(False, "it was closed"):
            message = "ncclCommDestroy did not return in time and was abandoned"
            raise CollectiveTimeoutError(f"{self._name}: {message}")

    def abort(self, reason: str) -> bool:
        """End the work on the device. Later calls report ``reason``. Returns whether NCCL returned
        in time."""
        if os.getpid() != self._pid:
            return True  # a fork: the parent still uses the sockets and the device
        return self._release(True, reason)

    def fail(self, kind: type[TpkernelsError], message: str) -> NoReturn:
        """Abort the communicator and raise an error of this class."""
        message = f"{self._name}: {message}"
        if not self.abort(message):
            message += "; ncclCommAbort did not return and was abandoned"
        raise kind(f"{message}. The communicator is broken; create a new communicator.")

    def _fail_with(self, call: str, code: int) -> NoReturn:
        kinds = {_REMOTE_ERROR: PeerLostError, _TIMEOUT: CollectiveTimeoutError}
        message = f"{call} failed: {self._library.error_message(code)}"
        self.fail(kinds.get(code, TpkernelsError), message)

    def _call(self, call: str, function: Callable[[], int]) -> None:
        """Run a NCCL function and wait for its completion."""
        self._require_usable()
        if not self._call_lock.acquire(timeout=self._timeout):
            raise CollectiveTimeoutError(
                f"{self._name}: {call} waited {self._timeout:g} s for a call on a different thread"
            )
        try:
            deadline, (pause, longest) = time.monotonic() + self._timeout, _POLL_SECONDS
            code = self._run_locked(function)
            # Some functions return success while they are in progress.
            while code in (_SUCCESS, _IN_PROGRESS):
                code = self._run_locked(self._native.async_error)
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
            # No effect if the communicator has ended already.
            self.abort(f"{call} was interrupted by {describe_error(error)}")
            raise
        finally:
            self._call_lock.release()

    def _run_locked(self, function: Callable[[], int]) -> int:
        """Run one NCCL function, holding ``_nccl_lock``."""
        self._require_usable()  # before locking: in a fork the lock may be held forever
        with self._nccl_lock:
            self._require_usable()
            return function()

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise GroupBrokenError(
                f"{self._name} belongs to process {self._pid}, and process {os.getpid()} is a fork "
                "of it; create a communicator in the fork"
            )
        if self._end_reason:
            raise GroupBrokenError(
                f"{self._name} cannot run more calls; create a new communicator. The reason: "
                f"{self._end_reason}"
            )

    def _release(self, aborts: bool, reason: str) -> bool:
        """Abort or destroy the communicator, once. Returns whether NCCL returned in time."""
        if not self._end_lock.acquire(blocking=False):
            return True
        self._end_reason, seconds = reason, min(self._timeout, _ABORT_SECONDS)
        # A thread that holds the lock for longer hangs in NCCL, and only an abort can release it.
        locked = self._nccl_lock.acquire(timeout=seconds)
        try:
            return self._native.free(aborts, seconds)
        finally:
            if locked:
                self._nccl_lock.release()


# Setup.


def _current_device() -> torch.device:
    """Return the current CUDA device after creating its context, because NCCL requires one."""
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
    """Return the library, the device and the unique id of rank 0. Collective. The ranks exchange
    reports before NCCL is initialised, so that all ranks raise if a rank cannot participate."""
    report: dict[str, Any] = {"timeout": participant.timeout}
    failure: Exception | None = None
    try:
        device, library = _current_device(), load(path)
        code, unique_id = library.unique_id() if participant.rank == 0 else (_SUCCESS, b"")
        if code != _SUCCESS:
            raise TpkernelsError(f"ncclGetUniqueId failed: {library.error_message(code)}")
        report |= {"NCCL": library.version, "unique_id": unique_id.hex()}
    except Exception as error:  # sent to the other ranks, whatever its class
        failure, report["error"] = error, describe_error(error)
    reports = participant.exchange("NCCL communicator", report)
    if failure is not None:
        raise failure
    prefix = f"NCCL communicator of group '{participant.group}'"
    for rank, other in enumerate(reports):
        if "error" in other:
            message = f"{prefix}: rank {rank} cannot take part: {other['error']}"
            raise TpkernelsError(message, peer=rank)
    for key, kind in (("timeout", ValueError), ("NCCL", TpkernelsError)):
        values = [other[key] for other in reports]
        if len(set(values)) > 1:
            raise kind(f"{prefix}: the ranks have {key} {values}; all ranks must have the same")
    return library, device, bytes.fromhex(reports[0]["unique_id"])


# The library.


def _library_candidates() -> Iterator[tuple[str, str]]:
    """Yield (origin, file) of NCCL libraries in order of preference. The library of torch, if any,
    is already loaded in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libnccl.so" in line:
            yield "loaded in this process", line.split(maxsplit=5)[5]
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            yield "from a wheel", str(distribution.locate_file(f"nvidia/nccl/lib/{SONAME}"))
    yield "the system's", SONAME


def _find() -> tuple[str, _C.nccl.Library]:
    """Return the origin and the library that `load` selects."""
    refusals = []
    for origin, name in dict.fromkeys(_library_candidates()):
        try:
            return origin, _C.nccl.Library(name)
        except NotImplementedError as error:
            refusals.append(str(error))
    raise NotImplementedError(
        f"cannot load NCCL: {'; '.join(refusals)}. Install it with `pip install nvidia-nccl-cu13` "
        "(-cu12 for CUDA 12), or pass the path of the library"
    )


def load(library: str | None = None) -> _C.nccl.Library:
    """Load the NCCL library.

    Args:
        library: path of the file. By default, the first of: the library loaded in this process (by
            torch), an ``nvidia-nccl`` wheel, the system library.

    Returns:
        The library, with attributes ``path`` and ``version``.

    Raises:
        NotImplementedError: no library was found, or it is older than 2.14.
    """
    return _find()[1] if library is None else _C.nccl.Library(library)


def facts() -> dict[str, Any]:
    """Return a dict with ``path``, ``version`` and ``origin`` of the library that `load` selects,
    or with ``unsupported``, the reason, if no library can be loaded."""
    try:
        origin, library = _find()
    except NotImplementedError as error:
        return {"unsupported": str(error)}
    return {"path": library.path, "version": library.version, "origin": origin}
