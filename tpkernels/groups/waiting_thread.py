"""A thread that waits for torch.distributed ``Work`` objects, so that the calling thread can poll.

A point-to-point ``Work`` of gloo reports no status until ``wait`` is called. A ``wait`` that times
out closes all connections of the process group. So this thread waits for the full group timeout,
and the thread of the op polls the outcome. Between polls it handles interrupts and checks its
peers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tpkernels.errors import TpkernelsError


class TransferError(RuntimeError):
    """A transfer with rank ``peer`` failed."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


class PendingTransfers:
    """A sequence of ``Work`` objects that a `Waiter` waits for, with the interface of one ``Work``
    that can be polled."""

    def __init__(self, works: Sequence[tuple[Any, int]], timeout: timedelta) -> None:
        self._works, self._timeout = works, timeout
        self._done = threading.Event()
        self._error: TransferError | TpkernelsError | None = None

    def run(self) -> None:
        """Wait for the works in order, with ``timeout`` for each."""
        for work, peer in self._works:
            try:
                work.wait(self._timeout)
            except TpkernelsError as error:
                self._error = error
                break
            except RuntimeError as error:
                self._error = TransferError(str(error), peer)
                break
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raise ``RuntimeError`` if a work failed, or if the works do not complete within
        ``timeout``."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not completed yet")
        if self._error is not None:
            raise self._error


class Waiter:
    """The waiting thread of a group. It starts at the first wait."""

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[PendingTransfers | None] = queue.SimpleQueue()
        self._started = False

    def wait_for(self, works: Sequence[tuple[Any, int]], timeout: timedelta) -> PendingTransfers:
        """Start to wait for (work, peer) pairs. Calls of a group run one after another."""
        if not self._started:
            threading.Thread(target=_serve, args=(self._pending,), daemon=True).start()
            self._started = True
        transfers = PendingTransfers(works, timeout)
        self._pending.put(transfers)
        return transfers

    def close(self) -> None:
        """End the thread after its current and queued waits."""
        if self._started:
            self._pending.put(None)
            self._started = False


def _serve(pending: queue.SimpleQueue[PendingTransfers | None]) -> None:
    while (transfers := pending.get()) is not None:
        transfers.run()
        del transfers  # frees the tensors while the thread is idle
