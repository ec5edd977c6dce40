"""NCCL without torch: a communicator over the ranks of a process group, with bounded calls.

NCCL is loaded on first use, so this module imports on machines without NCCL and CUDA.
csrc/nccl/communicator.h describes how a call ends that NCCL cannot complete.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tpkernels import _C, defaults, dtypes, groups
from tpkernels._C.nccl import Operation
from tpkernels.errors import CollectiveTimeoutError, TpkernelsError
from tpkernels.groups import GroupLike
from tpkernels.symm.exchange import Participant
from tpkernels.text import of_error

__all__ = ["Communicator", "facts", "load"]

SONAME = "libnccl.so.2"
_POLL_INTERVAL = 1e-3  # s, between queries of an event


class Communicator:
    """A NCCL communicator. Creating one is collective: all ranks of ``group`` do it together, with
    the same timeout. Each rank uses the CUDA device that is current when it does.

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

    Raises:
        ValueError: the timeout is out of range or differs between ranks.
        NotImplementedError: there is no CUDA device, or no NCCL that is new enough.
        TpkernelsError: a rank cannot take part or did not come in time; raised on all ranks.
    """

    def __init__(
        self,
        group: GroupLike,
        *,
        timeout: float = defaults.TIMEOUT,
        library: str | None = None,
        name: str | None = None,
    ) -> None:
        if not 0 < timeout <= 86400:
            raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
        members = groups.get(groups.name_of(group))
        self.timeout, self.rank, self.world = timeout, members.rank, members.world
        self.name = members.name if name is None else name
        with members.turn():
            self.library, self.device, unique_id = _bootstrap(members.participant(timeout), library)
            self._native = _C.nccl.Communicator(
                self.library, unique_id, self.rank, self.world, name=self.name, timeout=timeout
            )
        # The calls of each thread's `group`, with their tensors: their memory must not be reused
        # before they are enqueued.
        self._batch = threading.local()
        # Runs at exit too: work left on the device would wait for its peers.
        weakref.finalize(self, self._native.abort, "it was dropped without having been closed")

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenate the ``x`` of all ranks along dim 0, in rank order."""
        out = self._output(x, out, [self.world * self._rows(x), *x.shape[1:]])
        return self._enqueue("all_gather", x, out)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's shard, along dim 0, of what `all_reduce` returns."""
        out = self._output(x, out, [self._rows(x, divisible=True) // self.world, *x.shape[1:]])
        return self._enqueue("reduce_scatter", x, out)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum all ranks' ``x``, in NCCL's order and in x's dtype; in place with ``out=x``."""
        self._check(x, "x")
        return self._enqueue("all_reduce", x, self._output(x, out, x.shape))

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

    def all_to_all(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        send_rows: Sequence[int] | None = None,
        recv_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Send piece r of ``x`` along dim 0 to rank r, and return the pieces received, in rank
        order. ``send_rows`` has the rows of each piece, by default equal; ``send_rows[r]`` must
        equal ``recv_rows[this rank]`` on rank r."""
        rows = self._rows(x, divisible=send_rows is None)
        send_rows = [rows // self.world] * self.world if send_rows is None else list(send_rows)
        recv_rows = send_rows if recv_rows is None else list(recv_rows)
        for sizes, name in ((send_rows, "send_rows"), (recv_rows, "recv_rows")):
            if len(sizes) != self.world or min(sizes) < 0:
                raise ValueError(f"{name} is {sizes}; it must be {self.world} numbers of 0 or more")
        if sum(send_rows) != rows:
            raise ValueError(f"send_rows {send_rows} adds up to {sum(send_rows)}, not x's {rows}")
        out = self._output(x, out, [sum(recv_rows), *x.shape[1:]])
        pieces = zip(x.split(send_rows), out.view(-1, *x.shape[1:]).split(recv_rows), strict=True)
        with self.group() if self._open_group is None else contextlib.nullcontext():
            for peer, (sent, received) in enumerate(pieces):
                self.send(sent, peer)
                self.recv(received, peer)
        return out

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start all calls that this thread makes in the block as one, when the block ends. If the
        block raises, none is started."""
        if self._open_group is not None:
            raise RuntimeError(f"{self!r}: this thread is already in a group")
        calls = self._batch.calls = []
        try:
            yield
        finally:
            self._batch.calls = None
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
                text = f"{self!r}: enqueued work was not done within {limit:g} s"
                self._native.abort(text)
                raise CollectiveTimeoutError(f"{text}. The communicator is broken: make a new one.")
            time.sleep(_POLL_INTERVAL)
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

    def __repr__(self) -> str:
        return (
            f"<nccl.Communicator '{self.name}', rank {self.rank} of {self.world} on {self.device}, "
            f"NCCL {self.library.version}>"
        )

    @property
    def _open_group(self) -> list[tuple[Operation, torch.Tensor, torch.Tensor]] | None:
        return getattr(self._batch, "calls", None)

    def _enqueue(
        self, kind: str, x: torch.Tensor, out: torch.Tensor, peer: int = 0
    ) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        count = min(x.numel(), out.numel())  # NCCL counts the elements of a shard
        operation = Operation(
            kind, x.data_ptr(), out.data_ptr(), count, dtypes.CODES[x.dtype], peer, stream
        )
        if (calls := self._open_group) is None:
            self._native.enqueue([operation])
        else:
            calls.append((operation, x, out))
        return out

    def _enqueue_with(self, kind: str, x: torch.Tensor, rank: int, name: str) -> torch.Tensor:
        if not 0 <= rank < self.world:
            raise ValueError(f"{name} is {rank}; it must be one of ranks 0 to {self.world - 1}")
        self._check(x, "x")
        return self._enqueue(kind, x, x, rank)

    def _check(self, x: torch.Tensor, name: str) -> None:
        """Raise unless NCCL can use ``x`` in place."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a tensor")
        dtypes.check_supported(x.dtype, name)
        if x.device != self.device:
            raise ValueError(f"{name} is on {x.device}, but the communicator is on {self.device}")
        if not x.is_contiguous():
            raise ValueError(
                f"{name} of shape {list(x.shape)} and strides {list(x.stride())} is not "
                "contiguous; pass the result of .contiguous()"
            )

    def _rows(self, x: torch.Tensor, *, divisible: bool = False) -> int:
        """Return the rows of ``x``, which the ranks must divide if ``divisible``."""
        self._check(x, "x")
        if x.dim() < 1:
            raise ValueError("x has no dims; it must have at least one")
        if divisible and x.shape[0] % self.world:
            raise ValueError(f"x has {x.shape[0]} rows, no multiple of {self.world} ranks")
        return x.shape[0]

    def _output(
        self, x: torch.Tensor, out: torch.Tensor | None, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return ``out`` if it suits, or a new tensor of ``shape``."""
        if out is None:
            return x.new_empty(shape)
        self._check(out, "out")
        if x.dtype != out.dtype:
            raise TypeError(f"x is {dtypes.name(x.dtype)} but out is {dtypes.name(out.dtype)}")
        if out.numel() != math.prod(shape):
            raise ValueError(
                f"out has {out.numel()} elements; the result has {math.prod(shape)}, of shape "
                f"{list(shape)}"
            )
        return out


def _current_device() -> torch.device:
    """Return the current CUDA device, after creating its context, which NCCL needs."""
    if not torch.cuda.is_available():
        nccl = facts()
        library = nccl.get("unsupported") or f"NCCL {nccl['version']} is here ({nccl['path']})"
        needs = "a NCCL communicator needs a CUDA device"
        raise NotImplementedError(f"{needs}, and torch {torch.__version__} sees none; {library}")
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
        unique_id = library.unique_id() if participant.rank == 0 else b""
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
    for (rank, other), key in itertools.product(enumerate(reports), ("timeout", "NCCL")):
        if other[key] != report[key]:
            text = (
                f"{where}: rank {participant.rank} has {key} {report[key]}, rank {rank} "
                f"{other[key]}; all ranks must have the same"
            )
            raise ValueError(text) if key == "timeout" else TpkernelsError(text, peer=rank)
    return library, device, bytes.fromhex(reports[0]["unique_id"])


# The library.


def _loaded() -> Iterator[Path]:
    """Yield the copies of NCCL that this process has mapped, in the order of their addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "libnccl.so" in line)
    return map(Path, files)


def _wheels() -> Iterator[Path]:
    """Yield the copies in installed wheels; the one for torch's version of CUDA comes first."""
    names = ["nvidia-nccl-cu13", "nvidia-nccl-cu12"]
    if (torch.version.cuda or "").startswith("12."):
        names.reverse()
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            yield Path(str(distribution.locate_file(f"nvidia/nccl/lib/{SONAME}")))


def _find() -> tuple[str, _C.nccl.Library]:
    """Return where the best NCCL is from, and the library: see `load`."""
    candidates = [("loaded in this process", path) for path in _loaded()]
    candidates += [("from a wheel", path) for path in _wheels()]
    names = [(origin, str(path)) for origin, path in candidates if path.is_file()]
    refusals = []
    for origin, name in [*names, ("the system's", SONAME)]:
        try:
            return origin, _C.nccl.Library(name)
        except NotImplementedError as error:
            refusals.append(str(error))
    raise NotImplementedError(
        f"no NCCL: {'; '.join(refusals)}. Install one with `pip install nvidia-nccl-cu13` (-cu12 "
        "for CUDA 12), or name the file"
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
