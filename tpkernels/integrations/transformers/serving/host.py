"""The process that starts the ranks of ``tpkernels serve``, watches them and ends them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from types import MappingProxyType

from tpkernels.integrations.transformers.serving import rank
from tpkernels.launch import Outcome, RankError, Ranks, fork_server
from tpkernels.terminal import UsageError

_PRELOAD = [
    "transformers.generation.continuous_batching",
    "transformers.modeling_utils",
    "tpkernels.integrations.transformers.serving.rank",
    "fastapi",
    "uvicorn",
]
# How many prepared products with packed weights oneDNN keeps, and torch in front of it. There is
# one for each shape of a weight and each number of rows, of half a MiB in fp32. By default they
# keep 1024, and a rank grows by hundreds of MiB: its batches have all sizes. Preparing takes 1 ms.
_PREPARED: Mapping[str, str] = MappingProxyType(
    {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
)
_LOOK_S = 0.5  # between two looks at the ranks
_FAILED_S = 10.0  # for rank 0 to answer its clients after a rank has failed
_FOLLOW_S = 2.0  # for the other ranks to end after rank 0
_LEAVE_S = 15.0  # for rank 0 to end, in addition to the grace for its clients


def serve(options: rank.Options, *, ranks: int, threads: int, host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM, on which running requests get ``options.grace`` seconds. A
    second signal ends everything at once.

    Raises:
        UsageError: the address cannot be used.
        RankError: a rank failed.
        KeyboardInterrupt: the second signal.
    """
    with (
        _bound(host, port) as listener,
        _blocked(signal.SIGTERM) as unblock,
        _preload(),
        Ranks(ranks, threads=threads, env=limits(), shared=listener) as started,
        _Stopping(started) as stopping,
    ):
        listener.close()
        unblock()
        started.submit(rank.run_rank, options)
        outcomes = _watch(started, stopping, options.grace)
        failed = [one for one in outcomes if not one.ok]
        if failed and not _stopped(outcomes, stopping):
            failed.sort(key=lambda one: one.exitcode is None)  # what died, then what noticed
            parts = [f"serve failed on {len(failed)} of {ranks} ranks"]
            raise RankError("\n\n".join([*parts, *map(started.describe, failed)]), outcomes)


def limits() -> dict[str, str]:
    """Environment of the ranks that bounds their memory, as far as the user has not set it."""
    return {name: os.environ.get(name, value) for name, value in _PREPARED.items()}


@contextlib.contextmanager
def _blocked(sign: signal.Signals) -> Iterator[Callable[[], object]]:
    """In the block, until what it yields is called, a signal waits.

    A supervisor may send SIGTERM to all processes that it started. It must not end the fork server,
    nor ranks other than 0: they inherit the mask.
    """

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {sign})

    resource_tracker.ensure_running()  # the fork server starts it, and it would unblock SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, {sign})
    try:
        yield unblock
    finally:
        unblock()


@contextlib.contextmanager
def _preload() -> Iterator[None]:
    """Has the fork server import what takes seconds, once for all ranks."""
    fork_server(_PRELOAD)
    yield


def _watch(ranks: Ranks, stopping: _Stopping, grace: float) -> list[Outcome]:
    """The outcomes, once all ranks have ended or have had the time to."""
    deadline = math.inf
    while True:
        outcomes = ranks.collect(_LOOK_S)
        late = [one.rank for one in outcomes if one.timed_out]
        now = time.monotonic()
        if len(late) < ranks.world:
            deadline = min(deadline, now + (_FAILED_S if 0 in late else _FOLLOW_S))
        elif stopping.asked:
            deadline = min(deadline, now + grace + _LEAVE_S)
        if not late or now > deadline:
            return outcomes


def _stopped(outcomes: list[Outcome], stopping: _Stopping) -> bool:
    """Return whether the signal ended rank 0 before it had begun to serve; the others fail without
    it."""
    return stopping.asked and outcomes[0].exitcode == -signal.SIGTERM


class _Stopping:
    """In the block, SIGINT and SIGTERM are passed on to rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank_0 = ranks.pids[0]
        self.asked = False

    def __enter__(self) -> _Stopping:
        self._before = {
            each: signal.signal(each, self._ask) for each in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._rank_0, signal.SIGTERM)


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to an address, before anything slow begins."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host is {host}: {error.strerror or error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield listener
